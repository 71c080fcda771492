"""Coverage of a distribution of texts: divergences of words and of pairs, and the vocabulary used.

Texts can all be valid, and each as diverse as a text of the corpus, and still say one word of a kind for all
of them. Validity, perplexity and entropy within a text do not see that; these scores do. Their floor is above
zero: few texts of the corpus itself never have the frequencies of many.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import numpy as np
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr

from corpora.rows import Corpus, Rows, detokenize

WORD_DIVERGENCE, PAIR_DIVERGENCE = "divergence of words (nats)", "divergence of pairs (nats)"
VOCABULARY = "vocabulary used"
APART = 3  # words of a pair stand at most this far apart
MANY, MANY_TOKENS = 20_000, 2_000_000  # texts and tokens that a truth is counted on


class Counts(NamedTuple):
    """Numbers of words, and of ordered pairs of words near each other in a sentence."""

    words: Counter
    pairs: Counter


def count(texts: Iterable[str]) -> Counts:
    words, pairs = Counter(), Counter()
    for text in texts:
        for sentence in re.split(r"[.!?]+", text):
            own = re.findall(r"\w+", sentence)
            words.update(own)
            for distance in range(1, APART + 1):
                pairs.update(zip(own, own[distance:], strict=False))
    return Counts(words, pairs)


def divergence(a: Counter, b: Counter) -> float:
    """Compute the Jensen–Shannon divergence of two distributions: 0 if equal, ln 2 if they share nothing."""
    if not a or not b:
        return math.log(2)
    keys = list(a.keys() | b.keys())
    p, q = (np.array([counts[key] for key in keys]) / counts.total() for counts in (a, b))
    return float(jensenshannon(p, q) ** 2)


def scores(texts: list[str], truth: Counts) -> dict[str, float]:
    """Score texts by the divergence of their words and pairs from the truth, and the share of words used."""
    own = count(texts)
    used = sum(word in own.words for word in truth.words) / max(len(truth.words), 1)
    distances = {WORD_DIVERGENCE: divergence(own.words, truth.words)}
    return distances | {PAIR_DIVERGENCE: divergence(own.pairs, truth.pairs), VOCABULARY: used}


def truth_of(corpus: Corpus) -> Counts:
    """Count the words of a corpus: of many written texts if it is built in, else of the held-out texts."""
    rows = corpus.rows if corpus.built_in else corpus.validation
    return count(texts_of(corpus, rows, min(MANY, MANY_TOKENS // rows.s.shape[1])))


def floor(corpus: Corpus, n: int, truth: Counts) -> dict[str, float]:
    """Score as many texts of the corpus itself, none of which the truth was counted on."""
    return scores(texts_of(corpus, corpus.validation if corpus.built_in else corpus.rows, n), truth)


def texts_of(corpus: Corpus, rows: Rows, n: int) -> list[str]:
    """Read the texts of n rows from all over the corpus, cut like samples."""
    chosen = np.linspace(0, len(rows.s) - 1, min(n, len(rows.s))).astype(int)
    return detokenize(np.asarray(rows.s[chosen]), corpus.tokenizer, np.asarray(rows.prefix[chosen]))


def most_off(texts: list[str], truth: Counts, n: int = 6) -> str:
    """Name the words that add most to the divergence, each with its frequency relative to the truth."""
    own, words = count(texts).words, list(truth.words)
    p, q = (np.array([counts[w] for w in words]) / max(counts.total(), 1) for counts in (own, truth.words))
    worst = np.argsort(-rel_entr(p, (p + q) / 2) - rel_entr(q, (p + q) / 2))
    lines = []
    for label, off in (("too often", p > q), ("too rarely", p < q)):
        some = (f"{words[i]} {p[i] / q[i]:.1f}×" for i in worst if off[i])
        lines.append(f"{label}: {', '.join(islice(some, n))}")
    return "\n".join(lines)
