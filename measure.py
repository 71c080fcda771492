"""A trained network at work: texts sampled with some settings and judged. Each is measured once and then read from a file."""

import dataclasses
import json
from collections.abc import Iterable
from typing import NamedTuple

import jax
from jax.sharding import Mesh

import generate
import metrics
import runs
from corpora import Corpus, Split, digest
from generate import Asked, Form, Sampler
from judges import Judge, judge_of
from mesh import is_chief
from metrics import Score
from trained import Trained


class Bench(NamedTuple):
    """What a measurement needs besides the settings of the sampler."""

    trained: Trained
    corpus: Corpus | None
    """None for a released network that writes texts without sources: it can do without."""
    judge: Judge
    asked: Asked | None
    """The sources to be answered, where there are any."""
    n: int
    """Texts for each measurement."""
    mesh: Mesh
    form: Form = "paper"
    """Of the samplers in tables and figures."""


class Measured(NamedTuple):
    texts: list[str]
    scores: dict[str, Score]
    each: list[float]


def bench_for(
    trained: Trained, mesh: Mesh, n: int | None = None, judge: str = "", split: Split = "validation", form: Form = "paper"
) -> Bench:
    n = trained.config.num_samples if n is None else n
    if trained.released and not trained.config.source_length:
        return Bench(trained, None, judge_of(None, judge, mesh), None, n, mesh, form)
    corpus = trained.corpus(split)
    n = min(n, len(corpus.validation.s)) if corpus.has_sources else n
    return Bench(trained, corpus, judge_of(corpus, judge, mesh), trained.asked(corpus, mesh), n, mesh, form)


def measure(bench: Bench, sampler: Sampler, seed: int = 0) -> Measured:
    """Texts and what they are worth, from the file of an earlier time if there is one."""
    trained = bench.trained
    settings = dict(run=trained.name, weights=trained.weights, encoder=trained.config.encoder, n=bench.n, seed=seed)
    settings |= dict(rows=bench.corpus and [bench.corpus.key, bench.corpus.split])
    settings |= dict(judge=[bench.judge.signature, bench.judge.weights]) | dataclasses.asdict(sampler)
    file = trained.directory / "measured" / f"{digest(settings)}.json"
    if file.exists():
        found = json.loads(file.read_text())
        scores = {k: tuple(v) if isinstance(v, list) else v for k, v in found["scores"].items()}
        return Measured(found["texts"], scores, found["each"])
    with jax.set_mesh(bench.mesh):
        texts = generate.sample_texts(
            trained.config,
            sampler,
            trained.model,
            trained.tokenizer,
            bench.n,
            generate.sampling_key(seed),
            bench.mesh,
            bench.asked,
        )
    scores, each = bench.judge.judge(texts)
    found = dict(settings=settings, scores=scores, texts=texts, each=each)
    if is_chief():
        runs.write_whole(file, json.dumps(found, ensure_ascii=False, indent=1) + "\n")
    return Measured(texts, scores, each)


def over_seeds(bench: Bench, sampler: Sampler, seeds: Iterable[int]) -> dict[str, Score]:
    """Mean and standard error over seeds of every score; of a single seed, the scores as they are."""
    sampler = dataclasses.replace(sampler, form=bench.form)
    found = [measure(bench, sampler, seed).scores for seed in seeds]
    if len(found) == 1:
        return found[0]
    return {name: metrics.mean_and_error([metrics.mean_of(scores[name]) for scores in found]) for name in found[0]}
