"""Who judges sampled texts: the right answers, the grammar they should follow by its exact likelihood, or a GPT-2.

A low perplexity can be bought with dull texts, so every judge also tells their entropy and how distinct their words are.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Integer
from tqdm import tqdm

import corpora
import hub
import metrics
from corpora import Corpus, load_tokenizer
from data import fingerprint
from errors import Refused
from grammar import Grammar
from mesh import by_row, fetch, is_chief, place_rows, replicate
from metrics import Score
from pretrained import GPT2, load_gpt2


class Judgement(NamedTuple):
    scores: dict[str, Score]
    """Of all texts together."""
    each: list[float]
    """Of every text by itself."""


class Judge(NamedTuple):
    signature: str
    """What its numbers mean, in one line; changes whenever they do."""
    shown: dict[str, str]
    """The scores that tables show, by the head of their column, the first one first to be looked at."""
    each: str
    """What every text has by itself."""
    low_is_good: bool
    judge: Callable[[list[str]], Judgement]
    weights: str = ""
    """What tells its network from others, where it is one."""


def judge_of(corpus: Corpus | None, name: str, mesh: Mesh) -> Judge:
    """The one that is asked for; by default what the corpus itself can tell, and else GPT-2 Large as in the paper."""
    if name == "none":
        return NO_JUDGE
    if not name and corpus and (corpus.has_sources or corpus.rules):
        return judge_by(corpus)
    return gpt2_judge(name or "gpt2-large", mesh)


def judge_by(corpus: Corpus) -> Judge:
    """What a corpus can tell of texts: by the right answers, by the rules they should follow, or not much."""
    if corpus.has_sources:
        return answers_judge(corpus)
    return grammar_judge(corpus.rules) if corpus.rules else NO_JUDGE


def answers_judge(corpus: Corpus) -> Judge:
    """Texts are answers to the held-out sources, in their order."""

    def judge(texts: list[str]) -> Judgement:
        answers = [example.text for example in corpus.held_out[: len(texts)]]
        of_each = metrics.rouge(texts, answers)
        scores = {"BLEU": metrics.bleu(texts, answers)[0]} | {k: metrics.mean_and_error(v) for k, v in of_each.items()}
        right = sum(text == answer for text, answer in zip(texts, answers, strict=True))
        return Judgement(scores | {"exact matches": right / len(texts)}, of_each["ROUGE-L"])

    signature = (
        f"{corpus.split} split; corpus BLEU ({metrics.bleu([''], [''])[1]}); ROUGE F1 with stemming, mean ± standard error"
    )
    shown = {name: name for name in ("BLEU", "ROUGE-1", "ROUGE-2", "ROUGE-L")}
    return Judge(signature, shown, "ROUGE-L", low_is_good=False, judge=judge)


def grammar_judge(rules: Grammar) -> Judge:
    """An impossible text has no perplexity, so that of the others is told beside their share."""
    return Judge(
        "perplexity per word, exact, of the valid texts; entropy of words within a text, nats",
        {"PPL": metrics.EXACT_PERPLEXITY, "entropy": metrics.ENTROPY, "valid": metrics.VALID_TEXTS},
        "perplexity",
        low_is_good=True,
        judge=lambda texts: Judgement(metrics.grammar_scores(rules, texts), metrics.exact_perplexities(rules, texts)),
    )


NO_JUDGE = Judge(
    "no judge; entropy of words within a text, nats",
    {"entropy": metrics.ENTROPY, "distinct-2": "distinct-2"},
    "entropy",
    low_is_good=False,
    judge=lambda texts: Judgement(metrics.text_scores(texts), [metrics.unigram_entropy([text.split()]) for text in texts]),
)


def report(judge: Judge, corpus: Corpus | None, texts: list[str], scores: dict[str, Score]) -> str:
    """The scores of samples beside those of what they can be held against, as a table."""
    columns = dict(samples=scores)
    if corpus and "BLEU" in judge.shown:
        sources = [example.source for example in corpus.held_out[: len(texts)]]
        columns |= dict(source=judge.judge(sources).scores, nothing=judge.judge([""] * len(texts)).scores)
    elif corpus:  # Rows of the same length, cut at the same EOS: entropy and perplexity depend on both.
        s, prefix = (np.asarray(part[: len(texts)]) for part in (corpus.validation.s, corpus.validation.prefix))
        theirs = corpora.texts_of(s, corpus.tokenizer, prefix)
        columns |= dict(corpus=judge.judge(theirs).scores)
    title = f"{len(texts):,} samples" + (f", {corpus.split} split" if corpus else "")
    lines = [title.ljust(34) + "".join(f"{name:>15}" for name in columns)]
    for name in scores:
        lines.append(f"{name:34}" + "".join(f"{metrics.shown(name, column[name]):>15}" for column in columns.values()))
    return "\n".join([*lines, "", judge.signature])


def some_texts(corpus: Corpus | None, texts: list[str], n: int = 3) -> str:
    """A few samples to read, with what they answer."""
    if corpus is None or not corpus.has_sources:
        return "\n".join(f"  {text}" for text in texts[:n])
    answered = zip(corpus.held_out[:n], texts, strict=False)
    return "\n".join(f"  {shorten(e.source, 200, placeholder=' …')} → {text}  [{e.text}]" for e, text in answered)


def gpt2_judge(name: str, mesh: Mesh) -> Judge:
    more = ["tokenizer*", "vocab.json", "merges.txt"]
    place = hub.fetch_network(name, "--judge", more, holding="a GPT-2 and its tokenizer, or none to do without")
    model, tokenizer = load_gpt2(place), load_tokenizer(place)
    if len(tokenizer) > len(model.embed):
        raise Refused(f"--judge {name}: its tokenizer has {len(tokenizer)} tokens and its network {len(model.embed)}")
    context = len(model.positions)
    signature = f"Gen. PPL by {Path(name).name}, at most {context} tokens a text; entropy of its tokens within a text, nats"
    shown = {"PPL": "Gen. PPL", "entropy": metrics.ENTROPY}
    judge = partial(judged_by, replicate(model, mesh), tokenizer, mesh)
    return Judge(signature, shown, "perplexity", low_is_good=True, judge=judge, weights=fingerprint(model))


Tokens = list[list[int]]


def judged_tokens(
    model: GPT2, tokenizer: Any, mesh: Mesh, texts: list[str]
) -> tuple[Tokens, Float[np.ndarray, "N T-1"], Bool[np.ndarray, "N T-1"]]:
    """The tokens of texts, the negative log-likelihood of all but their first, and which of these count."""
    if not any(text.strip() for text in texts):
        raise Refused(f"nothing to judge: all of the {len(texts)} texts are empty")
    tokens = [row[: len(model.positions)] for row in tokenizer(texts, verbose=False)["input_ids"]]
    s = padded(tokens, len(model.positions), tokenizer.eos_token_id)
    return tokens, token_nll(model, s, mesh), counted(s, tokenizer.eos_token_id)


def judged_by(model: GPT2, tokenizer: Any, mesh: Mesh, texts: list[str]) -> Judgement:
    tokens, nll, counts = judged_tokens(model, tokenizer, mesh, texts)
    return Judgement(gpt2_scores(texts, tokens, nll, counts), each_of(nll, counts))


def each_of(nll: Float[np.ndarray, "N T-1"], counts: Bool[np.ndarray, "N T-1"]) -> list[float]:
    return [math.exp(row[own].mean()) if own.any() else math.inf for row, own in zip(nll, counts, strict=True)]


def gpt2_scores(
    texts: list[str], tokens: Tokens, nll: Float[np.ndarray, "N T-1"], counts: Bool[np.ndarray, "N T-1"]
) -> dict[str, Score]:
    """Total negative log-likelihood over all counted tokens of all texts; entropy and distinct n-grams of the same tokens."""
    return {
        "Gen. PPL": math.exp(float(nll[counts].sum(dtype=np.float64)) / int(counts.sum())),
        metrics.ENTROPY: metrics.unigram_entropy(tokens),
        "tokens per text": sum(map(len, tokens)) / len(texts),
        **metrics.distinct_scores(texts, tokens),
    }


def padded(tokens: list[list[int]], context: int, eos: int) -> Integer[np.ndarray, "N T"]:
    """Rows as wide as the longest text and its EOS, filled up with EOS; of few different widths, as each is compiled for."""
    widest = min(context, max(map(len, tokens)) + 1)
    s = np.full((len(tokens), min(context, -(-widest // 64) * 64)), eos, np.int32)
    for row, own in zip(s, tokens, strict=True):
        row[: len(own)] = own
    return s


def counted(s: Integer[np.ndarray, "N T"], eos: int) -> Bool[np.ndarray, "N T-1"]:
    """Tokens that count: all but the first of a row, which nothing predicts, and the EOS after the one that ends the text."""
    return ((s != eos) | (np.cumsum(s == eos, axis=1) == 1))[:, 1:]


def token_nll(model: GPT2, s: Integer[np.ndarray, "N T"], mesh: Mesh, rows: int = 4) -> Float[np.ndarray, "N T-1"]:
    """Of every token but the first, some rows at a time on each device."""
    size, found = rows * mesh.size, []
    nll = jax.jit(GPT2.nll, out_shardings=by_row(mesh))
    for start in tqdm(range(0, len(s), size), desc="judging", unit="batch", leave=False, disable=not is_chief()):
        chosen = np.arange(start, start + size) % len(s)
        found.append(fetch(nll(model, place_rows(s, chosen, mesh))))
    return np.concatenate(found)[: len(s)]
