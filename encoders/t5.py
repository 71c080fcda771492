"""Networks that others trained, read without their frameworks: T5 encoders, the GPT-2 judge, released ELF weights."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from safetensors import SafetensorError
from safetensors.flax import load_file
from safetensors.numpy import save_file

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
        return self.in_context(self.embed[s], sees)

    def in_context(self, h: Float[Array, "N L E"], sees: Bool[Array, "N L L"]) -> Float[Array, "N L E"]:
        bias = relative_bias(self.position_bias, sees, self.max_distance)
        h, _ = jax.lax.scan(lambda h, block: (block(h, bias), None), h, self.blocks, unroll=self.unroll)
        return self.norm(h)


# Weights by name. A table gives what others call each of our leaves; under `blocks`, a stacked leaf gathers layers 0, 1, …


def dotted(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def as_they_are(key: str, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return tensor


def fill(like, names: Mapping[str, str], tensors: Mapping[str, np.ndarray], where: str, convert: Callable = as_they_are):
    """`like` with tensors in the place of its leaves. Each must be there and fit, and none may be left over.

    `convert` is told the shape that a leaf should come to; what does not fit it leaves as it is, to be refused here.
    """
    left = set(tensors)

    def part(key, name, shape):
        if name not in tensors:
            raise Refused(f"{where}: it has no tensor {name}")
        left.discard(name)
        value = convert(key, tensors[name], shape)
        if value.shape != shape:
            raise Refused(f"{where}: {name} has shape {value.shape} where {shape} was expected")
        return np.asarray(value, np.float32)

    def leaf_of(path, leaf):
        key = dotted(path)
        name = names[key]
        if "{}" not in name:
            return jnp.asarray(part(key, name, leaf.shape))
        return jnp.stack([part(key, name.format(i), leaf.shape[1:]) for i in range(len(leaf))])

    filled = jax.tree_util.tree_map_with_path(leaf_of, like)
    if left:
        raise Refused(f"{where}: tensors that have no place here: {', '.join(sorted(left)[:5])}")
    return filled


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


def t5_names(encoder: T5Encoder) -> dict[str, str]:
    return T5_NAMES_UNGATED if encoder.blocks.mlp.gate is None else T5_NAMES


def turned(key: str, tensor: np.ndarray, shape: tuple[int, ...] = ()) -> np.ndarray:
    """Hugging Face keeps the matrices of a T5's layers as (out, in)."""
    return tensor.T if key.startswith("blocks.") else tensor


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


def t5_config(encoder: T5Encoder) -> dict:
    """What `t5_from_config` would make the like of an encoder from."""
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


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """The weights of a Hugging Face directory, bfloat16 ones too."""
    try:
        tensors = load_file(directory / "model.safetensors")
    except SafetensorError as error:  # cut off while downloading, or only the pointer of a large file
        raise Refused(f"{directory}/model.safetensors: not whole, or not of that format ({error})") from None
    return {name: np.asarray(tensor) for name, tensor in tensors.items()}


@contextmanager
def configuration(directory: Path) -> Iterator[dict]:
    """What a Hugging Face directory says of its network. What is damaged, or turns out to be missing, is told by name."""
    file = directory / "config.json"
    try:
        yield json.loads(file.read_text())
    except ValueError as error:
        raise Refused(f"{file}: not JSON ({error})") from None
    except (KeyError, TypeError) as error:
        raise Refused(f"{file}: it does not describe a network that is known here ({type(error).__name__}: {error})") from None


def load_t5(directory: Path) -> T5Encoder:
    """The encoder of a Hugging Face T5 directory. Every tensor must be there and fit."""
    with configuration(directory) as config:
        like = t5_like(config, directory)
    tensors = read_tensors(directory)
    tensors = {k: v for k, v in tensors.items() if not k.startswith(("decoder.", "lm_head."))}  # of whole T5s
    tensors.pop("encoder.embed_tokens.weight", None)  # a copy of shared.weight
    return fill(like, t5_names(like), tensors, f"{directory}/model.safetensors", turned)


def t5_like(config: Mapping, directory: Path) -> T5Encoder:
    """The shapes of an encoder, as its configuration tells them."""
    if config.get("model_type") not in ("t5", "mt5") or config.get("feed_forward_proj", "relu") not in ("relu", "gated-gelu"):
        kind = f"{config.get('model_type')}, {config.get('feed_forward_proj')}"
        raise Refused(f"{directory}: not a T5 (its configuration says {kind}), whose layers are relu or gated-gelu")
    return jax.eval_shape(lambda: t5_from_config(config, jax.random.key(0)))


def save_t5(encoder: T5Encoder, directory: Path):
    """Write an encoder as `load_t5` and Hugging Face read it; the configuration last, as a sign that all is there."""
    names, tensors = t5_names(encoder), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(encoder):
        key = dotted(path)
        parts = {names[key].format(i): part for i, part in enumerate(leaf)} if "{}" in names[key] else {names[key]: leaf}
        tensors |= {name: np.ascontiguousarray(turned(key, np.asarray(part))) for name, part in parts.items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(t5_config(encoder), indent=2) + "\n")


class LayerNorm(eqx.Module):
    weight: Float[Array, " n"]
    bias: Float[Array, " n"]

    def __init__(self, n: int):
        self.weight, self.bias = jnp.ones(n), jnp.zeros(n)

    def __call__(self, h: Float[Array, "*lead n"]) -> Float[Array, "*lead n"]:
        return jax.nn.standardize(h, epsilon=1e-5) * self.weight + self.bias


