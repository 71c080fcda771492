"""The processes of a run: how they start, join, agree and stop."""

import glob
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax.experimental import multihost_utils

from runtime.errors import UserError


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
