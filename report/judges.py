"""Judges of sampled texts: the right answers, a grammar's exact likelihood, or a GPT-2.

Dull texts can have a low perplexity, so every judge also reports entropy and distinct words. Where there is a
corpus, it also reports how well the texts cover it.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Integer
from tqdm import tqdm

from corpora.rows import Corpus, load_tokenizer
from corpora.stories import Grammar
from data import fingerprint
from encoders.gpt2 import GPT2, load_gpt2
from encoders.weights import download_network
from report import coverage, metrics
from report.coverage import PAIR_DIVERGENCE, WORD_DIVERGENCE, Counts
from report.metrics import ENTROPY, Score
from runtime.errors import UserError
from runtime.mesh import by_row, place_rows, replicate, to_host
from runtime.processes import is_process_0


class Judgement(NamedTuple):
    scores: dict[str, Score]
    """Scores of the texts as a set."""
    each: list[float]
    """One score for each text."""


class Judge(NamedTuple):
    signature: str
    """Meaning of the scores in one line; part of the hash of a stored measurement."""
    shown: dict[str, str]
    """Heads of the columns in tables, and the score under each; the most telling first."""
    each: str
    """Name of the score that each text has."""
    low_is_good: bool
    judge: Callable[[list[str]], Judgement]
    weights: str = ""
    """Hash of the judging network's weights, if there is one."""
    truth: Callable[[], Counts] | None = None
    """Counts of the words that texts should have, where there is a corpus."""


def judge_of(corpus: Corpus | None, name: str, mesh: Mesh) -> Judge:
    """Choose a judge: by name, else by the corpus' answers or grammar, else GPT-2 Large as in the paper."""
    if not name and corpus and (corpus.has_sources or corpus.rules):
        return judge_by(corpus)
    judge = NO_JUDGE if name == "none" else gpt2_judge(name or "gpt2-large", mesh)
    return with_coverage(judge, corpus) if corpus else judge


def judge_by(corpus: Corpus) -> Judge:
    """Choose what a corpus can judge by: right answers, its grammar, or words alone."""
    if corpus.has_sources:
        return with_coverage(answers_judge(corpus), corpus)
    return with_coverage(grammar_judge(corpus.rules) if corpus.rules else NO_JUDGE, corpus)


def with_coverage(judge: Judge, corpus: Corpus) -> Judge:
    """Also score how well texts cover a corpus."""
    truth = cache(partial(coverage.truth_of, corpus))

    def both(texts: list[str]) -> Judgement:
        scores, each = judge.judge(texts)
        return Judgement(scores | coverage.scores(texts, truth()), each)

    shown = judge.shown | {"words": WORD_DIVERGENCE, "pairs": PAIR_DIVERGENCE}
    others = "many texts of the corpus" if corpus.built_in else "the held-out texts"
    signature = f"{judge.signature}; Jensen–Shannon divergence from {others}, nats"
    return judge._replace(judge=both, shown=shown, signature=signature, truth=truth)


def answers_judge(corpus: Corpus) -> Judge:
    """Compare texts with the answers to the held-out sources, in their order."""

    def judge(texts: list[str]) -> Judgement:
        answers = [example.text for example in corpus.held_out[: len(texts)]]
        rouge = metrics.rouge(texts, answers)
        scores = {"BLEU": metrics.bleu(texts, answers)[0]}
        scores |= {name: metrics.mean_and_error(values) for name, values in rouge.items()}
        matches = sum(text == answer for text, answer in zip(texts, answers, strict=True))
        return Judgement(scores | {"exact matches": matches / len(texts)}, rouge["ROUGE-L"])

    bleu = f"corpus BLEU ({metrics.bleu([''], [''])[1]})"
    signature = f"{corpus.split} split; {bleu}; ROUGE F1 with stemming, mean ± standard error"
    shown = {name: name for name in ("BLEU", "ROUGE-1", "ROUGE-2", "ROUGE-L")}
    return Judge(signature, shown, "ROUGE-L", low_is_good=False, judge=judge)


def grammar_judge(rules: Grammar) -> Judge:
    """Judge by the exact likelihood. The share of valid texts is shown too, as others have no perplexity."""

    def judge(texts: list[str]) -> Judgement:
        return Judgement(*metrics.grammar_scores(rules, texts))

    signature = "perplexity per word, exact, of the valid texts; entropy of words within a text, nats"
    shown = {"PPL": metrics.EXACT_PERPLEXITY, "entropy": ENTROPY, "valid": metrics.VALID_TEXTS}
    return Judge(signature, shown, "perplexity", low_is_good=True, judge=judge)


def judge_words(texts: list[str]) -> Judgement:
    """Score texts by their words alone."""
    words = [text.split() for text in texts]
    return Judgement(metrics.word_scores(texts, words), [metrics.unigram_entropy([w]) for w in words])


WORD_SCORES = {"entropy": ENTROPY, "distinct-2": "distinct-2"}
NO_JUDGE = Judge("no judge; entropy of words within a text, nats", WORD_SCORES, "entropy", False, judge_words)


