"""Reads and writes slots of a pool of states, for the kernels of one token."""

from __future__ import annotations

import torch
from torch import Tensor

Expected = tuple[Tensor, tuple[int, ...], torch.dtype | None]  # a shape and, if it matters, a dtype


def read_slots(pool: Tensor, source: Tensor) -> Tensor:
    """Reads states `[B, *shape]` from slots `[B]` of a pool `[slots, *shape]`; -1 gives zeros."""
    states, found = pool.new_zeros(len(source), *pool.shape[1:]), source >= 0
    states[found] = pool[source[found]]
    return states


def write_slots(pool: Tensor, target: Tensor, states: Tensor) -> None:
    """Replaces the states in slots `[B]`; drops a state for slot -1."""
    kept = target >= 0
    pool[target[kept]] = states[kept]


def check_tensors(like: str, tensor: Tensor, expected: dict[str, Expected]) -> None:
    """Raises ValueError or TypeError for the first tensor that is not as expected.

    Args:
        like: the name of `tensor`, on whose device all must be.
    """
    device = tensor.device
    for name, (each, shape, dtype) in expected.items():
        if each.shape != shape:
            raise ValueError(f"{name}: expected {list(shape)}, got {list(each.shape)}")
        if each.device != device:
            raise ValueError(f"{name}: expected the device of {like}, {device}, got {each.device}")
        if dtype not in (None, each.dtype):
            raise TypeError(f"{name}: expected {dtype}, got {each.dtype}")
