"""Texts by name: files of one's own, saved `datasets`, and data sets of the hub, all read as a stream of examples.

A directory holds files named by split (train.jsonl, validation-00000.parquet, …), or all its files are for training. Without a
split to validate on, every hundredth example is held out. Files may be .jsonl and .parquet, with the columns below, or .txt with
a text a line.
"""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from errors import Refused
from hub import fetch


class Example(NamedTuple):
    """A text, and the source that it is to be written from, if any. Both may be tokens already."""

    text: str | list[int]
    source: str | list[int] | None = None


# The columns of a source (if any) and its text; the first of these that a record has are taken.
COLUMNS = [
    ("source", "target"),
    ("condition_input_ids", "input_ids"),
    ("document", "summary"),
    ("de", "en"),
    (None, "text"),
    (None, "input_ids"),
]

# Names of the paper's corpora: where they are on the hub, and in which folder. The second of each pair is what the authors
# released, in tokens of T5.
RELEASED = "embedded-language-flows"
HUB = {
    "owt": dict(train="Skylion007/openwebtext"),
    "owt-t5": dict(train=f"{RELEASED}/openwebtext-t5"),
    "de-en": dict(train="wmt/wmt14", folder="de-en"),
    "de-en-t5": dict(train=f"{RELEASED}/wmt14_de-en_train_t5", validation=f"{RELEASED}/wmt14_de-en_validation_t5"),
    "xsum": dict(train="EdinburghNLP/xsum"),
    "xsum-t5": dict(train=f"{RELEASED}/xsum_train_t5", validation=f"{RELEASED}/xsum_validation_t5"),
}
SPLITS = dict(train=("train",), validation=("validation", "valid", "val", "dev"), test=("test",))
HELD_OUT = 2_000  # at most, where there is no split for it
VALIDATED = 20_000  # at most, where there is


def find(name: str) -> dict[str, list[Path]]:
    """The files of each split."""
    if name in HUB:
        return find_on_hub(**HUB[name])
    if Path(name).is_file():
        return dict(train=[Path(name)])
    if not Path(name).is_dir() and name.count("/") != 1:
        raise Refused(
            f"--data {name}: no such file or directory, nor one of {', '.join(HUB)}, nor a name on the hub (owner/name)"
        )
    return find_on_hub(name)


def find_on_hub(train: str, validation: str = "", folder: str = "") -> dict[str, list[Path]]:
    """The files of directories, which may be local ones, or repositories on the hub."""
    inside = f"{folder}/*" if folder else "*"
    places = {
        split: fetch(name, "--data", [inside], "dataset")
        for split, name in (("train", train), ("validation", validation))
        if name
    }
    if len(places) == 2:
        return {split: all_files(place) for split, place in places.items()}
    return by_split(places["train"] / folder)


def all_files(directory: Path) -> list[Path]:
    """The files in a directory that hold examples; directories that `datasets` saved stand for themselves."""
    if (directory / "state.json").exists():
        return [directory]
    saved = [file.parent for file in sorted(directory.rglob("state.json"))]
    found = saved or sorted(file for file in directory.rglob("*") if file.suffix in READERS)
    if not found:
        raise Refused(f"--data {directory}: no {', '.join(READERS)} files there, nor a data set saved by `datasets`")
    return found


def by_split(directory: Path) -> dict[str, list[Path]]:
    files, splits = all_files(directory), {}
    for split, prefixes in SPLITS.items():
        of_split = [f for f in files if any(part.startswith(prefixes) for part in f.relative_to(directory).parts)]
        splits |= {split: of_split} if of_split else {}
    return splits if "train" in splits else dict(train=files)


def stream(name: str, files: dict[str, list[Path]], split: str, told: Counter) -> Iterator[Example]:
    """The examples of a split. What cannot be used is left out and counted."""
    if "validation" in files:
        yield from islice(examples(name, files[split], told), VALIDATED if split == "validation" else None)
    else:
        for i, example in enumerate(examples(name, files["train"], told)):
            held_out = i % 100 == 99 and i < 100 * HELD_OUT
            if held_out == (split == "validation"):
                yield example
            elif split == "validation" and i >= 100 * HELD_OUT:
                return


def examples(name: str, files: list[Path], told: Counter) -> Iterator[Example]:
    """All examples of some files; as the first one is, with a source or without, the others have to be."""
    first = None
    for file in files:
        read = READERS[file.suffix] if file.is_file() else read_saved
        for record in read(file):
            example = example_of(record) if isinstance(record, dict) else None
            first = first or example
            if example and (example.source is None) == (first.source is None) and type(example.text) is type(first.text):
                yield example
            else:
                told["unreadable lines" if record is None else "records without a text (or its source)"] += 1
    if first is None:
        wanted = ", ".join(text if source is None else f"{source} and {text}" for source, text in COLUMNS)
        raise Refused(f"--data {name}: no texts in {', '.join(map(str, files[:3]))}; records need {wanted}")


def example_of(record: dict) -> Example | None:
    record = record.get("translation", record)
    for source, text in COLUMNS:
        if text in record and (source is None or source in record):
            example = Example(record[text], record[source] if source else None)
            usable = all(isinstance(part, str | list) and len(part) for part in example if part is not None)
            return example if usable and (source is None) == (example.source is None) else None
    return None


def read_jsonl(file: Path) -> Iterator[dict | None]:
    with file.open("rb") as lines:
        for line in filter(bytes.strip, lines):
            try:
                yield json.loads(line.decode())
            except ValueError:  # not UTF-8, or not JSON
                yield None


def read_txt(file: Path) -> Iterator[dict | None]:
    with file.open("rb") as lines:
        for line in filter(bytes.strip, lines):
            try:
                yield dict(text=line.decode().strip())
            except ValueError:
                yield None


def read_parquet(file: Path) -> Iterator[dict]:
    import pyarrow.parquet

    for some in pyarrow.parquet.ParquetFile(file).iter_batches(1_000):
        yield from some.to_pylist()


def read_saved(directory: Path) -> Iterator[dict]:
    from datasets import load_from_disk

    yield from load_from_disk(str(directory))


READERS = {".jsonl": read_jsonl, ".txt": read_txt, ".parquet": read_parquet}