def report(judge: Judge, corpus: Corpus | None, texts: list[str], scores: dict[str, Score]) -> str:
    """Format the scores of samples as a table, beside those of the corpus itself or of trivial answers."""
    columns, n = dict(samples=scores), len(texts)
    if corpus and "BLEU" in judge.shown:
        sources = [example.source for example in corpus.held_out[:n]]
        columns |= dict(source=judge.judge(sources).scores, nothing=judge.judge([""] * n).scores)
        columns |= dict(corpus=coverage.floor(corpus, n, judge.truth()))
    elif corpus:  # Rows of equal length, cut at EOS alike: entropy and perplexity depend on both.
        held_out = coverage.texts_of(corpus, corpus.validation, n)
        columns |= dict(corpus=judge.judge(held_out).scores | coverage.floor(corpus, n, judge.truth()))
    title = f"{len(texts):,} samples" + (f", {corpus.split} split" if corpus else "")
    lines = [title.ljust(34) + "".join(f"{name:>15}" for name in columns)]
    for name in scores:
        cells = (metrics.shown(name, column.get(name, math.nan)) for column in columns.values())
        lines.append(f"{name:34}" + "".join(f"{cell:>15}" for cell in cells))
    off = [coverage.most_off(texts, judge.truth())] if corpus else []
    return "\n".join([*lines, "", *off, judge.signature])


def some_texts(corpus: Corpus | None, texts: list[str], n: int = 3) -> str:
    """Format a few samples to read, with their sources and references if there are any."""
    if corpus is None or not corpus.has_sources:
        return "\n".join(f"  {text}" for text in texts[:n])
    sources = [shorten(example.source, 200, placeholder=" …") for example in corpus.held_out[:n]]
    answers = zip(sources, texts, corpus.held_out, strict=False)
    return "\n".join(f"  {source} → {text}  [{example.text}]" for source, text, example in answers)


def gpt2_judge(name: str, mesh: Mesh) -> Judge:
    """Judge by the perplexity under a GPT-2, as in the paper."""
    files = ["tokenizer*", "vocab.json", "merges.txt"]
    holding = "a GPT-2 and its tokenizer, or none to do without"
    directory = download_network(name, "--judge", files, holding=holding)
    model, tokenizer = load_gpt2(directory), load_tokenizer(directory)
    if len(tokenizer) > len(model.embed):
        sizes = f"{len(tokenizer)} tokens in the tokenizer, {len(model.embed)} in the network"
        raise UserError(f"--judge {name}: {sizes}; give the tokenizer of this network")
    limit = f"at most {len(model.positions)} tokens a text"
    signature = f"Gen. PPL by {Path(name).name}, {limit}; entropy of its tokens within a text, nats"
    shown = {"PPL": "Gen. PPL", "entropy": ENTROPY}
    judge = partial(judge_by_gpt2, replicate(model, mesh), tokenizer, mesh)
    return Judge(signature, shown, "perplexity", low_is_good=True, judge=judge, weights=fingerprint(model))


def judge_by_gpt2(model: GPT2, tokenizer: Any, mesh: Mesh, texts: list[str]) -> Judgement:
    """Score texts by perplexity under the model, and by entropy and distinct n-grams of their tokens."""
    if not any(text.strip() for text in texts):
        raise UserError(f"nothing to judge: all of the {len(texts)} texts are empty; train longer")
    context, eos = len(model.positions), tokenizer.eos_token_id
    tokens = [row[:context] for row in tokenizer(texts, verbose=False)["input_ids"]]
    # An EOS ends each row, if there is room. Widths are multiples of 64, as each is compiled.
    width = min(context, 64 * (max(map(len, tokens)) // 64 + 1))
    s = np.array([row + [eos] * (width - len(row)) for row in tokens], np.int32)
    nll = token_nll(model, s, mesh)
    is_eos = s == eos
    counts = (~is_eos | (np.cumsum(is_eos, axis=1) == 1))[:, 1:]  # up to the EOS that ends the text
    scores = {
        "Gen. PPL": math.exp(float(nll[counts].sum(dtype=np.float64)) / int(counts.sum())),
        ENTROPY: metrics.unigram_entropy(tokens),
        "tokens per text": sum(map(len, tokens)) / len(texts),
        **metrics.distinct_scores(texts, tokens),
    }
    rows = zip(nll, counts, strict=True)
    return Judgement(scores, [math.exp(row[own].mean()) if own.any() else math.inf for row, own in rows])


def token_nll(model: GPT2, s: Integer[np.ndarray, "N T"], mesh: Mesh) -> Float[np.ndarray, "N T-1"]:
    """Compute the negative log-likelihood of every token but the first, 4 rows at a time on each device."""
    size, parts = 4 * mesh.size, []
    nll = jax.jit(GPT2.nll, out_shardings=by_row(mesh))
    starts = range(0, len(s), size)
    for start in tqdm(starts, desc="judging", unit="batch", leave=False, disable=not is_process_0()):
        chosen = np.arange(start, start + size) % len(s)
        parts.append(to_host(nll(model, place_rows(s, chosen, mesh))))
    return np.concatenate(parts)[: len(s)]
