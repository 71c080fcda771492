"""A small T5 trained from scratch by span corruption, of which ELF keeps the encoder.

The paper's scratch encoder is of T5-small's size and trains for epochs on OpenWebText; this one learns in minutes (see data.py).
"""

from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from tqdm import trange

from corpora import Rows
from elf import RMSNorm
from optimizers import make_optimizer, warmed_up
from pretrained import T5Attention, T5Encoder, T5FeedForward, relative_bias, t5_from_config


class DecoderBlock(eqx.Module):
    norm1: RMSNorm
    attend: T5Attention
    norm2: RMSNorm
    cross: T5Attention
    norm3: RMSNorm
    mlp: T5FeedForward

    def __init__(self, config: Mapping, *, key: PRNGKeyArray):
        k1, k2, k3 = jax.random.split(key, 3)
        width, heads, head_dim = config["d_model"], config["num_heads"], config["d_kv"]
        self.norm1, self.norm2, self.norm3 = RMSNorm(width), RMSNorm(width), RMSNorm(width)
        self.attend = T5Attention(width, heads, head_dim, key=k1)
        self.cross = T5Attention(width, heads, head_dim, key=k2)
        self.mlp = T5FeedForward(width, config["d_ff"], gated=True, key=k3)

    def __call__(self, h, context, bias, cross_bias):
        normed = self.norm1(h)
        h = h + self.attend(normed, normed, bias)
        h = h + self.cross(self.norm2(h), context, cross_bias)
        return h + self.mlp(self.norm3(h))


class T5(eqx.Module):
    """Encoder and decoder, as far as the span-corruption objective needs them."""

    encoder: T5Encoder
    position_bias: Float[Array, "buckets heads"]
    blocks: DecoderBlock  # every leaf stacked over depth
    norm: RMSNorm

    def __init__(self, config: Mapping, *, key: PRNGKeyArray):
        k1, k2, k3 = jax.random.split(key, 3)
        self.encoder = t5_from_config(config, k1)
        self.position_bias = config["d_model"] ** -0.5 * jax.random.normal(k2, self.encoder.position_bias.shape)
        self.blocks = eqx.filter_vmap(lambda k: DecoderBlock(config, key=k))(jax.random.split(k3, config["num_decoder_layers"]))
        self.norm = RMSNorm(config["d_model"])

    def __call__(self, s: Int[Array, "N L"], target: Int[Array, "N T"]) -> Float[Array, "N T V"]:
        """Logits of every target token, given the corrupted text and the target tokens before it. Padding is 0."""
        (n, length), width = s.shape, target.shape[1]
        valid = (s != 0)[:, None, :]
        context = self.encoder(s, jnp.broadcast_to(valid, (n, length, length)))
        causal = jnp.broadcast_to(jnp.tri(width, dtype=bool), (n, width, width))
        bias = relative_bias(self.position_bias, causal, self.encoder.max_distance)
        cross_bias = jnp.broadcast_to(jnp.where(valid, 0.0, -1e9)[:, None], (n, bias.shape[1], width, length))
        before = jnp.pad(target[:, :-1], ((0, 0), (1, 0)))
        h = self.encoder.embed[before]
        h, _ = jax.lax.scan(lambda h, block: (block(h, context, bias, cross_bias), None), h, self.blocks)
        return self.norm(h) @ self.encoder.embed.T * h.shape[-1] ** -0.5


def span_counts(length: int, density: float, mean_span: float, sentinels: int) -> tuple[int, int]:
    """How many tokens of a text are hidden, and in how many spans."""
    hidden = max(1, round(length * density))
    return hidden, min(max(1, round(hidden / mean_span)), sentinels, length - hidden + 1)


def corrupt_spans(
    rng: np.random.Generator, s: list[int], sentinels: list[int], eos: int, density: float, mean_span: float
) -> tuple[list[int], list[int]]:
    """T5's objective: spans give way to sentinels in the input, and the target spells them out."""
    n, spans = span_counts(len(s), density, mean_span, len(sentinels))
    cuts = np.sort(rng.choice(n - 1, spans - 1, replace=False)) + 1  # n hidden tokens into `spans` spans
    lengths = np.diff([0, *cuts, n]).tolist()
    gaps = np.sort(rng.choice(len(s) - n + 1, spans, replace=False)).tolist()  # kept tokens before each span
    source, target, kept, hidden = [], [], 0, 0
    for i, (gap, length) in enumerate(zip(gaps, lengths, strict=True)):
        start = gap + hidden
        source += [*s[kept:start], sentinels[i]]
        target += [sentinels[i], *s[start : start + length]]
        kept, hidden = start + length, hidden + length
    return [*source, *s[kept:], eos], [*target, eos]


def texts_to_learn(rows: Rows, most: int = 300_000) -> tuple[np.ndarray, np.ndarray]:
    """What the encoder learns from, and its lengths without the last EOS: whole rows and, where these have sources, also
    sources and texts by themselves. Together, words come to lie near their translations; alone, as a source is seen in ELF."""
    if not rows.prefix[0]:
        return rows.s, rows.length - 1
    s, length, prefix = (np.asarray(a[:most]) for a in rows)
    position = np.minimum(prefix[:, None] + np.arange(s.shape[1]), s.shape[1] - 1)
    texts = np.take_along_axis(s, position, axis=1)
    return np.concatenate([s, s, texts]), np.concatenate([length, prefix, length - prefix]) - 1


def pad(rows: list[list[int]], length: int) -> np.ndarray:
    out = np.zeros((len(rows), length), np.int32)
    for row, tokens in zip(out, rows, strict=True):
        row[: len(tokens)] = tokens
    return out


def train_encoder(
    rows: np.ndarray,
    lengths: np.ndarray,
    config: Mapping,
    *,
    sentinels: list[int],
    eos: int,
    steps: int,
    batch: int,
    learning_rate: float,
    density: float,
    mean_span: float,
    embed_std: float,
    seed: int,
) -> T5Encoder:
    """Train on padded rows of the given lengths by Muon; cosine learning rate, warm-up over 8% of the steps (0.4 of 5 epochs)."""
    optimizer = make_optimizer("muon", warmed_up(learning_rate, int(0.08 * steps), steps, "cosine"))
    model = T5(config, key=jax.random.key(seed))
    model = eqx.tree_at(lambda m: m.encoder.embed, model, embed_std * model.encoder.embed)
    length = rows.shape[1]
    hidden, spans = span_counts(length, density, mean_span, len(sentinels))
    source_length, target_length = length - hidden + spans + 1, hidden + spans + 1

    def loss(model, s, target):
        logits = model(s, target)
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, target)
        return jnp.sum(ce * (target != 0)) / jnp.sum(target != 0)

    @jax.jit
    def step(model, state, s, target):
        value, grads = jax.value_and_grad(loss)(model, s, target)
        updates, state = optimizer.update(grads, state, model)
        return optax.apply_updates(model, updates), state, value

    state, usable = optimizer.init(model), np.flatnonzero(lengths > 0)
    for i in (bar := trange(steps, desc="encoder", unit="step")):
        rng = np.random.default_rng([seed, i])
        chosen = usable[rng.choice(len(usable), min(batch, len(usable)), replace=False)]
        pairs = [corrupt_spans(rng, rows[j, : lengths[j]].tolist(), sentinels, eos, density, mean_span) for j in chosen]
        source, target = pad([a for a, _ in pairs], source_length), pad([b for _, b in pairs], target_length)
        model, state, value = step(model, state, source, target)
        if i % 20 == 0:
            bar.set_postfix(loss=f"{value:.3f}")
    return model.encoder
