"""T5 encoders, read and written as Hugging Face does."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from safetensors.numpy import save_file

from elf import Linear, RMSNorm
from encoders.weights import configuration, dotted, fill, read_tensors
from runtime.attention import attend_biased
from runtime.errors import UserError

Hidden = Float[Array, "N T E"]
Context = Float[Array, "N S E"]
Bias = Float[Array, "N heads T S"]
Sees = Bool[Array, "N T T"]  # [n, i, j] says whether i attends to j
linear = partial(Linear, bias=False)


class T5Attention(eqx.Module):
    """Attention without biases in its layers or scaling of its scores. Positions are a bias on the scores."""

    q: Linear
    k: Linear
    v: Linear
    out: Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, head_dim: int, *, key: PRNGKeyArray):
        inner = heads * head_dim
        keys = jax.random.split(key, 4)
        self.q = linear(width, inner, std=(width * head_dim) ** -0.5, key=keys[0])
        self.k = linear(width, inner, std=width**-0.5, key=keys[1])
        self.v = linear(width, inner, std=width**-0.5, key=keys[2])
        self.out = linear(inner, width, std=inner**-0.5, key=keys[3])
        self.heads = heads

    def __call__(self, h: Hidden, context: Context, bias: Bias) -> Hidden:
        split = partial(rearrange, pattern="N T (heads d) -> N heads T d", heads=self.heads)
        q, k, v = split(self.q(h)), split(self.k(context)), split(self.v(context))
        return self.out(attend_biased(q, k, v, bias))


class T5FeedForward(eqx.Module):
    """Gated GELU (v1.1 and flan), or ReLU where there is no gate (the original T5)."""

    up: Linear
    gate: Linear | None
    down: Linear

    def __init__(self, width: int, inner: int, gated: bool, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.up = linear(width, inner, std=width**-0.5, key=keys[0])
        self.gate = linear(width, inner, std=width**-0.5, key=keys[1]) if gated else None
        self.down = linear(inner, width, std=inner**-0.5, key=keys[2])

    def __call__(self, h: Hidden) -> Hidden:
        inner = jax.nn.relu(self.up(h)) if self.gate is None else jax.nn.gelu(self.gate(h)) * self.up(h)
        return self.down(inner)


class T5Block(eqx.Module):
    """A layer of the encoder, or one of the decoder, with attention across to the encoder's output."""

    norm1: RMSNorm
    attend: T5Attention
    norm2: RMSNorm
    cross: T5Attention | None
    norm3: RMSNorm | None
    mlp: T5FeedForward

    def __init__(self, width: int, heads: int, head_dim: int, inner: int, gated: bool, cross=False, *, key):
        k1, *k2, k3 = jax.random.split(key, 3 if cross else 2)
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.norm3 = RMSNorm(width) if cross else None
        self.attend = T5Attention(width, heads, head_dim, key=k1)
        self.cross = T5Attention(width, heads, head_dim, key=k2[0]) if cross else None
        self.mlp = T5FeedForward(width, inner, gated, key=k3)

    def __call__(self, h: Hidden, bias: Bias, across: tuple[Context, Bias] | None = None) -> Hidden:
        normed = self.norm1(h)
        h = h + self.attend(normed, normed, bias)
        if self.cross is None:
            return h + self.mlp(self.norm2(h))
        h = h + self.cross(self.norm2(h), *across)
        return h + self.mlp(self.norm3(h))


def relative_bucket(distance: Int[Array, "*s"], buckets: int, max_distance: int) -> Int[Array, "*s"]:
    """Sort distances into T5's bidirectional buckets: one per offset near by, logarithmic further off."""
    half = buckets // 2
    exact, far = half // 2, jnp.abs(distance)
    log_ratio = jnp.log(jnp.maximum(far, 1) / exact) / np.log(max_distance / exact)
    coarse = jnp.minimum(exact + (log_ratio * (half - exact)).astype(jnp.int32), half - 1)
    return jnp.where(distance > 0, half, 0) + jnp.where(far < exact, far, coarse)


def relative_bias(table: Float[Array, "buckets heads"], sees: Sees, max_distance: int) -> Bias:
    """Compute the score to add for every pair of positions, by their distance and by who sees whom."""
    positions = jnp.arange(sees.shape[-1])
    bias = table.T[:, relative_bucket(positions[None, :] - positions[:, None], len(table), max_distance)]
    return jnp.where(sees[:, None], bias, jnp.asarray(-1e9, bias.dtype))


class T5Encoder(eqx.Module):
    """Network from tokens to contextual embeddings."""

    embed: Float[Array, "V E"]
    position_bias: Float[Array, "buckets heads"]
    blocks: T5Block  # every leaf stacked over depth
    norm: RMSNorm
    max_distance: int = eqx.field(static=True)
    unroll: int = eqx.field(static=True)

    def __init__(self, vocab: int, depth: int, buckets: int, max_distance: int, unroll: int, key, **block):
        """Draw the weights; `block` holds the arguments of a `T5Block`."""
        k1, k2, k3 = jax.random.split(key, 3)
        width = block["width"]
        self.embed = jax.random.normal(k1, (vocab, width))
        self.position_bias = width**-0.5 * jax.random.normal(k2, (buckets, block["heads"]))
        self.blocks = eqx.filter_vmap(lambda k: T5Block(**block, key=k))(jax.random.split(k3, depth))
        self.norm = RMSNorm(width)
        self.max_distance, self.unroll = max_distance, unroll

    def __call__(self, s: Int[Array, "N T"], sees: Sees) -> Hidden:
        return self.in_context(self.embed[s], sees)

    def in_context(self, h: Hidden, sees: Sees) -> Hidden:
        """Run the network on embeddings that no context has changed yet."""
        bias = relative_bias(self.position_bias, sees, self.max_distance)
        h, _ = jax.lax.scan(lambda h, block: (block(h, bias), None), h, self.blocks, unroll=self.unroll)
        return self.norm(h)


