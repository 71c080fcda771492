"""From text to rows to batches to clean embeddings."""

import dataclasses
import shutil
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import corpora
import data
import grammar
import pretrained
import scratch
import train
from corpora import Layout, Rows


def test_rows_are_the_texts_they_came_from(stories):
    assert corpora.texts_of(stories.rows.s[:400], stories.tokenizer) == grammar.write(grammar.STORIES, 400, seed=1)
    assert stories.counts["train"]["rows"] == len(stories.rows.s) == corpora.WRITTEN["train"]
    assert stories.rows.s.dtype == np.uint16 and isinstance(stories.rows.s, np.memmap)


def test_held_out_texts_are_not_trained_on(stories):
    trained = set(corpora.texts_of(stories.rows.s, stories.tokenizer))
    assert sum(example.text in trained for example in stories.held_out) <= 2  # a coincidence has odds of about 1 in 10^4 a text


def test_padding_and_packing():
    told = Counter()
    padded = corpora.pad_rows([[5, 6], [7, 8, 9, 5]], [None, None], Layout(4), 1, told)
    assert_array_equal(padded.s, [[5, 6, 1, 1], [7, 8, 9, 1]])
    assert_array_equal(padded.length, [3, 4])
    assert told["texts cut"] == 1
    packed, rest = corpora.pack_rows([[5, 6], [7, 8, 9], [5]], 4, 1, np.array([4], np.int32))
    assert_array_equal(packed.s, [[4, 5, 6, 1], [7, 8, 9, 1]])
    assert_array_equal(rest, [5, 1])
    for as_given, expected in ((True, [[5, 6, 7, 8], [9, 1, 9, 1]]), (False, [[5, 6, 7, 8], [1, 9, 1, 1]])):
        again, _ = corpora.pack_rows([[5, 6, 7, 8], [9, 1], [9]], 4, 1, np.zeros(0, np.int32), as_given)
        assert_array_equal(again.s, expected)


def test_a_text_follows_its_source():
    told = Counter()
    rows = corpora.pad_rows([[5], [6, 7, 8, 9]], [[2, 3], [4, 4, 4, 4]], Layout(7, source=4), 1, told)
    assert_array_equal(rows.s, [[2, 3, 1, 5, 1, 1, 1], [4, 4, 4, 1, 6, 7, 1]])
    assert_array_equal(rows.prefix, [3, 4])
    assert_array_equal(rows.length, [5, 7])
    assert told == {"sources cut": 1, "texts cut": 1}


def test_a_preparation_that_was_interrupted_starts_again(tmp_path):
    """What was half made is never mistaken for the whole."""
    directory = tmp_path / "rows"
    with pytest.raises(KeyboardInterrupt), corpora.only_one(directory) as partial:
        (partial / "some").write_text("half")
        raise KeyboardInterrupt
    assert not directory.exists()
    with corpora.only_one(directory) as partial:
        assert not list(partial.iterdir())
        (partial / "all").write_text("whole")
    with corpora.only_one(directory) as partial:
        assert partial is None
    assert [file.name for file in directory.iterdir()] == ["all"]


@given(n=st.integers(1, 200), size=st.integers(1, 30), seed=st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_an_epoch_visits_every_row_at_most_once_and_steps_need_no_history(n, size, seed):
    per_epoch = n // size
    batches = [data.batch_indices(n, size, seed, step) for step in range(2 * per_epoch)]
    for epoch in (batches[:per_epoch], batches[per_epoch:]):
        seen = [i for batch in epoch for i in batch]
        assert len(seen) == len(set(seen)) == per_epoch * size
    backwards = [data.batch_indices(n, size, seed, step) for step in reversed(range(2 * per_epoch))]
    assert_array_equal(batches, backwards[::-1])


@given(first=st.integers(0, 5), end=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_prefetched_batches_come_in_order_and_once(first, end):
    loaded = []
    assert list(data.prefetched(lambda i: loaded.append(i) or i, first, end)) == list(range(first, end)) == loaded


def test_embeddings_are_normalised_and_padding_is_invisible(stories):
    """Channel means and variances are 0 and 1, and a text's embeddings do not depend on the padding behind it."""
    config = scratch.SMALL | dict(vocab_size=len(stories.tokenizer), d_model=16, d_ff=16, d_kv=4)
    encoder = pretrained.t5_from_config(config, jax.random.key(0))
    rows = Rows(*(np.asarray(a[:400], np.int32) for a in stories.rows))
    embedder = data.make_embedder(encoder, rows, by_channel=True, chunk=100)
    keep = jnp.zeros(400, bool)
    x = embedder(Rows(*map(jnp.asarray, rows)), keep).x
    text = x[np.arange(30) < rows.length[:, None]]
    assert_allclose(text.mean(0), 0, atol=1e-3)
    assert_allclose(text.std(0), 1, atol=1e-3)
    whole = data.make_embedder(encoder, rows, by_channel=False, chunk=100)
    assert_allclose(whole(Rows(*map(jnp.asarray, rows)), keep).x[np.arange(30) < rows.length[:, None]].std(), 1, atol=1e-3)
    assert len(np.unique(whole.std)) == 1
    s = rows.s[:1]
    n = int(rows.length[0])
    other = s.copy()
    other[:, n:] = 7
    one, two = (embedder(Rows(jnp.asarray(a), jnp.array([n]), jnp.array([0])), keep[:1]).x for a in (s, other))
    assert_array_equal(one[:, :n], two[:, :n])


def test_the_encoder_mask_keeps_prefix_text_and_padding_apart():
    mask = data.encoder_mask(jnp.array([4, 4]), jnp.array([2, 2]), jnp.array([False, True]), 5)
    expected = [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0]]
    dropped = [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0]]
    assert_array_equal(mask, np.array([expected, dropped], bool))


