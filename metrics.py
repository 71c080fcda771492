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


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1)
    return mean, (variance / len(values)) ** 0.5


def bleu(texts: list[str], references: list[str]) -> tuple[float, str]:
    """Corpus BLEU by sacreBLEU, lowercased and with effective order as the paper's, and its signature."""
    from sacrebleu.metrics import BLEU

    scorer = BLEU(lowercase=True, effective_order=True)
    score = scorer.corpus_score(texts, [references]).score
    return score, str(scorer.get_signature())


def rouge(texts: list[str], references: list[str]) -> dict[str, tuple[float, float]]:
    """ROUGE-1, -2 and -L with stemming: F1 in percent, mean and standard error over texts."""
    from rouge_score.rouge_scorer import RougeScorer

    kinds = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(kinds, use_stemmer=True)
    scores = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    return {kind: mean_and_error([100 * score[kind].fmeasure for score in scores]) for kind in kinds}


def task_scores(texts: list[str], references: list[str]) -> dict[str, float]:
    """How close texts come to the one answer given for each."""
    rouges = rouge(texts, references)
    return {
        "BLEU": bleu(texts, references)[0],
        "ROUGE-1": rouges["rouge1"][0],
        "ROUGE-2": rouges["rouge2"][0],
        "ROUGE-L": rouges["rougeL"][0],
        "± (standard error)": rouges["rougeL"][1],
        "exact matches": sum(a == b for a, b in zip(texts, references, strict=True)) / len(texts),
    }


def text_scores(texts: list[str]) -> dict[str, float]:
    """What can be said of texts without a judge."""
    words = [text.split() for text in texts]
    return {
        "unigram entropy (nats)": unigram_entropy(words),
        "words per text": sum(map(len, words)) / len(texts),
        "distinct texts": distinct(texts),
    }
