"""A T5 trained from scratch by span corruption, of which ELF keeps the encoder (the paper's Appendix E.3).

The paper's is of T5-small's size and trains on OpenWebText; the one of the embedded corpora is small and learns in minutes.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from corpora import Rows
from elf import RMSNorm
from errors import Refused
from pretrained import T5_CONFIGS, T5Attention, T5Encoder, T5FeedForward, relative_bias, t5_from_config

# The encoder of the embedded corpora. ELF learns fast where words of one kind lie together and every word still tells which it
# is. Hiding half of the short texts brings the first about; embeddings that start neither at T5's std of 1 nor near 0 keep the
# second. Where one answer is right, the second matters more, and training is short and gentle (see settings.py): it leaves the
# nearest of two words a squared distance of 0.9 apart, of a variance of 1, where the long one brings them to 0.07.
SMALL = dict(
    model_type="t5",
    d_model=128,
    num_layers=2,
    num_decoder_layers=1,
    num_heads=4,
    d_kv=32,
    d_ff=256,
    feed_forward_proj="gated-gelu",
    relative_attention_num_buckets=32,
    relative_attention_max_distance=128,
)


class Recipe(NamedTuple):
    shape: dict[str, Any]
    """As a Hugging Face configuration says it."""
    density: float
    """Share of a text that is hidden."""
    embed_std: float
    """Of the embeddings at first."""
    mean_span: float = 3.0
    """Tokens of a hidden span."""


def recipe_of(name: str, vocab: int) -> Recipe:
    """Of `scratch`, of another width by its name, as `scratch-256`, or of T5's own, as `scratch-t5-small`."""
    shape = name.removeprefix("scratch").removeprefix("-") or str(SMALL["d_model"])
    if shape in T5_CONFIGS:
        return Recipe(T5_CONFIGS[shape] | dict(vocab_size=vocab), density=0.15, embed_std=1.0)
    if not shape.isdigit() or int(shape) == 0:
        raise Refused(
            f"--encoder {name}: give scratch, scratch-256 for another width than {SMALL['d_model']}, or scratch-t5-small"
        )
    return Recipe(SMALL | dict(vocab_size=vocab, d_model=int(shape)), density=0.5, embed_std=0.7)


def sentinels_of(tokenizer) -> list[int]:
    """Tokens that stand for hidden spans: T5's <extra_id_0> and so on. Padding is hidden from the encoder as token 0."""
    known = tokenizer.get_vocab()
    found = [known[f"<extra_id_{i}>"] for i in range(100) if f"<extra_id_{i}>" in known]
    if not found or tokenizer.pad_token_id != 0:
        raise Refused("--encoder scratch needs a tokenizer like T5's: with <extra_id_0> and so on, and padding as token 0")
    return found


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
        self.mlp = T5FeedForward(width, config["d_ff"], config["feed_forward_proj"].startswith("gated"), key=k3)

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

    def __init__(self, config: Mapping, *, embed_std: float = 1.0, key: PRNGKeyArray):
        k1, k2, k3 = jax.random.split(key, 3)
        encoder, depth = t5_from_config(config, k1), config.get("num_decoder_layers", config["num_layers"])
        self.encoder = eqx.tree_at(lambda e: e.embed, encoder, embed_std * encoder.embed)
        self.position_bias = config["d_model"] ** -0.5 * jax.random.normal(k2, self.encoder.position_bias.shape)
        self.blocks = eqx.filter_vmap(lambda k: DecoderBlock(config, key=k))(jax.random.split(k3, depth))
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
        return (self.norm(h) @ self.encoder.embed.T * h.shape[-1] ** -0.5).astype(jnp.float32)


# Span corruption: spans of a text give way to sentinels in the source, and the target spells them out


def span_counts(length: int, density: float, mean_span: float, sentinels: int) -> tuple[int, int]:
    """How many tokens of a text are hidden, and in how many spans."""
    hidden = max(1, round(length * density))
    return hidden, min(max(1, round(hidden / mean_span)), sentinels, max(1, length - hidden + 1))


def choose(key: PRNGKeyArray, n: Int[Array, ""], of: Int[Array, ""], size: int) -> Bool[Array, " size"]:
    """Marks n of the first `of` places, each choice as likely as any other."""
    u = jnp.where(jnp.arange(size) < of, jax.random.uniform(key, (size,)), jnp.inf)
    return jnp.argsort(jnp.argsort(u)) < n


