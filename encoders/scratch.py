"""A T5 trained from scratch by span corruption; ELF keeps the encoder (Appendix E.3).

In the paper it has the size of T5-small and trains on OpenWebText. For built-in corpora it trains in minutes.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from corpora.rows import Rows
from elf import RMSNorm
from encoders.t5 import T5_CONFIGS, T5Block, T5Encoder, block_sizes, relative_bias, t5_from_config
from runtime.errors import UserError

Row = Int[Array, " L"]
Scalar = Int[Array, ""]
VERSION = 1
"""Version of the recipe: raise it by hand when the same config gives other weights (network, draws, loss)."""

# The encoder of the built-in corpora. ELF learns fast if words of one kind have similar embeddings, and each
# embedding still identifies its word. Hiding half of a short text gives the first. An initial std of
# embeddings between 0 and T5's 1 keeps the second. Where a source has one right answer, the second matters
# more, so training is shorter and its rate lower (config.py): the nearest two words are then at a squared
# distance of 0.9, for a variance of 1. Longer training brings them to 0.07.
SMALL = dict(model_type="t5", d_model=128, num_layers=2, num_decoder_layers=1, num_heads=4, d_kv=32, d_ff=256)
SMALL |= dict(feed_forward_proj="gated-gelu", relative_attention_num_buckets=32)
SMALL |= dict(relative_attention_max_distance=128)


class Recipe(NamedTuple):
    shape: dict[str, Any]
    """Hugging Face configuration of the network."""
    density: float
    """Share of a text that is hidden."""
    embed_std: float
    """Standard deviation of the initial embeddings."""
    mean_span: float = 3.0
    """Mean number of tokens in a hidden span."""


def recipe_of(name: str, vocab: int) -> Recipe:
    """Read a recipe from a name: `scratch`, another width as in `scratch-256`, or `scratch-t5-small`."""
    shape = name.removeprefix("scratch").removeprefix("-") or str(SMALL["d_model"])
    if shape in T5_CONFIGS:
        return Recipe(T5_CONFIGS[shape] | dict(vocab_size=vocab), density=0.15, embed_std=1.0)
    if not shape.isdigit() or int(shape) == 0:
        raise UserError(f"--encoder {name}: give scratch, scratch-256 for another width, or scratch-t5-small")
    return Recipe(SMALL | dict(vocab_size=vocab, d_model=int(shape)), density=0.5, embed_std=0.7)


def sentinels_of(tokenizer) -> list[int]:
    """List the tokens that stand for hidden spans: T5's <extra_id_0> and so on. Token 0 must be padding."""
    vocab = tokenizer.get_vocab()
    sentinels = [vocab[f"<extra_id_{i}>"] for i in range(100) if f"<extra_id_{i}>" in vocab]
    if not sentinels or tokenizer.pad_token_id != 0:
        raise UserError("--encoder scratch needs a --tokenizer with <extra_id_0> and padding as token 0")
    return sentinels


class T5(eqx.Module):
    """Encoder and decoder for span corruption, with one embedding table for both."""

    encoder: T5Encoder
    position_bias: Float[Array, "buckets heads"]
    blocks: T5Block  # every leaf stacked over depth
    norm: RMSNorm

    def __init__(self, config: Mapping, *, embed_std: float = 1.0, key: PRNGKeyArray):
        k1, k2, k3 = jax.random.split(key, 3)
        encoder = t5_from_config(config, k1)
        self.encoder = eqx.tree_at(lambda e: e.embed, encoder, embed_std * encoder.embed)
        self.position_bias = config["d_model"] ** -0.5 * jax.random.normal(k2, encoder.position_bias.shape)
        keys = jax.random.split(k3, config.get("num_decoder_layers", config["num_layers"]))
        self.blocks = eqx.filter_vmap(lambda k: T5Block(**block_sizes(config), cross=True, key=k))(keys)
        self.norm = RMSNorm(config["d_model"])

    def __call__(self, s: Int[Array, "N L"], target: Int[Array, "N T"]) -> Float[Array, "N T V"]:
        """Compute the logits of each target token from the source and earlier target tokens; 0 is padding."""
        (n, length), width = s.shape, target.shape[1]
        valid = (s != 0)[:, None, :]
        context = self.encoder(s, jnp.broadcast_to(valid, (n, length, length)))
        causal = jnp.broadcast_to(jnp.tri(width, dtype=bool), (n, width, width))
        bias = relative_bias(self.position_bias, causal, self.encoder.max_distance)
        seen = jnp.where(valid, 0.0, -1e9)[:, None]
        across = context, jnp.broadcast_to(seen, (n, bias.shape[1], width, length))
        h = self.encoder.embed[jnp.pad(target[:, :-1], ((0, 0), (1, 0)))]
        h, _ = jax.lax.scan(lambda h, block: (block(h, bias, across), None), h, self.blocks)
        return (self.norm(h) @ self.encoder.embed.T * h.shape[-1] ** -0.5).astype(jnp.float32)


