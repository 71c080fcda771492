"""Devices: the mesh, and where state and rows live on it.

The mesh has two axes, and rows are sharded over both. `data` holds copies of the weights, `fsdp` shards them.
Momentum and EMA weights are sharded over both axes, so no two devices repeat the optimizer's work.
"""

import math
import re

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from runtime.errors import UserError

ALL = ("data", "fsdp")
SMALL = 2**16  # smaller leaves, such as biases and norms, are not worth a message of their own


def platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform


def make_mesh(spec: str, batch: int, devices: list | None = None) -> Mesh:
    """Make the mesh of `8` or `4x2` devices (data x fsdp). Given devices must all be used."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", spec):
        raise UserError(f"--mesh {spec}: give one number (data shards, as 64) or two (data x fsdp, as 16x4)")
    use_all = devices is not None or jax.process_count() > 1
    devices = devices or jax.devices()
    shape = (*map(int, spec.split("x")), 1)[:2]
    needed, available, kind = math.prod(shape), len(devices), devices[0].platform
    if needed > available or (needed < available and use_all):
        remedy = f"use --mesh {available}"
        if kind == "cpu":
            remedy += f", or simulate them with XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        raise UserError(f"--mesh {spec} needs {needed} devices and there are {available} ({kind}): {remedy}")
    if batch % needed:
        raise UserError(f"--batch {batch}: not a multiple of the {needed} devices of --mesh {spec}")
    return jax.make_mesh(shape, ALL, axis_types=(AxisType.Auto,) * 2, devices=devices[:needed])


def shardings(tree, mesh: Mesh, axes: tuple[str, ...]):
    """Shard each leaf along the largest dimension that `axes`, or the last of them, divide.

    Small leaves are replicated.
    """

    def rule(leaf):
        for chosen in (axes, axes[-1:]) if leaf.size >= SMALL else ():
            ways = math.prod(mesh.shape[axis] for axis in chosen)
            fitting = [i for i, n in enumerate(leaf.shape) if n % ways == 0]
            if ways > 1 and fitting:
                spec = [None] * len(leaf.shape)
                spec[max(fitting, key=lambda i: leaf.shape[i])] = chosen
                return NamedSharding(mesh, P(*spec))
        return NamedSharding(mesh, P())

    return jax.tree.map(rule, tree)


def by_row(mesh: Mesh) -> NamedSharding:
    """Sharding of the first axis over all devices."""
    return NamedSharding(mesh, P(ALL))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding with a copy on every device."""
    return NamedSharding(mesh, P())


def shapes_on(tree, shardings):
    """Take the shapes and types of arrays, with shardings: one for all, or a tree of them."""
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings)


def place_rows(arrays, chosen: np.ndarray, mesh: Mesh):
    """Put the chosen rows of integer host arrays on the mesh; each process reads those of its own devices."""

    def place(a):
        def read(index):
            return a[chosen[index[0]]].astype(np.int32)

        return jax.make_array_from_callback((len(chosen), *a.shape[1:]), by_row(mesh), read)

    return jax.tree.map(place, arrays)


def replicate(tree, mesh: Mesh):
    """Copy arrays to every device, from a sharded tree or from equal copies in every process."""
    return jax.jit(lambda tree: tree, out_shardings=replicated(mesh))(tree)


def to_host(tree):
    """Gather arrays to the host, also where they are sharded over processes."""
    if jax.process_count() > 1:
        return multihost_utils.process_allgather(tree, tiled=True)
    return jax.tree.map(np.asarray, tree)
