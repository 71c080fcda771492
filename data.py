"""Rows of tokens to batches, and batches to clean embeddings x; the encoders that make them."""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from tqdm import tqdm

import scratch
from corpora import EMBEDDED, Corpus, Layout, Rows, digest, is_scratch, load_corpus, load_tokenizer, tokenizer_place
from errors import Refused
from hub import fetch, fetch_network
from losses import Batch
from pretrained import T5_CONFIGS, T5Encoder, configuration, load_t5, t5_from_config, t5_like


def batch_indices(rows: int, size: int, seed: int, step: int) -> np.ndarray:
    """Which rows make the batch of a step, a function of (seed, step) alone: every epoch is one shuffled pass."""
    epoch, k = divmod(step, rows // size)
    return shuffled(rows, seed, epoch)[k * size : (k + 1) * size]


def validation_batches(rows: int, size: int, enough: int = 256) -> Iterator[np.ndarray]:
    """Row numbers of whole batches, `enough` rows or a few more; rows come again where there are too few."""
    for start in range(0, min(rows, enough), size):
        yield np.arange(start, start + size) % rows


def prefetched(load: Callable[[int], Any], first: int, end: int, ahead: int = 2) -> Iterator:
    """load(first), load(first + 1), … up to `end`, loaded in the background before they are asked for."""
    with ThreadPoolExecutor(1) as pool:
        waiting = deque(pool.submit(load, i) for i in range(first, min(first + ahead, end)))
        for i in range(first + ahead, end + ahead):
            if i < end:
                waiting.append(pool.submit(load, i))
            yield waiting.popleft().result()


@lru_cache(maxsize=2)
def shuffled(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)


def encoder_mask(length: Int[Array, " N"], prefix: Int[Array, " N"], drop: Bool[Array, " N"], width: int) -> Bool[Array, "N L L"]:
    """Who sees whom in the encoder: the prefix itself only, all others every valid token; padding is seen by none.

    In rows whose condition is dropped, the text does not see the prefix either.
    """
    position = jnp.arange(width)
    valid, in_prefix = position < length[:, None], position < prefix[:, None]
    seen = valid & ~(in_prefix & drop[:, None])
    return jnp.where(in_prefix[:, :, None], in_prefix[:, None, :], seen[:, None, :])


class Embedder(eqx.Module):
    """A frozen encoder (or table) and the statistics that bring its output to mean 0 and variance 1."""

    encoder: eqx.Module
    mean: Float[Array, " E"]
    std: Float[Array, " E"]

    def __call__(self, rows: Rows, drop: Bool[Array, " N"]) -> Batch:
        """Rows with their embeddings; a dropped condition is zeros. Padding counts: EOS has to be learned."""
        sees = encoder_mask(rows.length, rows.prefix, drop, rows.s.shape[1])
        x = (self.encoder(rows.s, sees).astype(jnp.float32) - self.mean) / self.std
        prefix = jnp.arange(rows.s.shape[1]) < rows.prefix[:, None]
        x = jnp.where((prefix & drop[:, None])[..., None], 0.0, x)
        return Batch(rows.s, x, prefix, ~prefix)


def compute_in(embedder: Embedder, dtype) -> Embedder:
    """The same with the encoder in another type; the statistics stay float32."""
    return eqx.tree_at(lambda e: e.encoder, embedder, jax.tree.map(lambda a: a.astype(dtype), embedder.encoder))


def make_embedder(encoder: eqx.Module, rows: Rows, *, by_channel: bool, tokens: int = 2**16, chunk: int = 64) -> Embedder:
    """Statistics over tokens from all over the rows, padding left out: of each channel, or the same for all of them.

    The paper has the first for encoders from scratch. For T5-small, released code has the second: a mean of 0 and a std of 0.2.
    """
    width = encoder.embed.shape[1]
    raw = Embedder(encoder, jnp.zeros(width), jnp.ones(width))
    sums, count = np.zeros((2, width)), 0

    @jax.jit
    def moments(raw, part):
        valid = (jnp.arange(part.s.shape[1]) < part.length[:, None])[..., None]
        x = jnp.where(valid, raw(part, jnp.zeros(len(part.s), bool)).x, 0.0)
        return jnp.stack([x.sum((0, 1)), (x**2).sum((0, 1))])

    chosen = np.linspace(0, len(rows.s) - 1, min(-(-tokens // rows.s.shape[1]), len(rows.s))).astype(int)
    for some in tqdm(np.split(chosen, range(chunk, len(chosen), chunk)), desc="statistics", unit="batch", leave=False):
        part = Rows(*(jnp.asarray(a[some], jnp.int32) for a in rows))
        sums += np.asarray(moments(raw, part), np.float64)
        count += int(part.length.sum())
    sums = sums if by_channel else np.broadcast_to(sums.mean(1, keepdims=True), sums.shape)
    mean = sums[0] / count
    std = np.sqrt(np.maximum(sums[1] / count - mean**2, 1e-12))
    return Embedder(encoder, jnp.asarray(mean, jnp.float32), jnp.asarray(std, jnp.float32))


EMBEDDING = "embedding.json"  # in the directory of a run


def fingerprint(network: eqx.Module) -> str:
    """What tells the weights of a network from others."""
    return digest([hashlib.sha256(np.ascontiguousarray(leaf)).hexdigest() for leaf in jax.tree.leaves(network)])


def describe(embedder: Embedder, corpus: Corpus) -> str:
    """What a run keeps of its embeddings: the statistics, and what tells its encoder and rows from others."""
    kept = dict(mean=embedder.mean.tolist(), std=embedder.std.tolist())
    return json.dumps(kept | dict(encoder=fingerprint(embedder.encoder), rows=corpus.fingerprint)) + "\n"


def read_embedder(encoder: eqx.Module, directory: Path, corpus: Corpus | None = None) -> Embedder:
    """The embedder of a run. Another encoder than it was trained with is refused, and so are other rows if they are given."""
    kept = json.loads((directory / EMBEDDING).read_text())
    if kept["encoder"] != fingerprint(encoder):
        raise Refused(f"{directory} was trained with another encoder than this one: give it the same again")
    if corpus and kept["rows"] != corpus.fingerprint:
        raise Refused(f"{directory} was trained on other rows than --data now gives: choose another --name, or restore the data")
    return Embedder(encoder, jnp.asarray(kept["mean"]), jnp.asarray(kept["std"]))


def shapes_for(encoder: str, corpus: str, tokenizer: str, layout: Layout, cache: Path, unroll: int = 1) -> tuple[int, Embedder]:
    """Size of the vocabulary, and the embedder as shapes alone: what can be known without reading texts or weights."""
    if corpus in EMBEDDED:
        vocab = len(load_corpus(corpus, tokenizer, layout, cache).tokenizer)
    else:
        vocab = 32_100 if tokenizer in T5_CONFIGS else len(load_tokenizer(tokenizer_place(tokenizer)))
    if is_scratch(encoder):
        config = scratch.recipe_of(encoder, vocab).shape
    elif encoder in T5_CONFIGS:
        config = T5_CONFIGS[encoder]
    else:
        with configuration(fetch(encoder, "--encoder", ["config.json"])) as config:
            t5_like(config, Path(encoder))

    def make():
        network = t5_from_config(config, jax.random.key(0), unroll)
        return Embedder(network, jnp.zeros(config["d_model"]), jnp.ones(config["d_model"]))

    return vocab, jax.eval_shape(make)


def load_encoder(name: str, corpus: Corpus) -> T5Encoder:
    """A Hugging Face T5: a directory, or a name on the hub."""
    encoder = load_t5(fetch_network(name, "--encoder"))
    if len(encoder.embed) < len(corpus.tokenizer):
        raise Refused(f"--encoder {name} knows {len(encoder.embed)} tokens, the data's tokenizer {len(corpus.tokenizer)}")
    return encoder
