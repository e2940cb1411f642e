"""The bytes of recurrent states: the tensors of each state layer, with a row for each slot.

Memory is taken when slots are first used, and doubles each time, because one state may be as large
as the pages of thousands of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.config import CacheConfig
from pagedkv.kernels.sending import sent

from .memory import memory_errors

FEWEST = 8  # slots allocated at first


class StateStorage:
    """Tensors of all slots, `[slots, *shape]` for each tensor of each state layer.

    Args:
        devices: the device of each state layer.
        debug: whether to fill unwritten and freed slots with NaN, so that reading one shows.
    """

    def __init__(self, config: CacheConfig, devices: Sequence[torch.device], debug: bool) -> None:
        self.layers: tuple[Any, ...] = config.states
        self.devices, self.debug = devices, debug
        self._most = config.max_states
        self._data = [self._allocate(layer, 0) for layer in range(len(self.layers))]
        self._capacity = 0
        # By layer: the tensors written last, if they were donated, and their slots.
        self._donated: dict[int, tuple[list[Tensor], bytes]] = {}

    def _allocate(self, layer: int, slots: int) -> list[Tensor]:
        fill, device = float("nan") if self.debug else 0.0, self.devices[layer]
        with torch.inference_mode(False):
            return [
                torch.full((slots, *shape), fill, dtype=getattr(torch, dtype), device=device)
                for shape, dtype in self.layers[layer].tensors
            ]

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return sum(tensor.nbytes for layer in self._data for tensor in layer)

    def reserve(self, slots: int) -> None:
        """Takes memory for the first slots.

        Raises:
            MemoryError: there is too little; nothing was changed.
        """
        if slots <= self._capacity:
            return
        capacity = min(self._most, max(FEWEST, slots, 2 * self._capacity))
        for i in range(len(self.layers)):  # layer by layer: two copies of all may not fit
            with memory_errors():
                grown = self._allocate(i, capacity)
            for old, new in zip(self._data[i], grown):
                new[: self._capacity] = old[: self._capacity]
            self._data[i] = grown
        self._capacity = capacity

    def read(self, layer: int, slots: Ints) -> list[Tensor]:
        """Returns copies of the states in some slots, zeros for slot -1: `[n, *shape]` each."""
        donated, where = self._donated.pop(layer, ([], b""))
        # Tensors that are made in inference mode cannot be written to outside of it.
        ours = donated and donated[0].is_inference() <= torch.is_inference_mode_enabled()
        if ours and where == slots.tobytes():
            return donated
        if not self._capacity:
            found = self._allocate(layer, len(slots))
            return [tensor.zero_() for tensor in found]
        index = sent(np.maximum(slots, 0), self.devices[layer])
        found = [tensor.index_select(0, index) for tensor in self._data[layer]]
        if (slots < 0).any():
            fresh = sent(np.flatnonzero(np.asarray(slots) < 0), index.device)
            for tensor in found:
                tensor[fresh] = 0
        return found

    def write(
        self, layer: int, slots: Ints, index: Tensor, values: Sequence[Tensor], donate: bool
    ) -> None:
        """Replaces the states in some slots; it takes no memory.

        Args:
            index: the slots, on the layer's device.
            values: `[n, *shape]` each, in the layer's dtypes.
            donate: nobody else will touch them, so the next `read` may return them.
        """
        self._donated.pop(layer, None)
        for tensor, value in zip(self._data[layer], values):
            if index.device.type == "cpu":  # single copies are three times as fast
                for slot, state in zip(slots.tolist(), value):
                    tensor[slot] = state
            else:
                tensor.index_copy_(0, index, value)
        if donate:
            self._donated[layer] = list(values), slots.tobytes()

    def take_out(self, slot: int) -> list[Tensor]:
        """Copies one slot to host memory: the tensors of all layers, in order.

        Raises:
            MemoryError: there is no memory for the copy.
        """
        with memory_errors(), torch.inference_mode(False):
            return [tensor[slot].to("cpu", copy=True) for layer in self._data for tensor in layer]

    def drop_donated(self) -> None:
        """Releases the tensors that were donated."""
        self._donated.clear()

    def put_in(self, slot: int, tensors: Sequence[Tensor]) -> None:
        """Replaces one slot by the tensors of `take_out`; takes memory for a new slot."""
        self.reserve(slot + 1)
        self.drop_donated()
        every = (tensor for layer in self._data for tensor in layer)
        for tensor, value in zip(every, tensors):
            tensor[slot] = value.to(tensor.device)

    def poison(self, slots: Ints) -> None:
        """Fills slots with NaN."""
        if len(slots):
            self.drop_donated()
        for index, layer in zip(self._everywhere(slots), self._data):
            for tensor in layer:
                tensor[index] = float("nan")

    def is_poisoned(self, slots: Ints) -> bool:
        """Whether all numbers in some slots are NaN."""
        each = zip(self._everywhere(slots), self._data)
        return all(bool(t[index].isnan().all()) for index, layer in each for t in layer)

    def _everywhere(self, slots: Ints) -> list[Tensor]:
        """Returns slots as an index on each state layer's device."""
        index = np.asarray(slots)
        there = {device: sent(index, device) for device in dict.fromkeys(self.devices)}
        return [there[device] for device in self.devices]
