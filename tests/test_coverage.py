"""Divergences from a corpus: what they are, what they see, and what the other scores do not."""

import math
import random
from collections import Counter

import pytest

from corpora import stories
from corpora.rows import GRAMMARS
from report import coverage, judges, metrics
from report.coverage import PAIR_DIVERGENCE, VOCABULARY, WORD_DIVERGENCE


class Collapsed(stories.Writer):
    """A pen that says the most frequent word of a kind, wherever there is a choice of words."""

    def say_one(self, choice):
        self.say(choice.options[0])
        return choice.options[0]


def collapsed(n, seed):
    texts, rng = [], random.Random(seed)
    for _ in range(n):
        pen = Collapsed(rng)
        stories.STORIES.text(pen)
        texts.append(stories.join(pen.words))
    return texts


@pytest.fixture(scope="module", name="corpus")
def stories_corpus(stories):
    return stories


@pytest.fixture(scope="module")
def truth(corpus):
    return coverage.truth_of(corpus)


def test_divergences_are_those_computed_by_hand():
    """Equal counts give 0, disjoint ones ln 2, and a half against a whole what the formula gives."""
    one, two = Counter(a=3), Counter(a=1, b=1)
    assert coverage.divergence(two, Counter(a=5, b=5)) == pytest.approx(0, abs=1e-12)
    assert coverage.divergence(one, Counter(b=1)) == pytest.approx(math.log(2))
    by_hand = 0.5 * math.log(1 / 0.75) + 0.5 * (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    assert coverage.divergence(one, two) == coverage.divergence(two, one) == pytest.approx(by_hand)


def test_pairs_stand_in_order_near_each_other_and_in_one_sentence():
    pairs = coverage.count(["a b c d e. f g"]).pairs
    assert pairs == Counter(map(tuple, "ab bc cd de ac bd ce ad be fg".split()))


def test_a_collapsed_sampler_is_valid_and_still_seen(truth):
    """The most frequent word of each kind gives valid texts with few words: only the divergences tell."""
    texts = collapsed(256, seed=0)
    scores, _ = metrics.grammar_scores(GRAMMARS["stories"], texts)
    assert scores[metrics.VALID_TEXTS] == scores[metrics.VALID_SENTENCES] == 1
    honest, _ = metrics.grammar_scores(GRAMMARS["stories"], stories.write(stories.STORIES, 256, seed=5))
    assert scores[metrics.ENTROPY] == pytest.approx(honest[metrics.ENTROPY], rel=0.02)
    own = coverage.scores(texts, truth)
    assert own[WORD_DIVERGENCE] > 0.1 and own[PAIR_DIVERGENCE] > 0.2 and own[VOCABULARY] < 0.5
    assert "too rarely" in coverage.most_off(texts, truth)


def test_the_floor_is_what_other_texts_of_the_corpus_score(corpus, truth):
    """Held-out texts and freshly written ones diverge alike from many texts, and less if there are more."""
    floors = {n: coverage.floor(corpus, n, truth) for n in (64, 256)}
    for n, floor in floors.items():
        fresh = [coverage.scores(stories.write(stories.STORIES, n, seed), truth) for seed in (11, 12, 13)]
        for name in (WORD_DIVERGENCE, PAIR_DIVERGENCE):
            assert floor[name] == pytest.approx(sum(own[name] for own in fresh) / 3, rel=0.15)
    assert floors[256][WORD_DIVERGENCE] < 0.5 * floors[64][WORD_DIVERGENCE]


def test_every_judge_of_a_corpus_reports_its_coverage(corpus):
    """A report shows the divergences of samples beside their floor, and which words are off."""
    judge, texts = judges.judge_by(corpus), stories.write(stories.STORIES, 64, seed=3)
    report = judges.report(judge, corpus, texts, judge.judge(texts).scores)
    assert all(name in report for name in (WORD_DIVERGENCE, PAIR_DIVERGENCE, VOCABULARY, "too often"))
    assert {"words", "pairs"} <= judge.shown.keys()
