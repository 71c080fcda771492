"""Texts sampled from a trained network."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray
from tqdm import tqdm

import corpora
import data
import samplers
from elf import ELF
from mesh import by_row, fetch, is_chief, place_rows, replicate
from settings import TrainConfig


class Asked(NamedTuple):
    """Rows whose sources are to be answered; what follows them there is not looked at."""

    embedder: data.Embedder
    rows: corpora.Rows


class Frame(NamedTuple):
    """The text that a sample is at a time of its trajectory."""

    t: float
    text: str


Form = Literal["paper", "released"]  # whose SDE step, and whose unguided pass where a condition guides


@dataclass(frozen=True)
class Sampler:
    """How texts are sampled; the meaning of each is told in settings.py and eval.py."""

    steps: int
    w: float
    cfg: float
    gamma: float
    grid: Literal["logit-normal", "uniform"] = "logit-normal"
    form: Form = "paper"


def sampler_of(config: TrainConfig) -> Sampler:
    return Sampler(config.sample_steps, config.w, config.cfg, config.gamma, config.grid)


def sampling_key(seed: int) -> PRNGKeyArray:
    """Of all samples of a seed; apart from the keys of training."""
    return jax.random.fold_in(jax.random.key(seed), 3)


def grid_of(config: TrainConfig, sampler: Sampler, key: PRNGKeyArray) -> Float[Array, " T"]:
    """The times of a sampler's steps, from its key; noise comes from the same key, folded with other numbers."""
    if sampler.grid == "uniform":
        return samplers.uniform_grid(sampler.steps)
    return samplers.logit_normal_grid(jax.random.fold_in(key, 0), sampler.steps, config.t_mean, config.t_std)


@partial(jax.jit, static_argnames=("shape", "mesh"))
def noise_for(key: PRNGKeyArray, number: Int[Array, " N"], shape: tuple[int, int], mesh: Mesh):
    """Unit noise to start each sample from and a key for noise on its way, by its number: the same whatever batch and mesh."""
    keys = jax.vmap(lambda i: jax.random.split(jax.random.fold_in(key, 1 + i)))(number)
    eps = jax.vmap(lambda k: jax.random.normal(k, shape))(keys[:, 0])
    return jax.lax.with_sharding_constraint((eps, keys[:, 1]), by_row(mesh))


class Begun(NamedTuple):
    """Some samples before their first step."""

    z0: samplers.State
    keys: Key[Array, " N"]
    given: samplers.Given | None
    prefix: np.ndarray | None
    """Tokens of the condition in each, where there is one."""


def begin(
    config: TrainConfig, sampler: Sampler, model: ELF, key: PRNGKeyArray, mesh: Mesh, asked: Asked | None, number: np.ndarray
) -> Begun:
    """The samples of these numbers; with sources, answers to those of the same numbers."""
    eps, keys = noise_for(key, place_rows(number, np.arange(len(number)), mesh), (config.length, len(model.unembed.weight)), mesh)
    if not asked:
        return Begun(config.noise_scale * eps, keys, None, None)
    chosen = number % len(asked.rows.s)
    rows, none = place_rows(asked.rows, chosen, mesh), jnp.zeros(len(number), bool)
    batch = jax.jit(data.Embedder.__call__)(asked.embedder, rows, none)
    given = samplers.Given(batch.x, batch.prefix, sampler.cfg)
    return Begun(config.noise_scale * eps, keys, given, asked.rows.prefix[chosen])


def sample_texts(
    config: TrainConfig,
    sampler: Sampler,
    model: ELF,
    tokenizer,
    n: int,
    key: PRNGKeyArray,
    mesh: Mesh,
    asked: Asked | None = None,
) -> list[str]:
    """n texts from noise, 16 at a time on each device; the answers to the first n sources, where there are any."""
    settings = dict(w=sampler.w, gamma=sampler.gamma, noise_scale=config.noise_scale, released=sampler.form == "released")
    size = min(16, -(-n // mesh.size)) * mesh.size
    model, ts = replicate((model, grid_of(config, sampler, key)), mesh)
    texts = []
    for first in tqdm(range(0, n, size), desc="sampling", unit="batch", leave=False, disable=n <= size or not is_chief()):
        begun = begin(config, sampler, model, key, mesh, asked, np.arange(first, first + size))
        tokens = samplers.sample(model, begun.z0, ts, begun.keys, begun.given, **settings)
        texts += corpora.texts_of(fetch(tokens), tokenizer, begun.prefix)
    return texts[:n]


def trajectories(
    config: TrainConfig,
    sampler: Sampler,
    model: ELF,
    tokenizer,
    n: int,
    key: PRNGKeyArray,
    mesh: Mesh,
    asked: Asked | None,
    frames: int,
) -> list[list[Frame]]:
    """What n samples would be if the network had to decide at some of the times on their way: its prediction, decoded."""
    model, ts = replicate((model, grid_of(config, sampler, key)), mesh)
    begun = begin(config, sampler, model, key, mesh, asked, np.arange(-(-n // mesh.size) * mesh.size))
    shown = np.unique(np.linspace(0, sampler.steps - 1, frames).round().astype(int))

    @jax.jit
    def follow(model, ts, begun):
        denoise = samplers.denoiser_for(model, sampler.w, begun.given, released=sampler.form == "released")
        z, path = samplers.flow(
            denoise, begun.z0, ts, sampler.gamma, begun.keys, noise_scale=config.noise_scale, released=sampler.form == "released"
        )
        states = jnp.concatenate([path[shown], z[None]])
        return jax.lax.map(lambda x: samplers.decode(model, x, sampler.w), states)

    tokens, times = fetch(follow(model, ts, begun._replace(prefix=None))), [*np.asarray(ts)[shown].tolist(), 1.0]
    texts = [corpora.texts_of(at_t, tokenizer, begun.prefix)[:n] for at_t in tokens]
    return [[Frame(t, each[i]) for t, each in zip(times, texts, strict=True)] for i in range(n)]


def as_records(corpus: corpora.Corpus | None, texts: list[str]) -> list[dict[str, str]]:
    """Samples to be written, with what they answer, if anything."""
    if corpus is None or not corpus.has_sources:
        return [dict(text=text) for text in texts]
    truth = corpus.held_out[: len(texts)]
    return [dict(text=text, source=e.source, reference=e.text) for e, text in zip(truth, texts, strict=True)]
