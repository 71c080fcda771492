"""A trained network at work: texts sampled with some settings and scored. Each is measured once and then read from a file."""

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
from generate import Asked, Sampler
from judges import Judge, judge_of
from metrics import Score
from trained import Trained

ANSWERS = "corpus BLEU ({}); ROUGE F1 with stemming, mean ± standard error over texts"


class Bench(NamedTuple):
    """What a measurement needs besides the settings of the sampler."""

    trained: Trained
    corpus: Corpus
    judge: Judge | None
    """None where the corpus has the right answers."""
    asked: Asked | None
    n: int
    """Texts for each measurement."""
    mesh: Mesh

    @property
    def signature(self) -> str:
        if self.judge:
            return self.judge.signature
        return f"{self.corpus.split} split; {ANSWERS.format(metrics.bleu([''], [''])[1])}"

    @property
    def perplexity(self) -> str:
        """The name of the perplexity among the scores."""
        return self.judge.perplexity


class Measured(NamedTuple):
    texts: list[str]
    scores: dict[str, Score]


def bench_for(trained: Trained, mesh: Mesh, n: int | None = None, judge: str = "", split: Split = "validation") -> Bench:
    corpus, n = trained.corpus(split), trained.config.num_samples if n is None else n
    if corpus.has_sources:
        return Bench(trained, corpus, None, trained.asked(corpus, mesh), min(n, len(corpus.validation.s)), mesh)
    return Bench(trained, corpus, judge_of(corpus, judge, mesh), None, n, mesh)


def measure(bench: Bench, sampler: Sampler, seed: int = 0) -> Measured:
    """Texts and their scores, from the file of an earlier time if there is one."""
    trained = bench.trained
    settings = dict(run=trained.name, step=trained.step, encoder=trained.config.encoder, rows=bench.corpus.key)
    settings |= dict(split=bench.corpus.split, n=bench.n, seed=seed, judge=bench.signature) | dataclasses.asdict(sampler)
    file = trained.directory / "measured" / f"{digest(settings)}.json"
    if file.exists():
        found = json.loads(file.read_text())
        return Measured(found["texts"], {k: tuple(v) if isinstance(v, list) else v for k, v in found["scores"].items()})
    with jax.set_mesh(bench.mesh):
        key = generate.sampling_key(seed)
        texts = generate.sample_texts(
            trained.config, sampler, trained.model, trained.tokenizer, bench.n, key, bench.mesh, bench.asked
        )
    if bench.judge:
        scores = bench.judge.score(texts)
    else:
        scores = metrics.task_scores(texts, [example.text for example in bench.corpus.held_out[: bench.n]])
    runs.write_whole(file, json.dumps(dict(settings=settings, scores=scores, texts=texts), ensure_ascii=False, indent=1) + "\n")
    return Measured(texts, scores)


def over_seeds(bench: Bench, sampler: Sampler, seeds: Iterable[int]) -> dict[str, Score]:
    """Mean and standard error over seeds of every score; of a single seed, the scores as they are."""
    found = [measure(bench, sampler, seed).scores for seed in seeds]
    if len(found) == 1:
        return found[0]

    def mean(score: Score) -> float:
        return score[0] if isinstance(score, tuple) else score

    return {name: metrics.mean_and_error([mean(scores[name]) for scores in found]) for name in found[0]}
