"""Muon and AdamW, and the learning rate over time."""

from typing import Literal

import jax
import optax


def warmed_up(peak: float, warmup_steps: int, steps: int, then: Literal["constant", "cosine"]) -> optax.Schedule:
    """Linear from zero to the peak, then constant or along a cosine to zero."""
    warmup = optax.linear_schedule(0.0, peak, max(warmup_steps, 1))
    rest = optax.constant_schedule(peak) if then == "constant" else optax.cosine_decay_schedule(peak, steps - warmup_steps)
    return optax.join_schedules([warmup, rest], [warmup_steps])


def make_optimizer(name: Literal["muon", "adamw"], rate: optax.Schedule, clip: float = 1.0) -> optax.GradientTransformation:
    """Muon for matrices and Adam for the rest, or AdamW for all; gradients clipped by their global norm."""
    if name == "muon":
        update = optax.contrib.muon(rate, muon_weight_dimension_numbers=muon_dimensions)
    else:
        update = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.0)
    return optax.chain(optax.clip_by_global_norm(clip), update)


def muon_dimensions(model):
    """Muon takes every matrix as (in, out), layer by layer where stacked; None (Adam) for biases, norms, tables and tokens."""

    def dimensions(path, leaf):
        names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        is_matrix = names[-1:] == ["weight"] and leaf.ndim == 2 + ("blocks" in names)
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1) if is_matrix else None

    return jax.tree_util.tree_map_with_path(dimensions, model)
