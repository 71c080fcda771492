"""Corpora: rows of tokens, made once of the texts that a name stands for and read by memory map ever after.

corpus = load_corpus("stories", "", Layout(length=30), Path("cache"))
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Integer
from tqdm import tqdm

import grammar
import sources
import tasks
from errors import Refused
from grammar import STORIES, Grammar
from hub import fetch
from sources import Example
from tasks import TASKS, write_pairs

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # It warns that PyTorch is missing, which is how we want it.

SENTINELS = 8
GRAMMARS = {"stories": STORIES}
EMBEDDED = {**GRAMMARS, **TASKS}
WRITTEN = dict(train=100_000, validation=2_000, test=2_000)  # texts of each of these
FORMAT = 3  # of the files below; another number prepares all corpora anew
Split = Literal["validation", "test"]


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
    """Texts end to end and cut into full rows, rather than one a row; not where they have sources."""


@dataclass(frozen=True)
class Corpus:
    key: str
    """A name for what it was made of."""
    fingerprint: str
    """What tells that the rows to train on are those of an earlier time."""
    rows: Rows
    validation: Rows
    """Rows that are not trained on: of the split for validation, or for testing if that was asked for."""
    held_out: list[Example]
    """Texts that they were made of."""
    split: Split
    """Which of the two they are of."""
    tokenizer: Any
    counts: dict[str, dict[str, int]]
    """Rows in each split, and what was cut or left out."""
    rules: Grammar | None = None
    """The true distribution, where it is known."""

    @property
    def has_sources(self) -> bool:
        return self.held_out[0].source is not None

    def summary(self) -> str:
        """One line on what the rows were made of."""
        train, held_out = (
            ", ".join(f"{n:,} {what}" for what, n in self.counts[split].items() if n) for split in ("train", "validation")
        )
        return f"{train}; held out: {held_out}; {len(self.tokenizer):,} kinds of tokens"


def load_corpus(name: str, tokenizer: str, layout: Layout, cache: Path, split: Split = "validation") -> Corpus:
    """The rows of a corpus in the tokens of a tokenizer (a directory, or a name on the hub); grammars bring their own."""
    embedded = name in EMBEDDED
    if embedded:
        identity = [Path(module.__file__).read_text() for module in (grammar, tasks)]
    else:
        files, tokens = sources.find(name, EMBEDDED), tokenizer_place(tokenizer)
        identity = [content_of(chain(*files.values())), content_of(f for f in tokens.iterdir() if is_of_tokenizer(f))]
    directory = cache / f"rows-{digest([FORMAT, name, layout, identity])}"
    with only_one(directory) as place:
        if place and embedded:
            written = {part: write_embedded(name, n, seed) for seed, (part, n) in enumerate(WRITTEN.items(), 1)}
            words = word_tokenizer(text for example in written["train"] for text in example if text)
            prepare(place, {part: lambda told, part=part: written[part] for part in written}, words, layout)
        elif place:
            parts = ["train", "validation", *(["test"] if "test" in files else [])]
            texts = {part: partial(sources.stream, name, files, part) for part in parts}
            prepare(place, texts, load_tokenizer(tokens), layout)
    corpus = read_corpus(directory, layout, GRAMMARS.get(name), split)
    for what, flag in (("texts", "--length"), ("sources", "--source-length")):
        if embedded and (cut := corpus.counts["train"].get(f"{what} cut")):
            raise Refused(f"{cut:,} {what} of {name} do not fit into rows of {layout.length}: raise {flag}")
    return corpus


def write_embedded(name: str, n: int, seed: int) -> list[Example]:
    if name in TASKS:
        return [Example(text, source) for source, text in write_pairs(TASKS[name], n, seed)]
    return [Example(text) for text in grammar.write(GRAMMARS[name], n, seed)]


def digest(what) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def content_of(files: Iterable[Path]) -> list:
    """What tells that files (and those in directories) are still the same, without reading them; downloads from the hub link to a
    name that tells it."""
    files = chain.from_iterable(sorted(f.rglob("*")) if f.is_dir() else [f] for f in files)
    return sorted((str(f), f.stat().st_size, f.resolve().name if f.is_symlink() else f.stat().st_mtime_ns) for f in files)


@contextmanager
def only_one(directory: Path) -> Iterator[Path | None]:
    """A place to make `directory` in, unless it is there. It appears whole or not at all, and no two processes make it."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with directory.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if directory.exists():
                yield None
                return
            place = directory.with_suffix(".partial")
            shutil.rmtree(place, ignore_errors=True)  # of one that was killed
            place.mkdir()
            yield place
            place.rename(directory)
    except OSError as error:
        raise Refused(f"--cache {directory.parent}: data could not be prepared there ({error})") from None


# Texts to rows


