"""From texts to rows of tokens and back, and what tells one prepared corpus from another."""

import json
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from conftest import GOLDEN, ROOT
from numpy.testing import assert_array_equal

from corpora import rows, stories, tasks
from corpora.rows import Layout
from corpora.sources import Example
from corpora.stories import STORIES, write
from runtime.errors import UserError
from runtime.files import made_once


def write_jsonl(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def keys():
    return [rows.cache_key(name, Layout(30)) for name in rows.BUILT_IN]


def test_another_docstring_changes_no_key(tmp_path):
    """A built-in corpus is known by settings and a version, not by the source text of a module."""
    for package in ("corpora", "runtime"):
        shutil.copytree(ROOT / package, tmp_path / package)
    for file in tmp_path.glob("*/*.py"):
        file.write_text(f'"""Another docstring."""\n\n# Another comment\n{file.read_text()}')
    script = f"""
from corpora import rows
rows.WRITTEN.update({rows.WRITTEN})
print([rows.cache_key(name, rows.Layout(30)) for name in rows.BUILT_IN])"""
    edited = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, check=True)
    assert edited.stdout.decode().strip() == str(keys())


def test_a_raised_version_changes_the_keys_of_its_corpora(monkeypatch):
    before = keys()
    monkeypatch.setattr(stories, "VERSION", stories.VERSION + 1)
    assert [a == b for a, b in zip(before, keys(), strict=True)] == [False, True, True]
    monkeypatch.setattr(tasks, "VERSION", tasks.VERSION + 1)
    assert not set(before) & set(keys())


def test_other_settings_change_the_key(monkeypatch):
    names = {rows.cache_key("stories", layout) for layout in (Layout(30), Layout(31), Layout(30, pack=True))}
    monkeypatch.setitem(rows.WRITTEN, "train", 7)
    names.add(rows.cache_key("stories", Layout(30)))
    assert len(names) == 4


def test_rows_are_the_texts_they_came_from(stories):
    assert rows.detokenize(stories.rows.s[:400], stories.tokenizer) == write(STORIES, 400, seed=1)
    assert stories.counts["train"]["rows"] == len(stories.rows.s) == rows.WRITTEN["train"]
    assert stories.rows.s.dtype == np.uint16 and isinstance(stories.rows.s, np.memmap)


def test_held_out_texts_are_not_trained_on(stories):
    trained = set(rows.detokenize(stories.rows.s, stories.tokenizer))
    assert sum(example.text in trained for example in stories.held_out) <= 2  # by chance, 1 in 10^4 a text


def test_padding_and_packing():
    counts = Counter()
    padded = rows.pad_rows([[5, 6], [7, 8, 9, 5]], [None, None], Layout(4), 1, counts)
    assert_array_equal(padded.s, [[5, 6, 1, 1], [7, 8, 9, 1]])
    assert_array_equal(padded.length, [3, 4])
    assert counts["texts cut"] == 1
    packed, rest = rows.pack_rows([[5, 6], [7, 8, 9], [5]], 4, 1, np.array([4], np.int32))
    assert_array_equal(packed.s, [[4, 5, 6, 1], [7, 8, 9, 1]])
    assert_array_equal(rest, [5, 1])
    for as_given, expected in ((True, [[5, 6, 7, 8], [9, 1, 9, 1]]), (False, [[5, 6, 7, 8], [1, 9, 1, 1]])):
        again, _ = rows.pack_rows([[5, 6, 7, 8], [9, 1], [9]], 4, 1, np.zeros(0, np.int32), as_given)
        assert_array_equal(again.s, expected)


def test_a_text_follows_its_source():
    counts = Counter()
    made = rows.pad_rows([[5], [6, 7, 8, 9]], [[2, 3], [4, 4, 4, 4]], Layout(7, source=4), 1, counts)
    assert_array_equal(made.s, [[2, 3, 1, 5, 1, 1, 1], [4, 4, 4, 1, 6, 7, 1]])
    assert_array_equal(made.prefix, [3, 4])
    assert_array_equal(made.length, [5, 7])
    assert counts == {"sources cut": 1, "texts cut": 1}


