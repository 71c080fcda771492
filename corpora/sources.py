"""Texts by name: files of one's own, saved `datasets`, and data sets of the hub, all read as a stream of examples.

A directory holds files (or folders of them) named by split: train.jsonl, validation-00000.parquet, test/…; or, if none is, all
are for training. Without a split to validate on, every hundredth example is held out. Files may be .jsonl and .parquet, with the
columns below, or .txt with a text a line.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from errors import Refused
from hub import fetch


class Example(NamedTuple):
    """A text, and the source that it is to be written from, if any. Both may be tokens already."""

    text: str | list[int]
    source: str | list[int] | None = None
    readable: tuple[str, str] | None = None
    """Text and source in words, where the data has them beside their tokens."""


# The columns of a source (if any) and its text; the first of these that a record has are taken.
COLUMNS = [
    ("source", "target"),
    ("condition_input_ids", "input_ids"),
    ("document", "summary"),
    ("de", "en"),
    (None, "text"),
    (None, "input_ids"),
]

# Names of the paper's corpora: where they are on the hub as Parquet, in which folder and revision. The second of each pair is
# what the authors released, in tokens of T5.
RELEASED = "embedded-language-flows"
HUB = {
    "owt": dict(train="vietgpt/openwebtext_en"),
    "owt-t5": dict(train=f"{RELEASED}/openwebtext-t5"),
    "de-en": dict(train="wmt/wmt14", folder="de-en"),
    "de-en-t5": dict(train=f"{RELEASED}/wmt14_de-en_train_t5", validation=f"{RELEASED}/wmt14_de-en_validation_t5"),
    "xsum": dict(train="EdinburghNLP/xsum", revision="refs/convert/parquet"),
    "xsum-t5": dict(train=f"{RELEASED}/xsum_train_t5", validation=f"{RELEASED}/xsum_validation_t5"),
}
SPLITS = dict(train="train|training", validation="validation|valid|val|dev", test="test")
HELD_OUT = 2_000  # at most, where there is no split for it
VALIDATED = 20_000  # at most, where there is


def find(name: str, others: Iterable[str] = ()) -> dict[str, list[Path]]:
    """The files of each split. `others` are names that are known elsewhere."""
    if name in HUB:
        return find_on_hub(**HUB[name], flag=f"--data {name}, which is", how=" by --data-dir")
    if Path(name).is_file():
        if Path(name).suffix not in READERS:
            raise Refused(f"--data {name}: cannot read {Path(name).suffix or 'such'} files; give {', '.join(READERS)}")
        return dict(train=[Path(name)])
    if not Path(name).is_dir() and name.count("/") != 1:
        known = ", ".join([*others, *HUB])
        raise Refused(f"--data {name}: no such file or directory, nor one of {known}, nor a name on the hub (owner/name)")
    return find_on_hub(name)


def find_on_hub(
    train: str, validation: str = "", folder: str = "", revision: str | None = None, *, flag: str = "--data", how: str = ""
) -> dict[str, list[Path]]:
    """The files of directories, which may be local ones, or repositories on the hub."""
    inside = f"{folder}/*" if folder else "*"
    places = {
        split: fetch(name, flag, [inside], "dataset", revision, holding=f"{', '.join(READERS)} files{how}")
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
    refuse_missing(found)
    return found


def refuse_missing(files: list[Path]):
    """Of files numbered 00000-of-00003, all have to be there: a download may have been cut off."""
    parts = Counter()
    for file in files:
        if numbered := re.match(r"(.*)-\d+-of-0*(\d+)", file.name):
            parts[file.parent / numbered[1], int(numbered[2])] += 1
    for (name, total), there in parts.items():
        if there < total:
            raise Refused(f"--data {name}-*: {there} files of {total} are there: a download that was cut off?")


def split_of(path: Path) -> str | None:
    """What a path inside a data set says of its split; the name nearest to the file decides."""
    for part in reversed(path.parts):
        for split, names in SPLITS.items():
            if re.match(rf"({names})([-_.\d]|$)", part, re.IGNORECASE):
                return split
    return None


def by_split(directory: Path) -> dict[str, list[Path]]:
    files, splits = all_files(directory), {}
    for file in files:
        splits.setdefault(split_of(file.relative_to(directory)), []).append(file)
    unnamed = splits.pop(None, [])
    if not splits:
        return dict(train=unnamed)
    if "train" not in splits or unnamed:
        odd = f"{unnamed[0].name} belongs to none" if unnamed else "there is none to train on"
        raise Refused(f"--data {directory}: files are named by split ({', '.join(splits)}), and {odd}; name files train*")
    return splits


def stream(name: str, files: dict[str, list[Path]], split: str, told: Counter) -> Iterator[Example]:
    """The examples of a split. What cannot be used is left out and counted."""
    if split == "test" or "validation" in files:
        for i, example in enumerate(examples(name, files[split], told)):
            if split == "validation" and i >= VALIDATED:
                told["texts more than are validated on"] += 1
            else:
                yield example
    else:
        told = told if split == "train" else Counter()  # The same file is read for both; what is odd in it is told once.
        for i, example in enumerate(examples(name, files["train"], told)):
            held_out = i % 100 == 99 and i < 100 * HELD_OUT
            if held_out == (split == "validation"):
                yield example
            elif split == "validation" and i >= 100 * HELD_OUT:
                return


def examples(name: str, files: list[Path], told: Counter) -> Iterator[Example]:
    """All examples of some files; as the first one is, in words or tokens, with a source or without, the others have to be."""
    kinds, alike, others, columns = None, 0, "records of another kind than the first", ""
    for file in files:
        read = READERS[file.suffix] if file.is_file() else read_saved
        for record in read(file):
            columns = columns or (", ".join(list(record)[:9]) if isinstance(record, dict) else "")
            example = example_of(record) if isinstance(record, dict) else None
            found = example and (type(example.text), type(example.source))
            kinds = kinds or found
            if example and found == kinds:
                alike += 1
                yield example
            elif example:
                told[others] += 1
            else:
                told["unreadable lines" if record is None else "records without a text (or its source)"] += 1
    if told[others] > alike:
        raise Refused(f"--data {name}: {alike} texts are like the first, and {told[others]} of another kind (source, or tokens)")
    if kinds is None:
        wanted = " or ".join(f"'{text}'" if source is None else f"'{source}' with '{text}'" for source, text in COLUMNS)
        odd = told["unreadable lines"]
        reason = f"{odd} lines, none of them UTF-8 (and JSON)" if odd else f"records have {columns or 'nothing'}; give {wanted}"
        raise Refused(f"--data {name}: no texts in {', '.join(map(str, files[:3]))}: {reason}")


def example_of(record: dict) -> Example | None:
    record = record["translation"] if isinstance(record.get("translation"), dict) else record
    for source, text in COLUMNS:
        if text in record and (source is None or source in record):
            parts = [record[text]] if source is None else [record[text], record[source]]
            if not all(usable(part) for part in parts):
                return None
            readable = record.get("target"), record.get("input")
            in_words = text == "input_ids" and all(isinstance(part, str) for part in readable)
            return Example(*parts, readable=readable if in_words else None)
    return None


def usable(part) -> bool:
    """Words that can be written as UTF-8, or tokens."""
    if isinstance(part, str):
        return bool(part.strip()) and not re.search("[\ud800-\udfff]", part)
    return isinstance(part, list) and len(part) > 0 and all(type(token) is int for token in part)


def read_lines(file: Path, record_of: Callable[[str], dict]) -> Iterator[dict | None]:
    """Of every line that is not empty; None where it cannot be read."""
    with file.open("rb") as lines:
        for line in filter(bytes.strip, lines):
            try:
                yield record_of(line.decode("utf-8-sig").strip())
            except (ValueError, RecursionError):  # not UTF-8, or not JSON
                yield None


def read_jsonl(file: Path) -> Iterator[dict | None]:
    return read_lines(file, json.loads)


def read_txt(file: Path) -> Iterator[dict | None]:
    return read_lines(file, lambda line: dict(text=line))


def read_parquet(file: Path) -> Iterator[dict]:
    import pyarrow.parquet

    with whole(file, "a Parquet file"):
        for some in pyarrow.parquet.ParquetFile(file).iter_batches(1_000):
            yield from some.to_pylist()


def read_saved(directory: Path) -> Iterator[dict]:
    from datasets import load_from_disk

    with whole(directory, "a data set saved by `datasets`"):
        yield from load_from_disk(str(directory)).with_format(None)


@contextmanager
def whole(path: Path, kind: str) -> Iterator[None]:
    """What Arrow and the file system say of damaged data, in one line."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise Refused(f"{path}: not {kind}, or a damaged one ({str(error).splitlines()[0][:200]})") from None


READERS = {".jsonl": read_jsonl, ".txt": read_txt, ".parquet": read_parquet}
