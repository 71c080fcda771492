"""Corpora as rows of tokens: prepared once from texts, then read through memory maps.

corpus = load_corpus("stories", "", Layout(length=30), Path("cache"))
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Integer
from tqdm import tqdm

from corpora import sources, stories, tasks
from corpora.sources import Example
from corpora.stories import STORIES, Grammar
from corpora.tasks import TASKS
from runtime.errors import UserError, first_line
from runtime.files import download, hash_of, made_once

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # silences its warning that PyTorch is missing

SENTINELS = 8  # special tokens of a word tokenizer, for the spans that span corruption hides
GRAMMARS = {"stories": STORIES}
BUILT_IN = {**GRAMMARS, **TASKS}
WRITTEN = dict(train=100_000, validation=2_000, test=2_000)  # texts of a built-in corpus, by split
FORMAT = 3  # of prepared files: raise it by hand when they change, and every corpus is prepared again
TOKENIZER_FILES = ("tokenizer.json", "spiece.model", "vocab.json")  # one of them holds the tokens
Split = Literal["validation", "test"]
Tokens = list[int]
Texts = list[Tokens | None]


class Rows(NamedTuple):
    """Token rows: a condition of `prefix` tokens (or none), the text up to `length`, then EOS as padding."""

    s: Integer[np.ndarray | Array, "N L"]
    length: Integer[np.ndarray | Array, " N"]
    prefix: Integer[np.ndarray | Array, " N"]


class Layout(NamedTuple):
    """Rules by which texts become rows."""

    length: int
    """Tokens of a row."""
    source: int = 0
    """Maximum number of tokens of a source, with its EOS."""
    pack: bool = False
    """Joining and cutting of texts without sources into full rows, in place of one text a row."""


@dataclass(frozen=True)
class Corpus:
    key: str
    """Directory name in the cache: a hash of the inputs and settings."""
    fingerprint: str
    """Hash of the training rows."""
    rows: Rows
    validation: Rows
    """Held-out rows of the requested split."""
    held_out: list[Example]
    """Texts of the held-out rows."""
    split: Split
    """Name of the held-out split."""
    tokenizer: Any
    counts: dict[str, dict[str, int]]
    """Numbers of rows, of cut texts and of skipped records in each split."""
    built_in: bool
    """True if a seeded program writes the texts, as many as wanted."""
    rules: Grammar | None
    """True distribution of the texts, where it is known."""

    @property
    def has_sources(self) -> bool:
        return self.held_out[0].source is not None

    def summary(self) -> str:
        """Describe the rows in one line."""
        counts = (self.counts[split].items() for split in ("train", "validation"))
        train, held_out = (", ".join(f"{n:,} {label}" for label, n in items if n) for items in counts)
        return f"{train}; held out: {held_out}; {len(self.tokenizer):,} kinds of tokens"


def load_corpus(
    name: str, tokenizer: str, layout: Layout, cache: Path, split: Split = "validation"
) -> Corpus:
    """Load the rows of a corpus, and prepare them first if the cache does not hold them.

    `tokenizer` is a directory or a name on the hub; built-in corpora bring their own.
    """
    built_in, inputs = name in BUILT_IN, []
    if not built_in:
        files = sources.find(name, BUILT_IN)
        tokens = tokenizer_directory(tokenizer)
        wanted = (*TOKENIZER_FILES, "merges.txt")
        described = (file for file in tokens.iterdir() if "token" in file.name or file.name in wanted)
        inputs = [chain(*files.values()), described]
    directory = cache / cache_key(name, layout, *inputs)
    with made_once(directory) as place:
        if place:
            parts = (part for part in WRITTEN if built_in or part != "test" or part in files)
            counts = {part: Counter(rows=0) for part in parts}
            if built_in:
                texts = {part: write_built_in(name, part) for part in counts}
                words = word_tokenizer(text for example in texts["train"] for text in example if text)
            else:
                texts = {part: sources.stream(name, files, part, counts[part]) for part in counts}
                words = load_tokenizer(tokens)
            prepare(place, texts, counts, words, layout)
    corpus = read_corpus(directory, name, layout, split)
    for kind, flag in (("texts", "--length"), ("sources", "--source-length")):
        if built_in and (cut := corpus.counts["train"].get(f"{kind} cut")):
            raise UserError(f"{cut:,} {kind} of {name} do not fit into rows of {layout.length}: raise {flag}")
    return corpus


def cache_key(name: str, layout: Layout, *inputs: Iterable[Path]) -> str:
    """Hash what prepared rows depend on: settings, the version of a recipe or input files. No source code."""
    if name in BUILT_IN:
        identity = [WRITTEN, (stories if name in GRAMMARS else tasks).VERSION]
    else:
        identity = [content_of(files) for files in inputs]
    return f"rows-{hash_of([FORMAT, name, layout, identity])}"


def content_of(files: Iterable[Path]) -> list:
    """List names, sizes and times of files (and those in directories), to notice a change without reading.

    Downloads from the hub are links to names that are hashes: these stand for their times.
    """
    files = chain.from_iterable(sorted(f.rglob("*")) if f.is_dir() else [f] for f in files)
    changed = ((f, f.resolve().name if f.is_symlink() else f.stat().st_mtime_ns) for f in files)
    return sorted((str(f), f.stat().st_size, stamp) for f, stamp in changed)


def write_built_in(name: str, split: str) -> list[Example]:
    n, seed = WRITTEN[split], 1 + list(WRITTEN).index(split)
    if name in TASKS:
        return [Example(text, source) for source, text in tasks.write_pairs(TASKS[name], n, seed)]
    return [Example(text) for text in stories.write(GRAMMARS[name], n, seed)]


# Texts to rows


def prepare(place: Path, texts: dict[str, Iterable[Example]], counts: dict[str, Counter], tokenizer, layout):
    """Write the files that `read_corpus` reads. Reading the texts of a split may add to its counts."""
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no EOS to end texts with: give another --tokenizer")
    with_sources, content = set(), hashlib.sha256()
    for split, examples in texts.items():
        if split != "train":
            examples = saved(examples, place / f"{split}.texts", tokenizer)
        with (place / f"{split}.s").open("wb") as s, (place / f"{split}.ends").open("wb") as ends:
            for rows in to_rows(examples, tokenizer, layout, counts[split]):
                tokens = rows.s.astype(token_type(tokenizer)).tobytes()
                where = np.stack([rows.length, rows.prefix], axis=1).astype(np.int32).tobytes()
                s.write(tokens)
                ends.write(where)
                if split == "train":
                    content.update(tokens + where)
                counts[split]["rows"] += len(rows.s)
                with_sources |= {bool(prefix) for prefix in rows.prefix[:1]}
        if not counts[split]["rows"]:
            remedy = "lower --length, give --no-pack, or " if layout.pack else ""
            remedy += "give at least 100 texts, of which one is held out"
            raise UserError(f"too little text: not one row of {layout.length} tokens for {split}; {remedy}")
        if len(with_sources) > 1:
            raise UserError(f"only some splits have sources ({', '.join(texts)}): give all of them, or none")
    tokenizer.save_pretrained(place / "tokenizer")
    (place / "fingerprint").write_text(content.hexdigest())
    (place / "counts.json").write_text(json.dumps(counts, indent=2) + "\n")


def saved(examples: Iterable[Example], file: Path, tokenizer) -> Iterator[Example]:
    """Yield examples as they are, and write them to a file in words."""

    def words(part):
        if part is None or isinstance(part, str):
            return part
        return tokenizer.decode(known(part, tokenizer), skip_special_tokens=True)

    with file.open("w", encoding="utf-8") as out:
        for example in examples:
            text, source = example.readable or map(words, example[:2])
            out.write(json.dumps(dict(text=text, source=source), ensure_ascii=False) + "\n")
            yield example


def read_corpus(directory: Path, name: str, layout: Layout, split: Split) -> Corpus:
    counts = json.loads((directory / "counts.json").read_text())
    tokenizer = load_tokenizer(directory / "tokenizer")
    if split not in counts:
        raise UserError(f"--split {split}: the data has none; there are {', '.join(counts)}")

    def rows(split):
        n = counts[split]["rows"]
        ends = np.memmap(directory / f"{split}.ends", np.int32, "r", shape=(n, 2))
        s = np.memmap(directory / f"{split}.s", token_type(tokenizer), "r", shape=(n, layout.length))
        return Rows(s, *ends.T)

    with (directory / f"{split}.texts").open(encoding="utf-8") as lines:
        texts = [Example(**json.loads(line)) for line in lines]
    key, fingerprint = directory.name, (directory / "fingerprint").read_text()
    parts = rows("train"), rows(split), texts, split, tokenizer, counts
    return Corpus(key, fingerprint, *parts, name in BUILT_IN, GRAMMARS.get(name))


def is_scratch(encoder: str) -> bool:
    """Tell whether an encoder is trained on the corpus first. It has no tokenizer of its own then."""
    return encoder.split("-")[0] == "scratch"


def tokenizer_directory(name: str) -> Path:
    name = name.removeprefix("scratch-") if name.startswith("scratch-t5") else name
    if is_scratch(name):
        raise UserError("--encoder scratch has no tokenizer for this data: give one by --tokenizer")
    files = ["tokenizer*", "spiece.model", "special_tokens_map.json", "config.json"]
    return download(name, "--encoder or --tokenizer", files, holding="a tokenizer")


def load_tokenizer(directory: Path):
    from transformers import AutoTokenizer

    if not any((directory / file).exists() for file in TOKENIZER_FILES):  # transformers would make one up
        raise UserError(f"{directory}: no tokenizer.json or the like there: give another --tokenizer")
    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise UserError(f"{directory}: its tokenizer cannot be read ({first_line(error)})") from None


def token_type(tokenizer):
    return np.uint16 if len(tokenizer) <= 2**16 else np.uint32


def in_chunks(examples: Iterable[Example], most=1_000, size=2_000_000) -> Iterator[list[Example]]:
    """Group examples into lists, each closed at `most` texts or `size` characters to bound the memory."""
    chunk, characters = [], 0
    for example in examples:
        chunk.append(example)
        characters += len(example.text) + len(example.source or "")
        if len(chunk) == most or characters >= size:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def to_rows(examples: Iterable[Example], tokenizer, layout: Layout, counts: Counter) -> Iterator[Rows]:
    """Yield rows, chunk by chunk. Tokenizers use all cores by themselves if given many texts."""
    eos, rest = tokenizer.eos_token_id, np.zeros(0, np.int32)
    bar = tqdm(examples, desc="tokenising", unit=" texts", unit_scale=True, leave=False)
    for chunk in in_chunks(iter(bar)):
        texts = to_tokens([example.text for example in chunk], tokenizer, counts)
        given = to_tokens([example.source for example in chunk], tokenizer, counts)
        counts["unknown tokens"] += sum(row.count(tokenizer.unk_token_id) for row in texts + given if row)
        if given[0] is not None and not 0 < layout.source < layout.length:
            flags = f"--source-length {layout.source}, --length {layout.length}"
            raise UserError(f"{flags}: the data has sources; leave room for them and for a text after them")
        if layout.pack and given[0] is None:
            as_given = not isinstance(chunk[0].text, str)
            rows, rest = pack_rows(texts, layout.length, eos, rest, as_given)
            yield rows
        else:
            yield pad_rows(texts, given, layout, eos, counts)


def to_tokens(texts: list[str | Tokens | None], tokenizer, counts: Counter) -> list[Tokens | None]:
    """Tokenise texts that are not tokens yet. Words that spell EOS are left out: they do not end a text."""
    if not isinstance(texts[0], str):
        return texts if texts[0] is None else [known(row, tokenizer) for row in texts]
    options = dict(add_special_tokens=False, return_attention_mask=False, verbose=False)
    rows, eos = tokenizer(texts, **options)["input_ids"], tokenizer.eos_token_id
    if spelled := sum(row.count(eos) for row in rows):
        counts["EOS left out"] += spelled
        rows = [[token for token in row if token != eos] for row in rows]
    return rows


def known(tokens: Tokens, tokenizer) -> Tokens:
    """Return the tokens if the tokenizer has all of them."""
    size = len(tokenizer)
    if odd := [token for token in (min(tokens), max(tokens)) if not 0 <= token < size]:
        raise UserError(f"the data has token {odd[0]}, and the tokenizer {size}: give its own --tokenizer")
    return tokens


def pad_rows(texts: Texts, given: Texts, layout: Layout, eos: int, counts: Counter) -> Rows:
    """Put each text into a row, after its source if it has one. Both end in EOS, and EOS pads the row."""
    s = np.full((len(texts), layout.length), eos, np.int32)
    length, prefix = np.zeros((2, len(texts)), np.int32)

    def ended(tokens: Tokens, most: int, label: str) -> Tokens:
        tokens = tokens[:-1] if tokens[-1:] == [eos] else tokens
        counts[label] += len(tokens) >= most
        return [*tokens[: most - 1], eos]

    for i, (text, source) in enumerate(zip(texts, given, strict=True)):
        before = [] if source is None else ended(source, layout.source, "sources cut")
        after = ended(text, layout.length - (layout.source if before else 0), "texts cut")
        prefix[i], length[i] = len(before), len(before) + len(after)
        s[i, : length[i]] = before + after
    return Rows(s, length, prefix)


def pack_rows(
    texts: list[Tokens], length: int, eos: int, rest: np.ndarray, as_given: bool = False
) -> tuple[Rows, np.ndarray]:
    """Join texts after `rest`, with an EOS after each, and cut them into full rows; also return what is left.

    `as_given` are tokens: a text that fills a row was packed already, and others may end in EOS already.
    """
    texts = (t if as_given and (len(t) == length or t[-1] == eos) else [*t, eos] for t in texts)
    stream = np.concatenate([rest, np.fromiter(chain.from_iterable(texts), np.int32)])
    n = len(stream) // length
    rows = Rows(stream[: n * length].reshape(n, length), np.full(n, length, np.int32), np.zeros(n, np.int32))
    return rows, stream[n * length :]


# Rows to texts


def detokenize(
    tokens: Integer[np.ndarray, "N L"], tokenizer, prefix: Integer[np.ndarray, " N"] | None = None
) -> list[str]:
    """Turn token rows into texts, without the prefix and cut at the first EOS after it."""
    eos = tokenizer.eos_token_id
    starts = [0] * len(tokens) if prefix is None else prefix
    texts = (row[start:] for row, start in zip(tokens, starts, strict=True))
    return tokenizer.batch_decode([text[: np.argmax(np.append(text, eos) == eos)] for text in texts])


def word_tokenizer(texts: Iterable[str]):
    """Build a tokenizer with one token a word, in the interface and file format of Hugging Face."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for text in texts for word in stories.split(text)})
    sentinels = [f"<extra_id_{i}>" for i in range(SENTINELS)]
    vocab = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *words, *sentinels])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)  # no space before a full stop
    special = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=sentinels, **special)
