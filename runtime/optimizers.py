"""Muon and AdamW, and the learning rate over time."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

Matrices = Float[Array, "*n m k"]


def warmed_up(peak: float, warmup: int, steps: int, then: Literal["constant", "cosine"]) -> optax.Schedule:
    """Rise linearly from zero to the peak, then stay or fall along a cosine to zero."""
    rise = optax.linear_schedule(0.0, peak, max(warmup, 1))
    if then == "constant":
        rest = optax.constant_schedule(peak)
    else:
        rest = optax.cosine_decay_schedule(peak, steps - warmup)
    return optax.join_schedules([rise, rest], [warmup])


def make_optimizer(
    name: Literal["muon", "adamw"], rate: optax.Schedule, clip: float = 1.0, *, unroll: bool = False
) -> optax.GradientTransformation:
    """Make Muon for matrices and Adam for the rest, or AdamW for all; clip gradients by their global norm."""
    if name == "muon":
        muon = optax.chain(orthogonal_momentum(unroll), optax.scale_by_learning_rate(rate))
        update = optax.partition({"muon": muon, "adam": optax.nadam(rate)}, muon_or_adam)
    else:
        update = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.0)
    return optax.chain(optax.clip_by_global_norm(clip), update)


def muon_or_adam(model: PyTree) -> PyTree[str]:
    """Label the leaves: Muon takes every matrix, layer by layer where stacked; Adam takes the rest."""

    def label(path, leaf):
        names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        return "muon" if names[-1:] == ["weight"] and leaf.ndim == 2 + ("blocks" in names) else "adam"

    return jax.tree_util.tree_map_with_path(label, model)


class Momentum(NamedTuple):
    count: Int[Array, ""]
    mean: PyTree


def orthogonal_momentum(unroll: bool = False, beta: float = 0.95) -> optax.GradientTransformation:
    """Muon: Nesterov momentum, made orthogonal and scaled by √(out / in) where that is above 1.

    Equal to optax.contrib.muon, but devices of a mesh share the work: see `orthogonal`.
    """

    def init(params):
        return Momentum(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def scaled(m):
        return max(1.0, m.shape[-1] / m.shape[-2]) ** 0.5 * orthogonal(m, unroll)

    def update(grads, state, params=None):
        count = state.count + 1
        mean = optax.tree.update_moment(grads, state.mean, beta, 1)
        unbiased_mean = optax.tree.bias_correction(mean, beta, count + 1)
        unbiased_grads = optax.tree.bias_correction(grads, beta, count)
        ahead = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, unbiased_mean, unbiased_grads)
        return jax.tree.map(scaled, ahead), Momentum(count, mean)

    return optax.GradientTransformation(init, update)


A, B, C = 3.4445, -4.7750, 2.0315  # of Newton-Schulz
WIDE = 16  # ratio of width to height from which `orthogonal_wide` is faster


def orthogonal(x: Matrices, unroll: bool = False) -> Matrices:
    """Bring all singular values of a matrix near 1 by five rounds of Newton-Schulz.

    A round is x ← a x + b G x + c G² x with G = x xᵀ. On a mesh, the columns are sharded (padded by zeros,
    which change nothing), and only G is communicated. Multiplied out from the right, G² is not needed: it
    would be the one product that devices do not share.
    """
    *_, m, k = x.shape
    if m > k:
        return orthogonal(x.mT, unroll).mT

    def body(_, x):
        gram = x @ x.mT
        once = gram @ x
        return A * x + B * once + C * (gram @ once)

    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -k % mesh.size)])
        x = jax.lax.with_sharding_constraint(x, P(*[None] * (x.ndim - 1), mesh.axis_names))
    x = orthogonal_wide(x) if k >= WIDE * m else jax.lax.fori_loop(0, 5, body, x, unroll=unroll)
    return x[..., :k]


def orthogonal_wide(x: Matrices) -> Matrices:
    """Take the five rounds for the matrix of a vocabulary: eleven of fifteen products are small and square.

    A round multiplies x by a polynomial of G, and so is the next G. Float32 allows that for three rounds, not
    for five.
    """
    for rounds in (2, 3):
        gram, product = x @ x.mT, jnp.eye(x.shape[-2])
        for _ in range(rounds):
            factor = A * jnp.eye(x.shape[-2]) + B * gram + C * (gram @ gram)
            product, gram = factor @ product, factor @ gram @ factor
        x = product @ x
    return x
