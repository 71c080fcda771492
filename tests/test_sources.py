"""Texts from files of all kinds, good and bad."""

import json
from collections import Counter
from pathlib import Path

import pytest

from corpora import rows, sources
from corpora.sources import Example
from runtime.errors import UserError

WORDS = "the cat sat on a mat and looked at us".split()


def write_jsonl(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def read(name, split="train"):
    counts = Counter()
    return list(sources.stream(str(name), sources.find(str(name)), split, counts)), counts


@pytest.mark.parametrize(
    "records, expected",
    [
        ([dict(text="the cat")], Example("the cat")),
        ([dict(source="sat", target="on")], Example("on", "sat")),
        ([dict(document="a mat", summary="mat", id=3)], Example("mat", "a mat")),
        ([dict(translation=dict(de="Katze", en="cat"))], Example("cat", "Katze")),
        ([dict(condition_input_ids=[3, 1], input_ids=[4, 1])], Example([4, 1], [3, 1])),
        (
            [dict(condition_input_ids=[3], input_ids=[4], input="a", target="b")],
            Example([4], [3], ("b", "a")),
        ),
        ([dict(translation="not two languages", text="the cat")], Example("the cat")),
    ],
)
def test_columns_are_known_by_name(records, expected, tmp_path):
    write_jsonl(tmp_path / "data.jsonl", records)
    assert read(tmp_path / "data.jsonl")[0] == [expected]


def test_kinds_of_files_hold_the_same_texts(tmp_path):
    import datasets

    texts = [f"{a} {b}" for a in WORDS for b in WORDS]
    saved = datasets.Dataset.from_dict(dict(text=texts))
    (tmp_path / "a.txt").write_text("\n".join(texts) + "\n\n")
    write_jsonl(tmp_path / "a.jsonl", [dict(text=text) for text in texts])
    saved.to_parquet(tmp_path / "a.parquet")
    saved.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=saved, validation=saved.select(range(3))).save_to_disk(tmp_path / "splits")
    for name in ("a.txt", "a.jsonl", "a.parquet", "saved"):
        train, held_out = (read(tmp_path / name, split)[0] for split in ("train", "validation"))
        assert held_out == [Example(texts[99])]
        assert train == [Example(text) for text in texts[:99]]
    assert [len(read(tmp_path / "splits", split)[0]) for split in ("train", "validation")] == [100, 3]
    before = rows.content_of([tmp_path / "saved"])
    datasets.Dataset.from_dict(dict(text=texts[1:])).save_to_disk(tmp_path / "saved")
    assert rows.content_of([tmp_path / "saved"]) != before


def test_a_directory_tells_its_splits_by_names(tmp_path):
    for split, text in (("train-0", "a"), ("train-1", "cat"), ("validation", "sat"), ("test", "on")):
        write_jsonl(tmp_path / f"{split}.jsonl", [dict(text=text)])
    assert read(tmp_path)[0] == [Example("a"), Example("cat")]
    assert read(tmp_path, "validation")[0] == [Example("sat")]


def test_what_cannot_be_used_is_counted(tmp_path):
    lines = [
        b'\xef\xbb\xbf{"text": "the cat"}',
        b'{"text": "\xff"}',
        b"{cut",
        b'{"other": 1}',
        b'{"text": " "}',
    ]
    lines += [b'{"text": 3}', b"", b"[1]", b'{"text": "\\ud800"}', b'{"text": [3, "a"]}']
    lines += [b'{"source": "a", "target": "b"}', b"[" * 100_000]
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join(lines))
    texts, counts = read(tmp_path / "bad.jsonl")
    assert texts == [Example("the cat")]
    others = {"records of another kind than the first": 1}
    assert counts == {"unreadable lines": 3, "records without a text (or its source)": 6} | others


def test_odd_lines_are_counted_once_where_texts_are_held_out_of_the_same_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\n" * 3 + b"the cat\n" * 200)
    assert [read(tmp_path / "a.txt", split)[1].total() for split in ("train", "validation")] == [3, 0]


def test_texts_that_are_mostly_of_another_kind_than_the_first_are_refused(tmp_path):
    write_jsonl(tmp_path / "mixed.jsonl", [dict(text="the cat")] + [dict(source="a cat", target="a mat")] * 4)
    with pytest.raises(UserError, match="1 texts are like the first, and 4 of another kind"):
        read(tmp_path / "mixed.jsonl")


def test_held_out_texts_that_are_too_many_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "VALIDATED", 3)
    for split in ("train", "validation", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", [dict(text="the cat")] * 5)
    found = {split: read(tmp_path, split) for split in ("train", "validation", "test")}
    assert [len(texts) for texts, _ in found.values()] == [5, 3, 5]
    assert found["validation"][1] == {"validation texts beyond the limit": 2}


@pytest.mark.parametrize(
    "content, has", [("", "nothing"), ("{}\n", "nothing"), ('{"source": "a", "id": 3}\n', "source, id")]
)
def test_files_without_texts_are_refused(content, has, tmp_path):
    (tmp_path / "empty.jsonl").write_text(content)
    complaint = rf"no texts in .*empty.jsonl: records have {has}; give 'source' with 'target' or"
    with pytest.raises(UserError, match=complaint):
        read(tmp_path / "empty.jsonl")


def test_files_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"no .jsonl, .txt, .parquet files there"):
        sources.find(str(tmp_path))
    (tmp_path / "a.csv").write_text("text\nthe cat\n")
    with pytest.raises(UserError, match=r"cannot read .csv files; give .jsonl"):
        sources.find(str(tmp_path / "a.csv"))
    (tmp_path / "empty.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"empty.parquet: not a Parquet file"):
        read(tmp_path / "empty.parquet")


def test_damaged_data_is_refused(tmp_path):
    import datasets

    saved = datasets.Dataset.from_dict(dict(text=["the cat sat on a mat"] * 2_000)).with_format("numpy")
    saved.save_to_disk(tmp_path / "saved")
    assert len(read(tmp_path / "saved")[0]) == 1_980  # whatever the format it was saved in
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:3_000])
    with pytest.raises(UserError, match=r"saved: not a data set saved by `datasets`, or a damaged one"):
        read(tmp_path / "saved")
    saved.to_parquet(tmp_path / "a.parquet")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[4:400] = bytes(396)
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"a.parquet: not a Parquet file, or a damaged one"):
        read(tmp_path / "a.parquet")


def test_a_download_that_was_cut_off_is_refused(tmp_path):
    for i in (0, 2):
        write_jsonl(tmp_path / f"train-0000{i}-of-00003.jsonl", [dict(text="the cat")])
    with pytest.raises(UserError, match=r"train-\*: 2 files of 3 are there"):
        sources.find(str(tmp_path))


@pytest.mark.parametrize(
    "names, complaint",
    [
        (["validation.jsonl", "test.jsonl"], "there is none to train on"),
        (["train.jsonl", "value.jsonl"], "value.jsonl belongs to none"),
    ],
)
def test_directories_whose_splits_are_unclear_are_refused(names, complaint, tmp_path):
    for name in names:
        write_jsonl(tmp_path / name, [dict(text="a")])
    with pytest.raises(UserError, match=complaint):
        sources.find(str(tmp_path))
    paths = map(Path, ("test/train-0.jsonl", "Training1.jsonl", "validation/0000.parquet"))
    assert [sources.split_of(path) for path in paths] == ["train", "train", "validation"]
