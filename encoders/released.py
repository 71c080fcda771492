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
import jax
import msgpack
import numpy as np

from elf import ELF
from encoders.weights import fill
from runtime.errors import UserError, first_line

Tensors = dict[str, np.ndarray]


def read_released(path: Path, part: str = "ema_params1") -> Tensors:
    """Read the EMA weights, or another part, of a released checkpoint of any format, by their Flax paths."""
    kind = "an Orbax checkpoint" if path.is_dir() else "a released checkpoint"
    try:
        if path.is_dir():
            tensors = flat(read_orbax(path, part))
        elif zipfile.is_zipfile(path):
            tensors = from_torch_names(flat(only(read_torch(path), part, path)))
        else:
            tensors = flat(only(read_flax(path), part, path))
    except DAMAGED as error:
        raise UserError(f"{path}: not {kind}, or a damaged one ({first_line(error)})") from None
    if odd := [name for name, value in tensors.items() if value.dtype.kind in "OSU"]:
        raise UserError(f"{path}: not a released checkpoint: {odd[0]} is not a tensor")
    return tensors


# Errors that the readers raise on damaged files and on files of another kind
DAMAGED = (pickle.UnpicklingError, zipfile.BadZipFile, msgpack.exceptions.UnpackException, FileNotFoundError)
DAMAGED += (AttributeError, EOFError, LookupError, MemoryError, TypeError, ValueError)


def only(parts: Any, part: str, path: Path) -> dict:
    if not isinstance(parts, dict) or not isinstance(parts.get(part), dict):
        raise UserError(f"{path}: not a released checkpoint: it has no {part}")
    return parts[part]


def flat(tree: dict) -> Tensors:
    """Flatten nested dictionaries into one by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def read_orbax(path: Path, part: str) -> dict:
    """Read a part into NumPy arrays, as the devices that saved it are not here."""
    import orbax.checkpoint as ocp

    reader = ocp.PyTreeCheckpointer()
    item = {part: only(reader.metadata(path.absolute()).item_metadata.tree, part, path)}
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    return reader.restore(path.absolute(), item=item, restore_args=as_numpy, partial_restore=True)[part]


def widened(bfloat16: np.ndarray) -> np.ndarray:
    """Convert bfloat16, given as uint16, to float32."""
    return (bfloat16.astype(np.uint32) << 16).view(np.float32)


def read_flax(path: Path) -> Any:
    """Read a msgpack map; arrays are extension 1, NumPy scalars extension 3: (shape, type, bytes)."""

    def array(code, packed):
        if code not in (1, 3):
            raise ValueError(f"extension {code}")
        shape, kind, content = msgpack.unpackb(packed)
        if kind == "bfloat16":
            return widened(np.frombuffer(content, np.uint16)).reshape(shape)
        return np.frombuffer(content, kind).reshape(shape)

    return msgpack.unpackb(path.read_bytes(), ext_hook=array, strict_map_key=False)


def read_torch(path: Path) -> Any:
    """Read a zipped pickle, but only tensors and dictionaries of them."""
    with zipfile.ZipFile(path) as archive:
        (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(pickled) as file:
            return TensorReader(archive, file).load()


STORAGES = {"FloatStorage": "f4", "HalfStorage": "f2", "DoubleStorage": "f8", "BFloat16Storage": "bf16"}
STORAGES |= {"LongStorage": "i8", "IntStorage": "i4", "ByteStorage": "u1", "BoolStorage": "?"}


class TensorReader(pickle.Unpickler):
    """Unpickler that builds tensors and dictionaries of them, and nothing else."""

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
}
for ours, name in {
    "self_cond": "self_cond_proj/",
    "expand": "text_proj/proj2/",
    "time.mlp_in": "t_embedder/mlp_0/",
    "time.mlp_out": "t_embedder/mlp_2/",
    "guidance.mlp_in": "self_cond_cfg_embedder/mlp_0/",
    "guidance.mlp_out": "self_cond_cfg_embedder/mlp_2/",
    "blocks.attend.qkv": "blocks_{}/attn/qkv/",
    "blocks.attend.out": "blocks_{}/attn/proj/",
    "blocks.mlp.gate_up": "blocks_{}/mlp/w12/",
    "blocks.mlp.down": "blocks_{}/mlp/w3/",
    "x_head": "final_layer/linear/",
    "decode_head": "proj_",
    "unembed": "unembed_",
}.items():
    RELEASED_NAMES |= {f"{ours}.weight": f"{name}kernel", f"{ours}.bias": f"{name}bias"}


def from_released(like: ELF, tensors: Mapping[str, np.ndarray], where: str = "released weights") -> ELF:
    """Replace the weights of `like` by released ones, given by Flax path. Every weight must be there and fit.

    Released RoPE pairs neighbouring channels of a head, and ours the halves of a head: q and k are reordered.
    """
    tensors = dict(tensors)
    for name in {"t_emb_tokens", "self_cond_cfg_tokens", "mode_tokens"} & tensors.keys():
        if tensors[name].ndim == 3 and len(tensors[name]) == 1:  # an axis of 1 may be in front
            tensors[name] = tensors[name][0]
    model = fill(like, RELEASED_NAMES, tensors, where)
    d = model.blocks.attend.q_norm.weight.shape[-1]
    halves = np.r_[0:d:2, 1:d:2]
    channels = np.arange(model.blocks.attend.qkv.weight.shape[-1]).reshape(3, -1, d)
    channels[:2] = channels[:2, :, halves]

    def norms(model):
        return model.blocks.attend.q_norm.weight, model.blocks.attend.k_norm.weight

    def qkv(model):
        return model.blocks.attend.qkv.weight, model.blocks.attend.qkv.bias

    model = eqx.tree_at(norms, model, replace_fn=lambda weight: weight[..., halves])
    return eqx.tree_at(qkv, model, replace_fn=lambda weight: weight[..., channels.ravel()])
