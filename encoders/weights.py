"""Weights by name: a network is filled with tensors that have other names.

A table maps each of our leaves to a name. A name with {} stands for one tensor a layer, stacked in our leaf.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.flax import load_file

from runtime.errors import UserError
from runtime.files import download


def download_network(name: str, flag: str, more: Sequence[str] = (), *, holding="") -> Path:
    """Return the directory of a Hugging Face network; files in `more` are optional."""
    needed = ["config.json", "model.safetensors"]
    directory = download(name, flag, [*needed, *more], holding=holding)
    for file in needed:
        if not (directory / file).exists():
            raise UserError(f"{flag} {name}: it has no {file}")
    return directory


def dotted(path) -> str:
    """Write the path of a leaf as in `blocks.norm.weight`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def fill(like, names: Mapping[str, str], tensors: Mapping[str, np.ndarray], where: str):
    """Replace the leaves of `like` by tensors. Each must be there and fit, and none may be left over."""
    unused = set(tensors)

    def take(name, shape):
        if name not in tensors:
            raise UserError(f"{where}: it has no tensor {name}")
        if tensors[name].shape != shape:
            raise UserError(f"{where}: {name} has shape {tensors[name].shape} where {shape} was expected")
        unused.discard(name)
        return np.asarray(tensors[name], np.float32)

    def leaf_of(path, leaf):
        name = names[dotted(path)]
        if "{}" not in name:
            return jnp.asarray(take(name, leaf.shape))
        return jnp.stack([take(name.format(i), leaf.shape[1:]) for i in range(len(leaf))])

    filled = jax.tree_util.tree_map_with_path(leaf_of, like)
    if unused:
        raise UserError(f"{where}: tensors that have no place here: {', '.join(sorted(unused)[:5])}")
    return filled


def read_tensors(directory: Path, unneeded: str) -> dict[str, np.ndarray]:
    """Read the weights of a Hugging Face directory, without names that match the pattern `unneeded`."""
    file = directory / "model.safetensors"
    try:
        tensors = load_file(file)  # by JAX, as NumPy has no bfloat16
    except SafetensorError as error:  # cut off while downloading, or only the pointer of a large file
        raise UserError(f"{file}: not whole, or not of that format ({error}): download it again") from None
    return {name: np.asarray(tensor) for name, tensor in tensors.items() if not re.match(unneeded, name)}


@contextmanager
def configuration(directory: Path) -> Iterator[dict]:
    """Read the configuration of a Hugging Face directory; errors raised while it is used name its file."""
    file = directory / "config.json"
    try:
        yield json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file}: not JSON ({error})") from None
    except (KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{file}: it does not describe a network that is known here ({reason})") from None
