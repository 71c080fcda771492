"""Tasks with a source: the built-in ones, and a run on pairs from a file."""

import dataclasses
import json
import math
import shutil
import types

import jax
import pytest
from numpy.testing import assert_array_equal

import data
import eval
import train
from corpora import rows, stories, tasks
from corpora.sources import Example
from encoders import scratch, t5
from report import judges, metrics
from runtime.errors import UserError


@pytest.mark.parametrize("name, kinds", [("translate", 300), ("summarize", 80)])
def test_a_source_has_one_answer_and_both_are_rich(name, kinds):
    pairs = tasks.write_pairs(tasks.TASKS[name], 20_000, seed=1)
    answers = dict(pairs)
    assert all(answers[source] == text for source, text in pairs)
    assert len(answers) > 19_900
    assert pairs[:3] == tasks.write_pairs(tasks.TASKS[name], 3, seed=1)
    for side in zip(*pairs, strict=True):
        assert len({word for text in side for word in stories.split(text)}) > kinds


def test_german_has_another_word_order():
    german, english = tasks.write_pairs(tasks.translate, 1, seed=1)[0]
    assert german == "Früher baute der ernste Arzt den weißen Spiegel im Museum, weil er vorsichtig war."
    assert english.startswith("Earlier the serious doctor built the white mirror in the museum")
    assert english.endswith(" because he was careful.")


def test_scores_of_answers():
    answers = ["the cat sat on the mat .", "a dog barks in the yard ."]
    held_out = [Example(text, "source") for text in answers]
    judge = judges.answers_judge(types.SimpleNamespace(held_out=held_out, split="validation"))
    perfect, each = judge.judge(answers)
    assert perfect["BLEU"] == pytest.approx(100)
    assert perfect["ROUGE-L"] == (100, 0) and perfect["exact matches"] == 1
    nothing, of_nothing = judge.judge(["", ""])
    assert nothing["BLEU"] == nothing["exact matches"] == 0 and nothing["ROUGE-L"] == (0, 0)
    assert (each, of_nothing) == ([100, 100], [0, 0])
    assert "case:lc" in judge.signature
    assert metrics.shown("ROUGE-L", (35.123, 0.119)) == "35.12 ± 0.12"
    assert metrics.shown("exact matches", 0.5) == "50.0%"
    assert metrics.shown("entropy", (5.15, 0.0021)) == "5.15 ± 0.002"
    assert metrics.shown("perplexity", (math.inf, math.nan)) == metrics.shown("perplexity", math.inf) == "-"
    assert metrics.mean_and_error([1.0, 2.0, 3.0]) == pytest.approx((2, 1 / 3**0.5))


@pytest.fixture(scope="module")
def answered(small, tmp_path_factory):
    """A run on pairs from a file, with an encoder and its tokenizer in a directory."""
    place = tmp_path_factory.mktemp("pairs")
    pairs = tasks.write_pairs(tasks.summarize, 200, seed=0)
    (place / "pairs.jsonl").write_text("".join(json.dumps(dict(source=s, target=t)) + "\n" for s, t in pairs))
    words = rows.word_tokenizer(part for pair in pairs for part in pair)
    config = scratch.SMALL | dict(vocab_size=len(words), d_model=16, d_ff=16, d_kv=4, num_layers=1)
    t5.save_t5(t5.t5_from_config(config, jax.random.key(0)), place / "encoder")
    words.save_pretrained(place / "encoder")
    changes = dict(data=str(place / "pairs.jsonl"), encoder=str(place / "encoder"), runs=place, name="run")
    changes |= dict(length=58, source_length=43, steps=10, save_every=5, num_samples=5)
    config = dataclasses.replace(small, **changes)
    return config, train.train(config)


def test_a_run_with_sources_answers_held_out_ones(answered, capsys):
    config, _ = answered
    lines = [json.loads(line) for line in (config.directory / "samples" / "final.jsonl").open()]
    assert len(lines) == 2  # every hundredth of 200
    assert lines[0]["reference"].startswith("On ") and lines[0]["source"].startswith("The ")
    capsys.readouterr()
    eval.Samples(run=str(config.directory), sampling=eval.SamplerOptions(steps=2, cfg=1.0))()
    said = capsys.readouterr().out
    for words in (
        "2 samples, validation split",
        "BLEU",
        "ROUGE-L",
        "exact matches",
        "nrefs:1|case:lc|eff:yes",
    ):
        assert words in said
    eval.Table(name="downstream", run=(str(config.directory),))()
    said = capsys.readouterr().out
    assert "27.8 ± 0.12" in said and "11.6 ± 0.10" in said and "26.4" in said
    with pytest.raises(UserError, match="answers need no judge: leave out --judge"):
        eval.Table(name="downstream", run=(str(config.directory),), judge="none")()
    eval.Samples(run=str(config.directory), sampling=eval.SamplerOptions(steps=2), judge="none")()
    assert "no judge" in capsys.readouterr().out
    with pytest.raises(UserError, match="--split test: the data has none; there are train, validation"):
        eval.Samples(run=str(config.directory), split="test")()


def test_another_encoder_or_other_rows_are_refused(answered, tmp_path):
    """A run says so, rather than go on with embeddings that it was not trained on."""
    config, _ = answered
    moved = dataclasses.replace(config, runs=tmp_path)
    shutil.copytree(config.directory, moved.directory)
    file = moved.directory / data.EMBEDDING
    kept = json.loads(file.read_text())
    for what, complaint in (("encoder", "trained with another encoder"), ("rows", "trained on other rows")):
        file.write_text(json.dumps(kept | {what: "0"}))
        with pytest.raises(UserError, match=complaint):
            train.train(moved)


def test_learned_embeddings_are_refused_where_there_are_sources(answered):
    config, _ = answered
    with pytest.raises(UserError, match="--embeddings learned: not for data with sources"):
        train.train(dataclasses.replace(config, name="learned", embeddings="learned"))


def test_a_run_with_sources_continues(answered):
    config, state = answered
    shutil.rmtree(config.directory / "checkpoints" / "10")
    jax.tree.map(assert_array_equal, train.train(config).model, state.model)
