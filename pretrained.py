"""Networks that others trained, read without their frameworks: T5 encoders and released ELF weights."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from safetensors.numpy import load_file, save_file

from attention import attend_biased
from elf import ELF, Linear, RMSNorm
from errors import Refused


class T5Attention(eqx.Module):
    """T5's attention: no bias, no scaling of the scores, positions as an additive bias."""

    q: Linear
    k: Linear
    v: Linear
    out: Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, head_dim: int, *, key: PRNGKeyArray):
        keys, inner = jax.random.split(key, 4), heads * head_dim
        self.q = Linear(width, inner, bias=False, std=(width * head_dim) ** -0.5, key=keys[0])
        self.k = Linear(width, inner, bias=False, std=width**-0.5, key=keys[1])
        self.v = Linear(width, inner, bias=False, std=width**-0.5, key=keys[2])
        self.out = Linear(inner, width, bias=False, std=inner**-0.5, key=keys[3])
        self.heads = heads

    def __call__(
        self, h: Float[Array, "N T E"], context: Float[Array, "N S E"], bias: Float[Array, "N heads T S"]
    ) -> Float[Array, "N T E"]:
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
        self.up = Linear(width, inner, bias=False, std=width**-0.5, key=keys[0])
        self.gate = Linear(width, inner, bias=False, std=width**-0.5, key=keys[1]) if gated else None
        self.down = Linear(inner, width, bias=False, std=inner**-0.5, key=keys[2])

    def __call__(self, h: Float[Array, "N T E"]) -> Float[Array, "N T E"]:
        inner = jax.nn.relu(self.up(h)) if self.gate is None else jax.nn.gelu(self.gate(h)) * self.up(h)
        return self.down(inner)


class T5Block(eqx.Module):
    norm1: RMSNorm
    attend: T5Attention
    norm2: RMSNorm
    mlp: T5FeedForward

    def __init__(self, width: int, heads: int, head_dim: int, inner: int, gated: bool, *, key: PRNGKeyArray):
        k1, k2 = jax.random.split(key)
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attend = T5Attention(width, heads, head_dim, key=k1)
        self.mlp = T5FeedForward(width, inner, gated, key=k2)

    def __call__(self, h: Float[Array, "N T E"], bias: Float[Array, "N heads T T"]) -> Float[Array, "N T E"]:
        normed = self.norm1(h)
        h = h + self.attend(normed, normed, bias)
        return h + self.mlp(self.norm2(h))


def relative_bucket(distance: Int[Array, "*s"], buckets: int, max_distance: int) -> Int[Array, "*s"]:
    """T5's bidirectional buckets: one per offset near by, logarithmic further off."""
    half = buckets // 2
    exact, far = half // 2, jnp.abs(distance)
    log_ratio = jnp.log(jnp.maximum(far, 1) / exact) / np.log(max_distance / exact)
    coarse = jnp.minimum(exact + (log_ratio * (half - exact)).astype(jnp.int32), half - 1)
    return jnp.where(distance > 0, half, 0) + jnp.where(far < exact, far, coarse)


def relative_bias(
    table: Float[Array, "buckets heads"], sees: Bool[Array, "N T T"], max_distance: int
) -> Float[Array, "N heads T T"]:
    """The score added for every pair of positions; `sees[n, i, j]` says whether i attends to j."""
    positions = jnp.arange(sees.shape[-1])
    bias = table.T[:, relative_bucket(positions[None, :] - positions[:, None], len(table), max_distance)]
    return jnp.where(sees[:, None], bias, jnp.asarray(-1e9, bias.dtype))


class T5Encoder(eqx.Module):
    """Tokens to contextual embeddings."""

    embed: Float[Array, "V E"]
    position_bias: Float[Array, "buckets heads"]
    blocks: T5Block  # every leaf stacked over depth
    norm: RMSNorm
    max_distance: int = eqx.field(static=True)
    unroll: int = eqx.field(static=True)

    def __init__(
        self,
        vocab: int,
        width: int,
        depth: int,
        heads: int,
        head_dim: int,
        inner: int,
        *,
        gated: bool = True,
        buckets: int = 32,
        max_distance: int = 128,
        unroll: int = 1,
        key: PRNGKeyArray,
    ):
        k1, k2, k3 = jax.random.split(key, 3)
        self.embed = jax.random.normal(k1, (vocab, width))
        self.position_bias = width**-0.5 * jax.random.normal(k2, (buckets, heads))
        blocks = eqx.filter_vmap(lambda k: T5Block(width, heads, head_dim, inner, gated, key=k))
        self.blocks = blocks(jax.random.split(k3, depth))
        self.norm = RMSNorm(width)
        self.max_distance, self.unroll = max_distance, unroll

    def __call__(self, s: Int[Array, "N L"], sees: Bool[Array, "N L L"]) -> Float[Array, "N L E"]:
        bias = relative_bias(self.position_bias, sees, self.max_distance)
        h, _ = jax.lax.scan(lambda h, block: (block(h, bias), None), self.embed[s], self.blocks, unroll=self.unroll)
        return self.norm(h)


