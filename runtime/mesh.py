"""Devices: the mesh, where state and rows live on it, and the processes that share it.

The mesh has two axes, and rows are sharded over both. `data` holds copies of the weights, `fsdp` shards them.
Momentum and EMA weights are sharded over both axes, so no two devices repeat the optimizer's work.
"""

import glob
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from runtime.errors import UserError

ALL = ("data", "fsdp")
SMALL = 2**16  # smaller leaves, such as biases and norms, are not worth a message of their own


def restart_with_huge_pages():
    """Restart with huge pages behind XLA's buffers (Linux on CPU): fewer page faults in every step.

    JAX is kept on the CPU, as libtpu, installed for preflights, would look for TPUs.
    """
    accelerators = ("accel[0-9]*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd")  # JAX is not started to ask it
    on_cpu = not any(glob.glob(f"/dev/{name}") for name in accelerators)
    if sys.platform == "linux" and on_cpu and "GLIBC_TUNABLES" not in os.environ:
        settings = dict(hugetlb=1, mmap_threshold=2**32, trim_threshold=2**33)
        tunables = ":".join(f"glibc.malloc.{name}={value}" for name, value in settings.items())
        environment = {"JAX_PLATFORMS": "cpu"} | os.environ | {"GLIBC_TUNABLES": tunables}
        os.execve(sys.executable, sys.orig_argv, environment)


# Processes


def join_processes(coordinator: str, processes: int, process_id: int):
    """Join the processes of a run by a coordinator, or as JAX finds them on TPU slices and under Slurm."""
    on_tpu = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    in_srun = "SLURM_STEP_NODELIST" in os.environ and int(os.environ.get("SLURM_NTASKS", 1)) > 1
    if coordinator:
        jax.distributed.initialize(coordinator, processes, process_id)
    elif on_tpu or in_srun:
        jax.distributed.initialize()


def is_process_0() -> bool:
    """Tell whether this is the process that prints and writes files."""
    return jax.process_index() == 0


def all_succeeded(success: bool) -> bool:
    """Tell whether all processes succeeded; also a barrier."""
    if jax.process_count() == 1:
        return success
    return bool(np.all(multihost_utils.process_allgather(np.array(success))))


@contextmanager
def process_0_first():
    """Run a block in process 0, then in the others, which find its files. They fail if it failed."""
    if not is_process_0() and not all_succeeded(True):
        raise UserError("process 0 failed; see its message")
    success = False
    try:
        yield
        success = True
    finally:
        if is_process_0():
            all_succeeded(success)


@contextmanager
def stop_signal() -> Iterator[Callable[[int], bool]]:
    """Catch SIGTERM and Ctrl-C; yield a function: steps done -> whether all processes stop here."""
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    caught: list[int] = []

    def catch(number, _):
        caught.append(number)
        signal.signal(number, handlers[number])  # a second signal acts at once

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in handlers:
        signal.signal(number, catch)
    try:
        yield lambda step: bool(caught)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# The mesh


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
