"""Texts from files of all kinds, good and bad."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN
from numpy.testing import assert_array_equal

import corpora
import sources
from corpora import Layout
from errors import Refused
from sources import Example

WORDS = "the cat sat on a mat and looked at us".split()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    corpora.word_tokenizer(WORDS).save_pretrained(directory)
    return str(directory)


def write_jsonl(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def read(name, split="train"):
    told = Counter()
    return list(sources.stream(str(name), sources.find(str(name)), split, told)), told


@pytest.mark.parametrize(
    "records, expected",
    [
        ([dict(text="the cat")], Example("the cat")),
        ([dict(source="sat", target="on")], Example("on", "sat")),
        ([dict(document="a mat", summary="mat", id=3)], Example("mat", "a mat")),
        ([dict(translation=dict(de="Katze", en="cat"))], Example("cat", "Katze")),
        ([dict(condition_input_ids=[3, 1], input_ids=[4, 1])], Example([4, 1], [3, 1])),
        ([dict(condition_input_ids=[3], input_ids=[4], input="a", target="b")], Example([4], [3], readable=("b", "a"))),
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
    before = corpora.content_of([tmp_path / "saved"])
    datasets.Dataset.from_dict(dict(text=texts[1:])).save_to_disk(tmp_path / "saved")
    assert corpora.content_of([tmp_path / "saved"]) != before


def test_a_directory_tells_its_splits_by_names(tmp_path):
    for split, text in (("train-0", "a"), ("train-1", "cat"), ("validation", "sat"), ("test", "on")):
        write_jsonl(tmp_path / f"{split}.jsonl", [dict(text=text)])
    assert read(tmp_path)[0] == [Example("a"), Example("cat")]
    assert read(tmp_path, "validation")[0] == [Example("sat")]


def test_what_cannot_be_used_is_counted(tmp_path):
    lines = [b'\xef\xbb\xbf{"text": "the cat"}', b'{"text": "\xff"}', b"{cut", b'{"other": 1}', b'{"text": " "}', b'{"text": 3}']
    lines += [b"", b"[1]", b'{"text": "\\ud800"}', b'{"text": [3, "a"]}', b'{"source": "a", "target": "b"}', b"[" * 100_000]
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join(lines))
    found, told = read(tmp_path / "bad.jsonl")
    assert found == [Example("the cat")]
    others = {"records of another kind than the first": 1}
    assert told == {"unreadable lines": 3, "records without a text (or its source)": 6} | others


def test_odd_lines_are_told_once_where_texts_are_held_out_of_the_same_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\n" * 3 + b"the cat\n" * 200)
    assert [read(tmp_path / "a.txt", split)[1].total() for split in ("train", "validation")] == [3, 0]


def test_texts_that_are_mostly_of_another_kind_than_the_first_are_refused(tmp_path):
    write_jsonl(tmp_path / "mixed.jsonl", [dict(text="the cat")] + [dict(source="a cat", target="a mat")] * 4)
    with pytest.raises(Refused, match="1 texts are like the first, and 4 of another kind"):
        read(tmp_path / "mixed.jsonl")


def test_held_out_texts_that_are_too_many_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "VALIDATED", 3)
    for split in ("train", "validation", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", [dict(text="the cat")] * 5)
    found = {split: read(tmp_path, split) for split in ("train", "validation", "test")}
    assert [len(texts) for texts, _ in found.values()] == [5, 3, 5]
    assert found["validation"][1] == {"texts more than are validated on": 2}


@pytest.mark.parametrize("content, has", [("", "nothing"), ("{}\n", "nothing"), ('{"source": "a", "id": 3}\n', "source, id")])
def test_files_without_texts_are_refused(content, has, tmp_path):
    (tmp_path / "empty.jsonl").write_text(content)
    with pytest.raises(Refused, match=rf"no texts in .*empty.jsonl: records have {has}; give 'source' with 'target' or"):
        read(tmp_path / "empty.jsonl")


def test_files_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(Refused, match=r"no .jsonl, .txt, .parquet files there"):
        sources.find(str(tmp_path))
    (tmp_path / "a.csv").write_text("text\nthe cat\n")
    with pytest.raises(Refused, match=r"cannot read .csv files; give .jsonl"):
        sources.find(str(tmp_path / "a.csv"))
    (tmp_path / "empty.parquet").write_bytes(b"")
    with pytest.raises(Refused, match=r"empty.parquet: not a Parquet file"):
        read(tmp_path / "empty.parquet")


def test_damaged_data_is_refused(tmp_path):
    import datasets

    saved = datasets.Dataset.from_dict(dict(text=["the cat sat on a mat"] * 2_000)).with_format("numpy")
    saved.save_to_disk(tmp_path / "saved")
    assert len(read(tmp_path / "saved")[0]) == 1_980  # whatever the format it was saved in
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:3_000])
    with pytest.raises(Refused, match=r"saved: not a data set saved by `datasets`, or a damaged one"):
        read(tmp_path / "saved")
    saved.to_parquet(tmp_path / "a.parquet")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[4:400] = bytes(396)
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(Refused, match=r"a.parquet: not a Parquet file, or a damaged one"):
        read(tmp_path / "a.parquet")


def test_a_download_that_was_cut_off_is_refused(tmp_path):
    for i in (0, 2):
        write_jsonl(tmp_path / f"train-0000{i}-of-00003.jsonl", [dict(text="the cat")])
    with pytest.raises(Refused, match=r"train-\*: 2 files of 3 are there"):
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
    with pytest.raises(Refused, match=complaint):
        sources.find(str(tmp_path))
    assert (
        sources.split_of(Path("test/train-0.jsonl")) == sources.split_of(Path("Training1.jsonl")) == "train"
        and sources.split_of(Path("validation/0000.parquet")) == "validation"
    )


def test_a_split_for_testing_is_scored_when_asked_for(tokenizer, tmp_path):
    for split, text in (("train", "the cat"), ("validation", "a mat"), ("test", "on us")):
        write_jsonl(tmp_path / f"{split}.jsonl", [dict(text=text)])
    for split, text in (("validation", "a mat"), ("test", "on us")):
        corpus = corpora.load_corpus(str(tmp_path), tokenizer, Layout(9), tmp_path / "cache", split)
        assert corpus.held_out == [Example(text)] and corpus.split == split


def test_references_are_the_words_given_beside_tokens(tokenizer, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [dict(condition_input_ids=[3], input_ids=[4], input="a", target="b c")] * 200)
    corpus = corpora.load_corpus(str(tmp_path), tokenizer, Layout(8, source=4), tmp_path / "cache")
    assert corpus.held_out == [Example("b c", "a")] * 2


def test_rows_are_prepared_once_and_cuts_are_counted(tokenizer, tmp_path):
    records = [dict(source="the cat", target="sat on"), dict(source="a " * 9, target="mat " * 8 + "elsewhere")]
    write_jsonl(tmp_path / "train.jsonl", records)
    write_jsonl(tmp_path / "validation.jsonl", records[:1])
    corpus = corpora.load_corpus(str(tmp_path), tokenizer, Layout(9, source=4, pack=True), tmp_path / "cache")
    assert corpus.counts["train"] == {"rows": 2, "sources cut": 1, "texts cut": 1, "unknown tokens": 1}
    assert_array_equal(corpus.rows.prefix, [3, 4])
    assert_array_equal(corpus.rows.length, [6, 9])
    assert corpora.texts_of(np.asarray(corpus.rows.s), corpus.tokenizer, corpus.rows.prefix)[0] == "sat on"
    assert corpus.held_out == [Example("sat on", "the cat")] and corpus.has_sources
    (made,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    stamp = made.stat().st_mtime_ns
    again = corpora.load_corpus(str(tmp_path), tokenizer, Layout(9, source=4, pack=True), tmp_path / "cache")
    assert again.key == corpus.key and made.stat().st_mtime_ns == stamp
    write_jsonl(tmp_path / "train.jsonl", records * 2)
    other = corpora.load_corpus(str(tmp_path), tokenizer, Layout(9, source=4, pack=True), tmp_path / "cache")
    assert other.key != corpus.key and len(other.rows.s) == 4


def test_texts_without_sources_are_packed(tokenizer, tmp_path):
    (tmp_path / "train.txt").write_text("the cat sat\n" * 40)
    (tmp_path / "validation.txt").write_text("a mat looked\n" * 10)
    corpus = corpora.load_corpus(str(tmp_path), tokenizer, Layout(10, source=4, pack=True), tmp_path / "cache")
    assert len(corpus.rows.s) == 16 and not corpus.has_sources
    assert corpus.tokenizer.decode(corpus.rows.s[0]) == "the cat sat </s> the cat sat </s> the cat"


def test_bad_tokens_and_layouts_are_refused(tokenizer, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [dict(condition_input_ids=[3], input_ids=[999])] * 100)
    with pytest.raises(Refused, match="the data has token 999, and the tokenizer 21"):
        corpora.load_corpus(str(tmp_path), tokenizer, Layout(8, source=4), tmp_path / "cache")
    write_jsonl(tmp_path / "pairs.jsonl", [dict(source="a cat", target="a mat")] * 100)
    with pytest.raises(Refused, match="--source-length"):
        corpora.load_corpus(str(tmp_path / "pairs.jsonl"), tokenizer, Layout(8), tmp_path / "cache")
    (tmp_path / "few.txt").write_text("a cat\n")
    with pytest.raises(Refused, match="too little text"):
        corpora.load_corpus(str(tmp_path / "few.txt"), tokenizer, Layout(1000, pack=True), tmp_path / "cache")
    (tmp_path / "two").mkdir()
    write_jsonl(tmp_path / "two" / "train.jsonl", [dict(source="a cat", target="a mat")])
    write_jsonl(tmp_path / "two" / "validation.jsonl", [dict(text="a mat")])
    with pytest.raises(Refused, match="sources in one split and none in another"):
        corpora.load_corpus(str(tmp_path / "two"), tokenizer, Layout(8, source=4), tmp_path / "cache")
    with pytest.raises(Refused, match="give at least 100 texts, of which one is held out"):
        corpora.load_corpus(str(tmp_path / "few.txt"), tokenizer, Layout(8), tmp_path / "cache")
    with pytest.raises(Refused, match="give one by --tokenizer"):
        corpora.load_corpus(str(tmp_path / "few.txt"), "scratch", Layout(8), tmp_path / "cache")


def test_odd_tokens_are_refused_in_every_split(tokenizer, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [dict(condition_input_ids=[3], input_ids=[4])])
    for odd in (-3, 2**40):
        write_jsonl(tmp_path / "validation.jsonl", [dict(condition_input_ids=[3], input_ids=[odd])])
        with pytest.raises(Refused, match=f"the data has token {odd}, and the tokenizer 21"):
            corpora.load_corpus(str(tmp_path), tokenizer, Layout(8, source=4), tmp_path / "cache")


def test_a_text_that_spells_eos_does_not_end_there(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("the cat </s> sat\n" * 200)
    corpus = corpora.load_corpus(str(tmp_path / "a.txt"), tokenizer, Layout(8), tmp_path / "cache")
    assert corpora.texts_of(np.asarray(corpus.rows.s[:1]), corpus.tokenizer) == ["the cat sat"]
    assert corpus.counts["train"]["EOS left out"] == 198


def test_long_texts_are_tokenised_a_few_at_a_time():
    """Memory is bounded by characters as well as by texts."""
    examples = [Example("x" * n, "y" * n) for n in (1, 1, 1, 30, 1, 60)]
    sizes = [len(some) for some in corpora.some_at_a_time(examples, most=3, size=50)]
    assert sizes == [3, 1, 2]


def test_changed_rows_have_another_fingerprint(tokenizer, tmp_path):
    prints = []
    for last in ("a mat", "a cat", "a mat"):
        write_jsonl(tmp_path / "train.jsonl", [dict(text="the cat")] * 1_500 + [dict(text=last)])
        write_jsonl(tmp_path / "validation.jsonl", [dict(text="on us")])
        prints.append(corpora.load_corpus(str(tmp_path), tokenizer, Layout(8), tmp_path / "cache").fingerprint)
    assert prints[0] == prints[2] != prints[1]


def test_a_directory_without_a_tokenizer_is_refused():
    """Where there is none, transformers would make one up."""
    with pytest.raises(Refused, match=r"no tokenizer there; it would be one of tokenizer\.json"):
        corpora.load_tokenizer(GOLDEN / "t5")
