"""The built-in corpus: what it writes is what it says, and it knows exactly how likely that is."""

import math
import random
from collections import Counter

import pytest

from corpora import stories
from corpora.stories import STORIES, Grammar, Writer, log_probability, valid_sentences, weighted, write, zipf


def test_the_probability_of_a_text_is_that_of_the_choices_that_wrote_it():
    rng = random.Random(0)
    for _ in range(50):
        pen = Writer(rng)
        STORIES.text(pen)
        assert math.isclose(log_probability(STORIES.text, stories.join(pen.words)), pen.log_p, rel_tol=1e-9)


def test_probabilities_sum_to_one_and_add_over_ways_to_write_a_text():
    """A grammar small enough to list, in which 'a b' can be written in two ways."""

    def small(pen):
        if pen.pick(weighted({True: 1, False: 3})):
            pen.say("a", "b")
        else:
            pen.say_one(zipf(["a", "c"]))
            pen.say_one(zipf(["b", "d"]))

    texts = {f"{x} {y}" for x in "ac" for y in "bd"}
    assert math.isclose(sum(math.exp(log_probability(small, text)) for text in texts), 1.0)
    counts = Counter(write(Grammar(small, ()), 20_000, seed=0))
    assert math.isclose(counts["a b"] / 20_000, math.exp(log_probability(small, "a b")), abs_tol=0.02)


def test_stories_are_as_rich_as_promised():
    texts = [stories.split(text) for text in write(STORIES, 20_000, seed=3)]
    assert len({word for text in texts for word in text}) >= 300
    assert 20 <= sum(map(len, texts)) / len(texts) <= 28
    assert all(text.count(".") == 2 for text in texts)


FIRST = "Yesterday Anna bought a sweet apple at the market."


@pytest.mark.parametrize(
    "text, sentences",
    [
        (f"{FIRST} Then she ate the apple with her friend.", 2),
        (f"{FIRST} Then he ate the apple with his friend.", 2),  # another person
        (f"{FIRST} Then she ate the pear with her friend.", 2),  # another object
        (f"{FIRST} Then she eats the apple with her friend.", 2),  # another tense
        (f"{FIRST} Then she ate them with her friend.", 2),  # another number
        (f"{FIRST.replace('bought', 'buys')} Then she ate the apple with her friend.", 1),  # two tenses
        (f"{FIRST.replace(' a ', ' an ')} Then she ate the apple with her friend.", 1),
        (f"{FIRST} Then she ate the apple with his friend.", 1),  # whose friend
        (FIRST.removesuffix("."), 0),
        ("", 0),
    ],
)
def test_stories_must_agree_within_and_across_sentences(text, sentences):
    """Only the first is a story; the numbers say how many of its sentences could stand in some story."""
    is_story = text == f"{FIRST} Then she ate the apple with her friend."
    assert (log_probability(STORIES.text, text) > -math.inf) == is_story
    assert valid_sentences(STORIES, text)[0] == sentences


def test_the_corpus_is_the_same_everywhere():
    assert write(STORIES, 2, seed=1) == write(STORIES, 3, seed=1)[:2]
    assert write(STORIES, 2, seed=1) != write(STORIES, 2, seed=2)


def test_a_reader_refuses_text_beyond_the_end():
    pen = stories.Reader(["a"], ())
    with pytest.raises(stories.Mismatch):
        pen.say("a", "b")
