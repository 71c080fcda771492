"""Measuring finished runs: samples, tables, figures, pages."""

import dataclasses
import json
import math
import shutil
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN
from safetensors.numpy import load_file, save_file

import eval
import train
from corpora import rows
from encoders import gpt2, released
from report import figures, judges, paper, samples
from runtime import checkpoints
from runtime.errors import UserError
from runtime.mesh import make_mesh


@pytest.fixture(scope="module")
def finished(small, tmp_path_factory):
    """A run that learned hardly anything: its texts are random words; some learning would bring only EOS."""
    config = dataclasses.replace(
        small, runs=tmp_path_factory.mktemp("runs"), name="whole", learning_rate=1e-5
    )
    return config, train.train(config)


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, words)])
    eval.main()


def test_samples_are_written_and_scored_and_follow_from_the_seed(finished, tmp_path, monkeypatch, capsys):
    config, _ = finished
    texts = {}
    for name, seed in [("one", 0), ("again", 0), ("other", 1)]:
        settings = ["--steps", 2, "--w", 2, "--gamma", 1.5, "--num-samples", 6, "--seed", seed]
        run(monkeypatch, "samples", "--run", config.directory, *settings, "--out", tmp_path / f"{name}.jsonl")
        texts[name] = [
            json.loads(line)["text"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()
        ]
    assert len(texts["one"]) == 6 and texts["one"] == texts["again"] != texts["other"]
    assert "samples of whole" in (tmp_path / "one.html").read_text()
    said = capsys.readouterr().out
    for word in ("valid sentences", "exact perplexity", "unigram entropy", "gamma 1.5", texts["other"][0]):
        assert word in said


@pytest.mark.parametrize("words", [["--form", "released"], ["--grid", "uniform"], ["--gamma", "0"]])
def test_every_sampler_samples(finished, tmp_path, monkeypatch, words):
    config, _ = finished
    out = tmp_path / "out.jsonl"
    run(
        monkeypatch,
        "samples",
        "--run",
        config.directory,
        "--steps",
        2,
        "--num-samples",
        6,
        "--out",
        out,
        *words,
    )
    assert len(out.read_text().splitlines()) == 6


def test_a_directory_without_a_run_is_refused(tmp_path, monkeypatch, finished):
    with pytest.raises(SystemExit, match="no run there"):
        run(monkeypatch, "samples", "--run", tmp_path)
    (tmp_path / "config.json").write_text((finished[0].directory / "config.json").read_text())
    with pytest.raises(SystemExit, match="no checkpoint yet"):
        run(monkeypatch, "samples", "--run", tmp_path)
    with pytest.raises(SystemExit, match=r"config.json is not that of a run"):
        run(monkeypatch, "samples", "--run", GOLDEN / "gpt2")
    (tmp_path / "config.json").rename(tmp_path / "checkpoint_best")
    with pytest.raises(SystemExit, match="no released checkpoint"):
        run(monkeypatch, "samples", "--run", tmp_path)


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["--num-samples", "0"], "must be at least 1"),
        (["--steps", "0"], "must be at least 1"),
        (["--gamma", "-1"], "--gamma -1.0: must be at least 0"),
        (["--w", "0"], "--w 0.0: must be above 0"),
        (["--out", "page.html"], r"--out page.html: must end in .jsonl"),
        (["--encoder", "t5-small"], "only for a released checkpoint"),
    ],
)
def test_flags_that_cannot_work_are_refused(finished, monkeypatch, words, complaint):
    with pytest.raises(SystemExit, match=complaint):
        run(monkeypatch, "samples", "--run", finished[0].directory, *words)


def test_no_run_at_all_is_refused(monkeypatch):
    for words in (["table", "system", "--run"], ["figure", "guidance", "--run"], ["compare"]):
        with pytest.raises(SystemExit, match="give at least one run"):
            run(monkeypatch, *words)


@pytest.mark.parametrize(
    "damage, complaint",
    [
        (lambda run: shutil.rmtree(run / "checkpoints" / "20" / "ema"), "checkpoint 20 has no EMA weights"),
        (
            lambda run: [f.write_bytes(f.read_bytes()[:9]) for f in run.glob("checkpoints/20/ema/**/d/*")],
            "20 cannot be read",
        ),
        (lambda run: (run / "checkpoints" / "20" / "ema" / "_METADATA").unlink(), "20 cannot be read"),
        (lambda run: (run / "config.json").write_text("[]"), "config.json is not that of a run"),
        (
            lambda run: change(run / "config.json", model="elf-xl"),
            r"names no known size of network \(elf-xl\)",
        ),
    ],
)
def test_damaged_runs_are_refused(finished, tmp_path, damage, complaint):
    copy = shutil.copytree(finished[0].directory, tmp_path / "copy")
    damage(copy)
    with pytest.raises(UserError, match=complaint):
        checkpoints.load(str(copy), make_mesh("1", 0))


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_judges_of_one_name_are_told_apart(judge, tmp_path):
    """What one GPT-2 judged is not read again as what another of the same name would."""
    other = shutil.copytree(judge, tmp_path / judge.name)
    tensors = load_file(other / "model.safetensors")
    save_file({k: 1.01 * v for k, v in tensors.items()}, other / "model.safetensors")
    one, two = (judges.gpt2_judge(str(place), make_mesh("1", 0)) for place in (judge, other))
    assert one.signature == two.signature and one.weights != two.weights


