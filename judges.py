"""Who judges sampled texts: the grammar they should follow, by its exact likelihood, or a GPT-2, by generative perplexity.

A low perplexity can be bought with dull texts, so every judge also tells their entropy and how distinct their words are.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Integer
from tqdm import tqdm

import hub
import metrics
from corpora import Corpus, load_tokenizer
from errors import Refused
from mesh import by_row, fetch, is_chief, place_rows, replicate
from metrics import Score
from pretrained import GPT2, load_gpt2


class Judge(NamedTuple):
    signature: str
    """What its numbers mean, in one line; changes whenever they do."""
    perplexity: str
    """The name of its perplexity among its scores."""
    score: Callable[[list[str]], dict[str, Score]]
    each: Callable[[list[str]], list[float]]
    """Perplexity of every text by itself; infinite where it is impossible, or empty."""


def judge_of(corpus: Corpus, name: str, mesh: Mesh) -> Judge:
    """The one that is asked for; by default the grammar of a corpus that has one, and else GPT-2 Large as in the paper."""
    if not name and corpus.rules:
        signature = "perplexity per word, exact, of the valid texts; entropy of words within a text, nats"
        score, each = metrics.grammar_scores, metrics.exact_perplexities
        return Judge(signature, metrics.EXACT_PERPLEXITY, partial(score, corpus.rules), partial(each, corpus.rules))
    return gpt2_judge(name or "gpt2-large", mesh)


def gpt2_judge(name: str, mesh: Mesh) -> Judge:
    place = hub.fetch_network(name, "--judge", ["tokenizer*", "vocab.json", "merges.txt"])
    model, tokenizer = replicate(load_gpt2(place), mesh), load_tokenizer(place)
    if len(tokenizer) > len(model.embed):
        raise Refused(f"--judge {name}: its tokenizer has {len(tokenizer)} tokens and its network {len(model.embed)}")
    context = len(model.positions)
    signature = f"Gen. PPL by {Path(name).name}, at most {context} tokens a text; entropy of its tokens within a text, nats"
    judged = partial(judged_tokens, model, tokenizer, mesh)
    return Judge(
        signature, "Gen. PPL", lambda texts: gpt2_scores(texts, *judged(texts)), lambda texts: each_of(*judged(texts)[1:])
    )


Tokens = list[list[int]]


def judged_tokens(
    model: GPT2, tokenizer: Any, mesh: Mesh, texts: list[str]
) -> tuple[Tokens, Float[np.ndarray, "N T-1"], Bool[np.ndarray, "N T-1"]]:
    """The tokens of texts, the negative log-likelihood of all but their first, and which of these count."""
    tokens = [row[: len(model.positions)] for row in tokenizer(texts, verbose=False)["input_ids"]]
    s = padded(tokens, len(model.positions), tokenizer.eos_token_id)
    counts = counted(s, tokenizer.eos_token_id)
    if not counts.any():
        raise Refused(f"nothing to judge: all of the {len(texts)} texts are empty")
    return tokens, token_nll(model, s, mesh), counts


def each_of(nll: Float[np.ndarray, "N T-1"], counts: Bool[np.ndarray, "N T-1"]) -> list[float]:
    return [math.exp(row[own].mean()) if own.any() else math.inf for row, own in zip(nll, counts, strict=True)]


def gpt2_scores(
    texts: list[str], tokens: Tokens, nll: Float[np.ndarray, "N T-1"], counts: Bool[np.ndarray, "N T-1"]
) -> dict[str, Score]:
    """Total negative log-likelihood over all counted tokens of all texts; entropy and distinct n-grams of the same tokens."""
    return {
        "Gen. PPL": math.exp(float(nll[counts].sum(dtype=np.float64)) / int(counts.sum())),
        "unigram entropy (nats)": metrics.unigram_entropy(tokens),
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
