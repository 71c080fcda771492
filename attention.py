"""Attention, by the best means of the platform it is compiled for. All of them compute the same."""

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

Heads = Float[Array, "*n heads T d"]


def attend(q: Heads, k: Heads, v: Heads) -> Heads:
    """softmax(q kᵀ / √d) v, every position seeing every other. Which means is decided when the program is lowered."""
    return jax.lax.platform_dependent(q, k, v, tpu=on_tpu, cuda=on_gpu, default=plain)


def plain(q: Heads, k: Heads, v: Heads) -> Heads:
    scores = (q @ rearrange(k, "... T d -> ... d T")).astype(jnp.float32) * q.shape[-1] ** -0.5
    return jax.nn.softmax(scores).astype(v.dtype) @ v


def on_gpu(q: Heads, k: Heads, v: Heads) -> Heads:
    q, k, v = (rearrange(a, "... heads T d -> ... T heads d") for a in (q, k, v))
    return rearrange(jax.nn.dot_product_attention(q, k, v), "... T heads d -> ... heads T d")


def on_tpu(q: Heads, k: Heads, v: Heads) -> Heads:
    """JAX's splash kernel, which never writes the scores to memory, on the rows of each device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or q.ndim == 3:
        return flash(q, k, v)
    rows = P(mesh.axis_names) if len(q) % mesh.size == 0 else P()
    return jax.shard_map(flash, in_specs=rows, out_specs=rows, check_vma=False)(q, k, v)


def flash(q: Heads, k: Heads, v: Heads, *, interpret: bool = False) -> Heads:
    """The kernel wants whole blocks, so the length is padded to one that has them; segments keep text and padding apart.

    All keys of a row are one block, worked through in parts: the gradient of the queries then comes as one piece, not as one
    for each block of keys that would have to be summed.
    """
    *_, heads, length, d = q.shape
    padded = -(-length // 128) * 128
    part = max(size for size in range(128, 1024 + 1, 128) if padded % size == 0)
    segment = (jnp.arange(padded) >= length).astype(jnp.int32)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([splash.FullMask((padded, padded))] * heads),
        block_sizes=splash.BlockSizes(
            block_q=part,
            block_kv=padded,
            block_kv_compute=part,
            block_q_dkv=part,
            block_kv_dkv=padded,
            block_kv_dkv_compute=part,
            use_fused_bwd_kernel=True,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )

    def one(q, k, v):
        q, k, v = (jnp.pad(a, ((0, 0), (0, padded - length), (0, 0))) for a in (q * d**-0.5, k, v))
        return kernel(q, k, v, splash.SegmentIds(segment, segment))[:, :length]

    for _ in q.shape[:-3]:
        one = jax.vmap(one)
    return one(q, k, v)
