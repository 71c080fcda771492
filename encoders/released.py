"""Checkpoints that the authors released: an Orbax directory, a Flax file or a PyTorch file.

    params = read_released(Path("checkpoint_7"))   # EMA weights by Flax path: {"blocks_0/attn/qkv/kernel": …}

Neither flax nor torch is needed, and nothing in a file is executed: a PyTorch pickle may build tensors only.
"""

import collections
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import msgpack
import numpy as np

from elf import ELF
from encoders.weights import fill
from runtime.errors import UserError, first_line

Tensors = dict[str, np.ndarray]


def read_released(path: Path, part: str = "ema_params1") -> Tensors:
    """Read the EMA weights, or another part, of a released checkpoint of any format, by their Flax paths."""
    if path.is_dir():
        tensors = flat(read_orbax(path, part))
    elif zipfile.is_zipfile(path):
        tensors = from_torch_names(flat(only(read_torch(path), part, path)))
    else:
        tensors = flat(only(read_flax(path), part, path))
    if odd := [name for name, value in tensors.items() if value.dtype.kind in "OSU"]:
        raise UserError(f"{path}: not a released checkpoint: {odd[0]} is not a tensor")
    return tensors


def only(parts: Any, part: str, path: Path) -> dict:
    if not isinstance(parts, dict) or not isinstance(parts.get(part), dict):
        raise UserError(f"{path}: not a released checkpoint: it has no {part}")
    return parts[part]


def flat(tree: dict, prefix: str = "") -> Tensors:
    """Flatten nested dictionaries into one by path."""
    tensors = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        tensors |= flat(value, f"{path}/") if isinstance(value, dict) else {path: np.asarray(value)}
    return tensors


def read_orbax(path: Path, part: str) -> dict:
    """Restore into NumPy leaves, as the devices that saved them are not here."""
    import jax
    import orbax.checkpoint as ocp

    reader = ocp.PyTreeCheckpointer()
    try:
        saved = reader.metadata(path.absolute()).item_metadata.tree
    except (FileNotFoundError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: not an Orbax checkpoint, or a damaged one ({first_line(error)})") from None
    only(saved, part, path)
    item = {part: saved[part]}
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    try:
        return reader.restore(path.absolute(), item=item, restore_args=as_numpy, partial_restore=True)[part]
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"{path}: a damaged Orbax checkpoint ({first_line(error)})") from None


def widened(bfloat16: np.ndarray) -> np.ndarray:
    """Convert bfloat16, given as uint16, to float32."""
    return (bfloat16.astype(np.uint32) << 16).view(np.float32)


def read_flax(path: Path) -> Any:
    """Read a msgpack map; arrays are extension 1, NumPy scalars extension 3: (shape, type, bytes)."""

    def array(code, packed):
        if code not in (1, 3):
            raise ValueError(f"extension {code}")
        shape, kind, content = msgpack.unpackb(packed)
        is_bfloat16 = kind == "bfloat16"
        values = np.frombuffer(content, "uint16" if is_bfloat16 else kind)
        return (widened(values) if is_bfloat16 else values).reshape(shape)

    try:
        return msgpack.unpackb(path.read_bytes(), ext_hook=array, strict_map_key=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        reason = error or "it ends too early"
        raise UserError(f"{path}: not a released checkpoint, or a damaged one ({reason})") from None


STORAGES = {"FloatStorage": "f4", "HalfStorage": "f2", "DoubleStorage": "f8", "BFloat16Storage": "bf16"}
STORAGES |= {"LongStorage": "i8", "IntStorage": "i4", "ByteStorage": "u1", "BoolStorage": "?"}


class TensorReader(pickle.Unpickler):
    """Unpickler that can build tensors and dictionaries of them, and nothing else."""

    def __init__(self, archive: zipfile.ZipFile, file):
        super().__init__(file)
        self.archive, self.root = archive, file.name.removesuffix("/data.pkl")

    def find_class(self, module, name):
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return tensor
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"it needs {module}.{name}, which weights do not need")

    def persistent_load(self, identity):
        _, kind, key, _, _ = identity
        content = self.archive.read(f"{self.root}/data/{key}")
        return widened(np.frombuffer(content, "u2")) if kind == "bf16" else np.frombuffer(content, kind)


