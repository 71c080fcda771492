"""Methods on one backbone, corpus and set of metrics: ELF, its ablations, and what it is compared with."""

from collections.abc import Callable
from typing import NamedTuple


class Method(NamedTuple):
    """Network, loss and sampler; the loop, the checkpoints and the reports are the same for all methods."""

    make: Callable
    """key -> network"""
    loss: Callable
    """(network, frozen, rows, row numbers, key) -> summed loss, {name: (sum, count)}"""
    sample: Callable | None = None
    """(network, conditions, row numbers, key, sampler) -> tokens; None for stages that are not sampled"""