def corrupt_spans(
    key: PRNGKeyArray,
    s: Int[Array, " L"],
    n: Int[Array, ""],
    sentinels: Int[Array, " K"],
    eos: int,
    density: float,
    mean_span: float,
) -> tuple[Int[Array, " S"], Int[Array, " T"]]:
    """Source and target of the first n tokens of s, each ended by EOS and padded by 0."""
    length, (k1, k2) = len(s), jax.random.split(key)
    counts = np.array([span_counts(i, density, mean_span, len(sentinels)) for i in range(length + 1)])
    source_length, target_length = (np.arange(length + 1) - counts[:, 0] + counts[:, 1]).max() + 1, counts.sum(1).max() + 1
    hidden, spans = jnp.asarray(counts)[n]

    j = jnp.arange(counts[:, 0].max())  # the hidden tokens in their order
    starts = jnp.pad(choose(k1, spans - 1, hidden - 1, len(j)), (1, 0), constant_values=True)[:-1]  # those that begin a span
    span = jnp.cumsum(starts) - 1
    (kept_before,) = jnp.nonzero(choose(k2, spans, n - hidden + 1, length + 1), size=len(sentinels))  # spans never touch
    position = jnp.where(j < hidden, j + kept_before[span], length)

    def mark(where):
        return jnp.zeros(length, bool).at[jnp.where(where, position, length)].set(True, mode="drop")

    def put(size, *parts):
        """Values where they belong, if that is inside."""
        at, values = (jnp.concatenate([jnp.atleast_1d(part[i]) for part in parts]) for i in range(2))
        return jnp.zeros(size, s.dtype).at[at].set(values, mode="drop")

    first, gone = mark(starts), mark(True)
    stays = (jnp.arange(length) < n) & (first | ~gone)
    tokens = jnp.where(first, sentinels[jnp.cumsum(first) - 1], s)
    source = put(source_length, (jnp.where(stays, jnp.cumsum(stays) - 1, source_length), tokens), (jnp.sum(stays), eos))
    sentinel_at = jnp.where(starts & (j < hidden), j + span, target_length)
    token_at = jnp.where(j < hidden, j + span + 1, target_length)
    target = put(target_length, (sentinel_at, sentinels[span]), (token_at, s[position]), (hidden + spans, eos))
    return source, target


def text_to_learn(
    key: PRNGKeyArray, s: Int[Array, " L"], length: Int[Array, ""], prefix: Int[Array, ""]
) -> tuple[Int[Array, " L"], Int[Array, ""]]:
    """What the encoder learns from, and its tokens without the last EOS: a whole row or, where it has a source, also the source
    or the text by itself. Together, words come to lie near their translations; alone, as a source is seen in ELF."""
    piece = jnp.where(prefix > 0, jax.random.randint(key, (), 0, 3), 0)
    begin, end = jnp.stack([0, 0, prefix])[piece], jnp.stack([length, prefix, length])[piece]
    return jnp.roll(s, -begin), end - begin - 1


def make_loss(recipe: Recipe, sentinels: list[int], eos: int, cast: Callable) -> Callable:
    """(model, nothing, rows, their numbers, key) -> summed cross-entropy of the targets, and sums and counts as ELF's losses."""

    def pair(row, s, length, prefix, key):
        k1, k2 = jax.random.split(jax.random.fold_in(key, row))
        s, n = text_to_learn(k1, s, length, prefix)
        source, target = corrupt_spans(k2, s, n, jnp.array(sentinels), eos, recipe.density, recipe.mean_span)
        return source, jnp.where(n > 0, target, 0)

    def loss(model: T5, _, rows: Rows, row: Int[Array, " N"], key: PRNGKeyArray):
        source, target = jax.vmap(pair, in_axes=(0, 0, 0, 0, None))(row, *rows, key)
        ce = optax.softmax_cross_entropy_with_integer_labels(cast(model)(source, target), target)
        ces = jnp.stack([jnp.sum(ce * (target != 0)), jnp.sum(target != 0)])
        return ces[0], jnp.stack([jnp.zeros(2), ces])

    return loss
