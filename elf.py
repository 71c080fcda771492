"""The ELF network: one transformer that denoises embeddings and, at t = 1, decodes them to tokens.

A sequence of L embeddings of width E goes in, alone or with a batch axis before it (`*n`).

    model = ELF(**SIZES["elf-b"], vocab=32_100, embedding=512, bottleneck=128, key=key)
    x_hat  = model.denoise(z, x_prev, t, w)   # clean-embedding prediction, any t
    logits = model.decode(z, w)               # tokens, at t = 1

The two modes share every weight but the head. Underneath them, `trunk` takes the mode as a number, so a batch
may mix both. Parameters may be float32 or bfloat16: activations follow them; norms and softmax compute in
float32, and heads return it.
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, PRNGKeyArray

from runtime.attention import attend

SIZES = {
    "elf-b": dict(depth=12, width=768, heads=12),
    "elf-m": dict(depth=24, width=1056, heads=16),
    "elf-l": dict(depth=32, width=1280, heads=16),
    "desk-m": dict(depth=4, width=256, heads=4),
    "desk": dict(depth=4, width=128, heads=4),
    "tiny": dict(depth=2, width=48, heads=4),
}
CONTROL_TOKENS = 4  # of each kind: time, guidance scale, mode
DENOISE, DECODE = 0.0, 1.0
# Outputs of the head, and the x that follows: z = t x + (1 - t) e with scaled noise e, and v = x - e.
# The paper does not say how x stays finite at t = 0 if e is predicted: t is clipped as 1 - t in losses.py.
PREDICTIONS = {
    "x": lambda x, z, t: x,
    "v": lambda v, z, t: z + (1 - t) * v,
    "eps": lambda e, z, t: (z - (1 - t) * e) / jnp.maximum(t, 0.05),
}

Rope = tuple[Float[Array, "T half_d"], Float[Array, "T half_d"]]
Scalars = Float[Array, "*n"]
State = Float[Array, "*n L E"]
Hidden = Float[Array, "*n L D"]


class Linear(eqx.Module):
    """h W + b over the last axis, W stored (in, out): Xavier uniform, or normal(`std`) if given."""

    weight: Float[Array, "n_in n_out"]
    bias: Float[Array, " n_out"] | None

    def __init__(self, n_in: int, n_out: int, *, bias=True, std: float | None = None, key: PRNGKeyArray):
        init = jax.nn.initializers.glorot_uniform() if std is None else jax.nn.initializers.normal(std)
        self.weight = init(key, (n_in, n_out))
        self.bias = jnp.zeros(n_out) if bias else None

    def __call__(self, h: Float[Array, "*n n_in"]) -> Float[Array, "*n n_out"]:
        y = jax.lax.platform_dependent(h, self.weight, cpu=flat_matmul, default=jnp.matmul)
        return y if self.bias is None else y + self.bias


def flat_matmul(h: Float[Array, "*n n_in"], weight: Float[Array, "n_in n_out"]) -> Float[Array, "*n n_out"]:
    """Multiply as one matrix product, also in the gradient: faster on CPU. On TPU the reshape may copy."""
    return (h.reshape(-1, h.shape[-1]) @ weight).reshape(*h.shape[:-1], weight.shape[1])


# Cheap functions that the backward pass recomputes from their inputs rather than keep intermediate results.
recomputed = partial(jax.checkpoint, prevent_cse=False)


class RMSNorm(eqx.Module):
    weight: Float[Array, " n"]

    def __init__(self, n: int):
        self.weight = jnp.ones(n)

    @recomputed
    def __call__(self, h: Float[Array, "*lead n"]) -> Float[Array, "*lead n"]:
        h32 = h.astype(jnp.float32)
        h32 = h32 * jax.lax.rsqrt(jnp.mean(h32**2, axis=-1, keepdims=True) + 1e-6)
        return (h32 * self.weight).astype(h.dtype)


@partial(recomputed, static_argnums=3)
def normed_product(
    norm: eqx.Module, layer: Linear, h: Float[Array, "*lead n"], parts: int
) -> tuple[Float[Array, "*lead part"], ...]:
    """Compute layer(norm(h)) in parts: one product on CPU, one a part elsewhere, where cutting would copy."""

    def cut(whole):
        return tuple(jnp.split(whole, parts, axis=-1))

    def one_product(h, layer):
        return cut(layer(h))

    def product_each(h, layer):
        return tuple(h @ w + b for w, b in zip(cut(layer.weight), cut(layer.bias), strict=True))

    return jax.lax.platform_dependent(norm(h), layer, cpu=one_product, default=product_each)


class ScalarTokens(eqx.Module):
    """Control tokens that carry a number: learned vectors plus the number's sinusoidal embedding."""

    tokens: Float[Array, "C D"]
    mlp_in: Linear
    mlp_out: Linear

    def __init__(self, width: int, *, tokens: int = CONTROL_TOKENS, features: int = 256, key: PRNGKeyArray):
        k1, k2, k3 = jax.random.split(key, 3)
        self.tokens = 0.02 * jax.random.normal(k1, (tokens, width))
        self.mlp_in = Linear(features, width, std=0.02, key=k2)
        self.mlp_out = Linear(width, width, std=0.02, key=k3)

    def __call__(self, scalar: Scalars) -> Float[Array, "*n C D"]:
        half = self.mlp_in.weight.shape[0] // 2
        angles = scalar[..., None] * 10_000 ** (-jnp.arange(half) / half)
        features = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1).astype(self.tokens.dtype)
        return self.tokens + self.mlp_out(jax.nn.silu(self.mlp_in(features)))[..., None, :]


