"""The encoder that is trained from scratch: its objective, and that it is trained once."""

import dataclasses
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import data
import train
from encoders import scratch, t5
from runtime.mesh import make_mesh


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
    return scratch.corrupt_spans(key, s, n, sentinels, eos, scratch.Recipe({}, density, embed_std=1.0))


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
    corpus, mesh = data.load_corpus(config), make_mesh("1", 1)
    place = data.scratch_config(config, corpus).directory
    train.train_encoder(config, corpus, mesh)
    first = t5.load_t5(place / "t5")
    stamp = (place / "t5" / "model.safetensors").stat().st_mtime_ns
    train.train_encoder(config, corpus, mesh)
    assert (place / "t5" / "model.safetensors").stat().st_mtime_ns == stamp
    shutil.rmtree(place / "t5")
    shutil.rmtree(place / "checkpoints" / "4")
    train.train_encoder(config, corpus, mesh)
    jax.tree.map(assert_array_equal, t5.load_t5(place / "t5"), first)


def test_a_raised_version_trains_the_encoder_again(small, stories, monkeypatch):
    """No source text is read for the key of a cached encoder."""
    config = dataclasses.replace(small, encoder="scratch-16")
    with monkeypatch.context() as m:
        m.delattr(Path, "read_text")
        m.delattr(Path, "read_bytes")
        name = data.scratch_config(config, stories).name
    monkeypatch.setattr(scratch, "VERSION", scratch.VERSION + 1)
    assert data.scratch_config(config, stories).name != name
