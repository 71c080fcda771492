"""Networks that others trained, read without their frameworks: released ELF weights."""

from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from elf import ELF

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
    "blocks.norm1.weight": "blocks_{}/norm1/weight",
    "blocks.attend.qkv.weight": "blocks_{}/attn/qkv/kernel",
    "blocks.attend.qkv.bias": "blocks_{}/attn/qkv/bias",
    "blocks.attend.q_norm.weight": "blocks_{}/attn/q_norm/weight",
    "blocks.attend.k_norm.weight": "blocks_{}/attn/k_norm/weight",
    "blocks.attend.out.weight": "blocks_{}/attn/proj/kernel",
    "blocks.attend.out.bias": "blocks_{}/attn/proj/bias",
    "blocks.norm2.weight": "blocks_{}/norm2/weight",
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
    """`like` with the released weights, given under their Flax paths. Every weight must be there and fit."""

    def fetch(path, leaf):
        name = RELEASED_NAMES[jax.tree_util.keystr(path, simple=True, separator=".")]
        if "{}" in name:
            value = np.stack([weights[name.format(i)] for i in range(like.depth)])
        else:
            value = weights[name]
        return jnp.asarray(np.reshape(value, leaf.shape), leaf.dtype)

    arrays, static = eqx.partition(like, eqx.is_array)
    return eqx.combine(jax.tree_util.tree_map_with_path(fetch, arrays), static)