def rope_angles(length: int, head_dim: int, control: int) -> Rope:
    """Cosines and sines for text positions 0…L−1; the control tokens before them are not rotated."""
    frequencies = 10_000 ** (-jnp.arange(0, head_dim, 2) / head_dim)
    positions = jnp.concatenate([jnp.zeros(control), jnp.arange(length)])
    return jnp.cos(positions[:, None] * frequencies), jnp.sin(positions[:, None] * frequencies)


def rotate(q: Float[Array, "*n T d"], rope: Rope) -> Float[Array, "*n T d"]:
    """Apply RoPE to the pairs (i, i + d/2). Released code pairs neighbours: other channels, and slower."""
    cos, sin = (r.astype(q.dtype) for r in rope)
    a, b = jnp.split(q, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(eqx.Module):
    """Bidirectional self-attention with qk-norm and RoPE. Padding is attended to, as in the released code."""

    norm: RMSNorm
    qkv: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm
    out: Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, *, key: PRNGKeyArray):
        k1, k2 = jax.random.split(key)
        self.norm = RMSNorm(width)
        self.qkv = Linear(width, 3 * width, key=k1)
        self.q_norm = RMSNorm(width // heads)
        self.k_norm = RMSNorm(width // heads)
        self.out = Linear(width, width, key=k2)
        self.heads = heads

    def __call__(self, h: Float[Array, "*n T D"], rope: Rope) -> Float[Array, "*n T D"]:
        split = partial(rearrange, pattern="... T (heads d) -> ... heads T d", heads=self.heads)
        q, k, v = (split(part) for part in normed_product(self.norm, self.qkv, h, 3))
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        return self.out(attend(q, k, v))


class SwiGLU(eqx.Module):
    norm: RMSNorm
    gate_up: Linear
    down: Linear

    def __init__(self, width: int, *, key: PRNGKeyArray):
        k1, k2 = jax.random.split(key)
        inner = int(4 * width * 2 / 3)
        self.norm = RMSNorm(width)
        self.gate_up = Linear(width, 2 * inner, key=k1)
        self.down = Linear(inner, width, key=k2)

    def __call__(self, h: Float[Array, "*n T D"]) -> Float[Array, "*n T D"]:
        gated = recomputed(lambda gate, up, down: down(jax.nn.silu(gate) * up))
        return gated(*normed_product(self.norm, self.gate_up, h, 2), self.down)


class Block(eqx.Module):
    attend: Attention
    mlp: SwiGLU

    def __init__(self, width: int, heads: int, *, key: PRNGKeyArray):
        k1, k2 = jax.random.split(key)
        self.attend = Attention(width, heads, key=k1)
        self.mlp = SwiGLU(width, key=k2)

    def __call__(self, h: Float[Array, "*n T D"], rope: Rope) -> Float[Array, "*n T D"]:
        h = h + self.attend(h, rope)
        return h + self.mlp(h)


class ELF(eqx.Module):
    self_cond: Linear  # [z, x_prev] -> embedding
    squeeze: Linear | eqx.nn.Identity  # embedding -> bottleneck, if there is one
    expand: Linear  # bottleneck -> hidden
    time: ScalarTokens
    guidance: ScalarTokens
    mode: Float[Array, "C D"]
    blocks: Block  # every leaf stacked over depth
    x_norm: RMSNorm
    x_head: Linear  # hidden -> embedding
    decode_head: Linear  # hidden -> embedding
    unembed: Linear  # embedding -> vocabulary
    prediction: str = eqx.field(static=True)
    depth: int = eqx.field(static=True)
    unroll: int = eqx.field(static=True)
    remat: bool = eqx.field(static=True)

    def __init__(
        self,
        depth: int,
        width: int,
        heads: int,
        *,
        vocab: int,
        embedding: int,
        bottleneck: int,
        prediction: str = "x",
        unroll: int = 1,
        remat: bool = False,
        key: PRNGKeyArray,
    ):
        """Make a network; a bottleneck of 0 is none. `unroll` layers are unrolled in each round of the
        loop over them: to unroll all is faster on CPU, but compiles slowly. `remat` trades time for
        memory."""
        keys = jax.random.split(key, 10)
        self.self_cond = Linear(2 * embedding, embedding, key=keys[0])
        self.squeeze = (
            Linear(embedding, bottleneck, bias=False, key=keys[1]) if bottleneck else eqx.nn.Identity()
        )
        self.expand = Linear(bottleneck or embedding, width, key=keys[2])
        self.time = ScalarTokens(width, key=keys[3])
        self.guidance = ScalarTokens(width, key=keys[4])
        self.mode = 0.02 * jax.random.normal(keys[5], (CONTROL_TOKENS, width))
        self.blocks = eqx.filter_vmap(lambda k: Block(width, heads, key=k))(jax.random.split(keys[6], depth))
        self.x_norm = RMSNorm(width)
        self.x_head = Linear(width, embedding, std=0.0, key=keys[7])
        self.decode_head = Linear(width, embedding, key=keys[8])
        self.unembed = Linear(embedding, vocab, key=keys[9])
        self.prediction, self.depth, self.unroll, self.remat = prediction, depth, unroll, remat

    def trunk(self, z: State, x_prev: State, t: Scalars, w: Scalars, mode: Scalars) -> Hidden:
        """Hidden states of the text positions. `mode` is 0 to denoise and 1 to decode."""
        dtype = self.mode.dtype
        h = self.expand(self.squeeze(self.self_cond(jnp.concatenate([z, x_prev], axis=-1).astype(dtype))))
        control = [self.time(t), self.guidance(w), mode.astype(dtype)[..., None, None] * self.mode]
        rope = rope_angles(h.shape[-2], h.shape[-1] // self.blocks.attend.heads, 3 * CONTROL_TOKENS)

        def layer(h, block):
            return block(h, rope), None

        h = jnp.concatenate([*control, h], axis=-2)
        layer = jax.checkpoint(layer) if self.remat else layer
        h, _ = jax.lax.scan(layer, h, self.blocks, unroll=self.unroll)
        return h[..., 3 * CONTROL_TOKENS :, :]

    def predict(self, h: Hidden, z: State, t: Scalars) -> State:
        """Hidden states at z and t to the clean-embedding prediction x_hat."""
        predicted = self.x_head(self.x_norm(h)).astype(jnp.float32)
        return PREDICTIONS[self.prediction](predicted, z, t[..., None, None])

    def logits(self, h: Hidden) -> Float[Array, "*n L V"]:
        """Hidden states to token logits. The released head has two layers; the paper writes one matrix W."""
        return self.unembed(jax.nn.gelu(self.decode_head(h))).astype(jnp.float32)

    def denoise(self, z: State, x_prev: State, t: Scalars, w: Scalars) -> State:
        return self.predict(self.trunk(z, x_prev, t, w, jnp.full_like(t, DENOISE)), z, t)

    def decode(self, z: State, w: Scalars) -> Float[Array, "*n L V"]:
        return self.logits(self.trunk(z, jnp.zeros_like(z), jnp.ones_like(w), w, jnp.full_like(w, DECODE)))
