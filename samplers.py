"""Sampling, from noise to tokens: time grids, ODE and SDE steps, one scan, one decode.

    ts = logit_normal_grid(key, steps=64)
    s = sample(model, z0, ts, keys, w=3.0, gamma=1.5)   # z0: noise, already of the scale it had in training

Guidance scales, γ, grids and keys are traced: sweeping them does not recompile. γ = 0 is the ODE. Every row
has its own key, so a sample does not depend on the others in its batch.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from losses import logit_normal, velocity

State = Float[Array, "N L E"]
Denoiser = Callable[[State, State, Float[Array, ""]], State]  # (z, x_prev, t) -> x_hat
Scalar = Float[Array, ""] | float


def uniform_grid(steps: int) -> Float[Array, " T"]:
    return jnp.linspace(0.0, 1.0, steps + 1)


def logit_normal_grid(key: PRNGKeyArray, steps: int, mean=-1.5, std=0.8) -> Float[Array, " T"]:
    """Times drawn like the training times and sorted: small steps in the noise, large ones near the data."""
    inner = jnp.sort(logit_normal(jax.random.normal(key, (steps - 1,)), mean, std))
    return jnp.concatenate([jnp.zeros(1), inner, jnp.ones(1)])


def denoiser(model, w: Scalar) -> Denoiser:
    """Make the network a function of the state alone (Alg. 5)."""

    def denoise(z, x_prev, t):
        n = len(z)
        return model.denoise(z, x_prev, jnp.full(n, t), jnp.full(n, w))

    return denoise


def prefix_denoiser(
    model, w: Scalar, x: State, prefix: Bool[Array, "N L"], scale: Scalar, *, released: bool = False
) -> Denoiser:
    """Guide by a clean prefix x with strength `scale`; both passes run as one batch.

    The unconditional pass sees neither prefix nor self-conditioning. Released code keeps the latter.
    """
    denoise, given = denoiser(model, w), prefix[..., None]

    def guided(z, x_prev, t):
        z_cond, prev_cond = jnp.where(given, x, z), jnp.where(given, x, x_prev)
        z_null, prev_null = jnp.where(given, 0.0, z), jnp.where(given | (not released), 0.0, x_prev)
        pairs = [z_cond, z_null], [prev_cond, prev_null]
        z, x_prev = (rearrange(pair, "two N L E -> (N two) L E") for pair in pairs)
        x_cond, x_null = rearrange(denoise(z, x_prev, t), "(N two) L E -> two N L E", two=2)
        return jnp.where(given, x, x_null + scale * (x_cond - x_null))

    return guided


def step(
    denoise: Denoiser,
    z: State,
    x_prev: State,
    t: Scalar,
    t_next: Scalar,
    gamma: Scalar,
    eps: State,
    *,
    released=False,
) -> tuple[State, State]:
    """Take one step of Alg. 6: an SDE step, or with γ = 0 an ODE step. `eps` has the scale of z at t = 0."""
    alpha = jnp.clip(1 - gamma * (t_next - t), 0.0, 1.0)
    z_back, t_back = alpha * z + (1 - alpha) * eps, alpha * t
    x_hat = denoise(z_back, x_prev, t_back)
    if released:  # Released code continues from the re-noised state; the paper updates the original.
        z, t = z_back, t_back
    v = velocity(x_hat, z, jnp.full(len(z), t), clip=0.0)
    return z + (t_next - t) * v, x_hat


def flow(
    denoise: Denoiser,
    z0: State,
    ts: Float[Array, " T"],
    gamma: Scalar,
    keys: Key[Array, " N"],
    *,
    noise_scale: Scalar = 2.0,
    released: bool = False,
) -> tuple[State, Float[Array, "S N L E"]]:
    """Integrate from z0 to z at t = 1, last by an ODE step; also return the predictions x_hat on the way."""

    def noise(key, i):
        return noise_scale * jax.random.normal(jax.random.fold_in(key, i), z0.shape[1:])

    def body(carry, inputs):
        z, x_prev = carry
        i, t, t_next, gamma = inputs
        eps = jax.vmap(noise, in_axes=(0, None))(keys, i)
        z, x_hat = step(denoise, z, x_prev, t, t_next, gamma, eps, released=released)
        return (z, x_hat), x_hat

    steps = len(ts) - 1
    gammas = jnp.full(steps, gamma).at[-1].set(0.0)
    carry = (z0, jnp.zeros_like(z0))
    (z, _), path = jax.lax.scan(body, carry, (jnp.arange(steps), ts[:-1], ts[1:], gammas))
    return z, path


def decode(model, z: State, w: Scalar) -> Int[Array, "N L"]:
    """Decode by the same network at t = 1, in decode mode: the most likely tokens."""
    return jnp.argmax(model.decode(z, jnp.full(len(z), w)), axis=-1)


class Given(NamedTuple):
    """A condition: clean embeddings x at the positions of the prefix, and its guidance scale."""

    x: State
    prefix: Bool[Array, "N L"]
    scale: Scalar


def denoiser_for(model, w: Scalar, given: Given | None, *, released: bool = False) -> Denoiser:
    return denoiser(model, w) if given is None else prefix_denoiser(model, w, *given, released=released)


@partial(jax.jit, static_argnames="released")
def sample(
    model,
    z0: State,
    ts: Float[Array, " T"],
    keys: Key[Array, " N"],
    given: Given | None = None,
    *,
    w: Scalar,
    gamma: Scalar,
    noise_scale: Scalar = 2.0,
    released: bool = False,
) -> Int[Array, "N L"]:
    """Turn noise z0 into tokens (Alg. 5), given a condition if there is one."""
    denoise = denoiser_for(model, w, given, released=released)
    z, _ = flow(denoise, z0, ts, gamma, keys, noise_scale=noise_scale, released=released)
    return decode(model, z, w)
