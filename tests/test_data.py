"""From rows to batches to clean embeddings."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import data
from corpora.rows import Rows
from encoders import scratch, t5


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
    batches = list(data.prefetched(lambda i: loaded.append(i) or i, first, end))
    assert batches == list(range(first, end)) == loaded


def test_embeddings_are_normalised_and_padding_is_invisible(stories):
    """Channel means and variances are 0 and 1, and embeddings of a text do not depend on its padding."""
    config = scratch.SMALL | dict(vocab_size=len(stories.tokenizer), d_model=16, d_ff=16, d_kv=4)
    encoder = t5.t5_from_config(config, jax.random.key(0))
    rows = Rows(*(np.asarray(a[:400], np.int32) for a in stories.rows))
    embedder = data.make_embedder(encoder, rows, by_channel=True, chunk=100)
    keep = jnp.zeros(400, bool)
    x = embedder(Rows(*map(jnp.asarray, rows)), keep).x
    text = x[np.arange(30) < rows.length[:, None]]
    assert_allclose(text.mean(0), 0, atol=1e-3)
    assert_allclose(text.std(0), 1, atol=1e-3)
    whole = data.make_embedder(encoder, rows, by_channel=False, chunk=100)
    x = whole(Rows(*map(jnp.asarray, rows)), keep).x
    assert_allclose(x[np.arange(30) < rows.length[:, None]].std(), 1, atol=1e-3)
    assert len(np.unique(whole.std)) == 1
    s = rows.s[:1]
    n = int(rows.length[0])
    other = s.copy()
    other[:, n:] = 7
    ends = jnp.array([n]), jnp.array([0])
    one, two = (embedder(Rows(jnp.asarray(a), *ends), keep[:1]).x for a in (s, other))
    assert_array_equal(one[:, :n], two[:, :n])


def test_the_encoder_mask_keeps_prefix_text_and_padding_apart():
    mask = data.encoder_mask(jnp.array([4, 4]), jnp.array([2, 2]), jnp.array([False, True]), 5)
    expected = [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0]]
    dropped = [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0]]
    assert_array_equal(mask, np.array([expected, dropped], bool))


def test_a_dropped_condition_leaves_no_trace(stories):
    """Whatever the prefix was, batch embeddings are the same once it is dropped."""
    config = scratch.SMALL | dict(vocab_size=len(stories.tokenizer), d_model=16, d_ff=16, d_kv=4)
    encoder = t5.t5_from_config(config, jax.random.key(0))
    embedder = data.Embedder(encoder, jnp.zeros(16), jnp.ones(16))
    s = jnp.asarray(stories.rows.s[:4], jnp.int32)
    length, prefix, drop = jnp.full(4, 20), jnp.full(4, 6), jnp.array([True, True, False, False])
    one = embedder(Rows(s, length, prefix), drop).x
    two = embedder(Rows(s.at[:, :6].set(9), length, prefix), drop).x
    assert_array_equal(one[:2], two[:2])
    assert jnp.all(one[:2, :6] == 0) and not jnp.any(one[2:] == two[2:])
