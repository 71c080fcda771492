"""Attention in the best form for each platform. All forms compute the same: heads in, joined heads out."""

import dataclasses
from collections.abc import Callable
from functools import partial

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
    on_tpu = partial(by_device, splashed)
    return jax.lax.platform_dependent(q, k, v, tpu=on_tpu, cuda=on_gpu, default=plain)


def attend_biased(q: Heads, k: OtherHeads, v: OtherHeads, bias: Bias) -> Joined:
    """Compute softmax(q kᵀ + bias) v, as in T5, with positions and masks in the bias."""
    if q.shape[-2] % 128 or k.shape[-2] % 128:
        return biased(q, k, v, bias)
    return jax.lax.platform_dependent(q, k, v, bias, tpu=partial(by_device, flashed), default=biased)


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
    """Run a kernel on each device's own rows, or on all rows if they cannot be divided."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or arrays[0].ndim == 3:
        return kernel(*arrays)
    rows = P(mesh.axis_names) if len(arrays[0]) % mesh.size == 0 else P()
    return jax.shard_map(kernel, in_specs=rows, out_specs=rows, check_vma=False)(*arrays)


def whole_part(length: int, most: int) -> int:
    """Find the largest multiple of 128 that divides a length and is not above `most`."""
    return max(size for size in range(128, most + 1, 128) if length % size == 0)


def flashed(q: Heads, k: OtherHeads, v: OtherHeads, bias: Bias) -> Joined:
    """Run JAX's flash kernel, which takes a bias."""
    own, other = (whole_part(a.shape[-2], 512) for a in (q, k))
    names = [field.name for field in dataclasses.fields(flash.BlockSizes)]
    sizes = {name: own if "_q" in name else other for name in names} | dict(block_b=1)
    attended = flash.flash_attention(q, k, v, bias, block_sizes=flash.BlockSizes(**sizes))
    return rearrange(attended, "n heads T d -> n T (heads d)")


def splashed(q: Heads, k: Heads, v: Heads, *, interpret: bool = False) -> Joined:
    """Run JAX's splash kernel, which never writes the scores to memory.

    It needs whole blocks, so the length is padded; segments keep text and padding apart. All keys of a row
    are one block, computed in parts: the queries' gradient is then one piece, not a sum over blocks of keys.
    Positions, not channels, are adjacent in memory: a TPU would pad the channels of a head to 128.
    """
    *_, heads, length, d = q.shape
    padded = -(-length // 128) * 128
    part = whole_part(padded, 1024)
    segment = (jnp.arange(padded) >= length).astype(jnp.int32)
    mask = splash.MultiHeadMask([splash.FullMask((padded, padded))] * heads)
    sizes = dict.fromkeys(("block_q", "block_kv_compute", "block_q_dkv", "block_kv_dkv_compute"), part)
    sizes |= dict.fromkeys(("block_kv", "block_kv_dkv"), padded)
    layouts = dict.fromkeys(("q_layout", "k_layout", "v_layout"), splash.QKVLayout.SEQ_MINOR)
    blocks = splash.BlockSizes(**sizes, **layouts, use_fused_bwd_kernel=True)
    shards = dict(head_shards=1, q_seq_shards=1)
    kernel = splash.make_splash_mha(mask, block_sizes=blocks, **shards, interpret=interpret)

    def one(q, k, v):
        q, k, v = (jnp.pad(a, ((0, 0), (0, padded - length), (0, 0))) for a in (q * d**-0.5, k, v))
        attended = kernel(q, k, v, splash.SegmentIds(segment, segment))
        return rearrange(attended, "heads T d -> T (heads d)")[:length]

    for _ in q.shape[:-3]:
        one = jax.vmap(one)
    positions_last = Layout((*range(q.ndim - 2), q.ndim - 1, q.ndim - 2))
    return one(*(with_layout_constraint(a, positions_last) for a in (q, k, v)))
