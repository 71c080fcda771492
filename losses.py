"""The training objectives of ELF, in the paper's letters.

    s      tokens                                x      their clean embeddings, the data (t = 1)
    eps    unit Gaussian noise                   z      noisy state, t x + (1 - t) (noise scale) eps
    t      time of a sequence, 0 noise, 1 data   p      corruption level of a token in the decode branch
    w      self-conditioning guidance scale      v      velocity, dz/dt
    x_prev the network's earlier prediction (self-conditioning), or zeros; _no_sc without it
    _hat   a prediction

All functions are pure. Random draws are arguments (`Draws`), already batched: N rows of L tokens.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, Shaped

MIN_REMAINING = 0.05  # Released code clips 1 - t here, in prediction and target; the paper does not say.

State = Float[Array, "N L E"]


class Batch(NamedTuple):
    s: Int[Array, "N L"]
    x: State
    prefix: Bool[Array, "N L"]
    """Positions of the condition: clean, never predicted. All False for unconditional text."""
    counts: Bool[Array, "N L"]
    """Positions that count in the loss."""


class Draws(NamedTuple):
    t: Float[Array, " N"]
    p: Float[Array, "N L"]
    w: Float[Array, " N"]
    eps: State
    decode: Bool[Array, " N"]
    """Rows that train the decoder (Alg. 4); the others train the denoiser (Alg. 3)."""
    self_cond: Bool[Array, " N"]
    """Denoiser rows that see their own first prediction."""


class Slots(NamedTuple):
    """Places of the rare roles: in every `group` of rows, the first `decode` and the last `self_cond`."""

    group: int
    decode: int
    self_cond: int


def velocity(x: State, z: State, t: Float[Array, " N"], clip: float = MIN_REMAINING) -> State:
    """The velocity at z that leads to x at t = 1."""
    return (x - z) / jnp.maximum(1 - t, clip)[:, None, None]


def corrupt(batch: Batch, draws: Draws, noise_scale: float, decode_noise_scale: float) -> State:
    """Noise by time in denoiser rows, by token in decoder rows; the condition stays clean in both."""
    level = jnp.where(draws.decode[:, None], draws.p, draws.t[:, None])[..., None]
    scale = jnp.where(draws.decode, decode_noise_scale, noise_scale)[:, None, None]
    z = level * batch.x + (1 - level) * scale * draws.eps
    return jnp.where(batch.prefix[..., None], batch.x, z)


def guided_target(v: State, v_sc: State, v_no_sc: State, w: Float[Array, " N"]) -> State:
    """The target that makes one pass model the guided velocity (Eq. 5)."""
    return v + (1 - 1 / w)[:, None, None] * (v_sc - v_no_sc)


def denoise_loss(v_hat: State, v_target: State) -> Float[Array, "N L"]:
    """Velocity-space error of an x-prediction network (Eq. 1), per token."""
    return jnp.mean((v_hat - v_target) ** 2, axis=-1)


def distill_target(z: State, z_r: State, t: Float[Array, " N"], r: Float[Array, " N"]) -> State:
    """The x that takes z at t to z_r at r in one step (Eq. 3)."""
    return jax.lax.stop_gradient(z + ((1 - t) / (r - t))[:, None, None] * (z_r - z))


def distill_loss(x_hat: State, x_target: State) -> Float[Array, "N L"]:
    """Error of the prediction itself (Eq. 4), per token."""
    return jnp.mean((x_hat - x_target) ** 2, axis=-1)


def decode_loss(logits: Float[Array, "N L V"], s: Int[Array, "N L"]) -> Float[Array, "N L"]:
    """Cross-entropy of the tokens (Eq. 2), per token."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, s)


class Inputs(NamedTuple):
    """Inputs of the network for a batch of both branches."""

    z: State
    x_prev: State
    t: Float[Array, " N"]
    x_no_sc: State
    """First predictions of self-conditioned rows."""


def make_inputs(
    model, batch: Batch, draws: Draws, slots: Slots, noise_scale: float, decode_noise_scale: float
) -> Inputs:
    """Corrupt the embeddings; predict self-conditioned rows once without self-conditioning."""
    last = slice(slots.group - slots.self_cond, slots.group)
    take, put = partial(take_rows, slots.group), partial(put_rows, len(draws.t), slots.group)

    z = corrupt(batch, draws, noise_scale, decode_noise_scale)
    t = jnp.where(draws.decode, 1.0, draws.t)
    given = batch.prefix & ~draws.decode[:, None]
    no_sc = jnp.where(given[..., None], batch.x, 0.0)
    frozen, inputs = jax.lax.stop_gradient((model, [take(a, last) for a in (z, no_sc, t, draws.w)]))
    x_no_sc = put(frozen.denoise(*inputs), last)
    x_prev = jnp.where(draws.self_cond[:, None, None] & ~batch.prefix[..., None], x_no_sc, no_sc)
    return Inputs(z, x_prev, t, x_no_sc)