def tensor(storage: np.ndarray, offset: int, size: tuple, stride: tuple, *_) -> np.ndarray:
    """Rebuild a tensor as torch's _rebuild_tensor_v2 does; a view that would leave its storage is refused."""
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if min((offset, *size, *stride), default=0) < 0 or (0 not in size and last >= len(storage)):
        raise pickle.UnpicklingError("a tensor reaches beyond its storage")
    steps = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], size, steps, writeable=False)


# Errors of an unpickler on a damaged file
DAMAGED = (pickle.UnpicklingError, zipfile.BadZipFile, AttributeError, EOFError, LookupError, MemoryError)
DAMAGED += (TypeError, ValueError)


def read_torch(path: Path) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(pickled) as file:
                return TensorReader(archive, file).load()
    except DAMAGED as error:
        raise UserError(f"{path}: refused: not PyTorch weights, or a damaged file ({error})") from None


def from_torch_names(tensors: Tensors) -> Tensors:
    """Convert names and layouts of PyTorch to those of Flax."""
    renamed = {}
    for name, value in tensors.items():
        name = name.removeprefix("_orig_mod.").replace("blocks.", "blocks_").replace(".", "/")
        if name.endswith("/weight") and value.ndim == 2:
            name, value = f"{name.removesuffix('weight')}kernel", value.T
        renamed[name] = value
    return renamed


# Our leaf -> name in the released Flax tree
RELEASED_NAMES = {
    "squeeze.weight": "text_proj/proj1/kernel",
    "time.tokens": "t_emb_tokens",
    "guidance.tokens": "self_cond_cfg_tokens",
    "mode": "mode_tokens",
    "blocks.attend.norm.weight": "blocks_{}/norm1/weight",
    "blocks.attend.q_norm.weight": "blocks_{}/attn/q_norm/weight",
    "blocks.attend.k_norm.weight": "blocks_{}/attn/k_norm/weight",
    "blocks.mlp.norm.weight": "blocks_{}/norm2/weight",
    "x_norm.weight": "final_layer/norm_final/weight",
    "decode_head.weight": "proj_kernel",
    "decode_head.bias": "proj_bias",
    "unembed.weight": "unembed_kernel",
    "unembed.bias": "unembed_bias",
}
for ours, name in {
    "self_cond": "self_cond_proj",
    "expand": "text_proj/proj2",
    "time.mlp_in": "t_embedder/mlp_0",
    "time.mlp_out": "t_embedder/mlp_2",
    "guidance.mlp_in": "self_cond_cfg_embedder/mlp_0",
    "guidance.mlp_out": "self_cond_cfg_embedder/mlp_2",
    "blocks.attend.qkv": "blocks_{}/attn/qkv",
    "blocks.attend.out": "blocks_{}/attn/proj",
    "blocks.mlp.gate_up": "blocks_{}/mlp/w12",
    "blocks.mlp.down": "blocks_{}/mlp/w3",
    "x_head": "final_layer/linear",
}.items():
    RELEASED_NAMES |= {f"{ours}.weight": f"{name}/kernel", f"{ours}.bias": f"{name}/bias"}


def from_released(like: ELF, tensors: Mapping[str, np.ndarray], where: str = "released weights") -> ELF:
    """Replace the weights of `like` by released ones, given by Flax path. Every weight must be there and fit.

    Released RoPE pairs neighbouring channels of a head, and ours the halves of a head: q and k are reordered.
    """
    control = ("t_emb_tokens", "self_cond_cfg_tokens", "mode_tokens")  # may have an axis of 1 in front
    tensors = {
        name: value[0] if name in control and value.ndim == 3 and len(value) == 1 else value
        for name, value in tensors.items()
    }
    model = fill(like, RELEASED_NAMES, tensors, where)
    d = model.blocks.attend.q_norm.weight.shape[-1]
    halves = np.r_[0:d:2, 1:d:2]

    def leaves(model):
        attend = model.blocks.attend
        return attend.q_norm.weight, attend.k_norm.weight, attend.qkv.weight, attend.qkv.bias

    def reordered(qkv):
        parts = qkv.reshape(*qkv.shape[:-1], 3, -1, d)
        return jnp.concatenate([parts[..., :2, :, halves], parts[..., 2:, :, :]], axis=-3).reshape(qkv.shape)

    q_norm, k_norm, *qkv = leaves(model)
    return eqx.tree_at(leaves, model, [q_norm[..., halves], k_norm[..., halves], *map(reordered, qkv)])