def test_a_table_has_our_numbers_and_the_papers_and_is_measured_once(finished, tmp_path, monkeypatch, capsys):
    config, _ = finished
    words = [
        "table",
        "system",
        "--run",
        config.directory,
        "--num-samples",
        4,
        "--seeds",
        0,
        1,
        "--out",
        tmp_path / "system",
    ]
    run(monkeypatch, *words)
    said = capsys.readouterr().out
    assert (
        "67.32 ± 2.25" in said
        and "5.15 ± 0.002" in said
        and "4 samples, seed 0, 1" in said
        and "valid" in said
    )
    assert "| 8 | 3.0 | 2.0 |" in (tmp_path / "system.md").read_text()
    assert len((tmp_path / "system.csv").read_text().splitlines()) == 4
    monkeypatch.setattr(samples, "sample_texts", None)  # a second time, nothing is sampled
    run(monkeypatch, *words)
    assert capsys.readouterr().out == said


def test_runs_are_compared_in_a_table_and_a_plot(finished, tmp_path, monkeypatch, capsys):
    config, _ = finished
    other = shutil.copytree(config.directory, tmp_path / "other")
    run(
        monkeypatch,
        "compare",
        config.directory,
        other,
        "--steps",
        2,
        "--num-samples",
        4,
        "--out",
        tmp_path / "both",
    )
    said = capsys.readouterr().out
    assert "whole" in said and "other" in said and (tmp_path / "both.png").stat().st_size > 5_000


def test_a_figure_is_drawn_and_its_numbers_are_written(finished, tmp_path, monkeypatch, capsys):
    config, _ = finished
    sweep, scales = figures.SWEEPS["guidance"], {"w 1", "w 2"}
    curves = {
        kind: {k: v for k, v in samplers.items() if k in scales} for kind, samplers in sweep.curves.items()
    }
    monkeypatch.setitem(figures.SWEEPS, "guidance", sweep._replace(curves=curves))
    run(
        monkeypatch,
        "figure",
        "guidance",
        "--run",
        config.directory,
        "--num-samples",
        4,
        "--out",
        tmp_path / "guidance",
    )
    assert (tmp_path / "guidance.png").stat().st_size > 10_000
    assert len((tmp_path / "guidance.csv").read_text().splitlines()) == 5
    with pytest.raises(SystemExit, match="its texts have no source, so there is no right answer"):
        run(monkeypatch, "figure", "cfg", "--run", config.directory)


def test_a_trajectory_ends_in_the_sample(finished, tmp_path, monkeypatch, capsys):
    config, _ = finished
    settings = ["--run", config.directory, "--steps", 4, "--gamma", 1, "--seed", 3]
    run(monkeypatch, "trajectory", *settings, "--frames", 3, "--samples", 2, "--out", tmp_path / "page.html")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("t = ")]
    assert [line[:9] for line in lines][::3] == ["t = 0.000", "t = 1.000"]
    run(monkeypatch, "samples", *settings, "--num-samples", 2, "--out", tmp_path / "samples.jsonl")
    first = json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])["text"]
    assert lines[-1] == f"t = 1.000  {first}"
    assert 'type="range"' in (tmp_path / "page.html").read_text()


def test_tokens_are_counted(finished, tmp_path, monkeypatch, capsys):
    config, _ = finished
    run(monkeypatch, "table", "tokens", "--run", config.directory, "--out", tmp_path / "tokens")
    assert "16 x 20 x 30" in capsys.readouterr().out
    for name, (base, distillation, billions, ratio) in paper.TOKENS.items():
        total = sum(math.prod(part) for part in (base, distillation) if part) or 5 * paper.OWT_TOKENS
        assert round(total / 1e9, 1) == billions and round(total / (5 * paper.OWT_TOKENS), 1) == ratio, name


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """The golden GPT-2 with a tokenizer of words, as a directory."""
    directory = tmp_path_factory.mktemp("judge")
    for file in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "gpt2" / file, directory)
    rows.word_tokenizer([f"word{i}" for i in range(80)]).save_pretrained(directory)
    return directory


