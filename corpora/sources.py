"""Texts by name: local files, saved `datasets` and data sets of the hub, read as a stream of examples.

A directory holds files (or folders of them) named by split: train.jsonl, validation-00000.parquet, test/…
Without such names, all files are for training. Without a validation split, every 100th example is held out.
Files are .jsonl or .parquet with the columns below, or .txt with one text a line.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
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
SUFFIXES = (".jsonl", ".txt", ".parquet")
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
        if path.suffix not in SUFFIXES:
            raise UserError(f"--data {name}: cannot read {path.suffix} files; give {', '.join(SUFFIXES)}")
        return dict(train=[path])
    if not path.is_dir() and name.count("/") != 1:
        known = ", ".join([*others, *HUB])
        raise UserError(f"--data {name}: no such file or directory, nor one of {known}, nor owner/name")
    return find_on_hub(name)


def find_on_hub(train: str, validation="", folder="", revision=None, *, flag="--data", how="") -> Files:
    """Find the files of repositories on the hub, or of local directories."""

    def place(name):
        files = [f"{folder}/*" if folder else "*"]
        return download(name, flag, files, "dataset", revision, holding=f"{', '.join(SUFFIXES)} files{how}")

    if validation:
        return dict(train=all_files(place(train)), validation=all_files(place(validation)))
    return by_split(place(train) / folder)


def all_files(directory: Path) -> list[Path]:
    """List the files with examples; a directory that `datasets` saved counts as one."""
    if (directory / "state.json").exists():
        return [directory]
    saved = [file.parent for file in sorted(directory.rglob("state.json"))]
    files = saved or sorted(file for file in directory.rglob("*") if file.suffix in SUFFIXES)
    if not files:
        raise UserError(f"--data {directory}: no {', '.join(SUFFIXES)} files there, nor a saved data set")
    parts = Counter()  # of files numbered like 00000-of-00003: a download may have been cut off
    for file in files:
        if numbered := re.match(r"(.*)-\d+-of-0*(\d+)", file.name):
            parts[file.parent / numbered[1], int(numbered[2])] += 1
    for (name, total), there in parts.items():
        if there < total:
            raise UserError(f"--data {name}-*: {there} files of {total} are there: download it again")
    return files


def split_of(path: Path) -> str | None:
    """Read the split from a path inside a data set; the name nearest to the file decides."""
    for part in reversed(path.parts):
        for split, names in SPLITS.items():
            if re.match(rf"({names})([-_.\d]|$)", part, re.IGNORECASE):
                return split
    return None


def by_split(directory: Path) -> Files:
    """Group the files of a directory by split; without names of splits, all are for training."""
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
        found = examples(name, files[split], counts)
        yield from islice(found, VALIDATED if split == "validation" else None)
        if beyond := sum(1 for _ in found):
            counts["validation texts beyond the limit"] = beyond
    elif split == "validation":  # held out of the training files, whose odd records count there
        yield from islice(examples(name, files["train"], Counter()), 99, 100 * HELD_OUT, 100)
    else:
        numbered = enumerate(examples(name, files["train"], counts))
        yield from (example for i, example in numbered if i % 100 != 99 or i >= 100 * HELD_OUT)


def examples(name: str, files: list[Path], counts: Counter) -> Iterator[Example]:
    """Yield the examples that are of the kind of the first: words or tokens, with a source or without."""
    first_kind, alike, columns = None, 0, ""
    for record in (record for file in files for record in read(file)):
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


def read(path: Path) -> Iterator[dict | None]:
    """Yield the records of a file or of a saved data set; None for a line that cannot be read."""
    if path.is_dir() or path.suffix == ".parquet":
        yield from read_arrow(path)
        return
    with path.open("rb") as lines:
        for line in filter(bytes.strip, lines):
            try:
                text = line.decode("utf-8-sig").strip()
                yield json.loads(text) if path.suffix == ".jsonl" else dict(text=text)
            except (ValueError, RecursionError):  # not UTF-8, or not JSON
                yield None


def read_arrow(path: Path) -> Iterator[dict]:
    """Yield the records of a Parquet file or of a data set that `datasets` saved."""
    import pyarrow.parquet

    try:
        if path.is_file():
            for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1_000):
                yield from batch.to_pylist()
        else:
            from datasets import load_from_disk

            yield from load_from_disk(str(path)).with_format(None)
    except (pyarrow.ArrowInvalid, OSError) as error:
        kind = "a Parquet file" if path.is_file() else "a data set saved by `datasets`"
        raise UserError(f"{path}: not {kind}, or a damaged one ({first_line(error)})") from None
