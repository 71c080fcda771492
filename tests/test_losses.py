"""The objective against the released numbers, and the claims the paper makes of it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import under
from numpy.testing import assert_allclose

import losses
from encoders.released import from_released
from losses import Batch, Draws, Slots, guidance_scale, make_slots, roles, summed, velocity

in_one_piece = partial(jax.jit, static_argnames=("slots", "noise_scale", "decode_noise_scale"))
token_losses = in_one_piece(losses.token_losses)


def read(g, *, decode):
    """A golden file as arguments of `token_losses`: all rows in one branch, any row self-conditioned."""
    n = len(g["t"])
    dropped, prefix = g["drop"][:, None], g["cond_mask"] > 0
    counts = ~prefix & ((g["valid_mask"] > 0) | (g["pad_counts"] > 0))
    x = np.where((dropped & prefix)[..., None], 0, g["x"])
    batch = Batch(jnp.asarray(g["ids"]), jnp.asarray(x), jnp.asarray(prefix), jnp.asarray(counts))
    eps = jnp.asarray(g["decode_eps_unit" if decode else "eps_unit"])
    self_cond = jnp.zeros(n, bool) if decode else jnp.asarray(g["self_cond"])
    draws = Draws(
        jnp.asarray(g["t"]), jnp.asarray(g["p"]), jnp.asarray(g["w"]), eps, jnp.full(n, decode), self_cond
    )
    scales = dict(noise_scale=float(g["noise_scale"]), decode_noise_scale=float(g["decode_noise_scale"]))
    return batch, draws, Slots(n, n * decode, n * (not decode)), scales


@in_one_piece
@jax.value_and_grad
def loss_and_grad(model, batch, draws, slots, **scales):
    total, sums = summed(losses.token_losses(model, batch, draws, slots, **scales), batch, draws)
    return total / sum(count for _, count in sums.values())


def norm(tree):
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


@pytest.mark.parametrize(
    "file, branch",
    [
        ("losses_uncond", "denoise"),
        ("losses_uncond", "decode"),
        ("losses_late_t", "denoise"),
        ("losses_late_t", "decode"),
        ("losses_cond_pad", "denoise"),
        ("losses_cond_drop", "denoise"),
    ],
)
def test_losses_and_gradients_match_the_released_ones(golden, golden_model, file, branch):
    g = golden(file)
    batch, draws, slots, scales = read(g, decode=branch == "decode")
    value, grad = loss_and_grad(golden_model, batch, draws, slots=slots, **scales)
    assert_allclose(value, g[f"{branch}_loss"], rtol=1e-4)
    if f"{branch}_grad_norm" in g.files:
        assert_allclose(norm(grad), g[f"{branch}_grad_norm"], rtol=1e-3)
    given, params = under(f"{branch}_grad/", g), under("params/", golden("elf_params"))
    expected = from_released(
        golden_model, {k: given.get(k, np.full_like(v, np.nan)) for k, v in params.items()}
    )
    compared = 0
    for ours, theirs in zip(jax.tree.leaves(grad), jax.tree.leaves(expected), strict=True):
        there = ~np.isnan(theirs)
        assert np.linalg.norm((ours - theirs)[there]) <= 1e-3 * np.linalg.norm(theirs[there]) + 1e-7
        compared += there.sum()
    assert compared == sum(v.size for v in given.values())


@pytest.fixture(scope="module")
def mixed(golden):
    """A batch of 8 rows in both branches, in their slots."""
    g = golden("losses_uncond")
    batch, draws, _, scales = read(g, decode=False)
    grow = lambda a: jnp.concatenate([a, a[:2]])  # noqa: E731
    batch, draws = jax.tree.map(grow, (batch, draws))
    rows = jnp.arange(8)
    return batch, draws._replace(decode=rows < 2, self_cond=rows > 4), Slots(8, 2, 4), scales


def test_a_mixed_batch_is_its_branches_put_together(golden_model, mixed):
    """Slots only save work: every row's loss equals its loss with all rows in all slots."""
    batch, draws, where, scales = mixed
    together, replicated, small_groups = (
        token_losses(golden_model, batch, draws, slots=slots, **scales)
        for slots in (where, Slots(8, 8, 8), Slots(1, 1, 1))
    )
    assert_allclose(together, replicated, rtol=1e-5, atol=1e-6)
    assert_allclose(together, small_groups, rtol=1e-5, atol=1e-6)


def test_positions_that_do_not_count_change_neither_loss_nor_gradient(golden_model, mixed):
    batch, draws, where, scales = mixed
    counts = jnp.ones_like(batch.counts).at[:, 12:].set(False)

    def run(s):
        return loss_and_grad(golden_model, batch._replace(s=s, counts=counts), draws, slots=where, **scales)

    one, other = run(batch.s), run(batch.s.at[:, 12:].set(7))
    jax.tree.map(assert_allclose, one, other)


def test_the_guided_target_carries_no_gradient(golden_model, mixed):
    """With w = 1 the guided target is the plain one: the passes behind it leave no trace in the gradient."""
    batch, draws, where, scales = mixed
    plain = draws._replace(w=jnp.ones(8))

    def by_hand(model):
        """Rows 5 to 7 and the rest apart, target v, self-conditioning under stop-gradient."""
        z = plain.t[:, None, None] * batch.x + (1 - plain.t[:, None, None]) * 2.0 * plain.eps
        null = model.denoise(z, jnp.zeros_like(z), plain.t, plain.w)
        prev = jnp.where(plain.self_cond[:, None, None], jax.lax.stop_gradient(null), 0)
        x_hat = model.denoise(z, prev, plain.t, plain.w)
        error = jnp.mean((velocity(x_hat, z, plain.t) - velocity(batch.x, z, plain.t)) ** 2, axis=-1)
        return jnp.sum(jnp.where(plain.decode[:, None], 0, error) * batch.counts) / jnp.sum(batch.counts)

    def only_denoise(model):
        found = token_losses(model, batch, plain, slots=where, **scales)
        return jnp.sum(jnp.where(plain.decode[:, None], 0, found) * batch.counts) / jnp.sum(batch.counts)

    close = lambda a, b: assert_allclose(a, b, rtol=1e-3, atol=1e-6)  # noqa: E731
    jax.tree.map(close, *(jax.jit(jax.grad(loss))(golden_model) for loss in (only_denoise, by_hand)))


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "p_decode, p_self_cond", [(0.2, 0.5), (0.9, 0.5), (0.5, 1.0), (0.0, 0.5), (1.0, 0.5)]
)
def test_roles_have_the_asked_shares_and_stay_in_their_slots(group, p_decode, p_self_cond):
    n = 40_000
    decode, self_cond = roles(jax.random.uniform(jax.random.key(0), (n,)), group, p_decode, p_self_cond)
    assert not jnp.any(decode & self_cond)
    assert_allclose(jnp.mean(decode), p_decode, atol=0.01)
    assert_allclose(jnp.mean(self_cond), (1 - p_decode) * p_self_cond, atol=0.01)
    where = make_slots(group, p_decode, p_self_cond)
    row = jnp.arange(n) % group
    assert not jnp.any(decode & (row >= where.decode))
    assert not jnp.any(self_cond & (row < group - where.self_cond))


def test_guidance_scales_span_their_range_and_favour_small_ones():
    w = guidance_scale(jax.random.uniform(jax.random.key(0), (20_000,)), 0.5, 5.0)
    assert w.min() >= 0.5 and w.max() <= 5.0
    assert_allclose(jnp.median(w), 1.5 * 4**0.5 - 1, rtol=0.02)  # half of the mass below w = 2
