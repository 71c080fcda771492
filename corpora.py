"""Corpora: where texts come from, and the rows of tokens made of them once and read by memory map ever after.

    corpus = load_corpus("translate", "scratch", Layout(length=48, source=24, pack=False), Path("cache"))

Embedded grammars, data sets of the hub and files of one's own all become the same thing: texts, alone or with the source each
is to be written from.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Integer
from tqdm import tqdm

import grammar
from errors import Refused
from grammar import STORIES, Grammar

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # It warns that PyTorch is missing, which is how we want it.

SENTINELS = 8
GRAMMARS = {"stories": STORIES}
FORMAT = 1  # of the files below; another number prepares all corpora anew


class Rows(NamedTuple):
    """Token rows: a condition of `prefix` tokens (or none), the text up to `length`, then padding by EOS."""

    s: Integer[np.ndarray | Array, "N L"]
    length: Integer[np.ndarray | Array, " N"]
    prefix: Integer[np.ndarray | Array, " N"]


class Layout(NamedTuple):
    """How texts become rows."""

    length: int
    """Tokens of a row."""
    source: int = 0
    """Most of them that a source may take, its EOS included."""
    pack: bool = False
    """Texts end to end and cut into full rows, rather than one a row; not with sources."""


class Example(NamedTuple):
    """A text, and the source that it is to be written from, if any. Both may be tokens already."""

    text: str | list[int]
    source: str | list[int] | None = None


@dataclass(frozen=True)
class Corpus:
    key: str
    """A name for the content."""
    rows: Rows
    validation: Rows
    """Rows that are not trained on."""
    held_out: list[Example]
    """What they were made of."""
    tokenizer: Any
    counts: dict[str, int]
    """What was left out or cut when the rows were made."""
    rules: Grammar | None = None
    """The true distribution, where it is known."""


def load_corpus(name: str, encoder: str, layout: Layout, cache: Path) -> Corpus:
    """The rows of a corpus in the tokens of an encoder: from the cache, or made and put there."""
    if name not in GRAMMARS:
        raise Refused(f"--data {name}: unknown; known are {', '.join(GRAMMARS)}")
    rules = GRAMMARS[name]
    directory = cache / f"rows-{digest([FORMAT, name, layout, Path(grammar.__file__).read_text()])}"
    with only_one(directory) as partial:
        if partial:
            train, unseen = ([Example(text) for text in grammar.write(rules, n, seed)] for n, seed in ((100_000, 1), (2_000, 2)))
            prepare(partial, train, unseen, word_tokenizer(example.text for example in train), layout)
    corpus = read_corpus(directory, layout, rules)
    if corpus.counts["texts cut"]:
        raise Refused(f"{corpus.counts['texts cut']} texts of {name} do not fit into rows of {layout.length}: raise --length")
    return corpus


def digest(what) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


@contextmanager
def only_one(directory: Path) -> Iterator[Path | None]:
    """A place to make `directory` in, unless it is there. It appears whole or not at all, and no two processes make it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if directory.exists():
            yield None
            return
        partial = directory.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)  # of one that was killed
        partial.mkdir()
        yield partial
        partial.rename(directory)


# Texts to rows


def prepare(directory: Path, train: Iterable[Example], unseen: Iterable[Example], tokenizer, layout: Layout):
    """Write what `read_corpus` reads."""
    told = Counter()
    for split, examples in (("train", train), ("validation", unseen)):
        rows = 0
        with (directory / f"{split}.s").open("wb") as s, (directory / f"{split}.ends").open("wb") as ends:
            for part in to_rows(examples, tokenizer, layout, told):
                part.s.astype(token_type(tokenizer)).tofile(s)
                np.stack([part.length, part.prefix], axis=1).astype(np.int32).tofile(ends)
                rows += len(part.s)
        told[f"{split} rows"] = rows
    tokenizer.save_pretrained(directory / "tokenizer")
    held_out = (json.dumps(example._asdict(), ensure_ascii=False) + "\n" for example in unseen)
    (directory / "held_out.jsonl").write_text("".join(held_out))
    (directory / "counts.json").write_text(json.dumps(told, indent=2) + "\n")