class GPT2Block(eqx.Module):
    norm1: LayerNorm
    qkv: Linear
    out: Linear
    norm2: LayerNorm
    up: Linear
    down: Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        self.norm1, self.norm2 = LayerNorm(width), LayerNorm(width)
        self.qkv, self.out = Linear(width, 3 * width, std=0.02, key=keys[0]), Linear(width, width, std=0.02, key=keys[1])
        self.up, self.down = Linear(width, 4 * width, std=0.02, key=keys[2]), Linear(4 * width, width, std=0.02, key=keys[3])
        self.heads = heads

    def __call__(self, h: Float[Array, "N T D"]) -> Float[Array, "N T D"]:
        q, k, v = rearrange(self.qkv(self.norm1(h)), "N T (three heads d) -> three N T heads d", three=3, heads=self.heads)
        h = h + self.out(rearrange(jax.nn.dot_product_attention(q, k, v, is_causal=True), "N T heads d -> N T (heads d)"))
        return h + self.down(jax.nn.gelu(self.up(self.norm2(h))))


class GPT2(eqx.Module):
    """The judge of generated text: how likely each token is after those before it."""

    embed: Float[Array, "V D"]
    positions: Float[Array, "M D"]
    blocks: GPT2Block  # every leaf stacked over depth
    norm: LayerNorm

    def __init__(self, vocab: int, positions: int, width: int, depth: int, heads: int, *, key: PRNGKeyArray):
        k1, k2, k3 = jax.random.split(key, 3)
        self.embed = 0.02 * jax.random.normal(k1, (vocab, width))
        self.positions = 0.01 * jax.random.normal(k2, (positions, width))
        self.blocks = eqx.filter_vmap(lambda k: GPT2Block(width, heads, key=k))(jax.random.split(k3, depth))
        self.norm = LayerNorm(width)

    def hidden(self, s: Int[Array, "N T"]) -> Float[Array, "N T D"]:
        h = self.embed[s] + self.positions[: s.shape[1]]
        h, _ = jax.lax.scan(lambda h, block: (block(h), None), h, self.blocks)
        return self.norm(h)

    def __call__(self, s: Int[Array, "N T"]) -> Float[Array, "N T V"]:
        """Logits of the token after each."""
        return self.hidden(s) @ self.embed.T

    def nll(self, s: Int[Array, "N T"]) -> Float[Array, "N T-1"]:
        """Negative log-likelihood of every token but the first; logits of 64 positions in memory at a time.

        One position after the other and not one row, as rows are spread over devices.
        """

        def at_position(inputs):
            h, after = inputs
            return optax.softmax_cross_entropy_with_integer_labels(h @ self.embed.T, after)

        return jax.lax.map(at_position, (self.hidden(s)[:, :-1].swapaxes(0, 1), s[:, 1:].T), batch_size=64).T


GPT2_NAMES = {
    "embed": "wte.weight",
    "positions": "wpe.weight",
    "blocks.norm1.weight": "h.{}.ln_1.weight",
    "blocks.norm1.bias": "h.{}.ln_1.bias",
    "blocks.qkv.weight": "h.{}.attn.c_attn.weight",
    "blocks.qkv.bias": "h.{}.attn.c_attn.bias",
    "blocks.out.weight": "h.{}.attn.c_proj.weight",
    "blocks.out.bias": "h.{}.attn.c_proj.bias",
    "blocks.norm2.weight": "h.{}.ln_2.weight",
    "blocks.norm2.bias": "h.{}.ln_2.bias",
    "blocks.up.weight": "h.{}.mlp.c_fc.weight",
    "blocks.up.bias": "h.{}.mlp.c_fc.bias",
    "blocks.down.weight": "h.{}.mlp.c_proj.weight",
    "blocks.down.bias": "h.{}.mlp.c_proj.bias",
    "norm.weight": "ln_f.weight",
    "norm.bias": "ln_f.bias",
}


def load_gpt2(directory: Path) -> GPT2:
    """A Hugging Face GPT-2 directory. Every tensor must be there and fit."""
    with configuration(directory) as config:
        if config.get("model_type") != "gpt2":
            raise Refused(f"{directory}: not a GPT-2 (its configuration says {config.get('model_type')})")
        sizes = [config[name] for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")]
    like = jax.eval_shape(lambda: GPT2(*sizes, key=jax.random.key(0)))
    tensors = {k.removeprefix("transformer."): v for k, v in read_tensors(directory).items()}
    masks = (".attn.bias", ".attn.masked_bias")  # of causal attention, kept as tensors; lm_head is a copy of wte
    tensors = {k: v for k, v in tensors.items() if not k.endswith(masks) and k != "lm_head.weight"}
    return fill(like, GPT2_NAMES, tensors, f"{directory}/model.safetensors")


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


def from_released(like: ELF, tensors: Mapping[str, np.ndarray], where: str = "released weights") -> ELF:
    """`like` with the released weights, given under their Flax paths. Every weight must be there and fit.

    Released RoPE pairs neighbouring channels of a head and ours its halves, so the channels of q and k change order.
    """
    d = like.blocks.attend.q_norm.weight.shape[-1]
    halves = np.r_[0:d:2, 1:d:2]

    def convert(key, tensor, shape):
        if key in ("time.tokens", "guidance.tokens", "mode") and tensor.shape == (1, *shape):
            return tensor[0]
        if tensor.shape != shape:
            return tensor
        if key.startswith(("blocks.attend.q_norm", "blocks.attend.k_norm")):
            return tensor[halves]
        if key.startswith("blocks.attend.qkv"):
            q, k, v = np.split(tensor.reshape(*tensor.shape[:-1], -1, d), 3, axis=-2)
            return np.concatenate([q[..., halves], k[..., halves], v], axis=-2).reshape(tensor.shape)
        return tensor

    return fill(like, RELEASED_NAMES, tensors, where, convert)