def test_a_dropped_condition_leaves_no_trace(stories):
    """Whatever the prefix was, batch embeddings are the same once it is dropped."""
    config = scratch.SMALL | dict(vocab_size=len(stories.tokenizer), d_model=16, d_ff=16, d_kv=4)
    encoder = pretrained.t5_from_config(config, jax.random.key(0))
    embedder = data.Embedder(encoder, jnp.zeros(16), jnp.ones(16))
    s = jnp.asarray(stories.rows.s[:4], jnp.int32)
    length, prefix, drop = jnp.full(4, 20), jnp.full(4, 6), jnp.array([True, True, False, False])
    one = embedder(Rows(s, length, prefix), drop).x
    two = embedder(Rows(s.at[:, :6].set(9), length, prefix), drop).x
    assert_array_equal(one[:2], two[:2])
    assert jnp.all(one[:2, :6] == 0) and not jnp.any(one[2:] == two[2:])


@given(st.integers(0, 40), st.integers(0, 10_000), st.sampled_from([0.15, 0.5]))
@settings(max_examples=60, deadline=None)
def test_span_corruption_loses_nothing(n, seed, density):
    """Putting the target's spans back at their sentinels gives the text again."""
    s, sentinels, eos = np.arange(100, 140), np.arange(2, 10), 1
    source, target = corrupted(jax.random.key(seed), s, n, sentinels, eos, density)
    source, target = (part[part != 0].tolist() for part in (np.asarray(source), np.asarray(target)))
    assert source[-1] == target[-1] == eos
    if n == 0:
        return
    spans, current = {}, None
    for token in target[:-1]:
        if token in sentinels:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    restored = [token for piece in source[:-1] for token in (spans[piece] if piece in sentinels else [piece])]
    assert restored == s[:n].tolist()
    assert sum(map(len, spans.values())) == max(1, round(n * density)) and all(spans.values())


@partial(jax.jit, static_argnums=(4, 5))
def corrupted(key, s, n, sentinels, eos, density):
    return scratch.corrupt_spans(key, s, n, sentinels, eos, density, 3.0)


def test_an_encoder_learns_from_rows_and_from_their_sources_and_texts():
    s, length, prefix = jnp.array([5, 6, 1, 7, 8, 9, 1, 1]), jnp.array(7), jnp.array(3)
    seen = {}
    for seed in range(20):
        tokens, n = scratch.text_to_learn(jax.random.key(seed), s, length, prefix)
        seen[tuple(tokens[:n].tolist())] = None
    assert set(seen) == {(5, 6, 1, 7, 8, 9), (5, 6), (7, 8, 9)}
    tokens, n = scratch.text_to_learn(jax.random.key(0), s, length, jnp.array(0))
    assert tokens[:n].tolist() == [5, 6, 1, 7, 8, 9]


def test_an_encoder_from_scratch_is_trained_once_and_continues(small, tmp_path):
    config = dataclasses.replace(small, encoder="scratch-16", encoder_steps=4, runs=tmp_path, save_every=2)
    corpus, mesh = train.load_corpus(config), train.make_mesh("1", 1)
    place = train.encoder_stage(config, corpus).directory
    train.train_encoder(config, corpus, mesh)
    first = pretrained.load_t5(place / "t5")
    stamp = (place / "t5" / "model.safetensors").stat().st_mtime_ns
    train.train_encoder(config, corpus, mesh)
    assert (place / "t5" / "model.safetensors").stat().st_mtime_ns == stamp
    shutil.rmtree(place / "t5")
    shutil.rmtree(place / "checkpoints" / "4")
    train.train_encoder(config, corpus, mesh)
    jax.tree.map(assert_array_equal, pretrained.load_t5(place / "t5"), first)
