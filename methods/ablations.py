"""The paper's ablations of ELF: adaLN-Zero for control tokens, a learned table, a separate decoder."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from config import TrainConfig
from corpora.rows import Rows
from data import Embedder, cast
from elf import ELF, Attention, Linear, RMSNorm, Rope, Scalars, ScalarTokens, State, SwiGLU, rope_angles
from encoders.t5 import T5Encoder, t5_config, t5_from_config
from encoders.table import unit
from losses import Batch, decode_loss, logit_normal
from methods import Method

Condition = Float[Array, "*n 1 D"]

# Conditioning by adaLN-Zero (Appendix D.4). The paper gives only the number of parameters: 148M for ELF-B.


class Modulated(eqx.Module):
    """A norm with an output scaled and shifted by the condition."""

    norm: RMSNorm
    scale: Condition
    shift: Condition

    def __call__(self, h: Float[Array, "*n T D"]) -> Float[Array, "*n T D"]:
        return self.norm(h) * (1 + self.scale) + self.shift


class ModulatedBlock(eqx.Module):
    """A block with norms and outputs modulated by the condition; it starts as identity."""

    attend: Attention
    mlp: SwiGLU
    modulation: Linear  # condition -> scale, shift, gate of both halves

    def __init__(self, width: int, heads: int, *, key: PRNGKeyArray):
        k1, k2, k3 = jax.random.split(key, 3)
        self.attend = Attention(width, heads, key=k1)
        self.mlp = SwiGLU(width, key=k2)
        self.modulation = Linear(width, 6 * width, std=0.0, key=k3)

    def __call__(self, h: Float[Array, "*n T D"], c: Condition, rope: Rope) -> Float[Array, "*n T D"]:
        parts = jnp.split(self.modulation(jax.nn.silu(c)), 6, axis=-1)
        scale, shift, gate, scale_mlp, shift_mlp, gate_mlp = parts
        attend = eqx.tree_at(lambda a: a.norm, self.attend, Modulated(self.attend.norm, scale, shift))
        mlp = eqx.tree_at(lambda m: m.norm, self.mlp, Modulated(self.mlp.norm, scale_mlp, shift_mlp))
        h = h + gate * attend(h, rope)
        return h + gate_mlp * mlp(h)


class AdaLNZero(ELF):
    """ELF without control tokens: the sum of time, guidance scale and mode modulates blocks and output."""

    blocks: ModulatedBlock
    modulation: Linear  # condition -> scale and shift of the output, before its norm

    def __init__(self, depth: int, width: int, heads: int, *, key: PRNGKeyArray, **others):
        super().__init__(depth, width, heads, key=key, **others)
        keys = jax.random.split(jax.random.fold_in(key, 1), 5)
        self.time = ScalarTokens(width, tokens=1, key=keys[0])
        self.guidance = ScalarTokens(width, tokens=1, key=keys[1])
        self.mode = 0.02 * jax.random.normal(keys[2], (1, width))
        block_keys = jax.random.split(keys[3], depth)
        self.blocks = eqx.filter_vmap(lambda k: ModulatedBlock(width, heads, key=k))(block_keys)
        self.modulation = Linear(width, 2 * width, std=0.0, key=keys[4])

    def trunk(self, z: State, x_prev: State, t: Scalars, w: Scalars, mode: Scalars) -> Float[Array, "*n L D"]:
        dtype = self.mode.dtype
        h = self.expand(self.squeeze(self.self_cond(jnp.concatenate([z, x_prev], axis=-1).astype(dtype))))
        c = self.time(t) + self.guidance(w) + mode.astype(dtype)[..., None, None] * self.mode
        rope = rope_angles(h.shape[-2], h.shape[-1] // self.blocks.attend.heads, control=0)

        def layer(h, block):
            return block(h, c, rope), None

        layer = jax.checkpoint(layer) if self.remat else layer
        h, _ = jax.lax.scan(layer, h, self.blocks, unroll=self.unroll)
        scale, shift = jnp.split(self.modulation(jax.nn.silu(c)), 2, axis=-1)
        return h * (1 + scale) + shift


# A learned embedding table (Appendix E.3), tied to the last layer of the decoder head


def with_unit_table(model: ELF) -> ELF:
    """Normalise the learned table of a network."""
    return eqx.tree_at(lambda m: m.unembed.weight, model, replace_fn=lambda w: unit(w.T).T)


def keep_unit_table() -> optax.GradientTransformation:
    """Normalise the learned table again after every step; the last part of an optimizer."""

    def update(updates, state, params):
        new = with_unit_table(optax.apply_updates(params, updates))
        change = new.unembed.weight - params.unembed.weight
        return eqx.tree_at(lambda m: m.unembed.weight, updates, change), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def embed_learned(model: ELF, batch: Batch, decode: Bool[Array, " N"]) -> Batch:
    """Embed a batch by the network's own table, which decoder rows train as unembedding only."""
    x = model.unembed.weight.T[batch.s]
    return batch._replace(x=jnp.where(decode[:, None, None], jax.lax.stop_gradient(x), x))


