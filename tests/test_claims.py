"""The study of the paper's claims: every run can be made, and verdicts follow from the numbers."""

import json
import math
import signal
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT

import distill
from config import check, parse
from report import claims
from report.metrics import DISTINCT, ENTROPY, EXACT_PERPLEXITY, VALID_SENTENCES, VALID_TEXTS, WORDS
from runtime.errors import UserError

OTHERS = {VALID_SENTENCES: 0.8, EXACT_PERPLEXITY: 3.1, ENTROPY: 2.9, WORDS: 22.0, DISTINCT: 1.0}
OTHERS |= {claims.PARAMETERS: 1_000, claims.ENCODER: "a b"}
BOTTLENECK = claims.CLAIMS["bottleneck"]


def kept_of(claim, scores):
    """Make scores as the study keeps them, from the shares of valid texts by arm and seed."""
    return {
        claims.key_of(arm.variant, seed, arm.sampler): {VALID_TEXTS: value} | OTHERS
        for arm, values in zip(claim.arms, scores, strict=True)
        for seed, value in enumerate(values)
    }


@pytest.mark.parametrize(
    "scores, expected",
    [
        ([(0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.2, 0.3, 0.41)], claims.HOLDS),
        ([(0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.6, 0.7, 0.81)], claims.FAILS),
        ([(0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.6, 0.3, 0.4)], claims.OPEN),
        # Worse, but by chance, as there are two pairs.
        ([(0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.44, 0.53, 0.68)], claims.OPEN),
        ([(0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.2, 0.3)], "not yet run (2 of 3 seeds)"),
        ([(), (), ()], "not yet run (0 of 3 seeds)"),
        ([(0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.38, 0.3, 0.5)], claims.OPEN),
        ([(0.1, 0.2, 0.3) * 2, (0.4, 0.5, 0.6) * 2, (0.38, 0.3, 0.5) * 2], claims.HOLDS),
    ],
)
def test_a_verdict_follows_from_differences_in_the_same_seeds(scores, expected):
    """Seeds may differ much, as all arms have the same ones; more seeds decide what few leave open."""
    kept = kept_of(BOTTLENECK, scores)
    assert claims.verdict(BOTTLENECK, kept) == expected
    assert expected in claims.report(kept)


def test_as_good_means_not_worse_by_a_margin():
    claim = claims.CLAIMS["conditioning"]
    found = [
        {d.score: d.verdict for d in claims.differences(claim, kept_of(claim, [(0.50, 0.51, 0.52), others]))}
        for others in ((0.51, 0.52, 0.53), (0.60, 0.61, 0.62))
    ]
    assert [each[VALID_TEXTS] for each in found] == [claims.HOLDS, claims.FAILS]
    assert found[0][claims.PARAMETERS] == claims.OPEN  # as many in both


def test_a_run_of_other_settings_is_not_measured(tmp_path, monkeypatch):
    """If training is refused, the finished run of an earlier budget there is not measured."""
    monkeypatch.setattr(claims, "PLACE", tmp_path)
    monkeypatch.setattr(claims, "command_of", lambda variant, seed: "python -c raise(SystemExit(1))")
    monkeypatch.setattr(claims.checkpoints, "is_finished", lambda run: True)
    claims.run_of("base", 0).mkdir()
    (claims.run_of("base", 0) / "config.json").write_text("{}")
    with pytest.raises(UserError, match="did not finish"):
        claims.make_run("base", 0)


