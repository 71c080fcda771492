"""Devices: the mesh, where state and rows live on it, and the processes that share it.

The mesh has two axes. Rows are split over both. `data` holds copies of the weights; `fsdp` splits them. What only the optimizer
and the average need (momentum, averaged weights) is split over both, so no device does work that another one does too.
"""

import glob
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from errors import Refused

ALL = ("data", "fsdp")


def has_accelerator() -> bool:
    """Whether this machine has TPUs or GPUs, found without starting JAX's backends."""
    return any(glob.glob(f"/dev/{kind}") for kind in ("accel[0-9]*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd"))


def join_processes(coordinator: str, processes: int, process_id: int):
    """Join the other processes of a run: named ones, or those that JAX finds on TPU slices and under Slurm's srun."""
    on_tpu = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    in_srun = "SLURM_STEP_NODELIST" in os.environ and int(os.environ.get("SLURM_NTASKS", 1)) > 1
    if coordinator:
        jax.distributed.initialize(coordinator, processes, process_id)
    elif on_tpu or in_srun:
        jax.distributed.initialize()


def is_chief() -> bool:
    """The one process that speaks and writes files by itself."""
    return jax.process_index() == 0


def all_succeeded(success: bool) -> bool:
    """Whether a step went well in every process; also a barrier."""
    if jax.process_count() == 1:
        return success
    return bool(np.all(multihost_utils.process_allgather(np.array(success))))


@contextmanager
def chief_first():
    """What the chief prepares on disk, the others find there. If it fails, so do they."""
    if not is_chief() and not all_succeeded(True):
        raise Refused("process 0 gave up; its message says why")
    success = False
    try:
        yield
        success = True
    finally:
        if is_chief():
            all_succeeded(success)


@contextmanager
def stop_signal() -> Iterator[Callable[[int], bool]]:
    """Whether a SIGTERM (or Ctrl-C) came, as a function of the steps done: processes agree on the step after which they leave."""
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    caught: list[int] = []

    def catch(number, _):
        caught.append(number)
        signal.signal(number, before[number])  # The second time, it acts at once.

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, catch)
    try:
        yield lambda step: bool(caught)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform


def make_mesh(spec: str, batch: int, devices: list | None = None) -> Mesh:
    """`8` or `4x2`: data shards, and the ways in which the weights are split. Devices that are given must all be used."""
    sizes = [int(n) for n in spec.split("x")] if all(n.isdigit() for n in spec.split("x")) else []
    if len(sizes) not in (1, 2) or 0 in sizes:
        raise Refused(f"--mesh {spec}: give one number (data shards, as 64) or two (data x fsdp, as 16x4)")
    use_all = devices is not None or jax.process_count() > 1
    shape, devices = (*sizes, 1)[:2], jax.devices() if devices is None else devices
    wanted, there = int(np.prod(shape)), len(devices)
    if wanted > there or (wanted < there and use_all):
        simulate = f", or simulate them on CPU with XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
        raise Refused(
            f"--mesh {spec} needs {wanted} devices and there are {there} ({devices[0].platform}): use --mesh {there}"
            + simulate * (devices[0].platform == "cpu")
        )
    if batch % wanted:
        raise Refused(f"--batch {batch} does not divide over the {wanted} devices of --mesh {spec}: use a multiple of {wanted}")
    return jax.make_mesh(shape, ALL, axis_types=(AxisType.Auto,) * 2, devices=devices[:wanted])


SMALL = 2**16  # numbers: what has fewer, as biases and norms, is not worth a message of its own


def split(tree, mesh: Mesh, axes: tuple[str, ...]):
    """Shardings that split each leaf over `axes`, along the largest dimension they divide; over fewer axes if there is none.
    Small leaves are not split."""

    def rule(leaf):
        for some in (axes, axes[-1:]) if leaf.size >= SMALL else ():
            ways = int(np.prod([mesh.shape[axis] for axis in some]))
            fitting = [i for i, n in enumerate(leaf.shape) if n % ways == 0]
            if ways > 1 and fitting:
                largest = max(fitting, key=lambda i: leaf.shape[i])
                return NamedSharding(mesh, P(*(some if i == largest else None for i in range(len(leaf.shape)))))
        return NamedSharding(mesh, P())

    return jax.tree.map(rule, tree)


def by_row(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P(ALL))


def everywhere(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def shapes_on(tree, shardings):
    """Shapes and types of arrays, to stand in for them where `shardings` (one for all, or a tree of them) says."""
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings)


def place_rows(arrays, chosen: np.ndarray, mesh: Mesh):
    """The chosen rows of host arrays of whole numbers on the mesh. Each process reads only the rows of its own devices."""

    def place(a):
        shape = (len(chosen), *a.shape[1:])
        return jax.make_array_from_callback(shape, by_row(mesh), lambda index: a[chosen[index[0]]].astype(np.int32))

    return jax.tree.map(place, arrays)


def replicate(tree, mesh: Mesh):
    """A copy of everything on every device, from wherever it is: split over the mesh, or the same in every process."""
    return jax.jit(lambda tree: tree, out_shardings=everywhere(mesh))(tree)


def fetch(tree):
    """Host copies of arrays that may be spread over processes."""
    if jax.process_count() > 1:
        return multihost_utils.process_allgather(tree, tiled=True)
    return jax.tree.map(np.asarray, tree)
