"""Texts by name: local files, saved `datasets` and data sets of the hub, all read as a stream of examples.

A directory holds files (or folders of them) named by split: train.jsonl, validation-00000.parquet, test/…
Without such names, all files are for training. Without a validation split, every 100th example is held out.
Files are .jsonl or .parquet with the columns below, or .txt with one text a line.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from runtime.errors import UserError, first_line
from runtime.files import download

Files = dict[str, list[Path]]  # by split


class Example(NamedTuple):
    """A text and its source, if any. Both may be tokens already."""

    text: str | list[int]
    source: str | list[int] | None = None
    readable: tuple[str, str] | None = None
    """Text and source in words, where the data has them beside tokens."""


# Columns of a source (if any) and its text; the first pair that a record has is taken.
COLUMNS = [("source", "target"), ("condition_input_ids", "input_ids"), ("document", "summary"), ("de", "en")]
COLUMNS += [(None, "text"), (None, "input_ids")]

# The paper's corpora: repositories on the hub, with folder and revision of their Parquet files. Names in -t5
# are what the authors released, in T5 tokens.
RELEASED = "embedded-language-flows"
HUB = {
    "owt": dict(train="vietgpt/openwebtext_en"),
    "owt-t5": dict(train=f"{RELEASED}/openwebtext-t5"),
    "de-en": dict(train="wmt/wmt14", folder="de-en"),
    "de-en-t5": {split: f"{RELEASED}/wmt14_de-en_{split}_t5" for split in ("train", "validation")},
    "xsum": dict(train="EdinburghNLP/xsum", revision="refs/convert/parquet"),
    "xsum-t5": {split: f"{RELEASED}/xsum_{split}_t5" for split in ("train", "validation")},
}
SPLITS = dict(train="train|training", validation="validation|valid|val|dev", test="test")
HELD_OUT = 2_000  # maximum of held-out examples without a validation split
VALIDATED = 20_000  # maximum of validation examples with one
OTHERS, UNREADABLE = "records of another kind than the first", "unreadable lines"


def find(name: str, others: Iterable[str] = ()) -> Files:
    """Find the files of each split. `others` are corpora known elsewhere, for the error message."""
    path = Path(name)
    if name in HUB:
        return find_on_hub(**HUB[name], flag=f"--data {name}, which is", how=" by --data-dir")
    if path.is_file():
        if path.suffix not in READERS:
            raise UserError(f"--data {name}: cannot read {path.suffix} files; give {', '.join(READERS)}")
        return dict(train=[path])
    if not path.is_dir() and name.count("/") != 1:
        known = ", ".join([*others, *HUB])
        raise UserError(f"--data {name}: no such file or directory, nor one of {known}, nor owner/name")
    return find_on_hub(name)


def find_on_hub(train: str, validation="", folder="", revision=None, *, flag="--data", how="") -> Files:
    """Find the files of repositories on the hub, or of local directories."""
    inside, holding = f"{folder}/*" if folder else "*", f"{', '.join(READERS)} files{how}"
    places = {
        split: download(name, flag, [inside], "dataset", revision, holding=holding)
        for split, name in (("train", train), ("validation", validation))
        if name
    }
    if len(places) == 2:
        return {split: all_files(place) for split, place in places.items()}
    return by_split(places["train"] / folder)


def all_files(directory: Path) -> list[Path]:
    """List the files with examples; a directory that `datasets` saved counts as one."""
    if (directory / "state.json").exists():
        return [directory]
    saved = [file.parent for file in sorted(directory.rglob("state.json"))]
    files = saved or sorted(file for file in directory.rglob("*") if file.suffix in READERS)
    if not files:
        raise UserError(f"--data {directory}: no {', '.join(READERS)} files there, nor a saved data set")
    refuse_missing(files)
    return files


def refuse_missing(files: list[Path]):
    """Check that files numbered like 00000-of-00003 are complete, as a download may have been cut off."""
    parts = Counter()
    for file in files:
        if numbered := re.match(r"(.*)-\d+-of-0*(\d+)", file.name):
            parts[file.parent / numbered[1], int(numbered[2])] += 1
    for (name, total), there in parts.items():
        if there < total:
            raise UserError(f"--data {name}-*: {there} files of {total} are there: download it again")


def split_of(path: Path) -> str | None:
    """Read the split from a path inside a data set; the name nearest to the file decides."""
    for part in reversed(path.parts):
        for split, names in SPLITS.items():
            if re.match(rf"({names})([-_.\d]|$)", part, re.IGNORECASE):
                return split
    return None


def by_split(directory: Path) -> Files:
    splits = {}
    for file in all_files(directory):
        splits.setdefault(split_of(file.relative_to(directory)), []).append(file)
    unnamed = splits.pop(None, [])
    if not splits:
        return dict(train=unnamed)
    if "train" not in splits or unnamed:
        odd = f"{unnamed[0].name} belongs to none" if unnamed else "there is none to train on"
        raise UserError(f"--data {directory}: files are named by split, and {odd}; name files train*")
    return splits


def stream(name: str, files: Files, split: str, counts: Counter) -> Iterator[Example]:
    """Yield the examples of a split. Records that cannot be used are skipped and counted."""
    if split == "test" or "validation" in files:
        for i, example in enumerate(examples(name, files[split], counts)):
            if split == "validation" and i >= VALIDATED:
                counts["validation texts beyond the limit"] += 1
            else:
                yield example
        return
    counts = counts if split == "train" else Counter()  # One file serves both: count its odd records once.
    for i, example in enumerate(examples(name, files["train"], counts)):
        held_out = i % 100 == 99 and i < 100 * HELD_OUT
        if held_out == (split == "validation"):
            yield example
        elif split == "validation" and i >= 100 * HELD_OUT:
            return


def examples(name: str, files: list[Path], counts: Counter) -> Iterator[Example]:
    """Yield the examples that are of the kind of the first: words or tokens, with a source or without."""
    first_kind, alike, columns = None, 0, ""
    for file in files:
        read = READERS[file.suffix] if file.is_file() else read_saved
        for record in read(file):
            columns = columns or (", ".join(list(record)[:9]) if isinstance(record, dict) else "")
            example = example_of(record) if isinstance(record, dict) else None
            if not example:
                counts[UNREADABLE if record is None else "records without a text (or its source)"] += 1
                continue
            kind = type(example.text), type(example.source)
            first_kind = first_kind or kind
            if kind == first_kind:
                alike += 1
                yield example
            else:
                counts[OTHERS] += 1
    if counts[OTHERS] > alike:
        odd = f"{alike} texts are like the first, and {counts[OTHERS]} of another kind (source, or tokens)"
        raise UserError(f"--data {name}: {odd}; give one kind")
    if first_kind is None:
        pairs = (f"'{source}' with '{text}'" if source else f"'{text}'" for source, text in COLUMNS)
        reason = f"records have {columns or 'nothing'}; give {' or '.join(pairs)}"
        if odd := counts[UNREADABLE]:
            reason = f"{odd} lines, none of them UTF-8 (and JSON)"
        raise UserError(f"--data {name}: no texts in {', '.join(map(str, files[:3]))}: {reason}")


def example_of(record: dict) -> Example | None:
    """Make an example from the first columns that a record has; None if they hold nothing usable."""
    record = record["translation"] if isinstance(record.get("translation"), dict) else record
    for source, text in COLUMNS:
        if text in record and (source is None or source in record):
            parts = [record[text]] if source is None else [record[text], record[source]]
            if not all(map(usable, parts)):
                return None
            readable = record.get("target"), record.get("input")
            in_words = text == "input_ids" and all(isinstance(part, str) for part in readable)
            return Example(*parts, readable=readable if in_words else None)
    return None


def usable(part) -> bool:
    """Check for words that can be written as UTF-8, or tokens."""
    if isinstance(part, str):
        return bool(part.strip()) and not re.search("[\ud800-\udfff]", part)
    return isinstance(part, list) and len(part) > 0 and all(type(token) is int for token in part)


def read_lines(file: Path, record_of: Callable[[str], dict]) -> Iterator[dict | None]:
    """Yield a record for every line that is not empty, None if it cannot be read."""
    with file.open("rb") as lines:
        for line in filter(bytes.strip, lines):
            try:
                yield record_of(line.decode("utf-8-sig").strip())
            except (ValueError, RecursionError):  # not UTF-8, or not JSON
                yield None


def read_parquet(file: Path) -> Iterator[dict]:
    import pyarrow.parquet

    with damage_named(file, "a Parquet file"):
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1_000):
            yield from batch.to_pylist()


def read_saved(directory: Path) -> Iterator[dict]:
    from datasets import load_from_disk

    with damage_named(directory, "a data set saved by `datasets`"):
        yield from load_from_disk(str(directory)).with_format(None)


@contextmanager
def damage_named(path: Path, kind: str) -> Iterator[None]:
    """Turn what Arrow and the file system raise on damaged data into one line."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not {kind}, or a damaged one ({first_line(error)})") from None


READERS = {
    ".jsonl": partial(read_lines, record_of=json.loads),
    ".txt": partial(read_lines, record_of=lambda line: dict(text=line)),
    ".parquet": read_parquet,
}