# Span corruption: sentinels replace spans of a text in the source, and the target spells out the spans


def choose(key: PRNGKeyArray, n: Scalar, of: Scalar, size: int) -> Bool[Array, " size"]:
    """Mark n of the first `of` places; every choice is equally likely."""
    u = jnp.where(jnp.arange(size) < of, jax.random.uniform(key, (size,)), jnp.inf)
    return jnp.argsort(jnp.argsort(u)) < n


def span_counts(n: np.ndarray, sentinels: int, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Count the hidden tokens of texts of n tokens, and the spans they form."""
    hidden = np.maximum(1, np.round(n * recipe.density)).astype(int)
    spans = np.maximum(1, np.round(hidden / recipe.mean_span)).astype(int)
    return hidden, np.minimum(spans, np.clip(n - hidden + 1, 1, sentinels))


def scatter(size: int, *parts: tuple[Array, Array | int]) -> Int[Array, " size"]:
    """Put values at places, given as (places, values), into zeros; places beyond the size are dropped."""
    at, values = (jnp.concatenate([jnp.atleast_1d(a) for a in column]) for column in zip(*parts, strict=True))
    return jnp.zeros(size, values.dtype).at[at].set(values, mode="drop")


def corrupt_spans(
    key: PRNGKeyArray, s: Row, n: Scalar, sentinels: Int[Array, " K"], eos: int, recipe: Recipe
) -> tuple[Int[Array, " S"], Int[Array, " T"]]:
    """Make source and target from the first n tokens of s; both end in EOS and are padded by 0."""
    length, (k1, k2) = len(s), jax.random.split(key)
    lengths = np.arange(length + 1)
    hidden, spans = span_counts(lengths, len(sentinels), recipe)
    source_length = int(max(lengths - hidden + spans)) + 1
    target_length = int(max(hidden + spans)) + 1
    j = jnp.arange(hidden.max())  # numbers the hidden tokens
    hidden, spans = jnp.asarray(hidden)[n], jnp.asarray(spans)[n]

    starts = choose(k1, spans - 1, hidden - 1, len(j))  # hidden tokens that begin a span, except the first
    starts = jnp.pad(starts, (1, 0), constant_values=True)[:-1]
    span = jnp.cumsum(starts) - 1
    gaps = choose(k2, spans, n - hidden + 1, length + 1)  # spans never touch
    (kept_before,) = jnp.nonzero(gaps, size=len(sentinels))
    position = jnp.where(j < hidden, j + kept_before[span], length)

    def mark(where):
        return jnp.zeros(length, bool).at[jnp.where(where, position, length)].set(True, mode="drop")

    first, gone = mark(starts), mark(True)
    stays = (jnp.arange(length) < n) & (first | ~gone)
    tokens = jnp.where(first, sentinels[jnp.cumsum(first) - 1], s)
    stay_at = jnp.where(stays, jnp.cumsum(stays) - 1, source_length)
    source = scatter(source_length, (stay_at, tokens), (jnp.sum(stays), eos))
    sentinel_at = jnp.where(starts & (j < hidden), j + span, target_length)
    token_at = jnp.where(j < hidden, j + span + 1, target_length)
    spelled = (sentinel_at, sentinels[span]), (token_at, s[position])
    return source, scatter(target_length, *spelled, (hidden + spans, eos))


def text_to_learn(key: PRNGKeyArray, s: Row, length: Scalar, prefix: Scalar) -> tuple[Row, Scalar]:
    """Draw what to learn from, the row or only its source or text, and its length without the last EOS.

    From whole rows, words get embeddings near their translations; alone is how ELF encodes a source.
    """
    piece = jnp.where(prefix > 0, jax.random.randint(key, (), 0, 3), 0)
    begin, end = jnp.stack([0, 0, prefix])[piece], jnp.stack([length, prefix, length])[piece]
    return jnp.roll(s, -begin), end - begin - 1


def make_loss(recipe: Recipe, sentinels: list[int], eos: int, cast: Callable) -> Callable:
    """Make the loss of a Method: the cross-entropy of the targets, with nothing frozen."""

    def pair(row, s, length, prefix, key):
        k1, k2 = jax.random.split(jax.random.fold_in(key, row))
        s, n = text_to_learn(k1, s, length, prefix)
        source, target = corrupt_spans(k2, s, n, jnp.array(sentinels), eos, recipe)
        return source, jnp.where(n > 0, target, 0)

    def loss(model: T5, _, rows: Rows, row: Int[Array, " N"], key: PRNGKeyArray):
        source, target = jax.vmap(pair, in_axes=(0, 0, 0, 0, None))(row, *rows, key)
        counted = target != 0
        ce = optax.softmax_cross_entropy_with_integer_labels(cast(model)(source, target), target)
        total = jnp.sum(ce * counted)
        return total, {"ce": (total, jnp.sum(counted))}

    return loss
