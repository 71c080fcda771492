"""Numbers that judge a set of texts."""

import math
from collections import Counter

import grammar


def unigram_entropy(texts_words: list[list]) -> float:
    """Entropy in nats of the words (or tokens) within a text, averaged over texts. It grows with their length."""
    entropies = []
    for words in texts_words:
        counts = Counter(words).values()
        total = sum(counts)
        entropies.append(-sum(n / total * math.log(n / total) for n in counts))
    return sum(entropies) / len(entropies)


def distinct(texts: list[str]) -> float:
    return len(set(texts)) / len(texts)


def grammar_scores(rules: grammar.Grammar, texts: list[str]) -> dict[str, float]:
    """How well texts follow a grammar that knows their probability.

    An ungrammatical text has probability zero, so perplexity (per word) is that of the valid texts: read it beside their share.
    """
    log_p = [grammar.log_probability(rules.text, text) for text in texts]
    words = [grammar.split(text) for text in texts]
    nll = -sum(p for p in log_p if p > -math.inf)
    valid_words = sum(len(w) for w, p in zip(words, log_p, strict=True) if p > -math.inf)
    valid, sentences = map(sum, zip(*(grammar.valid_sentences(rules, text) for text in texts), strict=True))
    return {
        "valid sentences": valid / max(sentences, 1),
        "valid texts": sum(p > -math.inf for p in log_p) / len(texts),
        "exact perplexity of valid texts": math.exp(nll / valid_words) if valid_words else math.inf,
        "unigram entropy (nats)": unigram_entropy(words),
        "words per text": sum(map(len, words)) / len(texts),
        "distinct texts": distinct(texts),
    }