# Our leaf -> name in a Hugging Face T5
LAYER = "encoder.block.{}.layer"
T5_NAMES = {
    "embed": "shared.weight",
    "position_bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "blocks.norm1.weight": f"{LAYER}.0.layer_norm.weight",
    "blocks.attend.q.weight": f"{LAYER}.0.SelfAttention.q.weight",
    "blocks.attend.k.weight": f"{LAYER}.0.SelfAttention.k.weight",
    "blocks.attend.v.weight": f"{LAYER}.0.SelfAttention.v.weight",
    "blocks.attend.out.weight": f"{LAYER}.0.SelfAttention.o.weight",
    "blocks.norm2.weight": f"{LAYER}.1.layer_norm.weight",
    "blocks.mlp.up.weight": f"{LAYER}.1.DenseReluDense.wi_1.weight",
    "blocks.mlp.gate.weight": f"{LAYER}.1.DenseReluDense.wi_0.weight",
    "blocks.mlp.down.weight": f"{LAYER}.1.DenseReluDense.wo.weight",
    "norm.weight": "encoder.final_layer_norm.weight",
}
# Configurations of the original T5s, for planning without their files
ORIGINAL = dict(vocab_size=32_128, d_kv=64, feed_forward_proj="relu")
ORIGINAL |= dict(relative_attention_num_buckets=32, relative_attention_max_distance=128)
T5_CONFIGS = {
    name: ORIGINAL | dict(d_model=width, num_layers=depth, num_heads=width // 64, d_ff=4 * width)
    for name, width, depth in (("t5-small", 512, 6), ("t5-base", 768, 12), ("t5-large", 1024, 24))
}


def t5_names(encoder: T5Encoder) -> dict[str, str]:
    """Return the Hugging Face name of every leaf; without a gate, `wi` takes the place of `wi_1`."""
    ungated = {"blocks.mlp.up.weight": f"{LAYER}.1.DenseReluDense.wi.weight"}
    return T5_NAMES | ungated if encoder.blocks.mlp.gate is None else T5_NAMES


def transposed(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Transpose the matrices of layers, which Hugging Face keeps as (out, in)."""
    matrices = {name for name in tensors if ".block." in name and "relative_attention" not in name}
    return {name: tensor.T if name in matrices else tensor for name, tensor in tensors.items()}


def block_sizes(config: Mapping) -> dict:
    """Read the arguments of a `T5Block` from a Hugging Face configuration."""
    sizes = dict(width=config["d_model"], heads=config["num_heads"], head_dim=config["d_kv"])
    return sizes | dict(
        inner=config["d_ff"], gated=config.get("feed_forward_proj", "relu").startswith("gated")
    )


def t5_from_config(config: Mapping, key: PRNGKeyArray, unroll: int = 1) -> T5Encoder:
    """Make an untrained encoder of the shape in a Hugging Face configuration."""
    block = block_sizes(config)
    buckets = config["relative_attention_num_buckets"]
    max_distance = config.get("relative_attention_max_distance", 128)
    sizes = config["vocab_size"], config["num_layers"], buckets, max_distance
    return T5Encoder(*sizes, unroll=unroll, key=key, **block)


def t5_config(encoder: T5Encoder) -> dict:
    """Describe the shape of an encoder, such that `t5_from_config` makes another like it."""
    (vocab, width), blocks = encoder.embed.shape, encoder.blocks
    return dict(
        model_type="t5",
        vocab_size=vocab,
        d_model=width,
        num_layers=len(blocks.norm1.weight),
        num_heads=blocks.attend.heads,
        d_kv=blocks.attend.q.weight.shape[-1] // blocks.attend.heads,
        d_ff=blocks.mlp.up.weight.shape[-1],
        feed_forward_proj="relu" if blocks.mlp.gate is None else "gated-gelu",
        relative_attention_num_buckets=len(encoder.position_bias),
        relative_attention_max_distance=encoder.max_distance,
    )


def load_t5(directory: Path) -> T5Encoder:
    """Load the encoder of a Hugging Face T5 directory. Every tensor must be there and fit."""
    with configuration(directory) as config:
        like = t5_like(config, directory)
    # A whole T5 has a decoder, a head and a copy of shared.weight.
    tensors = read_tensors(directory, unneeded=r"decoder\.|lm_head\.|encoder\.embed_tokens\.weight$")
    return fill(like, t5_names(like), transposed(tensors), f"{directory}/model.safetensors")


def t5_like(config: Mapping, directory: Path) -> T5Encoder:
    """Compute the shapes of an encoder from its configuration."""
    kind, activation = config.get("model_type"), config.get("feed_forward_proj", "relu")
    if kind not in ("t5", "mt5") or activation not in ("relu", "gated-gelu"):
        raise UserError(f"{directory}: not a T5 with relu or gated-gelu layers ({kind}, {activation})")
    return jax.eval_shape(lambda: t5_from_config(config, jax.random.key(0)))


def save_t5(encoder: T5Encoder, directory: Path):
    """Write an encoder as Hugging Face reads it; the configuration comes last and marks a complete one."""
    names, tensors = t5_names(encoder), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(encoder):
        name = names[dotted(path)]
        parts = np.asarray(leaf) if "{}" in name else [np.asarray(leaf)]
        tensors |= {name.format(i): part for i, part in enumerate(parts)}
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in transposed(tensors).items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(t5_config(encoder), indent=2) + "\n")
