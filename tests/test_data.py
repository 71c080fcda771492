"""From text to rows to batches to clean embeddings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import data
import grammar
import pretrained
import scratch
from data import Rows
from errors import Refused


@pytest.fixture(scope="module")
def corpus():
    return data.grammar_corpus("stories", 32, size=400, held_out=10)


def test_rows_are_the_texts_they_came_from(corpus):
    assert data.texts_of(corpus.rows.s, corpus.tokenizer) == grammar.write(grammar.STORIES, 400, seed=1)


def test_held_out_texts_are_not_trained_on():
    corpus = data.load_corpus("stories", 32)
    trained = set(data.texts_of(corpus.rows.s, corpus.tokenizer))
    assert sum(text in trained for text in corpus.held_out) <= 2  # a coincidence has odds of about 1 in 10^4 a text


def test_padding_and_packing():
    padded = data.pad_rows([[5, 6], [7, 8, 9]], 4, eos=1)
    assert_array_equal(padded.s, [[5, 6, 1, 1], [7, 8, 9, 1]])
    assert_array_equal(padded.length, [3, 4])
    packed = data.pack_rows([[5, 6], [7, 8, 9], [5]], 4, eos=1)
    assert_array_equal(packed.s, [[5, 6, 1, 7], [8, 9, 1, 5]])
    with pytest.raises(Refused, match="--length"):
        data.pad_rows([[1, 2, 3]], 3, eos=1)


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


def test_embeddings_are_normalised_and_padding_is_invisible(corpus):
    """Channel means and variances are 0 and 1, and a text's embeddings do not depend on the padding behind it."""
    config = data.SCRATCH | dict(vocab_size=len(corpus.tokenizer), d_model=16, d_ff=16, d_kv=4)
    encoder = pretrained.t5_from_config(config, jax.random.key(0))
    embedder = data.make_embedder(encoder, corpus.rows, chunk=100)
    keep = jnp.zeros(400, bool)
    x = embedder(Rows(*map(jnp.asarray, corpus.rows)), keep).x
    text = x[np.arange(32) < corpus.rows.length[:, None]]
    assert_allclose(text.mean(0), 0, atol=1e-3)
    assert_allclose(text.std(0), 1, atol=1e-3)
    s = corpus.rows.s[:1]
    n = int(corpus.rows.length[0])
    other = s.copy()
    other[:, n:] = 7
    one, two = (embedder(Rows(jnp.asarray(a), jnp.array([n]), jnp.array([0])), keep[:1]).x for a in (s, other))
    assert_array_equal(one[:, :n], two[:, :n])


def test_the_encoder_mask_keeps_prefix_text_and_padding_apart():
    mask = data.encoder_mask(jnp.array([4, 4]), jnp.array([2, 2]), jnp.array([False, True]), 5)
    expected = [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0]]
    dropped = [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0]]
    assert_array_equal(mask, np.array([expected, dropped], bool))


def test_a_dropped_condition_leaves_no_trace(corpus):
    """Whatever the prefix was, batch embeddings are the same once it is dropped."""
    config = data.SCRATCH | dict(vocab_size=len(corpus.tokenizer), d_model=16, d_ff=16, d_kv=4)
    encoder = pretrained.t5_from_config(config, jax.random.key(0))
    embedder = data.Embedder(encoder, jnp.zeros(16), jnp.ones(16))
    s = jnp.asarray(corpus.rows.s[:4])
    length, prefix, drop = jnp.full(4, 20), jnp.full(4, 6), jnp.array([True, True, False, False])
    one = embedder(Rows(s, length, prefix), drop).x
    two = embedder(Rows(s.at[:, :6].set(9), length, prefix), drop).x
    assert_array_equal(one[:2], two[:2])
    assert jnp.all(one[:2, :6] == 0) and not jnp.any(one[2:] == two[2:])


@given(st.integers(2, 60), st.integers(0, 10_000), st.floats(0.1, 0.5))
@settings(max_examples=60, deadline=None)
def test_span_corruption_loses_nothing(n, seed, density):
    """Putting the target's spans back at their sentinels gives the text again."""
    s, sentinels = list(range(100, 100 + n)), list(range(8))
    source, target = scratch.corrupt_spans(np.random.default_rng(seed), s, sentinels, 99, density, 3.0)
    assert source[-1] == target[-1] == 99
    spans, current = {}, None
    for token in target[:-1]:
        if token in sentinels:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    restored = [token for piece in source[:-1] for token in (spans[piece] if piece in sentinels else [piece])]
    assert restored == s
    assert sum(map(len, spans.values())) == max(1, round(n * density))


def test_the_scratch_encoder_is_trained_once_and_then_read_back(corpus, tmp_path):
    recipe = data.RECIPE | dict(steps=3, batch=8)
    first = data.scratch_encoder(corpus, tmp_path, **recipe)
    (directory,) = tmp_path.iterdir()
    stamp = (directory / "model.safetensors").stat().st_mtime_ns
    second = data.scratch_encoder(corpus, tmp_path, **recipe)
    assert (directory / "model.safetensors").stat().st_mtime_ns == stamp
    jax.tree.map(assert_array_equal, first, second)
