"""Numbers that judge a set of texts."""

import math
from collections import Counter

import grammar

Score = float | tuple[float, float]  # a number, or a mean over texts and its standard error
VALID_TEXTS, VALID_SENTENCES = "valid texts", "valid sentences"
EXACT_PERPLEXITY, ENTROPY = "exact perplexity of valid texts", "unigram entropy (nats)"
WORDS, DISTINCT = "words per text", "distinct texts"


def unigram_entropy(texts_words: list[list]) -> float:
    """Entropy in nats of the words (or tokens) within a text, averaged over texts. It grows with their length."""
    entropies = []
    for words in texts_words:
        counts = Counter(words).values()
        total = sum(counts)
        entropies.append(-sum(n / total * math.log(n / total) for n in counts))
    return sum(entropies) / len(entropies)


def distinct(items: list) -> float:
    return len(set(items)) / max(len(items), 1)


def distinct_scores(texts: list[str], texts_words: list[list]) -> dict[str, float]:
    """How many of the texts, and of their words and pairs and triples of words, are not repetitions."""
    found = {DISTINCT: distinct(texts)}
    for n in (1, 2, 3):
        grams = [tuple(words[i : i + n]) for words in texts_words for i in range(len(words) - n + 1)]
        found[f"distinct-{n}"] = distinct(grams)
    return found


def grammar_scores(rules: grammar.Grammar, texts: list[str]) -> dict[str, Score]:
    """How well texts follow a grammar that knows their probability.

    An ungrammatical text has probability zero, so perplexity (per word) is that of the valid texts: read it beside their share.
    """
    log_p = [grammar.log_probability(rules.text, text) for text in texts]
    words = [grammar.split(text) for text in texts]
    nll = -sum(p for p in log_p if p > -math.inf)
    valid_words = sum(len(w) for w, p in zip(words, log_p, strict=True) if p > -math.inf)
    valid, sentences = map(sum, zip(*(grammar.valid_sentences(rules, text) for text in texts), strict=True))
    return {
        VALID_SENTENCES: valid / max(sentences, 1),
        VALID_TEXTS: sum(p > -math.inf for p in log_p) / len(texts),
        EXACT_PERPLEXITY: math.exp(nll / valid_words) if valid_words else math.inf,
        ENTROPY: unigram_entropy(words),
        WORDS: sum(map(len, words)) / len(texts),
        **distinct_scores(texts, words),
    }


def exact_perplexities(rules: grammar.Grammar, texts: list[str]) -> list[float]:
    """Per word, of every text by itself."""
    log_p = [grammar.log_probability(rules.text, text) for text in texts]
    return [math.exp(-p / len(grammar.split(text))) if p > -math.inf else math.inf for p, text in zip(log_p, texts, strict=True)]


def mean_of(score: Score) -> float:
    return score[0] if isinstance(score, tuple) else score


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1)
    return mean, (variance / len(values)) ** 0.5


def bleu(texts: list[str], references: list[str]) -> tuple[float, str]:
    """Corpus BLEU by sacreBLEU, lowercased and with effective order as in the released code, and its signature."""
    from sacrebleu.metrics import BLEU

    scorer = BLEU(lowercase=True, effective_order=True)
    score = scorer.corpus_score(texts, [references]).score
    return score, str(scorer.get_signature())


def rouge(texts: list[str], references: list[str]) -> dict[str, list[float]]:
    """ROUGE-1, -2 and -L with stemming: F1 in percent, of every text."""
    from rouge_score.rouge_scorer import RougeScorer

    kinds = {"ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "ROUGE-L": "rougeL"}
    scorer = RougeScorer(list(kinds.values()), use_stemmer=True)
    scores = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    return {name: [100 * score[kind].fmeasure for score in scores] for name, kind in kinds.items()}


def text_scores(texts: list[str]) -> dict[str, Score]:
    """What can be said of texts without a judge."""
    words = [text.split() for text in texts]
    return {
        ENTROPY: unigram_entropy(words),
        WORDS: sum(map(len, words)) / len(texts),
        **distinct_scores(texts, words),
    }


def shown(name: str, score: Score) -> str:
    """A score as text: shares in percent, means with their error; - where there is none, as no text was valid."""
    is_share = name.startswith(("valid", "distinct", "exact matches"))
    if not math.isfinite(mean_of(score)):
        return "-"
    if isinstance(score, tuple):
        mean, error = (100 * part if is_share else part for part in score)
        return f"{mean:.1f} ± {error:.1f}%" if is_share else f"{mean:.2f} ± {error:.{2 if error >= 0.1 else 3}f}"
    return f"{score:.1%}" if is_share else f"{score:.3f}"
