"""Checkpoints that the authors released: an Orbax directory, a Flax file or a PyTorch file, read without flax or torch.

    params = read_released(Path("checkpoint_7"))     # averaged weights under their Flax paths: {"blocks_0/attn/qkv/kernel": …}

Nothing in a file is executed: of a PyTorch pickle, only what builds tensors is understood, and all else is refused.
"""

import collections
import pickle
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np

from errors import Refused

Tensors = dict[str, np.ndarray]


def read_released(path: Path, part: str = "ema_params1") -> Tensors:
    """The averaged weights, or another part, of a released checkpoint of any format, under their Flax paths."""
    if path.is_dir():
        tensors = flat(read_orbax(path, part))
    elif zipfile.is_zipfile(path):
        tensors = from_torch_names(flat(only(read_torch(path), part, path)))
    else:
        tensors = flat(only(read_flax(path), part, path))
    if odd := [name for name, value in tensors.items() if value.dtype.kind in "OSU"]:
        raise Refused(f"{path}: not a released checkpoint: {odd[0]} is not a tensor")
    return tensors


def only(parts: Any, part: str, path: Path) -> dict:
    if not isinstance(parts, dict) or not isinstance(parts.get(part), dict):
        raise Refused(f"{path}: not a released checkpoint: it has no {part}")
    return parts[part]


def flat(tree: dict, before: str = "") -> Tensors:
    """Nested dictionaries as one, by path."""
    found = {}
    for key, value in tree.items():
        found |= flat(value, f"{before}{key}/") if isinstance(value, dict) else {f"{before}{key}": np.asarray(value)}
    return found


def read_orbax(path: Path, part: str) -> dict:
    """From NumPy leaves, as the devices that it was saved on are not here."""
    import jax
    import orbax.checkpoint as ocp

    reader = ocp.PyTreeCheckpointer()
    try:
        saved = reader.metadata(path.absolute()).item_metadata.tree
    except (FileNotFoundError, ValueError, KeyError, AttributeError) as error:
        raise Refused(f"{path}: not an Orbax checkpoint, or a damaged one ({str(error).splitlines()[0][:200]})") from None
    only(saved, part, path)
    item = {part: saved[part]}
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    try:
        return reader.restore(path.absolute(), item=item, restore_args=as_numpy, partial_restore=True)[part]
    except (FileNotFoundError, ValueError) as error:
        raise Refused(f"{path}: a damaged Orbax checkpoint ({str(error).splitlines()[0][:200]})") from None


def read_flax(path: Path) -> Any:
    """A msgpack map; arrays are extension 1, NumPy scalars extension 3: (shape, type, bytes)."""

    def array(code, packed):
        if code not in (1, 3):
            raise ValueError(f"extension {code}")
        shape, kind, content = msgpack.unpackb(packed)
        values = np.frombuffer(content, "uint16" if kind == "bfloat16" else kind)
        if kind == "bfloat16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.reshape(shape)

    try:
        return msgpack.unpackb(path.read_bytes(), ext_hook=array, strict_map_key=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise Refused(f"{path}: not a released checkpoint, or a damaged one ({error or 'it ends too early'})") from None


class Storage(NamedTuple):
    """Where in a PyTorch file the numbers of a tensor are."""

    values: np.ndarray


STORAGES = {"FloatStorage": "f4", "HalfStorage": "f2", "DoubleStorage": "f8", "BFloat16Storage": "bf16"}
STORAGES |= {"LongStorage": "i8", "IntStorage": "i4", "ByteStorage": "u1", "BoolStorage": "?"}


class TensorReader(pickle.Unpickler):
    """Of all that a pickle can ask for, only tensors, and dictionaries of them."""

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
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which weights do not need")

    def persistent_load(self, asked):
        _, kind, key, _, _ = asked
        content = self.archive.read(f"{self.root}/data/{key}")
        if kind == "bf16":
            return Storage((np.frombuffer(content, "u2").astype(np.uint32) << 16).view(np.float32))
        return Storage(np.frombuffer(content, kind))


def tensor(storage: Storage, offset: int, size: tuple, stride: tuple, *_) -> np.ndarray:
    """What torch calls _rebuild_tensor_v2, as NumPy does it; a view that would leave its storage is refused."""
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if min((offset, *size, *stride), default=0) < 0 or (0 not in size and last >= len(storage.values)):
        raise pickle.UnpicklingError("a tensor reaches beyond its storage")
    width = storage.values.itemsize
    return np.lib.stride_tricks.as_strided(storage.values[offset:], size, [step * width for step in stride], writeable=False)


# What an unpickler may raise of a damaged file.
DAMAGED = (pickle.UnpicklingError, zipfile.BadZipFile, AttributeError, EOFError, LookupError, MemoryError, TypeError, ValueError)


def read_torch(path: Path) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(pickled) as file:
                return TensorReader(archive, file).load()
    except DAMAGED as error:
        raise Refused(f"{path}: refused: not a PyTorch checkpoint of weights, or a damaged one ({error})") from None


def from_torch_names(tensors: Tensors) -> Tensors:
    """Names and layouts of PyTorch to those of Flax."""
    renamed = {}
    for name, value in tensors.items():
        name = name.removeprefix("_orig_mod.").replace("blocks.", "blocks_").replace(".", "/")
        if name.endswith("/weight") and value.ndim == 2:
            name, value = f"{name.removesuffix('weight')}kernel", value.T
        renamed[name] = value
    return renamed
