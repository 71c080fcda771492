"""Measuring a finished run."""

import json
import sys

import pytest

import eval


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, words)])
    eval.main()


def test_samples_are_written_and_scored_and_follow_from_the_seed(finished, tmp_path, monkeypatch, capsys):
    config, _ = finished
    texts = {}
    for name, seed in [("one", 0), ("again", 0), ("other", 1)]:
        settings = ["--steps", 2, "--w", 2, "--gamma", 1.5, "--num-samples", 6, "--seed", seed]
        run(monkeypatch, "samples", "--run", config.directory, *settings, "--out", tmp_path / name)
        texts[name] = [json.loads(line)["text"] for line in (tmp_path / name).read_text().splitlines()]
    assert len(texts["one"]) == 6 and texts["one"] == texts["again"] != texts["other"]
    said = capsys.readouterr().out
    for word in ("valid sentences", "exact perplexity", "unigram entropy", "gamma 1.5", texts["other"][0]):
        assert word in said


@pytest.mark.parametrize("words", [["--form", "released"], ["--grid", "uniform"], ["--gamma", "0"]])
def test_every_sampler_samples(finished, tmp_path, monkeypatch, words):
    config, _ = finished
    run(monkeypatch, "samples", "--run", config.directory, "--steps", 2, "--num-samples", 6, "--out", tmp_path / "out", *words)
    assert len((tmp_path / "out").read_text().splitlines()) == 6


def test_a_directory_without_a_run_is_refused(tmp_path, monkeypatch, finished):
    with pytest.raises(SystemExit, match="no run there"):
        run(monkeypatch, "samples", "--run", tmp_path)
    (tmp_path / "config.json").write_text((finished[0].directory / "config.json").read_text())
    with pytest.raises(SystemExit, match="no checkpoint yet"):
        run(monkeypatch, "samples", "--run", tmp_path)


@pytest.mark.parametrize("words", [["--num-samples", "0"], ["--steps", "0"]])
def test_nothing_to_sample_is_refused(finished, monkeypatch, words):
    with pytest.raises(SystemExit, match="must be at least 1"):
        run(monkeypatch, "samples", "--run", finished[0].directory, *words)


def test_speed_times_every_part(monkeypatch, capsys):
    run(monkeypatch, "speed", "--model", "tiny", "--batch", 8, "--length", 8, "--embedding", 16, "--repeats", 1)
    said = capsys.readouterr().out
    for part in (
        "forward",
        "losses and gradients",
        "encoder",
        "optimizer",
        "whole step",
        "sampling",
        "waiting for data",
        "peak memory",
    ):
        assert part in said
    with pytest.raises(SystemExit, match="unknown; known are elf-b"):
        run(monkeypatch, "speed", "--model", "elf-xl")
