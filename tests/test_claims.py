"""The study of the paper's claims: what it would run can be run, and its verdicts follow from the numbers."""

import math

import pytest

import claims
import distill
import settings
from metrics import DISTINCT, ENTROPY, EXACT_PERPLEXITY, VALID_SENTENCES, VALID_TEXTS, WORDS

OTHERS = {VALID_SENTENCES: 0.8, EXACT_PERPLEXITY: 3.1, ENTROPY: 2.9, WORDS: 22.0, DISTINCT: 1.0}
OTHERS |= {claims.PARAMETERS: 1_000, claims.ENCODER: "a b"}
BOTTLENECK = claims.CLAIMS["bottleneck"]


def kept_of(claim, scores):
    """What the study would have kept, from the share of valid texts of each arm in every seed."""
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
        ([(0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.44, 0.53, 0.68)], claims.OPEN),  # worse by chance, as there are two pairs
        ([(0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.2, 0.3)], "not yet run (2 of 3 seeds)"),
        ([(), (), ()], "not yet run (0 of 3 seeds)"),
        ([(0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.38, 0.3, 0.5)], claims.OPEN),
        ([(0.1, 0.2, 0.3) * 2, (0.4, 0.5, 0.6) * 2, (0.38, 0.3, 0.5) * 2], claims.HOLDS),
    ],
)
def test_a_verdict_follows_from_differences_in_the_same_seeds(scores, expected):
    """Seeds may differ much among themselves, as all arms have the same; more of them decide what few leave open."""
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
    """Training that was refused leaves the finished run of an earlier budget where it is."""
    monkeypatch.setattr(claims, "PLACE", tmp_path)
    monkeypatch.setattr(claims, "command_of", lambda variant, seed: "python -c raise(SystemExit(1))")
    monkeypatch.setattr(claims.runs, "is_finished", lambda run: True)
    claims.run_of("base", 0).mkdir()
    (claims.run_of("base", 0) / "config.json").write_text("{}")
    assert not claims.make_run("base", 0)


SCRIPT = """
import os, signal, sys, time
_, _, variant, seed = sys.argv
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved")))
print(*os.sched_getaffinity(0), flush=True)
time.sleep(60 * (variant == "learned"))
sys.exit(variant == "table")
"""


def test_runs_go_side_by_side_each_on_its_cores(tmp_path, monkeypatch):
    """What fails is told at the end; and who is stopped stops what it began, and waits for it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setattr(claims, "PLACE", tmp_path)
    monkeypatch.setattr(claims, "__file__", str(tmp_path / "script.py"))
    cores, said = claims.my_cores(), lambda run: (tmp_path / f"{run}.log").read_text().split()
    assert claims.side_by_side([("base", 0), ("table", 0), ("base", 1)], jobs=2) == [str(tmp_path / "table-0.log")]
    assert claims.my_cores() == cores == sorted(map(int, said("base-0") + said("table-0")))

    def stop(_):
        if said("learned-0"):
            raise SystemExit

    monkeypatch.setattr(claims.time, "sleep", stop)
    with pytest.raises(SystemExit):
        claims.side_by_side([("learned", 0)], jobs=1)
    assert said("learned-0")[-1] == "saved"


def test_measurements_of_several_processes_come_together(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "PLACE", tmp_path)
    monkeypatch.setattr(claims, "KEPT", tmp_path / "claims.json")
    for name in "ab":
        claims.keep(name, {VALID_TEXTS: 0.5})
    assert claims.read_kept().keys() == {"a", "b"}
    assert len(claims.missing("base", 0, {})) > 10 and len(claims.missing("adaln-zero", 0, {})) == 1


def test_a_seed_is_measured_with_one_encoder():
    """Encoders of other seeds, and of networks that it is not compared with, do not matter."""
    kept = {"base 0 a": {"encoder": "stories one"}, "v-256 0 b": {"encoder": "wide two"}}
    claims.refuse_mixed("table", 0, "stories one", kept)
    claims.refuse_mixed("table", 1, "stories other", kept)
    claims.refuse_mixed("x-128", 0, "stories other", kept)
    with pytest.raises(claims.Refused, match="seed 0 with another encoder"):
        claims.refuse_mixed("table", 0, "stories other", kept)
    kept = kept_of(BOTTLENECK, [(0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.2, 0.3, 0.41)])
    kept[claims.key_of("base", 0, claims.SDE)][claims.ENCODER] = "a other"
    assert [list(d.by_seed) for d in claims.differences(BOTTLENECK, kept)] == [[0, 1, 2], [1, 2]]


def test_all_arms_of_a_table_have_the_same_seeds():
    """A seed that only some have would move their means, and not what is compared."""
    kept = kept_of(BOTTLENECK, [(0.1, 0.2), (0.4, 0.5), (0.2, 0.3, 0.9)])
    assert claims.seeds_of(BOTTLENECK, kept) == [0, 1]
    assert "| as wide as embeddings | 25.0 ±" in claims.report(kept)


def test_longer_texts_do_not_count_as_more_entropic():
    claim = claims.CLAIMS["gamma"]
    kept = kept_of(claim, [(0.5, 0.5, 0.5)] * 3)
    for seed in range(3):
        kept[claims.key_of("base", seed, claim.arms[-1].sampler)] |= {WORDS: 24.0, ENTROPY: 2.9 + math.log(24 / 22)}
    found = {d.score: [*d.by_seed.values()] for d in claims.differences(claim, kept)}
    assert found[claims.NET_ENTROPY] == pytest.approx([0, 0, 0])


def test_every_variant_is_a_run_that_can_be_made():
    for variant in {arm.variant for claim in claims.CLAIMS.values() for arm in claim.arms}:
        _, script, *flags = claims.command_of(variant, seed=1).split()
        if script == "train.py":
            config = settings.parse(flags, "")
            settings.check(config)
            assert config.directory == claims.run_of(variant, 1)
        else:
            asked = distill.tyro.cli(distill.Distill, args=flags)
            assert asked.runs / asked.directory(1) == claims.run_of(variant, 1)
    for claim in claims.CLAIMS.values():
        labels = {arm.label for arm in claim.arms}
        assert len(labels) == len(claim.arms) and all(set(pair) <= labels for pairs in claim.orders.values() for pair in pairs)