def prepare(directory: Path, texts: dict[str, Callable[[Counter], Iterable[Example]]], tokenizer, layout: Layout):
    """Write what `read_corpus` reads. `texts` gives those of a split, and counts what it leaves out."""
    if tokenizer.eos_token_id is None:
        raise Refused("the tokenizer has no EOS, by which texts are ended: give another by --tokenizer")
    counts, with_sources, content = {split: Counter(rows=0) for split in texts}, set(), hashlib.sha256()
    for split, told in counts.items():
        examples = kept(texts[split](told), directory / f"{split}.texts", tokenizer, write=split != "train")
        with (directory / f"{split}.s").open("wb") as s, (directory / f"{split}.ends").open("wb") as ends:
            for some in to_rows(examples, tokenizer, layout, told):
                parts = some.s.astype(token_type(tokenizer)), np.stack([some.length, some.prefix], axis=1).astype(np.int32)
                for raw, file in zip(map(np.ndarray.tobytes, parts), (s, ends), strict=True):
                    file.write(raw)
                    content.update(raw if split == "train" else b"")
                told["rows"] += len(some.s)
                with_sources |= {bool(prefix) for prefix in some.prefix[:1]}
        if not told["rows"]:
            remedy = "give at least 100 texts, of which one is held out, or a directory with files named train and validation"
            remedy = f"{'lower --length, give --no-pack, or' if layout.pack else ''} {remedy}".strip()
            raise Refused(f"too little text: not one row of {layout.length} tokens for {split}; {remedy}")
        if len(with_sources) > 1:
            raise Refused(f"texts have sources in one split and none in another ({', '.join(texts)}): give all of them sources")
    tokenizer.save_pretrained(directory / "tokenizer")
    (directory / "fingerprint").write_text(content.hexdigest())
    (directory / "counts.json").write_text(json.dumps(counts, indent=2) + "\n")


def kept(examples: Iterable[Example], file: Path, tokenizer, *, write: bool) -> Iterator[Example]:
    """The same, written on the way in words if asked for."""
    with file.open("w", encoding="utf-8") if write else nullcontext() as out:
        for example in examples:
            if write:
                words = example.readable or [
                    part if isinstance(part, str | None) else tokenizer.decode(known(part, tokenizer), skip_special_tokens=True)
                    for part in (example.text, example.source)
                ]
                out.write(json.dumps(dict(zip(("text", "source"), words, strict=True)), ensure_ascii=False) + "\n")
            yield example


def read_corpus(directory: Path, layout: Layout, rules: Grammar | None = None, split: Split = "validation") -> Corpus:
    counts = json.loads((directory / "counts.json").read_text())
    tokenizer = load_tokenizer(directory / "tokenizer")
    if split not in counts:
        raise Refused(f"--split {split}: the data has none; there are {', '.join(counts)}")

    def rows(split):
        n = counts[split]["rows"]
        ends = np.memmap(directory / f"{split}.ends", np.int32, "r", shape=(n, 2))
        return Rows(np.memmap(directory / f"{split}.s", token_type(tokenizer), "r", shape=(n, layout.length)), *ends.T)

    held_out = [Example(**json.loads(line)) for line in (directory / f"{split}.texts").open(encoding="utf-8")]
    content = (directory / "fingerprint").read_text()
    return Corpus(directory.name, content, rows("train"), rows(split), held_out, split, tokenizer, counts, rules)


TOKENIZER_FILES = ("tokenizer.json", "spiece.model", "vocab.json")  # what holds its tokens, in one form or another


def is_of_tokenizer(file: Path) -> bool:
    return "token" in file.name or file.name in (*TOKENIZER_FILES, "merges.txt")


def is_scratch(encoder: str) -> bool:
    """Whether an encoder is one that is trained on the corpus first, and so has no tokenizer of its own."""
    return encoder.split("-")[0] == "scratch"


def tokenizer_place(name: str) -> Path:
    name = name.removeprefix("scratch-") if name.startswith("scratch-t5") else name
    if is_scratch(name):
        raise Refused("--encoder scratch has no tokenizer for this data: give one by --tokenizer")
    files = ["tokenizer*", "spiece.model", "special_tokens_map.json", "config.json"]
    return fetch(name, "--encoder or --tokenizer", files, holding="a tokenizer")


def load_tokenizer(directory: Path):
    from transformers import AutoTokenizer

    if not any((directory / file).exists() for file in TOKENIZER_FILES):  # Without them, transformers makes up a tokenizer.
        files = ", ".join(TOKENIZER_FILES)
        raise Refused(f"{directory}: no tokenizer there; it would be one of {files}, or give another directory by --tokenizer")
    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise Refused(f"{directory}: no tokenizer can be read there ({str(error).splitlines()[0][:200]})") from None


def token_type(tokenizer):
    return np.uint16 if len(tokenizer) <= 2**16 else np.uint32