def with_decoder(
    model, h: Float[Array, "N L D"], batch: Batch, draws: Draws, slots: Slots, denoised: Float[Array, "N L"]
) -> Float[Array, "N L"]:
    """Cross-entropy (Alg. 4) in decoder rows, the given loss in denoiser rows."""
    first = slice(0, slots.decode)
    ce = decode_loss(model.logits(take_rows(slots.group, h, first)), take_rows(slots.group, batch.s, first))
    return jnp.where(draws.decode[:, None], put_rows(len(draws.t), slots.group, ce, first), denoised)


def token_losses(
    model, batch: Batch, draws: Draws, slots: Slots, *, noise_scale: float, decode_noise_scale: float
) -> Float[Array, "N L"]:
    """Loss of every token: Alg. 3 in denoiser rows, Alg. 4 in decoder rows of one batch.

    It costs about 3.5 forward passes: one with gradients over all rows, and before it one without on
    self-conditioned rows. On these, the gradient pass is also the conditional term of the guided target.
    """
    z, x_prev, t, x_no_sc = make_inputs(model, batch, draws, slots, noise_scale, decode_noise_scale)
    h = model.trunk(z, x_prev, t, draws.w, draws.decode.astype(jnp.float32))
    v_hat, v = velocity(model.predict(h, z, t), z, t), velocity(batch.x, z, t)
    v_guided = guided_target(v, v_hat, velocity(x_no_sc, z, t), draws.w)
    v_target = jax.lax.stop_gradient(jnp.where(draws.self_cond[:, None, None], v_guided, v))
    return with_decoder(model, h, batch, draws, slots, denoise_loss(v_hat, v_target))


def summed(
    losses: Float[Array, "N L"], batch: Batch, draws: Draws
) -> tuple[Float[Array, ""], dict[str, tuple[Float[Array, ""], Int[Array, ""]]]]:
    """Summed loss, and sum and number of the counted tokens by branch: denoiser (mse) and decoder (ce).

    Every token weighs the same: 0.8 MSE + 0.2 CE in expectation.
    """
    branches = dict(mse=batch.counts & ~draws.decode[:, None], ce=batch.counts & draws.decode[:, None])
    sums = {name: (jnp.sum(losses * branch), jnp.sum(branch)) for name, branch in branches.items()}
    return sums["mse"][0] + sums["ce"][0], sums


# Distributions of the draws


def logit_normal(normal: Float[Array, "*s"], mean: float, std: float) -> Float[Array, "*s"]:
    """Standard normal draws to times in (0, 1)."""
    return jax.nn.sigmoid(mean + std * normal)


def uniform_time(normal: Float[Array, "*s"], mean: float, std: float) -> Float[Array, "*s"]:
    """Standard normal draws to uniform times."""
    return jax.scipy.stats.norm.cdf(normal)


TIMES = {"logit-normal": logit_normal, "uniform": uniform_time}


def guidance_scale(u: Float[Array, "*s"], low: float, high: float) -> Float[Array, "*s"]:
    """Uniform draws to w in [low, high], log-uniform in 1 + w: the released "power distribution"."""
    return (1 + low) * ((1 + high) / (1 + low)) ** u - 1


# Slots: static places for the two rare roles, so that no more rows than needed pay for them


def make_slots(n: int, p_decode: float, p_self_cond: float) -> Slots:
    """The fewest slots that hold both roles, in groups of up to 8 rows so that they shard over devices."""
    group = math.gcd(n, 8)
    return Slots(group, math.ceil(group * p_decode), math.ceil(group * (1 - p_decode) * p_self_cond))


def roles(
    u: Float[Array, " N"], group: int, p_decode: float, p_self_cond: float
) -> tuple[Bool[Array, " N"], Bool[Array, " N"]]:
    """Choose the rows that decode and those that are self-conditioned.

    Their shares are p_decode and (1 - p_decode) p_self_cond in expectation. Rows of a batch are exchangeable,
    so the roles need not be independent coins. Each fills its group from one end: whole rows first, then one
    more row with the probability of the remainder. Static slots then bound the work. One uniform draw serves
    both roles, as their probabilities in a row never exceed 1 together.
    """
    row = jnp.arange(len(u)) % group
    decode = jnp.clip(group * p_decode - row, 0, 1)
    self_cond = jnp.clip(group * (1 - p_decode) * p_self_cond - (group - 1 - row), 0, 1)
    return u < decode, u >= 1 - self_cond


def take_rows(group: int, a: Shaped[Array, "N ..."], rows: slice) -> Shaped[Array, "M ..."]:
    """Take a slice of rows out of every group."""
    return rearrange(rearrange(a, "(n g) ... -> n g ...", g=group)[:, rows], "n g ... -> (n g) ...")


def put_rows(n: int, group: int, a: Shaped[Array, "M ..."], rows: slice) -> Shaped[Array, "N ..."]:
    """Put rows back where `take_rows` took them, with zeros in all others."""
    blank = jnp.zeros((n // group, group, *a.shape[1:]), a.dtype)
    a = a.reshape(n // group, rows.stop - rows.start, *a.shape[1:])
    return rearrange(blank.at[:, rows].set(a), "n g ... -> (n g) ...")
