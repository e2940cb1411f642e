"""The states of a step: the rows' states before it, and the states that layers hand in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.errors import CorruptCacheError, LayerWritesError
from pagedkv.kernels.sending import sent

# State layer, slots, slots on the device, new states, whether they are donated.
Kept = tuple[int, Ints, Tensor, list[Tensor], bool]


class StateBytes(Protocol):
    """The storage of states, implemented in `storage/states.py`."""

    layers: tuple[Any, ...]
    devices: Sequence[torch.device]

    def read(self, layer: int, slots: Ints) -> list[Tensor]:
        """Returns copies of the states in some slots."""

    def write(
        self, layer: int, slots: Ints, index: Tensor, values: Sequence[Tensor], donate: bool
    ) -> None:
        """Replaces the states in some slots; it takes no memory."""

    def is_poisoned(self, slots: Ints) -> bool:
        """Whether all numbers in some slots are NaN."""


class StepStates:
    """The states that the state layers read and write in one step.

    Args:
        source: `[B]`, the slot of each row before the step; -1 for a row without tokens.
        target: `[B]`, the slot of each row after the step.
    """

    def __init__(self, storage: StateBytes, source: Ints, target: Ints) -> None:
        self.source, self.target = source, target
        self._storage = storage
        self._written: dict[int, list[Tensor]] = {}
        self._donated: set[int] = set()

    def read(self, layer: int) -> list[Tensor]:
        """Returns copies of the states before the step: `[B, *shape]` each."""
        self._require_layer(layer)
        return self._storage.read(layer, self.source)

    def write(self, layer: int, tensors: Sequence[Tensor], donate: bool = False) -> None:
        """Keeps the states after the step until they are stored.

        Args:
            tensors: `[B, *shape]` each.
            donate: whether the next step of these rows may use the tensors themselves.
        """
        self._require_layer(layer)
        if layer in self._written:
            raise LayerWritesError(f"step: state layer {layer} wrote more than once")
        expected = self._storage.layers[layer].tensors
        if len(tensors) != len(expected):
            raise ValueError(f"tensors: expected {len(expected)}, got {len(tensors)}")
        for tensor, (shape, _) in zip(tensors, expected):
            # Without these checks a copy into a slot would fail when the step is half committed.
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                what = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
                raise TypeError(
                    f"tensors: expected dense tensors in state layer {layer}, got {what}"
                )
            if tuple(tensor.shape) != (len(self.source), *shape):
                raise ValueError(
                    f"tensors: expected {[len(self.source), *shape]} in state layer {layer}, got "
                    f"{list(tensor.shape)}"
                )
            if tensor.device != self.device_of(layer):
                raise ValueError(
                    f"tensors: expected device {self.device_of(layer)}, got {tensor.device}"
                )
        self._written[layer] = list(tensors)
        if donate:
            self._donated.add(layer)

    def device_of(self, layer: int) -> torch.device:
        """Returns the device of a state layer."""
        return self._storage.devices[layer]

    def require_written(self) -> None:
        """Raises `LayerWritesError` unless every state layer has written."""
        layers = range(len(self._storage.layers))
        missing = [str(layer) for layer in layers if layer not in self._written]
        if missing:
            raise LayerWritesError(f"step: state layers {', '.join(missing)} wrote nothing")

    def kept(self, accepted: Ints) -> list[Kept]:
        """Returns the states to store, by layer; takes memory if it has to select or cast them.

        Args:
            accepted: `[B]`, how many tokens each row keeps; a row that keeps none stays as it was.
        """
        some = accepted > 0
        if not some.any():
            return []
        rows, slots = some.nonzero()[0].tolist(), self.target[some]
        kept = []
        for layer, tensors in self._written.items():
            chosen = tensors if some.all() else [tensor[rows] for tensor in tensors]
            dtypes = [getattr(torch, dtype) for _, dtype in self._storage.layers[layer].tensors]
            cast = [x.detach().to(dtype) for x, dtype in zip(chosen, dtypes)]
            index = sent(slots, self.device_of(layer))
            kept.append((layer, slots, index, cast, layer in self._donated))
        return kept

    def store(self, kept: Sequence[Kept]) -> None:
        """Stores the states that `kept` returned."""
        for each in kept:
            self._storage.write(*each)

    def check_unwritten(self) -> None:
        """Raises `CorruptCacheError` if a slot that this step took has numbers before `store`."""
        taken = self.target[self.target != self.source]
        if taken.size and not self._storage.is_poisoned(taken):
            raise CorruptCacheError(
                f"one of the state slots {taken.tolist()} was written too early"
            )

    def _require_layer(self, layer: int) -> None:
        last = len(self._storage.layers) - 1
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer <= last:
            raise ValueError(f"layer: expected a state layer 0..{last}, got {layer!r}")
