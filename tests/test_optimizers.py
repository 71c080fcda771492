import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from conftest import under
from numpy.testing import assert_allclose

import train
from config import PRESETS, preset
from encoders import released, weights
from runtime import optimizers


def test_three_muon_steps_match_the_released_ones(golden, golden_model):
    """Every weight, stacked as stored, is routed and scaled as by the released optimizer, after the clip."""
    g = golden("muon")
    config = dataclasses.replace(preset("elf-b", None), learning_rate=float(g["lr"]), warmup_steps=0)
    optimizer = train.optimizer_of(config)
    update = jax.jit(lambda grads, state, model: optimizer.update(grads, state, model))
    model, state = golden_model, optimizer.init(golden_model)
    for i in range(3):
        grads = released.from_released(model, under(f"grad{i}/", g))
        updates, state = update(grads, state, model)
        model = optax.apply_updates(model, updates)
    expected = released.from_released(model, under("after3/", g))
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=1e-5), model, expected)


def test_muon_takes_exactly_the_matrices(golden_model):
    labels = jax.tree_util.tree_leaves_with_path(optimizers.muon_or_adam(golden_model))
    taken = {weights.dotted(path) for path, label in labels if label == "muon"}
    matrices = {ours for ours, theirs in released.RELEASED_NAMES.items() if "kernel" in theirs}
    assert taken == matrices


def test_wide_matrices_are_made_orthogonal_alike(monkeypatch):
    """The short way for a wide matrix equals the rounds written out, also for small singular values."""
    x = jax.random.normal(jax.random.key(0), (24, 400)) * jnp.logspace(-4, 0, 24)[:, None]
    short = optimizers.orthogonal(x)
    monkeypatch.setattr(optimizers, "WIDE", 10**9)
    assert_allclose(short, optimizers.orthogonal(x), atol=1e-4)
    assert jnp.linalg.svd(optimizers.orthogonal(x[12:]))[1].min() > 0.6


def test_learning_rate_warms_up_from_zero_and_stays_or_decays():
    config = dataclasses.replace(
        PRESETS["stories"], optimizer="adamw", steps=100, warmup_steps=10, learning_rate=1.0
    )
    for schedule, end in [("constant", 1.0), ("cosine", 0.0)]:
        optimizer = train.optimizer_of(dataclasses.replace(config, schedule=schedule))
        params = jnp.zeros(1)
        state, moved = optimizer.init(params), []
        for _ in range(100):
            updates, state = optimizer.update(jnp.ones(1), state, params)
            moved.append(-float(updates[0]))
        assert moved[0] == 0 and np.isclose(moved[5], 0.5, atol=1e-3) and np.isclose(moved[10], 1, atol=1e-3)
        assert np.isclose(moved[-1], end, atol=1e-2)
