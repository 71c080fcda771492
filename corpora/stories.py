"""Stories from a seeded grammar that knows the exact probability of every text.

A grammar is a function of a `pen`: it lets the pen `pick` among weighted options and `say` words.
A `Writer` picks at random, so the grammar writes a text. A `Reader` follows a text and tries every option
that fits, so the grammar gives the probability of that text (zero if it is not grammatical).

    texts = write(STORIES, 1000, seed=0)
    log_probability(STORIES.text, texts[0])
"""

import math
import random
import re
from bisect import bisect
from collections.abc import Callable, Iterable
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

VERSION = 1
"""Version of the stories: raise it by hand when any text changes (words, their order, weights or draws)."""


class Choice(NamedTuple):
    options: tuple
    probabilities: tuple[float, ...]
    cumulative: tuple[float, ...]


def weighted(pairs: dict[Any, float]) -> Choice:
    total = sum(pairs.values())
    probabilities = tuple(weight / total for weight in pairs.values())
    return Choice(tuple(pairs), probabilities, tuple(accumulate(probabilities)))


def zipf(options: str | Iterable) -> Choice:
    """Weight options (or words) by rank: earlier ones are more likely, as the words of a language are."""
    options = options.split() if isinstance(options, str) else options
    return weighted({option: 1 / (rank + 3) for rank, option in enumerate(options)})


class Writer:
    """A pen that draws every choice at random."""

    def __init__(self, rng: random.Random):
        self.rng, self.words, self.log_p = rng, [], 0.0

    def pick(self, choice: Choice):
        i = bisect(choice.cumulative, choice.cumulative[-1] * self.rng.random(), hi=len(choice.options) - 1)
        self.log_p += math.log(choice.probabilities[i])
        return choice.options[i]

    def say(self, *words: str):
        self.words += words

    def say_one(self, choice: Choice) -> str:
        """Pick a word and say it."""
        self.say(word := self.pick(choice))
        return word


class Mismatch(Exception):
    """Error: the text does not continue with what the grammar says."""


class Fork(Exception):
    """Error: the text allows several options, and none is decided."""


class Reader:
    """A pen that follows a text; its first picks are decided."""

    def __init__(self, words: list[str], decided: tuple[int, ...]):
        self.words, self.decided = words, iter(decided)
        self.position, self.log_p = 0, 0.0

    def pick(self, choice: Choice):
        i = next(self.decided, None)
        if i is None:
            raise Fork(len(choice.options))
        self.log_p += math.log(choice.probabilities[i])
        return choice.options[i]

    def say(self, *words: str):
        end = self.position + len(words)
        if self.words[self.position : end] != list(words):
            raise Mismatch
        self.position = end

    def say_one(self, choice: Choice) -> str:
        """Take the option that the text has here: options are distinct words, so at most one fits."""
        word = self.words[self.position] if self.position < len(self.words) else None
        if word not in choice.options:
            raise Mismatch
        self.say(word)
        self.log_p += math.log(choice.probabilities[choice.options.index(word)])
        return word


Program = Callable[[Writer | Reader], Any]


class Grammar(NamedTuple):
    text: Program
    sentences: tuple[Program, ...]
    """Kinds of sentences that are valid out of context."""