EVAL = """
import os, signal, sys, time
_, _, _, variant, seed = sys.argv
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved")))
print(*os.sched_getaffinity(0), flush=True)
if variant == "learned":
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
sys.exit(variant == "table")
"""


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """The words in a run's log, where eval.py is a script that only prints its cores."""
    (tmp_path / "eval.py").write_text(EVAL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(claims, "PLACE", tmp_path)
    return lambda run: (tmp_path / f"{run}.log").read_text().split()


def test_runs_go_side_by_side_each_on_its_cores(tmp_path, logs):
    cores = claims.my_cores()
    failed = claims.run_all([("base", 0), ("table", 0), ("base", 1)], jobs=min(2, len(cores)))
    assert failed == [str(tmp_path / "table-0.log")]
    shares = {tuple(logs(run)) for run in ("base-0", "table-0", "base-1")}
    assert claims.my_cores() == cores == sorted(int(core) for share in shares for core in share)


def test_a_stopped_study_stops_its_runs_and_waits(logs):
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with pytest.raises(SystemExit):
            claims.run_all([("learned", 0), ("base", 1)], jobs=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert logs("learned-0")[-1] == "saved"
    with pytest.raises(FileNotFoundError):
        logs("base-1")


def test_runs_that_need_the_base_follow_it(monkeypatch, tmp_path):
    """The base of their seed is run first, even if all of its own scores are there."""
    monkeypatch.setattr(claims, "PLACE", tmp_path)
    monkeypatch.setattr(claims, "KEPT", tmp_path / "claims.json")
    samplers = claims.missing("base", 0, {})
    claims.KEPT.write_text(json.dumps({claims.key_of("base", 0, sampler): {} for sampler in samplers}))
    phases = []
    monkeypatch.setattr(claims, "run_all", lambda todo, jobs: phases.append(list(todo)) or [])
    claims.study(["distillation", "decoder"], (0,), 1)
    assert phases == [[("separate", 0), ("base", 0)], [("distilled", 0)]]


def test_scores_are_kept_with_the_encoder_of_the_run(monkeypatch, tmp_path):
    """A table, which replaces the encoder, counts as the encoder of its seed."""
    monkeypatch.setattr(claims, "PLACE", tmp_path)
    monkeypatch.setattr(claims, "KEPT", tmp_path / "claims.json")
    monkeypatch.setattr(claims, "make_run", lambda variant, seed: None)
    monkeypatch.setattr(claims.checkpoints, "load", lambda run: None)
    monkeypatch.setattr(claims, "bench_for", lambda *_: SimpleNamespace(trained=SimpleNamespace(model=())))
    monkeypatch.setattr(claims, "measure", lambda *_: SimpleNamespace(scores={VALID_TEXTS: 0.5}))
    for variant in ("base", "table", "tiny"):
        claims.run_of(variant, 0).mkdir()
        (claims.run_of(variant, 0) / "embedding.json").write_text(json.dumps(dict(encoder=f"of {variant}")))
    for variant in ("table", "tiny"):
        claims.do_run(variant, 0)
    encoders = {key.split()[0]: scores[claims.ENCODER] for key, scores in claims.read_kept().items()}
    assert encoders == dict(table="of base", tiny="of tiny")


def test_measurements_of_several_processes_come_together(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "PLACE", tmp_path)
    monkeypatch.setattr(claims, "KEPT", tmp_path / "claims.json")
    for name in "ab":
        claims.keep(name, {VALID_TEXTS: 0.5})
    assert claims.read_kept().keys() == {"a", "b"}
    assert len(claims.missing("base", 0, {})) > 10 and len(claims.missing("adaln-zero", 0, {})) == 1


def test_only_networks_with_the_same_encoder_are_compared():
    kept = kept_of(BOTTLENECK, [(0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.2, 0.3, 0.41)])
    kept[claims.key_of("base", 0, claims.SDE)][claims.ENCODER] = "a other"
    assert [list(d.by_seed) for d in claims.differences(BOTTLENECK, kept)] == [[0, 1, 2], [1, 2]]


def test_all_arms_of_a_table_have_the_same_seeds():
    """A seed that only some have would move their means, but no difference."""
    kept = kept_of(BOTTLENECK, [(0.1, 0.2), (0.4, 0.5), (0.2, 0.3, 0.9)])
    assert all(list(by_seed) == [0, 1] for by_seed in claims.scores_of(BOTTLENECK, kept).values())
    assert "| as wide as embeddings | 25.0 ±" in claims.report(kept)


def test_longer_texts_do_not_count_as_more_entropic():
    claim = claims.CLAIMS["gamma"]
    kept = kept_of(claim, [(0.5, 0.5, 0.5)] * 3)
    for seed in range(3):
        longer = {WORDS: 24.0, ENTROPY: 2.9 + math.log(24 / 22)}
        kept[claims.key_of("base", seed, claim.arms[-1].sampler)] |= longer
    found = {d.score: [*d.by_seed.values()] for d in claims.differences(claim, kept)}
    assert found[claims.NET_ENTROPY] == pytest.approx([0, 0, 0])


def test_every_variant_is_a_run_that_can_be_made():
    for variant in {arm.variant for arm in claims.ARMS}:
        _, script, *flags = claims.command_of(variant, seed=1).split()
        if script == "train.py":
            config = parse(flags, "")
            check(config)
            assert config.directory == claims.run_of(variant, 1)
        else:
            options = distill.tyro.cli(distill.Distill, args=flags)
            assert options.runs / options.directory(1) == claims.run_of(variant, 1)
    assert claims.SAYS.keys() == claims.CLAIMS.keys()
    for claim in claims.CLAIMS.values():
        labels = {arm.label for arm in claim.arms}
        assert len(labels) == len(claim.arms)
        assert all(set(pair) <= labels for pairs in claim.orders.values() for pair in pairs)


def test_numbers_of_the_results_are_read(monkeypatch):
    """The committed scores give a verdict on every claim."""
    monkeypatch.chdir(ROOT)
    kept = claims.read_kept()
    verdicts = {name: claims.verdict(claim, kept) for name, claim in claims.CLAIMS.items()}
    report = (claims.RESULTS / "RESULTS.md").read_text()
    assert all(verdict in (claims.HOLDS, claims.FAILS, claims.OPEN) for verdict in verdicts.values())
    assert all(f"(#{name})" in report and verdict in report for name, verdict in verdicts.items())