def test_perplexity_and_entropy_equal_a_slow_computation(judge):
    """In NumPy, token by token: all but the first, and the EOS that ends a text if there is room for it."""
    rng, mesh = np.random.default_rng(0), make_mesh("1", 0)
    texts = [" ".join(f"word{rng.integers(80)}" for _ in range(n)) for n in (1, 5, 30, 63, 64, 90)] + [""]
    scores, each = judges.gpt2_judge(str(judge), mesh).judge(texts)
    logits_of, tokenizer = jax.jit(gpt2.load_gpt2(judge).__call__), rows.load_tokenizer(judge)
    nll, count, entropies = 0.0, 0, []
    for text in texts:
        tokens = tokenizer(text)["input_ids"][:64]
        seen = [*tokens, tokenizer.eos_token_id][:64]
        logits = np.asarray(
            logits_of(jnp.asarray([seen + [7] * (64 - len(seen))]))[0], np.float64
        )  # what follows is not seen
        for i in range(1, len(seen)):
            nll += np.log(np.exp(logits[i - 1]).sum()) - logits[i - 1, seen[i]]
            count += 1
        shares = [n / len(tokens) for n in Counter(tokens).values()]
        entropies.append(-sum(p * math.log(p) for p in shares))
    assert scores["Gen. PPL"] == pytest.approx(math.exp(nll / count), rel=1e-4)
    assert scores["unigram entropy (nats)"] == pytest.approx(np.mean(entropies))
    assert count == 1 + 5 + 30 + 63 + 63 + 63
    assert len(each) == len(texts) and each[-1] == math.inf


def test_a_run_can_be_judged_by_gpt2(finished, judge, tmp_path, monkeypatch, capsys):
    config, _ = finished
    words = [
        "--run",
        config.directory,
        "--steps",
        2,
        "--num-samples",
        4,
        "--judge",
        judge,
        "--out",
        tmp_path / "out.jsonl",
    ]
    run(monkeypatch, "samples", *words)
    assert "Gen. PPL" in capsys.readouterr().out
    run(
        monkeypatch, "samples", "--run", config.directory, "--steps", 2, "--num-samples", 4, "--judge", "none"
    )
    assert "no judge" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="this needs perplexities, so a --judge"):
        run(monkeypatch, "table", "system", "--run", config.directory, "--judge", "none")


def test_nothing_to_judge_and_missing_judges_are_refused(judge, tmp_path, finished, monkeypatch):
    found = judges.gpt2_judge(str(judge), make_mesh("1", 0))
    with pytest.raises(UserError, match="nothing to judge: all of the 2 texts are empty"):
        found.judge(["", "  "])
    with pytest.raises(SystemExit, match="--judge nowhere: no such directory, and"):
        run(monkeypatch, "samples", "--run", finished[0].directory, "--judge", "nowhere")
    with pytest.raises(SystemExit, match=r"has no config.json"):
        run(monkeypatch, "samples", "--run", finished[0].directory, "--judge", tmp_path)


def save_words(n, directory):
    """Save a tokenizer of n tokens, 11 of them special; samples without a source need no encoder."""
    rows.word_tokenizer([f"word{i}" for i in range(n - 11)]).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", ["released_orbax/checkpoint_0", "checkpoint_7", "torch_checkpoint_7"])
def test_released_weights_load_by_path(name, golden_model, tmp_path, monkeypatch, capsys):
    path = checkpoints.find_checkpoint(str(GOLDEN / name))
    tensors = released.read_released(path, "params")
    sizes = checkpoints.sizes_of(tensors, path)
    assert sizes["depth"] == golden_model.depth and sizes["vocab"] == golden_model.unembed.weight.shape[1]
    with pytest.raises(UserError, match="its name does not say what it was trained on"):
        checkpoints.load(str(GOLDEN / name), make_mesh("1", 0))
    with pytest.raises(
        UserError, match="--data stories: a released checkpoint is of one of owt, de-en, xsum"
    ):
        checkpoints.load(str(GOLDEN / name), make_mesh("1", 0), corpus="stories")
    with pytest.raises(UserError, match=r"knows 101 tokens, and the tokenizer of .* 100"):
        checkpoints.load(
            str(GOLDEN / name),
            make_mesh("1", 0),
            corpus="owt",
            encoder=str(save_words(100, tmp_path / "100")),
        )
    words = [
        "--data",
        "owt",
        "--encoder",
        save_words(101, tmp_path / "101"),
        "--judge",
        "none",
        "--out",
        tmp_path / "out.jsonl",
    ]
    monkeypatch.chdir(tmp_path)  # what is measured goes to runs/
    run(monkeypatch, "samples", "--run", GOLDEN / name, *words, "--steps", 1, "--num-samples", 1)
    assert "1 samples" in capsys.readouterr().out


def test_speed_times_every_part(monkeypatch, capsys):
    run(
        monkeypatch,
        "speed",
        "--model",
        "tiny",
        "--batch",
        8,
        "--length",
        8,
        "--embedding",
        16,
        "--repeats",
        1,
    )
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
    with pytest.raises(SystemExit, match="unknown; choose elf-b"):
        run(monkeypatch, "speed", "--model", "elf-xl")