def split(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def join(words: list[str]) -> str:
    return re.sub(r" ([.,?!;:])", r"\1", " ".join(words))


def write(grammar: Grammar, n: int, seed: int) -> list[str]:
    """Write n texts by random choices from a seed."""
    rng = random.Random(seed)
    pens = [Writer(rng) for _ in range(n)]
    for pen in pens:
        grammar.text(pen)
    return [join(pen.words) for pen in pens]


def log_probability(program: Program, text: str) -> float:
    """Compute the log-probability of a text, summed over all ways to write it; -inf if there is none."""
    words, ways, undecided = split(text), [], [()]
    while undecided:
        decided = undecided.pop()
        pen = Reader(words, decided)
        try:
            program(pen)
        except Mismatch:
            continue
        except Fork as fork:
            undecided += [(*decided, i) for i in range(fork.args[0])]
            continue
        if pen.position == len(words):
            ways.append(pen.log_p)
    return math.log(sum(map(math.exp, ways))) if ways else -math.inf


def valid_sentences(grammar: Grammar, text: str) -> tuple[int, int]:
    """Count the sentences of a text that are well-formed by themselves, and all of its sentences."""
    sentences = [part for part in re.findall(r"[^.]+\.?", text) if part.strip()]
    if log_probability(grammar.text, text) > -math.inf:
        return len(sentences), len(sentences)
    valid = (any(log_probability(kind, part) > -math.inf for kind in grammar.sentences) for part in sentences)
    return sum(valid), len(sentences)


# Short English stories: someone gets something somewhere, then does something with it.

WOMEN = """Anna Clara Emma Julia Lena Maria Nora Olga Rosa Sara Tessa Vera Alice Betty Carla Diana Elsa Flora
Greta Hanna Irene Judith Kira Lucy""".split()
MEN = """Adam Boris David Felix Henry Jacob Leo Martin Oscar Peter Simon Tom Anton Bruno Conrad Daniel Emil
Frank Gustav Hugo Ivan Jonas Karl Louis""".split()


def regular(verb: str) -> tuple[str, str, str]:
    """Inflect a regular verb: base, third person and past."""
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb, verb[:-1] + "ies", verb[:-1] + "ied"
    third = verb + ("es" if verb.endswith(("s", "sh", "ch", "x")) else "s")
    return verb, third, verb + ("d" if verb.endswith("e") else "ed")


def irregular(verbs: str) -> dict[str, tuple[str, ...]]:
    """List the forms of irregular verbs by their base."""
    return {forms.split()[0]: tuple(forms.split()) for forms in verbs.split(";")}


IRREGULAR = irregular("""buy buys bought; find finds found; see sees saw; meet meets met; get gets got;
choose chooses chose; eat eats ate; feed feeds fed; read reads read; hide hides hid; sell sells sold;
wear wears wore; steal steals stole; draw draws drew; keep keeps kept; make makes made; hug hugs hugged;
chop chops chopped; win wins won; knit knits knitted; pat pats patted""")


class Kind(NamedTuple):
    """A kind of object: names in both numbers, properties, ways to get it and ways to use it."""

    nouns: Choice
    adjectives: Choice
    getting: Choice
    using: Choice


def make_kind(nouns: str, adjectives: str, getting: str, using: str) -> Kind:
    """Make a kind from lists of words; irregular plurals stand behind a slash."""
    pairs = (tuple(noun.split("/")) if "/" in noun else (noun, noun + "s") for noun in nouns.split())
    verbs = (zipf(IRREGULAR.get(verb) or regular(verb) for verb in part.split()) for part in (getting, using))
    return Kind(zipf(pairs), zipf(adjectives), *verbs)


KINDS = zipf(
    make_kind(*kind.split(";"))
    for kind in """
    apple cake pear cookie carrot onion melon plum peach/peaches tomato/tomatoes;
    sweet fresh ripe sour delicious juicy; buy find order choose; eat taste slice cook chop.
    dog cat horse goat rabbit duck parrot turtle puppy/puppies pony/ponies;
    hungry gentle noisy shy young clever; see meet adopt find; feed wash follow hug pat.
    book letter map poem diary/diaries novel postcard notebook magazine song;
    long secret funny famous strange ancient; borrow receive discover get; read copy study hide translate.
    lamp chair clock mirror box/boxes vase basket table shelf/shelves bench/benches;
    heavy wooden broken golden dusty elegant; buy inherit steal make; clean repair paint sell move.
    coat hat scarf/scarves dress/dresses shirt jacket sweater glove ribbon blanket;
    warm woolen colorful expensive soft ugly; order choose receive knit; wear fold mend wash sew.
    drum kite flute doll guitar violin puzzle trumpet camera compass/compasses;
    tiny shiny silver modern simple precious; get borrow discover win; polish draw keep test admire
    """.split(".")
)
NAMES = zipf(pair for both in zip(WOMEN, MEN, strict=True) for pair in zip(both, ("she", "he"), strict=True))
POSSESSIVE = {"she": "her", "he": "his", "they": "their"}
PRONOUNS = zipf(POSSESSIVE)
TENSES = weighted({"past": 5, "present": 3, "future": 2})
OPENING = {
    "past": zipf("Yesterday Recently Once Earlier"),
    "present": zipf("Often Usually Sometimes Nowadays"),
    "future": zipf("Tomorrow Soon Tonight Someday"),
}
LINKING = zipf("Then Later Afterwards Finally")
PLACES = """in garden, at market, near river, in kitchen, at station, near bridge, in forest, at school,
near church, in village, at harbor, near lake, in library, at fair, near castle, in cellar, at museum,
near tower, in valley, at bakery, near mill"""
WHERE = zipf(tuple(place.split()) for place in PLACES.split(","))
ROOMS = zipf("house room attic yard cabin shed")
COMPANIONS = zipf("friend sister brother neighbor cousin teacher uncle aunt")
NUMBERS = zipf("two three some many")
PRAISE = zipf("special lovely useful beautiful nice rare cheap unusual")
PLURAL = weighted({False: 2, True: 1})
OBJECT_AS = weighted({"noun": 3, "pronoun": 1})
SETTING = weighted({"companion": 2, "room": 1})
REASON = weighted({True: 3, False: 2})


class Scene(NamedTuple):
    """Features of the first sentence that the second must agree with."""

    tense: str
    pronoun: str
    kind: Kind
    noun: str
    plural: bool


def say_verb(pen, verbs: Choice, tense: str, plural: bool):
    if tense == "future":
        pen.say("will")
    form = {"future": 0, "present": 0 if plural else 1, "past": 2}[tense]
    pen.say_one(inflected(verbs, form))


@cache
def inflected(forms: Choice, i: int) -> Choice:
    """Choose among words in one of their forms."""
    return forms._replace(options=tuple(word[i] for word in forms.options))


@cache
def names_but(taken: str) -> Choice:
    others = zip(NAMES.options, NAMES.probabilities, strict=True)
    return weighted({name: p for (name, _), p in others if name != taken})


def say_someone(pen) -> str:
    """Say one or two people, and return the pronoun that stands for them."""
    name, pronoun = pen.pick(NAMES)
    pen.say(name)
    if not pen.pick(PLURAL):
        return pronoun
    pen.say("and")
    pen.say_one(names_but(name))
    return "they"


def first_sentence(pen) -> Scene:
    tense = pen.pick(TENSES)
    pen.say_one(OPENING[tense])
    pronoun = say_someone(pen)
    kind = pen.pick(KINDS)
    say_verb(pen, kind.getting, tense, pronoun == "they")
    plural = pen.pick(PLURAL)
    if plural:
        pen.say_one(NUMBERS)
        pen.say_one(kind.adjectives)
    else:
        adjective = pen.pick(kind.adjectives)
        pen.say("an" if adjective[0] in "aeiou" else "a", adjective)
    noun = pen.say_one(inflected(kind.nouns, int(plural)))
    preposition, place = pen.pick(WHERE)
    pen.say(preposition, "the", place, ".")
    return Scene(tense, pronoun, kind, noun, plural)


def second_sentence(pen, scene: Scene):
    pen.say_one(LINKING)
    pen.say(scene.pronoun)
    say_verb(pen, scene.kind.using, scene.tense, scene.pronoun == "they")
    if pen.pick(OBJECT_AS) == "noun":
        pen.say("the", scene.noun)
    else:
        pen.say("them" if scene.plural else "it")
    companion = pen.pick(SETTING) == "companion"
    pen.say("with" if companion else "in", POSSESSIVE[scene.pronoun])
    pen.say_one(COMPANIONS if companion else ROOMS)
    if pen.pick(REASON):
        be = ("was", "were") if scene.tense == "past" else ("is", "are")
        pen.say("because", "they" if scene.plural else "it", be[scene.plural], "so")
        pen.say_one(PRAISE)
    pen.say(".")


def story(pen):
    """Say two sentences that agree in person, number, tense and object."""
    second_sentence(pen, first_sentence(pen))


def lone_second_sentence(pen):
    """Say a second sentence that fits any first one."""
    kind = pen.pick(KINDS)
    tense, pronoun, plural = pen.pick(TENSES), pen.pick(PRONOUNS), pen.pick(PLURAL)
    noun = pen.pick(inflected(kind.nouns, int(plural)))
    second_sentence(pen, Scene(tense, pronoun, kind, noun, plural))


STORIES = Grammar(story, sentences=(first_sentence, lone_second_sentence))
