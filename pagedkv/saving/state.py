"""The recurrent state of a sequence in its file, with a tensor for each tensor of each layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedkv.config import CacheConfig
from pagedkv.pages.states import StateSlots
from pagedkv.storage.states import StateStorage

Layouts = dict[str, tuple[torch.dtype, list[int]]]


def shapes(config: CacheConfig) -> list[Any]:
    """Returns shapes and dtypes of all state layers, as JSON values."""
    return [[[list(size), dtype] for size, dtype in layer.tensors] for layer in config.states]


def take_out(config: CacheConfig, storage: StateStorage, slot: int) -> dict[str, Tensor]:
    """Returns the tensors of one slot by their names in a file."""
    return dict(zip(layouts(config), storage.take_out(slot)))


def found(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a file that belong to a state, by name."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith("state.")}


def put_in(slots: StateSlots, storage: StateStorage, row: int, tensors: list[Tensor]) -> None:
    """Gives a row the state of a file; call `StateSlots.require_slot` first."""
    slot = slots.receive(row)
    try:
        storage.put_in(slot, tensors)
    except BaseException:
        slots.leave(np.asarray([row]))
        raise


def layouts(config: CacheConfig) -> Layouts:
    """Returns dtypes and shapes of a state's tensors by their names in a file, in layer order."""
    return {
        f"state.{i}.{j}": (getattr(torch, dtype), list(size))
        for i, layer in enumerate(config.states)
        for j, (size, dtype) in enumerate(layer.tensors)
    }