def some_at_a_time(examples: Iterable[Example], most: int = 1_000, size: int = 2_000_000) -> Iterator[list[Example]]:
    """Lists of so many texts, or of texts of so many characters together: memory does not grow with their length."""
    some, long = [], 0
    for example in examples:
        some.append(example)
        long += len(example.text) + len(example.source or "")
        if len(some) == most or long >= size:
            yield some
            some, long = [], 0
    if some:
        yield some


def to_rows(examples: Iterable[Example], tokenizer, layout: Layout, told: Counter) -> Iterator[Rows]:
    """Rows of some texts after the other. Tokenizers work on all cores by themselves if given many texts."""
    eos, rest = tokenizer.eos_token_id, np.zeros(0, np.int32)
    ahead = iter(tqdm(examples, desc="tokenising", unit=" texts", unit_scale=True, leave=False))
    for some in some_at_a_time(ahead):
        texts, given = (to_tokens([example[i] for example in some], tokenizer, told) for i in range(2))
        told["unknown tokens"] += sum(row.count(tokenizer.unk_token_id) for row in chain(texts, given) if row)
        if given[0] is not None and not 0 < layout.source < layout.length:
            room = f"--source-length {layout.source}, --length {layout.length}"
            raise Refused(f"{room}: the data has sources, so there must be room for them and for a text after them")
        if layout.pack and given[0] is None:
            rows, rest = pack_rows(texts, layout.length, eos, rest, as_given=not isinstance(some[0].text, str))
            yield rows
        else:
            yield pad_rows(texts, given, layout, eos, told)


def to_tokens(texts: Sequence[str | list[int] | None], tokenizer, told: Counter) -> list[list[int] | None]:
    if isinstance(texts[0], str):
        rows = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return [without_eos(row, tokenizer.eos_token_id, told) for row in rows]
    return list(texts) if texts[0] is None else [known(row, tokenizer) for row in texts]


def without_eos(tokens: list[int], eos: int, told: Counter) -> list[int]:
    """Words that spell the end of a text do not end it."""
    if eos not in tokens:
        return tokens
    told["EOS left out"] += tokens.count(eos)
    return [token for token in tokens if token != eos]


def known(tokens: list[int], tokenizer) -> list[int]:
    """The same, if they are the tokenizer's."""
    if odd := next((token for token in (min(tokens), max(tokens)) if not 0 <= token < len(tokenizer)), None):
        raise Refused(f"the data has token {odd}, and the tokenizer {len(tokenizer)}: made for another encoder?")
    return tokens


def pad_rows(texts: Sequence[list[int]], given: Sequence[list[int] | None], layout: Layout, eos: int, told: Counter) -> Rows:
    """One text a row, after its source if it has one; each ended by EOS, and the row padded by EOS. What is too long is cut."""
    s = np.full((len(texts), layout.length), eos, np.int32)
    length, prefix = np.zeros((2, len(texts)), np.int32)
    for i, (text, source) in enumerate(zip(texts, given, strict=True)):
        before = [] if source is None else ended(source, layout.source, eos, told, "sources cut")
        after = ended(text, layout.length - (layout.source if before else 0), eos, told, "texts cut")
        prefix[i], length[i] = len(before), len(before) + len(after)
        s[i, : length[i]] = before + after
    return Rows(s, length, prefix)


def ended(tokens: list[int], most: int, eos: int, told: Counter, cut: str) -> list[int]:
    """Tokens and one EOS, at most `most` of them."""
    tokens = tokens[:-1] if tokens[-1:] == [eos] else tokens
    told[cut] += len(tokens) >= most
    return [*tokens[: most - 1], eos]


def pack_rows(
    texts: Sequence[list[int]], length: int, eos: int, rest: np.ndarray, as_given: bool = False
) -> tuple[Rows, np.ndarray]:
    """Texts end to end after `rest`, an EOS after each, cut into full rows; and what is left over.

    Given as tokens, a text of a full row's length was packed already, and one may have its EOS already.
    """
    texts = (text if as_given and (len(text) == length or text[-1] == eos) else [*text, eos] for text in texts)
    stream = np.concatenate([rest, np.fromiter(chain.from_iterable(texts), np.int32)])
    n = len(stream) // length
    rows = Rows(stream[: n * length].reshape(n, length), np.full(n, length, np.int32), np.zeros(n, np.int32))
    return rows, stream[n * length :]


# Rows to texts


def texts_of(tokens: Integer[np.ndarray, "N L"], tokenizer, prefix: Integer[np.ndarray, " N"] | None = None) -> list[str]:
    """Token rows as text, without the prefix and cut at the first EOS after it."""
    eos, texts = tokenizer.eos_token_id, []
    for row, start in zip(tokens, prefix if prefix is not None else [0] * len(tokens), strict=True):
        own = row[start:]
        texts.append(own[: int(np.argmax(own == eos))] if np.any(own == eos) else own)
    return tokenizer.batch_decode(texts)


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