# Our leaf -> its Hugging Face name, weights there (out, in). Under `blocks` one stacked leaf gathers block.0, block.1, ...
T5_NAMES = {
    "embed": "shared.weight",
    "position_bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "blocks.norm1.weight": "encoder.block.{}.layer.0.layer_norm.weight",
    "blocks.attend.q.weight": "encoder.block.{}.layer.0.SelfAttention.q.weight",
    "blocks.attend.k.weight": "encoder.block.{}.layer.0.SelfAttention.k.weight",
    "blocks.attend.v.weight": "encoder.block.{}.layer.0.SelfAttention.v.weight",
    "blocks.attend.out.weight": "encoder.block.{}.layer.0.SelfAttention.o.weight",
    "blocks.norm2.weight": "encoder.block.{}.layer.1.layer_norm.weight",
    "blocks.mlp.up.weight": "encoder.block.{}.layer.1.DenseReluDense.wi_1.weight",
    "blocks.mlp.gate.weight": "encoder.block.{}.layer.1.DenseReluDense.wi_0.weight",
    "blocks.mlp.down.weight": "encoder.block.{}.layer.1.DenseReluDense.wo.weight",
    "norm.weight": "encoder.final_layer_norm.weight",
}
T5_NAMES_UNGATED = T5_NAMES | {"blocks.mlp.up.weight": "encoder.block.{}.layer.1.DenseReluDense.wi.weight"}


def t5_tensors(encoder: T5Encoder) -> Iterator[tuple[str, tuple, int | None, bool]]:
    """For every tensor of a Hugging Face T5 encoder: its name, our leaf's path, the layer in it, and whether it is transposed."""
    names = T5_NAMES_UNGATED if encoder.blocks.mlp.gate is None else T5_NAMES
    for path, leaf in jax.tree_util.tree_leaves_with_path(encoder):
        key = dotted(path)
        name, transposed = names[key], key.startswith("blocks.") and "norm" not in key
        if "{}" in name:
            yield from ((name.format(i), key, i, transposed) for i in range(len(leaf)))
        else:
            yield name, key, None, transposed