def read_corpus(directory: Path, layout: Layout, rules: Grammar | None = None) -> Corpus:
    from transformers import AutoTokenizer

    counts = json.loads((directory / "counts.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer")

    def rows(split):
        n = counts[f"{split} rows"]
        ends = np.memmap(directory / f"{split}.ends", np.int32, "r", shape=(n, 2))
        return Rows(np.memmap(directory / f"{split}.s", token_type(tokenizer), "r", shape=(n, layout.length)), *ends.T)

    held_out = [Example(**json.loads(line)) for line in (directory / "held_out.jsonl").open()]
    return Corpus(directory.name, rows("train"), rows("validation"), held_out, tokenizer, counts, rules)


def token_type(tokenizer):
    return np.uint16 if len(tokenizer) <= 2**16 else np.uint32


def to_rows(examples: Iterable[Example], tokenizer, layout: Layout, told: Counter, at_once: int = 1_000) -> Iterator[Rows]:
    """Rows of some texts after the other. Tokenizers work on all cores by themselves if given many texts."""
    eos, rest = tokenizer.eos_token_id, np.zeros(0, np.int32)
    ahead = iter(tqdm(examples, desc="tokenising", unit=" texts", unit_scale=True, leave=False))
    while some := list(islice(ahead, at_once)):
        texts, sources = (to_tokens(column, tokenizer) for column in zip(*some, strict=True))
        if layout.pack:
            rows, rest = pack_rows(texts, layout.length, eos, rest)
            yield rows
        else:
            yield pad_rows(texts, sources, layout, eos, told)


def to_tokens(texts: Sequence[str | list[int] | None], tokenizer) -> list[list[int] | None]:
    if isinstance(texts[0], str):
        return tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return list(texts)


def pad_rows(texts: Sequence[list[int]], sources: Sequence[list[int] | None], layout: Layout, eos: int, told: Counter) -> Rows:
    """One text a row, after its source if it has one; each ended by EOS, and the row padded by EOS. What is too long is cut."""
    s = np.full((len(texts), layout.length), eos, np.int32)
    length, prefix = np.zeros((2, len(texts)), np.int32)
    for i, (text, source) in enumerate(zip(texts, sources, strict=True)):
        given = [] if source is None else [*source[: layout.source - 1], eos]
        own = [*text[: layout.length - (layout.source if given else 0) - 1], eos]
        told["sources cut"] += source is not None and len(source) >= layout.source
        told["texts cut"] += len(text) >= len(own)
        prefix[i], length[i] = len(given), len(given) + len(own)
        s[i, : length[i]] = given + own
    return Rows(s, length, prefix)


def pack_rows(texts: Sequence[list[int]], length: int, eos: int, rest: np.ndarray) -> tuple[Rows, np.ndarray]:
    """Texts end to end after `rest`, EOS after each, cut into full rows; and what is left over."""
    stream = np.concatenate([rest, np.fromiter(chain.from_iterable(chain(text, [eos]) for text in texts), np.int32)])
    n = len(stream) // length
    return Rows(stream[: n * length].reshape(n, length), np.full(n, length, np.int32), np.zeros(n, np.int32)), stream[
        n * length :
    ]


# Rows to texts


def texts_of(tokens: Integer[np.ndarray, "N L"], tokenizer) -> list[str]:
    """Token rows as text, cut at the first EOS."""
    eos = tokenizer.eos_token_id
    ends = [int(np.argmax(row == eos)) if np.any(row == eos) else len(row) for row in tokens]
    return tokenizer.batch_decode([row[:end] for row, end in zip(tokens, ends, strict=True)])


def word_tokenizer(texts: Iterable[str]):
    """One token a word, in the interface (and file format) of the Hugging Face tokenizers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for text in texts for word in grammar.split(text)})
    special = [f"<extra_id_{i}>" for i in range(SENTINELS)]
    vocab = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *words, *special])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)  # joins words by spaces, but not before a full stop
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=special,
    )
