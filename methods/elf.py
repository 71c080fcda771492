"""ELF as a method: draws of a training step, loss of a batch (Alg. 3 and 4), samples from noise (Alg. 5).

A run's randomness is a function of its seed, the step and the row's number, so it is the same on any mesh.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

import losses
import samplers
from config import Sampler, TrainConfig
from corpora.rows import Rows
from data import Conditions, Embedder, cast, compute_type
from elf import ELF, SIZES
from methods import Method
from methods.ablations import AdaLNZero, embed_learned, with_unit_table
from runtime.mesh import ALL, place_rows, platform, replicate

Sources = Conditions | None  # texts to be answered, if the data has any


def elf_method(config: TrainConfig, vocab: int, width: int, mesh: Mesh, unroll: int = 0) -> Method:
    """Make ELF for a vocabulary and a width of embeddings; on CPU, layers are unrolled by default: faster."""
    unroll = unroll or (SIZES[config.model]["depth"] if platform(mesh) == "cpu" else 1)
    make = partial(make_model, config, vocab, width, unroll=unroll)
    return Method(make, make_loss(config, compute_type(config, mesh)), partial(sample, config))


def make_model(config: TrainConfig, vocab: int, width: int, key: PRNGKeyArray, unroll: int = 1) -> ELF:
    """Make the network of a config before training."""
    sizes = SIZES[config.model] | dict(vocab=vocab, embedding=width, bottleneck=config.bottleneck)
    network = AdaLNZero if config.conditioning == "adaln-zero" else ELF
    model = network(**sizes, prediction=config.prediction, unroll=unroll, remat=config.remat, key=key)
    return with_unit_table(model) if config.embeddings == "learned" else model


# Training


def draw_step(
    config: TrainConfig, key: PRNGKeyArray, row: Int[Array, " N"], length: int, width: int, group: int
) -> tuple[losses.Draws, Bool[Array, " N"]]:
    """Draw all randomness of a step from its key and the rows' numbers; also the rows without condition."""

    def one(row):
        k = jax.random.split(jax.random.fold_in(key, row), 6)
        t = losses.TIMES[config.times](jax.random.normal(k[0]), config.t_mean, config.t_std)
        p = losses.logit_normal(jax.random.normal(k[1], (length,)), config.p_mean, config.p_std)
        w = losses.guidance_scale(jax.random.uniform(k[2]), config.w_min, config.w_max)
        eps = jax.random.normal(k[3], (length, width))
        return t, p, w, eps, jax.random.uniform(k[4]), jax.random.bernoulli(k[5], config.p_drop)

    t, p, w, eps, u, drop = jax.vmap(one)(row)
    roles = losses.roles(u, group, config.p_decode, config.p_self_cond)
    return losses.Draws(t, p, w, eps, *roles), drop


def slots_of(config: TrainConfig) -> losses.Slots:
    """Choose the slots of the rare roles in one part of a batch."""
    return losses.make_slots(config.batch // config.accumulate, config.p_decode, config.p_self_cond)


def noise_scales(config: TrainConfig) -> dict[str, float]:
    return dict(noise_scale=config.noise_scale, decode_noise_scale=config.decode_noise_scale)


def make_loss(config: TrainConfig, dtype) -> Callable:
    """Make the loss of a Method: rows -> x -> draws -> Alg. 3 and 4, with the frozen embedder."""
    slots = slots_of(config)

    def loss(model: ELF, embedder: Embedder, rows: Rows, row: Int[Array, " N"], key: PRNGKeyArray):
        draws, drop = draw_step(config, key, row, rows.s.shape[1], len(embedder.mean), slots.group)
        batch = embedder(rows, drop)
        if config.embeddings == "learned":
            batch = embed_learned(model, batch, draws.decode)
        per_token = losses.token_losses(cast(model, dtype), batch, draws, slots, **noise_scales(config))
        return losses.summed(per_token, batch, draws)

    return loss


# Sampling


class Start(NamedTuple):
    """Samples before their first step."""

    z0: samplers.State
    keys: Key[Array, " N"]
    given: samplers.Given | None
    ts: Float[Array, " T"]


def start(
    config: TrainConfig, model, conditions: Sources, number: np.ndarray, key: PRNGKeyArray, sampler: Sampler
) -> Start:
    """Draw the time grid and the noise of the numbered samples; condition each on the row of its number."""
    mesh = jax.sharding.get_mesh()
    if sampler.grid == "uniform":
        ts = samplers.uniform_grid(sampler.steps)
    else:
        grid_key = jax.random.fold_in(key, 0)
        ts = samplers.logit_normal_grid(grid_key, sampler.steps, config.t_mean, config.t_std)
    shape = (config.length, len(model.unembed.weight))
    eps, keys = draw_noise(key, place_rows(number, np.arange(len(number)), mesh), shape)
    z0, ts = config.noise_scale * eps, replicate(ts, mesh)
    if conditions is None:
        return Start(z0, keys, None, ts)
    rows = place_rows(conditions.rows, number % len(conditions.rows.s), mesh)
    batch = jax.jit(Embedder.__call__)(conditions.embedder, rows, jnp.zeros(len(number), bool))
    return Start(z0, keys, samplers.Given(batch.x, batch.prefix, sampler.cfg), ts)


@partial(jax.jit, static_argnames="shape")
def draw_noise(key: PRNGKeyArray, number: Int[Array, " N"], shape: tuple[int, int]):
    """Draw unit noise and a key for later noise from each sample's number: equal for any batch or mesh."""
    keys = jax.vmap(lambda i: jax.random.split(jax.random.fold_in(key, 1 + i)))(number)
    eps = jax.vmap(lambda k: jax.random.normal(k, shape))(keys[:, 0])
    return jax.lax.with_sharding_constraint((eps, keys[:, 1]), P(ALL))


def sample(
    config: TrainConfig, model, conditions: Sources, number: np.ndarray, key: PRNGKeyArray, sampler: Sampler
) -> Int[Array, "N L"]:
    """Sample ELF (Alg. 5): tokens of the numbered texts, as answers to their conditions if there are any."""
    z0, keys, given, ts = start(config, model, conditions, number, key, sampler)
    settings = dict(w=sampler.w, gamma=sampler.gamma, noise_scale=config.noise_scale)
    return samplers.sample(model, z0, ts, keys, given, **settings, released=sampler.form == "released")


def trajectory(
    config: TrainConfig, model, conditions: Sources, number, key: PRNGKeyArray, sampler: Sampler, frames: int
) -> tuple[list[float], Int[Array, "F N L"]]:
    """Decode the predictions at some times along the way, and the end: times and tokens."""
    first = start(config, model, conditions, number, key, sampler)
    shown = np.unique(np.linspace(0, sampler.steps - 1, frames).round().astype(int))
    released = sampler.form == "released"

    @jax.jit
    def follow(model, first):
        z0, keys, given, ts = first
        denoise = samplers.denoiser_for(model, sampler.w, given, released=released)
        settings = dict(noise_scale=config.noise_scale, released=released)
        z, path = samplers.flow(denoise, z0, ts, sampler.gamma, keys, **settings)
        predictions = jnp.concatenate([path[shown], z[None]])
        return jax.lax.map(lambda x: samplers.decode(model, x, sampler.w), predictions)

    return [*np.asarray(first.ts)[shown].tolist(), 1.0], follow(model, first)
