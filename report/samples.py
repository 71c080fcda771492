"""Texts sampled from a trained network in batches over a mesh, with scores that are kept with the run."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from tqdm import tqdm

from config import Form, Sampler
from corpora.rows import Corpus, Split, detokenize
from data import Conditions
from methods.elf import elf_method, trajectory
from report import metrics
from report.judges import Judge, judge_of
from report.metrics import Score
from runtime.checkpoints import Trained
from runtime.files import hash_of, write_file
from runtime.mesh import replicate, to_host
from runtime.processes import is_process_0


def sampling_key(seed: int) -> PRNGKeyArray:
    """Make the random key of all samples of a seed, apart from the keys of training."""
    return jax.random.fold_in(jax.random.key(seed), 3)


def sample_texts(
    trained: Trained, n: int, sampler: Sampler | None = None, seed=0, conditions: Conditions | None = None
) -> list[str]:
    """Sample n texts, 16 at a time on each device; with conditions, the answers to the first n sources."""
    config, mesh, texts = trained.config, trained.mesh, []
    method = elf_method(config, len(trained.tokenizer), len(trained.model.unembed.weight), mesh)
    size = min(16, -(-n // mesh.size)) * mesh.size
    quiet = n <= size or not is_process_0()
    with jax.set_mesh(mesh):
        model = replicate(trained.model, mesh)
        for first in tqdm(range(0, n, size), desc="sampling", unit="batch", leave=False, disable=quiet):
            number = np.arange(first, first + size)
            key = sampling_key(seed)
            tokens = to_host(method.sample(model, conditions, number, key, sampler or config.sampler))
            texts += detokenize(tokens, trained.tokenizer, prefixes(conditions, number))
    return texts[:n]


def prefixes(conditions: Conditions | None, number: np.ndarray) -> np.ndarray | None:
    """Look up each condition's tokens, which are no part of the text."""
    return None if conditions is None else conditions.rows.prefix[number % len(conditions.rows.s)]


class Frame(NamedTuple):
    """Text of a sample at one time of its trajectory."""

    t: float
    text: str


def trajectories(
    trained: Trained, n: int, sampler: Sampler, seed: int, conditions: Conditions | None, frames: int
) -> list[list[Frame]]:
    """Decode the predictions of n samples at some times along their way."""
    mesh, key = trained.mesh, sampling_key(seed)
    number = np.arange(-(-n // mesh.size) * mesh.size)
    with jax.set_mesh(mesh):
        model = replicate(trained.model, mesh)
        times, tokens = trajectory(trained.config, model, conditions, number, key, sampler, frames)
    texts = [detokenize(at_t, trained.tokenizer, prefixes(conditions, number)) for at_t in to_host(tokens)]
    return [[Frame(t, at_t[i]) for t, at_t in zip(times, texts, strict=True)] for i in range(n)]


def as_records(corpus: Corpus | None, texts: list[str]) -> list[dict[str, str]]:
    """Make records of samples, with their sources and references if there are any."""
    if corpus is None or not corpus.has_sources:
        return [dict(text=text) for text in texts]
    pairs = zip(texts, corpus.held_out[: len(texts)], strict=True)
    return [dict(text=text, source=truth.source, reference=truth.text) for text, truth in pairs]


def write_texts(file: Path, records: list[dict[str, str]]):
    write_file(file, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


class Bench(NamedTuple):
    """Network, with all that a measurement needs besides the settings of the sampler."""

    trained: Trained
    corpus: Corpus | None
    """None for a released network that writes texts without sources: it needs none."""
    judge: Judge
    conditions: Conditions | None
    """Sources to answer, if there are any."""
    n: int
    """Texts for each measurement."""
    form: Form = "paper"
    """Form of the samplers in tables and figures."""


class Measured(NamedTuple):
    texts: list[str]
    scores: dict[str, Score]
    each: list[float]
    """One score for each text."""


def bench_for(
    trained: Trained, n: int | None = None, judge: str = "", split: Split = "validation", form: Form = "paper"
) -> Bench:
    """Choose corpus, judge and conditions for a network."""
    n = trained.config.num_samples if n is None else n
    if trained.released and not trained.config.source_length:
        return Bench(trained, None, judge_of(None, judge, trained.mesh), None, n, form)
    corpus = trained.corpus(split)
    n = min(n, len(corpus.validation.s)) if corpus.has_sources else n
    return Bench(trained, corpus, judge_of(corpus, judge, trained.mesh), trained.conditions(corpus), n, form)


def measure(bench: Bench, sampler: Sampler, seed: int = 0) -> Measured:
    """Sample and score texts, or read the file of an earlier measurement."""
    trained, corpus, judge = bench.trained, bench.corpus, bench.judge
    settings = dict(run=trained.name, weights=trained.weights, encoder=trained.config.encoder)
    settings |= dict(n=bench.n, seed=seed, rows=corpus and [corpus.key, corpus.split])
    settings |= dict(judge=[judge.signature, judge.weights]) | dataclasses.asdict(sampler)
    file = trained.directory / "measured" / f"{hash_of(settings)}.json"
    if file.exists():
        saved = json.loads(file.read_text())
        scores = {k: tuple(v) if isinstance(v, list) else v for k, v in saved["scores"].items()}
        return Measured(saved["texts"], scores, saved["each"])
    texts = sample_texts(trained, bench.n, sampler, seed, bench.conditions)
    scores, each = judge.judge(texts)
    if is_process_0():
        record = dict(settings=settings, scores=scores, texts=texts, each=each)
        write_file(file, json.dumps(record, ensure_ascii=False, indent=1) + "\n")
    return Measured(texts, scores, each)


def over_seeds(bench: Bench, sampler: Sampler, seeds: Iterable[int]) -> dict[str, Score]:
    """Compute the mean and standard error of every score over seeds; a single seed keeps its scores."""
    sampler = dataclasses.replace(sampler, form=bench.form)
    by_seed = [measure(bench, sampler, seed).scores for seed in seeds]
    if len(by_seed) == 1:
        return by_seed[0]
    means = {name: [metrics.mean_of(scores[name]) for scores in by_seed] for name in by_seed[0]}
    return {name: metrics.mean_and_error(values) for name, values in means.items()}
