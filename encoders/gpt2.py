"""GPT-2, which judges generated text by how likely each token is after those before it."""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from einops import rearrange
from jaxtyping import Array, Float, Int, PRNGKeyArray

from elf import Linear
from encoders.weights import configuration, fill, read_tensors
from runtime.errors import UserError


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
        self.qkv = Linear(width, 3 * width, std=0.02, key=keys[0])
        self.out = Linear(width, width, std=0.02, key=keys[1])
        self.up = Linear(width, 4 * width, std=0.02, key=keys[2])
        self.down = Linear(4 * width, width, std=0.02, key=keys[3])
        self.heads = heads

    def __call__(self, h: Float[Array, "N T D"]) -> Float[Array, "N T D"]:
        qkv = self.qkv(self.norm1(h))
        q, k, v = rearrange(qkv, "N T (three heads d) -> three N T heads d", three=3, heads=self.heads)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(rearrange(attended, "N T heads d -> N T (heads d)"))
        return h + self.down(jax.nn.gelu(self.up(self.norm2(h))))


class GPT2(eqx.Module):
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
        """Compute the logits of the next token at each position."""
        return self.hidden(s) @ self.embed.T

    def nll(self, s: Int[Array, "N T"]) -> Float[Array, "N T-1"]:
        """Compute the negative log-likelihood of every token but the first, 64 positions in memory at a time.

        The loop is over positions and not over rows, as rows are spread over devices.
        """

        def at_position(inputs):
            h, after = inputs
            return optax.softmax_cross_entropy_with_integer_labels(h @ self.embed.T, after)

        return jax.lax.map(at_position, (self.hidden(s)[:, :-1].swapaxes(0, 1), s[:, 1:].T), batch_size=64).T


# Our leaf -> name in a Hugging Face GPT-2
LAYERS = {"norm1": "ln_1", "qkv": "attn.c_attn", "out": "attn.c_proj"}
LAYERS |= {"norm2": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj"}
GPT2_NAMES = {"embed": "wte.weight", "positions": "wpe.weight"}
for part in ("weight", "bias"):
    GPT2_NAMES[f"norm.{part}"] = f"ln_f.{part}"
    GPT2_NAMES |= {f"blocks.{ours}.{part}": f"h.{{}}.{name}.{part}" for ours, name in LAYERS.items()}
UNNEEDED = r".*\.attn\.(masked_)?bias$|.*lm_head\.weight$"  # causal masks, and a copy of wte


def load_gpt2(directory: Path) -> GPT2:
    """Load a Hugging Face GPT-2 directory. Every tensor must be there and fit."""
    with configuration(directory) as config:
        if config.get("model_type") != "gpt2":
            raise UserError(f"{directory}: not a GPT-2 (its configuration says {config.get('model_type')})")
        sizes = [config[name] for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")]
    like = jax.eval_shape(lambda: GPT2(*sizes, key=jax.random.key(0)))
    tensors = read_tensors(directory, UNNEEDED)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return fill(like, GPT2_NAMES, tensors, f"{directory}/model.safetensors")