def dotted(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


# What the configurations of the original T5s say, for planning without their files.
T5_CONFIGS = {
    name: dict(
        vocab_size=32_128,
        d_model=width,
        num_layers=depth,
        num_heads=width // 64,
        d_kv=64,
        d_ff=4 * width,
        feed_forward_proj="relu",
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
    )
    for name, width, depth in (("t5-small", 512, 6), ("t5-base", 768, 12), ("t5-large", 1024, 24))
}


def t5_from_config(config: Mapping, key: PRNGKeyArray, unroll: int = 1) -> T5Encoder:
    """An untrained encoder of the shape a Hugging Face T5 configuration describes."""
    return T5Encoder(
        vocab=config["vocab_size"],
        width=config["d_model"],
        depth=config["num_layers"],
        heads=config["num_heads"],
        head_dim=config["d_kv"],
        inner=config["d_ff"],
        gated=config.get("feed_forward_proj", "relu").startswith("gated"),
        buckets=config["relative_attention_num_buckets"],
        max_distance=config.get("relative_attention_max_distance", 128),
        unroll=unroll,
        key=key,
    )


def load_t5(directory: Path) -> T5Encoder:
    """The encoder of a Hugging Face T5 directory. Every tensor must be there and fit."""
    config = json.loads((directory / "config.json").read_text())
    like = jax.eval_shape(lambda: t5_from_config(config, jax.random.key(0)))
    tensors = load_file(directory / "model.safetensors")
    tensors = {k: v for k, v in tensors.items() if not k.startswith(("decoder.", "lm_head."))}  # of whole T5s
    tensors.pop("encoder.embed_tokens.weight", None)  # a copy of shared.weight
    leaves: dict[str, list] = {}
    for name, key, _, transposed in t5_tensors(like):
        if name not in tensors:
            raise Refused(f"{directory}: model.safetensors has no tensor {name}")
        tensor = tensors.pop(name)
        leaves.setdefault(key, []).append(tensor.T if transposed else tensor)
    if tensors:
        raise Refused(f"{directory}: tensors that a T5 encoder does not have: {', '.join(sorted(tensors))}")

    def place(path, leaf):
        parts = leaves[dotted(path)]
        value = np.stack(parts) if dotted(path).startswith("blocks.") else parts[0]
        if value.shape != leaf.shape:
            raise Refused(f"{directory}: {dotted(path)} has shape {value.shape}, the configuration says {leaf.shape}")
        return jnp.asarray(value, jnp.float32)

    return jax.tree_util.tree_map_with_path(place, like)


def save_t5(encoder: T5Encoder, config: Mapping, directory: Path):
    """Write an encoder as `load_t5` and Hugging Face read it."""
    leaves = {dotted(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(encoder)}
    tensors = {}
    for name, key, i, transposed in t5_tensors(encoder):
        value = leaves[key] if i is None else leaves[key][i]
        tensors[name] = np.ascontiguousarray(value.T if transposed else value)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")


# Our leaf -> its name in the released Flax tree. Under `blocks` one stacked leaf gathers blocks_0, blocks_1, ...
RELEASED_NAMES = {
    "self_cond.weight": "self_cond_proj/kernel",
    "self_cond.bias": "self_cond_proj/bias",
    "squeeze.weight": "text_proj/proj1/kernel",
    "expand.weight": "text_proj/proj2/kernel",
    "expand.bias": "text_proj/proj2/bias",
    "time.tokens": "t_emb_tokens",
    "time.mlp_in.weight": "t_embedder/mlp_0/kernel",
    "time.mlp_in.bias": "t_embedder/mlp_0/bias",
    "time.mlp_out.weight": "t_embedder/mlp_2/kernel",
    "time.mlp_out.bias": "t_embedder/mlp_2/bias",
    "guidance.tokens": "self_cond_cfg_tokens",
    "guidance.mlp_in.weight": "self_cond_cfg_embedder/mlp_0/kernel",
    "guidance.mlp_in.bias": "self_cond_cfg_embedder/mlp_0/bias",
    "guidance.mlp_out.weight": "self_cond_cfg_embedder/mlp_2/kernel",
    "guidance.mlp_out.bias": "self_cond_cfg_embedder/mlp_2/bias",
    "mode": "mode_tokens",
    "blocks.attend.norm.weight": "blocks_{}/norm1/weight",
    "blocks.attend.qkv.weight": "blocks_{}/attn/qkv/kernel",
    "blocks.attend.qkv.bias": "blocks_{}/attn/qkv/bias",
    "blocks.attend.q_norm.weight": "blocks_{}/attn/q_norm/weight",
    "blocks.attend.k_norm.weight": "blocks_{}/attn/k_norm/weight",
    "blocks.attend.out.weight": "blocks_{}/attn/proj/kernel",
    "blocks.attend.out.bias": "blocks_{}/attn/proj/bias",
    "blocks.mlp.norm.weight": "blocks_{}/norm2/weight",
    "blocks.mlp.gate_up.weight": "blocks_{}/mlp/w12/kernel",
    "blocks.mlp.gate_up.bias": "blocks_{}/mlp/w12/bias",
    "blocks.mlp.down.weight": "blocks_{}/mlp/w3/kernel",
    "blocks.mlp.down.bias": "blocks_{}/mlp/w3/bias",
    "x_norm.weight": "final_layer/norm_final/weight",
    "x_head.weight": "final_layer/linear/kernel",
    "x_head.bias": "final_layer/linear/bias",
    "decode_head.weight": "proj_kernel",
    "decode_head.bias": "proj_bias",
    "unembed.weight": "unembed_kernel",
    "unembed.bias": "unembed_bias",
}


def from_released(like: ELF, weights: Mapping[str, np.ndarray]) -> ELF:
    """`like` with the released weights, given under their Flax paths. Every weight must be there and fit.

    Released RoPE pairs neighbouring channels of a head and ours its halves, so the channels of q and k change order.
    """
    d = like.blocks.attend.q_norm.weight.shape[-1]
    halves = np.r_[0:d:2, 1:d:2]

    def fetch(path, leaf):
        key = dotted(path)
        name = RELEASED_NAMES[key]
        if "{}" in name:
            value = np.stack([weights[name.format(i)] for i in range(like.depth)])
        else:
            value = weights[name]
        if key.startswith(("blocks.attend.q_norm", "blocks.attend.k_norm")):
            value = value[..., halves]
        if key.startswith("blocks.attend.qkv"):
            q, k, v = np.split(value.reshape(*value.shape[:-1], -1, d), 3, axis=-2)
            value = np.concatenate([q[..., halves], k[..., halves], v], axis=-2)
        return jnp.asarray(np.reshape(value, leaf.shape), leaf.dtype)

    arrays, static = eqx.partition(like, eqx.is_array)
    return eqx.combine(jax.tree_util.tree_map_with_path(fetch, arrays), static)
