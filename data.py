"""Rows of tokens to batches, and batches to clean embeddings x; the frozen encoder of a run."""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int
from tqdm import tqdm

import corpora.rows
from config import TrainConfig
from corpora.rows import Corpus, Layout, Rows, Split, is_scratch
from encoders import scratch
from encoders.t5 import T5_CONFIGS, T5Encoder, load_t5, save_t5, t5_from_config, t5_like
from encoders.table import Table, unit
from encoders.weights import configuration, download_network
from losses import Batch
from runtime.errors import UserError
from runtime.files import download, hash_of, write_file
from runtime.mesh import platform

# Rows and batches


def corpus_args(config: TrainConfig) -> tuple[str, str, Layout, Path]:
    """Arguments of `rows.load_corpus` for a config."""
    layout = Layout(config.length, config.source_length, config.pack)
    return config.data_dir or config.data, config.tokenizer or config.encoder, layout, config.cache


def load_corpus(config: TrainConfig, split: Split = "validation") -> Corpus:
    return corpora.rows.load_corpus(*corpus_args(config), split)


def batch_indices(n: int, size: int, seed: int, step: int) -> np.ndarray:
    """Row numbers of a step's batch, by (seed, step): every epoch is one shuffled pass over n rows."""
    epoch, k = divmod(step, n // size)
    return shuffled(n, seed, epoch)[k * size : (k + 1) * size]


@lru_cache(maxsize=2)
def shuffled(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)


def validation_batches(n: int, size: int, enough: int = 256) -> Iterator[np.ndarray]:
    """Row numbers of whole batches, `enough` rows or a few more; rows repeat where there are too few."""
    for start in range(0, min(n, enough), size):
        yield np.arange(start, start + size) % n


def prefetched(load: Callable[[int], Any], first: int, end: int, ahead: int = 2) -> Iterator:
    """Yield load(first), …, load(end - 1), each loaded in the background before it is needed."""
    with ThreadPoolExecutor(1) as pool:
        waiting = deque(pool.submit(load, i) for i in range(first, min(first + ahead, end)))
        for i in range(first + ahead, end + ahead):
            if i < end:
                waiting.append(pool.submit(load, i))
            yield waiting.popleft().result()


# Clean embeddings


def encoder_mask(
    length: Int[Array, " N"], prefix: Int[Array, " N"], drop: Bool[Array, " N"], width: int
) -> Bool[Array, "N L L"]:
    """Attention mask of the encoder: the prefix sees itself, and the text sees both; padding is not seen.

    In rows that drop their condition, the text sees only itself.
    """
    position = jnp.arange(width)
    valid, in_prefix = position < length[:, None], position < prefix[:, None]
    seen = valid & ~(in_prefix & drop[:, None])
    return jnp.where(in_prefix[:, :, None], in_prefix[:, None, :], seen[:, None, :])


class Embedder(eqx.Module):
    """A frozen encoder (or table) and the statistics that normalise its output to mean 0 and variance 1."""

    encoder: eqx.Module
    mean: Float[Array, " E"]
    std: Float[Array, " E"]

    def __call__(self, rows: Rows, drop: Bool[Array, " N"]) -> Batch:
        """Embed rows; a dropped condition is zeros. Padding counts in the loss, as EOS has to be learned."""
        sees = encoder_mask(rows.length, rows.prefix, drop, rows.s.shape[1])
        x = (self.encoder(rows.s, sees).astype(jnp.float32) - self.mean) / self.std
        prefix = jnp.arange(rows.s.shape[1]) < rows.prefix[:, None]
        x = jnp.where((prefix & drop[:, None])[..., None], 0.0, x)
        return Batch(rows.s, x, prefix, ~prefix)


class Conditions(NamedTuple):
    """Held-out rows with sources to be answered; the text after a source is not looked at."""

    embedder: Embedder
    rows: Rows


def cast(tree, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def compute_type(config: TrainConfig, mesh: Mesh) -> str:
    automatic = "float32" if platform(mesh) == "cpu" else "bfloat16"
    return automatic if config.precision == "auto" else config.precision


def cast_encoder(embedder: Embedder, dtype) -> Embedder:
    """Cast the encoder to the compute type; the statistics stay float32."""
    return eqx.tree_at(lambda e: e.encoder, embedder, cast(embedder.encoder, dtype))


def make_embedder(
    encoder: eqx.Module, rows: Rows, *, by_channel: bool, tokens: int = 2**16, chunk: int = 64
) -> Embedder:
    """Estimate the statistics over valid tokens from all over the rows: by channel, or one for all channels.

    The paper has the first for scratch encoders. For T5-small, released code has mean 0 and std 0.2.
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
    chunks = np.split(chosen, range(chunk, len(chosen), chunk))
    for numbers in tqdm(chunks, desc="statistics", unit="batch", leave=False):
        part = Rows(*(jnp.asarray(a[numbers], jnp.int32) for a in rows))
        sums += np.asarray(moments(raw, part), np.float64)
        count += int(part.length.sum())
    sums = sums if by_channel else np.broadcast_to(sums.mean(1, keepdims=True), sums.shape)
    mean = sums[0] / count
    std = np.sqrt(np.maximum(sums[1] / count - mean**2, 1e-12))
    return Embedder(encoder, jnp.asarray(mean, jnp.float32), jnp.asarray(std, jnp.float32))


# The encoder of a run, and the files that keep it there

EMBEDDING = "embedding.json"  # the statistics, and hashes of encoder and rows
TABLE = "table.npy"  # the table, in runs with one; of a learned table only the shape matters


def fingerprint(network: eqx.Module) -> str:
    """Hash of a network's weights."""
    leaves = jax.tree.leaves(network)
    return hash_of([hashlib.sha256(np.ascontiguousarray(leaf)).hexdigest() for leaf in leaves])


def trained_on_corpus(config: TrainConfig) -> bool:
    """Tell whether embeddings come from an encoder that is trained on the corpus itself."""
    return is_scratch(config.encoder) and config.embeddings == "encoder"


def scratch_config(config: TrainConfig, corpus: Corpus) -> TrainConfig:
    """Config of the stage that trains a scratch encoder: a run in the cache, shared by runs with its key."""
    steps, rate = config.encoder_steps, config.encoder_learning_rate
    key = [corpus.key, config.encoder, steps, rate, config.batch, config.precision, scratch.VERSION]
    stage = replace(config, model=config.encoder, name=f"encoder-{hash_of(key)}", runs=config.cache, seed=0)
    stage = replace(stage, steps=steps, learning_rate=rate, schedule="cosine", optimizer="muon", clip=1.0)
    stage = replace(stage, warmup_steps=int(0.08 * steps), num_samples=0, sample_every=0)  # 0.4 of 5 epochs
    return replace(stage, embeddings="encoder", wandb="", tensorboard=False)


def load_encoder(config: TrainConfig, corpus: Corpus, run: Path) -> T5Encoder | Table:
    """Load the frozen encoder of a run, or the table in its place; a learned one has only the right shape."""
    if (run / TABLE).exists():
        return Table(jnp.load(run / TABLE))
    if config.embeddings in ("gaussian", "learned"):
        width = len(abstract_embedder(config)[1].mean)
        key = jax.random.fold_in(jax.random.key(config.seed), 4)
        return Table(unit(jax.random.normal(key, (len(corpus.tokenizer), width))))
    if not is_scratch(config.encoder):
        encoder = load_pretrained(config.encoder, corpus)
    elif (run / "encoder" / "config.json").exists():
        encoder = load_t5(run / "encoder")
    else:
        encoder = load_t5(scratch_config(config, corpus).directory / "t5")
    return Table(unit(encoder.embed)) if config.embeddings == "table" else encoder


def load_pretrained(name: str, corpus: Corpus) -> T5Encoder:
    """Load a Hugging Face T5 from a directory or the hub."""
    encoder, tokens = load_t5(download_network(name, "--encoder")), len(corpus.tokenizer)
    if len(encoder.embed) < tokens:
        raise UserError(f"--encoder {name} knows {len(encoder.embed)} tokens, the data's tokenizer {tokens}")
    return encoder


def load_embedder(config: TrainConfig, corpus: Corpus) -> Embedder:
    """Load the embedder of a run, or make it for a new one."""
    encoder = load_encoder(config, corpus, config.directory)
    if (config.directory / EMBEDDING).exists():
        return read_embedder(encoder, config.directory, corpus)
    return make_embedder(encoder, corpus.rows, by_channel=trained_on_corpus(config))


def read_embedder(encoder: eqx.Module, run: Path, corpus: Corpus | None = None) -> Embedder:
    """Read the embedder of a run. Another encoder is an error, and so are other rows if they are given."""
    saved = json.loads((run / EMBEDDING).read_text())
    if saved["encoder"] != fingerprint(encoder):
        raise UserError(f"{run} was trained with another encoder: give that one again")
    if corpus and saved["rows"] != corpus.fingerprint:
        raise UserError(f"{run} was trained on other rows than --data gives: choose another --name")
    return Embedder(encoder, jnp.asarray(saved["mean"]), jnp.asarray(saved["std"]))


def save_embedder(config: TrainConfig, corpus: Corpus, embedder: Embedder):
    """Save what a run's embeddings were made with, and the tokenizer, into the run."""
    statistics = dict(mean=embedder.mean.tolist(), std=embedder.std.tolist())
    hashes = dict(encoder=fingerprint(embedder.encoder), rows=corpus.fingerprint)
    write_file(config.directory / EMBEDDING, json.dumps(statistics | hashes) + "\n")
    corpus.tokenizer.save_pretrained(config.directory / "tokenizer")
    if isinstance(embedder.encoder, Table):
        jnp.save(config.directory / TABLE, embedder.encoder.embed)
    if trained_on_corpus(config) and not (config.directory / "encoder" / "config.json").exists():
        save_t5(embedder.encoder, config.directory / "encoder")


def abstract_embedder(config: TrainConfig, unroll: int = 1) -> tuple[int, Embedder]:
    """Size of the vocabulary and shapes of the embedder, without reading texts or weights."""
    name, tokenizer, layout, cache = corpus_args(config)
    if name in corpora.rows.BUILT_IN:
        vocab = len(corpora.rows.load_corpus(name, tokenizer, layout, cache).tokenizer)
    elif tokenizer in T5_CONFIGS:
        vocab = 32_100
    else:
        vocab = len(corpora.rows.load_tokenizer(corpora.rows.tokenizer_directory(tokenizer)))
    if is_scratch(config.encoder):
        shape = scratch.recipe_of(config.encoder, vocab).shape
    elif config.encoder in T5_CONFIGS:
        shape = T5_CONFIGS[config.encoder]
    else:
        with configuration(download(config.encoder, "--encoder", ["config.json"])) as shape:
            t5_like(shape, Path(config.encoder))

    def make():
        network = t5_from_config(shape, jax.random.key(0), unroll)
        return Embedder(network, jnp.zeros(shape["d_model"]), jnp.ones(shape["d_model"]))

    return vocab, jax.eval_shape(make)