# A separate decoder, trained first, on embeddings of the frozen encoder. ELF then learns to denoise only.


class Decoder(eqx.Module):
    """The mirror of a T5 encoder: equal layers map embeddings to states, an equal table these to logits."""

    body: T5Encoder

    def __call__(self, z: Float[Array, "N L E"]) -> Float[Array, "N L V"]:
        sees = jnp.ones((len(z), z.shape[1], z.shape[1]), bool)
        h = self.body.in_context(z.astype(self.body.embed.dtype), sees)
        return (h @ self.body.embed.T * h.shape[-1] ** -0.5).astype(jnp.float32)


def reconstruction_loss(
    decoder: Decoder, batch: Batch, row: Int[Array, " N"], key: PRNGKeyArray, noise_scale: float
) -> Float[Array, "N L"]:
    """Loss of the separate decoder: cross-entropy of tokens given embeddings, of which a fifth is zeros.

    All draws follow from the key and the rows' numbers.
    """

    def one(row, x):
        k1, k2, k3 = jax.random.split(jax.random.fold_in(key, row), 3)
        p = logit_normal(jax.random.normal(k1, x.shape[:1]), mean=0.5, std=1.0)[:, None]
        hidden = jax.random.bernoulli(k2, 0.2, x.shape[:1])[:, None]
        return jnp.where(hidden, 0.0, p * x + (1 - p) * noise_scale * jax.random.normal(k3, x.shape))

    z = jnp.where(batch.prefix[..., None], batch.x, jax.vmap(one)(row, batch.x))
    return decode_loss(decoder(z), batch.s)


def decoder_method(config: TrainConfig, encoder: T5Encoder, dtype) -> Method:
    """Make the method that trains a separate decoder, a stage before ELF's own."""
    shape = t5_config(encoder)

    def loss(decoder: Decoder, embedder: Embedder, rows: Rows, row: Int[Array, " N"], key: PRNGKeyArray):
        batch = embedder(rows, jnp.zeros(len(row), bool))
        ce = reconstruction_loss(cast(decoder, dtype), batch, row, key, config.decode_noise_scale)
        total = jnp.sum(ce * batch.counts)
        return total, dict(ce=(total, jnp.sum(batch.counts)))

    return Method(lambda key: Decoder(t5_from_config(shape, key)), loss)


class TwoStage(eqx.Module):
    """A denoiser and a separately trained decoder, with the interface of an ELF that does both."""

    denoiser: ELF
    decoder: Decoder

    @property
    def unembed(self) -> Linear:
        return self.denoiser.unembed

    def denoise(self, z, x_prev, t, w) -> Float[Array, "N L E"]:
        return self.denoiser.denoise(z, x_prev, t, w)

    def decode(self, z, w) -> Float[Array, "N L V"]:
        return self.decoder(z)