def test_a_preparation_that_was_interrupted_starts_again(tmp_path):
    """What was half made is never mistaken for the whole."""
    directory = tmp_path / "rows"
    with pytest.raises(KeyboardInterrupt), made_once(directory) as partial:
        (partial / "some").write_text("half")
        raise KeyboardInterrupt
    assert not directory.exists()
    with made_once(directory) as partial:
        assert not list(partial.iterdir())
        (partial / "all").write_text("whole")
    with made_once(directory) as partial:
        assert partial is None
    assert [file.name for file in directory.iterdir()] == ["all"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    rows.word_tokenizer("the cat sat on a mat and looked at us".split()).save_pretrained(directory)
    return str(directory)


def test_a_split_for_testing_is_scored_when_asked_for(tokenizer, tmp_path):
    for split, text in (("train", "the cat"), ("validation", "a mat"), ("test", "on us")):
        write_jsonl(tmp_path / f"{split}.jsonl", [dict(text=text)])
    for split, text in (("validation", "a mat"), ("test", "on us")):
        corpus = rows.load_corpus(str(tmp_path), tokenizer, Layout(9), tmp_path / "cache", split)
        assert corpus.held_out == [Example(text)] and corpus.split == split


def test_references_are_the_words_given_beside_tokens(tokenizer, tmp_path):
    record = dict(condition_input_ids=[3], input_ids=[4], input="a", target="b c")
    write_jsonl(tmp_path / "train.jsonl", [record] * 200)
    corpus = rows.load_corpus(str(tmp_path), tokenizer, Layout(8, source=4), tmp_path / "cache")
    assert corpus.held_out == [Example("b c", "a")] * 2


def test_rows_are_prepared_once_and_cuts_are_counted(tokenizer, tmp_path):
    long = dict(source="a " * 9, target="mat " * 8 + "elsewhere")
    records = [dict(source="the cat", target="sat on"), long]
    write_jsonl(tmp_path / "train.jsonl", records)
    write_jsonl(tmp_path / "validation.jsonl", records[:1])
    corpus = rows.load_corpus(str(tmp_path), tokenizer, Layout(9, source=4, pack=True), tmp_path / "cache")
    assert corpus.counts["train"] == {"rows": 2, "sources cut": 1, "texts cut": 1, "unknown tokens": 1}
    assert_array_equal(corpus.rows.prefix, [3, 4])
    assert_array_equal(corpus.rows.length, [6, 9])
    assert rows.detokenize(np.asarray(corpus.rows.s), corpus.tokenizer, corpus.rows.prefix)[0] == "sat on"
    assert corpus.held_out == [Example("sat on", "the cat")] and corpus.has_sources
    (made,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    stamp = made.stat().st_mtime_ns
    again = rows.load_corpus(str(tmp_path), tokenizer, Layout(9, source=4, pack=True), tmp_path / "cache")
    assert again.key == corpus.key and made.stat().st_mtime_ns == stamp
    write_jsonl(tmp_path / "train.jsonl", records * 2)
    other = rows.load_corpus(str(tmp_path), tokenizer, Layout(9, source=4, pack=True), tmp_path / "cache")
    assert other.key != corpus.key and len(other.rows.s) == 4


def test_texts_without_sources_are_packed(tokenizer, tmp_path):
    (tmp_path / "train.txt").write_text("the cat sat\n" * 40)
    (tmp_path / "validation.txt").write_text("a mat looked\n" * 10)
    corpus = rows.load_corpus(str(tmp_path), tokenizer, Layout(10, source=4, pack=True), tmp_path / "cache")
    assert len(corpus.rows.s) == 16 and not corpus.has_sources
    assert corpus.tokenizer.decode(corpus.rows.s[0]) == "the cat sat </s> the cat sat </s> the cat"


def test_bad_tokens_and_layouts_are_refused(tokenizer, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [dict(condition_input_ids=[3], input_ids=[999])] * 100)
    with pytest.raises(UserError, match="the data has token 999, and the tokenizer 21"):
        rows.load_corpus(str(tmp_path), tokenizer, Layout(8, source=4), tmp_path / "cache")
    write_jsonl(tmp_path / "pairs.jsonl", [dict(source="a cat", target="a mat")] * 100)
    with pytest.raises(UserError, match="--source-length"):
        rows.load_corpus(str(tmp_path / "pairs.jsonl"), tokenizer, Layout(8), tmp_path / "cache")
    (tmp_path / "few.txt").write_text("a cat\n")
    with pytest.raises(UserError, match="too little text"):
        rows.load_corpus(str(tmp_path / "few.txt"), tokenizer, Layout(1000, pack=True), tmp_path / "cache")
    (tmp_path / "two").mkdir()
    write_jsonl(tmp_path / "two" / "train.jsonl", [dict(source="a cat", target="a mat")])
    write_jsonl(tmp_path / "two" / "validation.jsonl", [dict(text="a mat")])
    with pytest.raises(UserError, match="only some splits have sources"):
        rows.load_corpus(str(tmp_path / "two"), tokenizer, Layout(8, source=4), tmp_path / "cache")
    with pytest.raises(UserError, match="give at least 100 texts, of which one is held out"):
        rows.load_corpus(str(tmp_path / "few.txt"), tokenizer, Layout(8), tmp_path / "cache")
    with pytest.raises(UserError, match="give one by --tokenizer"):
        rows.load_corpus(str(tmp_path / "few.txt"), "scratch", Layout(8), tmp_path / "cache")


def test_odd_tokens_are_refused_in_every_split(tokenizer, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [dict(condition_input_ids=[3], input_ids=[4])])
    for odd in (-3, 2**40):
        write_jsonl(tmp_path / "validation.jsonl", [dict(condition_input_ids=[3], input_ids=[odd])])
        with pytest.raises(UserError, match=f"the data has token {odd}, and the tokenizer 21"):
            rows.load_corpus(str(tmp_path), tokenizer, Layout(8, source=4), tmp_path / "cache")


def test_a_text_that_spells_eos_does_not_end_there(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("the cat </s> sat\n" * 200)
    corpus = rows.load_corpus(str(tmp_path / "a.txt"), tokenizer, Layout(8), tmp_path / "cache")
    assert rows.detokenize(np.asarray(corpus.rows.s[:1]), corpus.tokenizer) == ["the cat sat"]
    assert corpus.counts["train"]["EOS left out"] == 198


def test_long_texts_are_tokenised_a_few_at_a_time():
    """Memory is bounded by characters as well as by texts."""
    examples = [Example("x" * n, "y" * n) for n in (1, 1, 1, 30, 1, 60)]
    sizes = [len(chunk) for chunk in rows.in_chunks(examples, most=3, size=50)]
    assert sizes == [3, 1, 2]


def test_changed_rows_have_another_fingerprint(tokenizer, tmp_path):
    prints = []
    for last in ("a mat", "a cat", "a mat"):
        write_jsonl(tmp_path / "train.jsonl", [dict(text="the cat")] * 1_500 + [dict(text=last)])
        write_jsonl(tmp_path / "validation.jsonl", [dict(text="on us")])
        prints.append(rows.load_corpus(str(tmp_path), tokenizer, Layout(8), tmp_path / "cache").fingerprint)
    assert prints[0] == prints[2] != prints[1]


def test_a_directory_without_a_tokenizer_is_refused():
    """Where there is none, transformers would make one up."""
    with pytest.raises(UserError, match=r"no tokenizer\.json or the like there"):
        rows.load_tokenizer(GOLDEN / "t5")
