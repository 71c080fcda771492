"""Scores of a set of texts."""

import math
from collections import Counter

from corpora import stories

Score = float | tuple[float, float]  # a number, or a mean over texts with its standard error
VALID_TEXTS, VALID_SENTENCES = "valid texts", "valid sentences"
EXACT_PERPLEXITY, ENTROPY = "exact perplexity of valid texts", "unigram entropy (nats)"
WORDS, DISTINCT = "words per text", "distinct texts"


def unigram_entropy(texts_words: list[list]) -> float:
    """Compute the mean entropy in nats of the words (or tokens) within a text; it grows with their length."""
    entropies = []
    for words in texts_words:
        shares = [n / len(words) for n in Counter(words).values()]
        entropies.append(-sum(share * math.log(share) for share in shares))
    return sum(entropies) / len(entropies)


def word_scores(texts: list[str], texts_words: list[list]) -> dict[str, Score]:
    """Score texts by their words alone: entropy, length, distinct texts and distinct n-grams."""
    scores = {ENTROPY: unigram_entropy(texts_words), WORDS: sum(map(len, texts_words)) / len(texts)}
    return scores | distinct_scores(texts, texts_words)


def distinct_scores(texts: list[str], texts_words: list[list]) -> dict[str, float]:
    """Compute the shares of texts, words, pairs and triples of words that are not repetitions."""
    parts = {DISTINCT: texts}
    for n in (1, 2, 3):
        grams = [tuple(words[i : i + n]) for words in texts_words for i in range(len(words) - n + 1)]
        parts[f"distinct-{n}"] = grams
    return {name: len(set(own)) / max(len(own), 1) for name, own in parts.items()}


def grammar_scores(rules: stories.Grammar, texts: list[str]) -> tuple[dict[str, Score], list[float]]:
    """Score texts by a grammar, together and one by one: perplexity per word, infinite for an invalid text.

    The perplexity of all texts is that of the valid ones: read it beside their share.
    """
    words = [stories.split(text) for text in texts]
    log_p = [stories.log_probability(rules.text, text) for text in texts]
    valid = [(p, len(own)) for p, own in zip(log_p, words, strict=True) if p > -math.inf]
    nll = -sum(p for p, _ in valid)
    n = sum(n for _, n in valid)
    good, sentences = map(sum, zip(*(stories.valid_sentences(rules, text) for text in texts), strict=True))
    scores = {
        VALID_SENTENCES: good / max(sentences, 1),
        VALID_TEXTS: len(valid) / len(texts),
        EXACT_PERPLEXITY: math.exp(nll / n) if n else math.inf,
        **word_scores(texts, words),
    }
    return scores, [math.exp(-p / max(len(own), 1)) for p, own in zip(log_p, words, strict=True)]


def mean_of(score: Score) -> float:
    return score[0] if isinstance(score, tuple) else score


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Compute the mean and its standard error."""
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1)
    return mean, (variance / len(values)) ** 0.5


def bleu(texts: list[str], references: list[str]) -> tuple[float, str]:
    """Compute corpus BLEU, lowercased with effective order as in the released code, and its signature."""
    from sacrebleu.metrics import BLEU

    scorer = BLEU(lowercase=True, effective_order=True)
    score = scorer.corpus_score(texts, [references]).score
    return score, str(scorer.get_signature())


def rouge(texts: list[str], references: list[str]) -> dict[str, list[float]]:
    """Compute each text's ROUGE-1, -2 and -L with stemming: F1 in percent."""
    from rouge_score.rouge_scorer import RougeScorer

    kinds = {"ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "ROUGE-L": "rougeL"}
    scorer = RougeScorer(list(kinds.values()), use_stemmer=True)
    scores = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    return {name: [100 * score[kind].fmeasure for score in scores] for name, kind in kinds.items()}


def is_share(name: str) -> bool:
    return name.startswith(("valid", "distinct", "exact matches", "vocabulary"))


def shown(name: str, score: Score, digits: int = 3) -> str:
    """Format a score: shares in percent, means with their error, - where it is not finite."""
    mean, error = score if isinstance(score, tuple) else (score, None)
    if not math.isfinite(mean):
        return "-"
    if error is None:
        return f"{mean:.1%}" if is_share(name) else f"{mean:.{digits}f}"
    if is_share(name):
        return f"{100 * mean:.1f} ± {100 * error:.1f}%"
    return f"{mean:.2f} ± {error:.{2 if error >= 0.1 else 3}f}"
