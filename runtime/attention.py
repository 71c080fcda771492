"""Attention in the best form for each platform. All forms compute the same: heads in, joined heads out."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

Heads = Float[Array, "*n heads T d"]
OtherHeads = Float[Array, "*n heads S d"]
Bias = Float[Array, "*n heads T S"]
Joined = Float[Array, "*n T D"]


def attend(q: Heads, k: Heads, v: Heads) -> Joined:
    """Compute softmax(q kᵀ / √d) v without a mask. The platform is chosen when the program is lowered."""
    return jax.lax.platform_dependent(q, k, v, tpu=on_tpu, cuda=on_gpu, default=plain)


def attend_biased(q: Heads, k: OtherHeads, v: OtherHeads, bias: Bias) -> Joined:
    """Compute softmax(q kᵀ + bias) v, as in T5, with positions and masks in the bias."""
    if q.shape[-2] % 128 == 0 and k.shape[-2] % 128 == 0:
        return jax.lax.platform_dependent(q, k, v, bias, tpu=biased_on_tpu, default=biased)
    return biased(q, k, v, bias)


def plain(q: Heads, k: Heads, v: Heads) -> Joined:
    return biased(q * q.shape[-1] ** -0.5, k, v, 0.0)


def biased(q: Heads, k: OtherHeads, v: OtherHeads, bias: Bias | float) -> Joined:
    scores = (q @ rearrange(k, "... T d -> ... d T")).astype(jnp.float32) + bias
    return rearrange(jax.nn.softmax(scores).astype(v.dtype) @ v, "... heads T d -> ... T (heads d)")


def on_gpu(q: Heads, k: Heads, v: Heads) -> Joined:
    has_cudnn = q.dtype == jnp.bfloat16 and jax.default_backend() == "gpu"
    q, k, v = (rearrange(a, "... heads T d -> ... T heads d") for a in (q, k, v))
    attended = jax.nn.dot_product_attention(q, k, v, implementation="cudnn" if has_cudnn else "xla")
    return rearrange(attended, "... T heads d -> ... T (heads d)")


def by_device(kernel: Callable, *arrays: Array) -> Joined:
    """Run a kernel on the rows of each device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or arrays[0].ndim == 3:
        return kernel(*arrays)
    rows = P(mesh.axis_names) if len(arrays[0]) % mesh.size == 0 else P()
    return jax.shard_map(kernel, in_specs=rows, out_specs=rows, check_vma=False)(*arrays)


def on_tpu(q: Heads, k: Heads, v: Heads) -> Joined:
    return by_device(splashed, q, k, v)


def biased_on_tpu(q: Heads, k: OtherHeads, v: OtherHeads, bias: Bias) -> Joined:
    return by_device(flashed, q, k, v, bias)


def flashed(q: Heads, k: OtherHeads, v: OtherHeads, bias: Bias) -> Joined:
    """Run JAX's flash kernel, which takes a bias."""
    own, other = (whole_part(a.shape[-2], 512) for a in (q, k))
    sizes = {f.name: own if "_q" in f.name else other for f in dataclasses.fields(flash.BlockSizes)} | dict(
        block_b=1
    )
    return rearrange(
        flash.flash_attention(q, k, v, bias, block_sizes=flash.BlockSizes(**sizes)),
        "n heads T d -> n T (heads d)",
    )


def whole_part(length: int, most: int) -> int:
    """Find the largest multiple of 128 that divides a length and is not above `most`."""
    return max(size for size in range(128, most + 1, 128) if length % size == 0)


def splashed(q: Heads, k: Heads, v: Heads, *, interpret: bool = False) -> Joined:
    """Run JAX's splash kernel, which never writes the scores to memory.

    It needs whole blocks, so the length is padded; segments keep text and padding apart. All keys of a row
    are one block, computed in parts: the gradient of the queries is then one piece, not a sum over blocks of
    keys. Positions, not channels, are adjacent in memory: a head has fewer channels than the 128 that a TPU
    would pad to.
    """
    *_, heads, length, d = q.shape
    padded = -(-length // 128) * 128
    part = whole_part(padded, 1024)
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
            q_layout=splash.QKVLayout.SEQ_MINOR,
            k_layout=splash.QKVLayout.SEQ_MINOR,
            v_layout=splash.QKVLayout.SEQ_MINOR,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )

    def one(q, k, v):
        q, k, v = (jnp.pad(a, ((0, 0), (0, padded - length), (0, 0))) for a in (q * d**-0.5, k, v))
        return rearrange(kernel(q, k, v, splash.SegmentIds(segment, segment)), "heads T d -> T (heads d)")[
            :length
        ]

    for _ in q.shape[:-3]:
        one = jax.vmap(one)
    positions_last = Layout((*range(q.ndim - 2), q.ndim - 1, q.ndim - 2))
    return one(*(with_layout_constraint(a, positions_last) for a in (q, k, v)))
