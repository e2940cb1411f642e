"""Pages whose layers are on several devices: a storage on each, and one storage for all of them.

A page has the same number on every device, and holds there the K and V of the device's layers. So
tables, prefixes and all other bookkeeping are the same as for one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.config import CacheConfig

from .dense import DenseStorage, Parts
from .placement import Placement


class DividedStorage(DenseStorage):
    """The pages of all layers, for callers that move whole pages; layers use their own device's.

    Args:
        make: makes the storage of some layers on a device.
    """

    def __init__(
        self,
        config: CacheConfig,
        placement: Placement,
        make: Callable[[torch.device, tuple[int, ...]], DenseStorage],
    ) -> None:
        self.device, self.page_size, self.groups = placement.home, config.page_size, config.groups
        layers_on = placement.layers_on.items()
        self.parts = {device: make(device, layers) for device, layers in layers_on if layers}
        self.dtype = next(iter(self.parts.values())).dtype
        self.memory: Any = _DividedMemory([part.memory for part in self.parts.values()])
        self.bounds: Any = _DividedBounds(self)
        self._part_of = [self.parts[device] for device in placement.layers]

    def on(self, device: torch.device) -> DenseStorage:
        """Returns the storage of the layers on a device; this object if it has no layer."""
        return self.parts.get(device, self)

    def of_group(self, group: int) -> Iterator[tuple[DenseStorage, list[int]]]:
        """Yields storages that have layers of a group, with their layers' indices in the group."""
        layers = self.groups[group].layers
        for part in self.parts.values():
            if mine := part.groups[group].layers:
                yield part, [layers.index(layer) for layer in mine]

    def layer(self, layer: int) -> tuple[Any, Any]:
        return self._part_of[layer].layer(layer)

    def copy_pages(self, group: int, source: Ints, target: Ints) -> None:
        for part, _ in self.of_group(group):
            part.copy_pages(group, source, target)

    def copy_slots(self, group: int, source: Ints, target: Ints) -> None:
        """See `DenseStorage`."""
        for part, _ in self.of_group(group):
            part.copy_slots(group, source, target)

    def code_pages(self, group: int, source: Ints, target: Ints) -> None:
        for part, _ in self.of_group(group):
            part.code_pages(group, source, target)

    def calibrate(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._part_of[layer].calibrate(layer, k, v)

    def read(self, layer: int, pages: Ints, tokens: int) -> tuple[Tensor, Tensor]:
        """Reads like `DenseStorage.read`; the copies are on the layer's device."""
        return self._part_of[layer].read(layer, pages, tokens)

    def take_out(
        self, group: int, pages: Ints, kind: int = 0, device: torch.device | None = None
    ) -> Parts:
        target = device or torch.device("cpu")
        parts = self.of_group(group)
        return _joined([(part.take_out(group, pages, kind, target), at) for part, at in parts])

    def put_in(self, group: int, pages: Ints, parts: Parts, kind: int = 0) -> None:
        for part, at in self.of_group(group):
            part.put_in(group, pages, _chosen(parts, at), kind)

    def layout(
        self, group: int, kind: int, pages: int, page_size: int
    ) -> dict[str, tuple[torch.dtype, list[int]]]:
        part, _ = next(self.of_group(group))
        layers = len(self.groups[group].layers)
        laid = part.layout(group, kind, pages, page_size)
        return {name: (dtype, [layers, *rest]) for name, (dtype, (_, *rest)) in laid.items()}

    def statics(self, group: int) -> Parts:
        return _joined([(part.statics(group), at) for part, at in self.of_group(group)])

    def adopt(self, group: int, parts: Parts, statics: Parts) -> tuple[Parts, Parts]:
        words, scales = [], []
        for part, at in self.of_group(group):
            both = part.adopt(group, _chosen(parts, at), _chosen(statics, at))
            mine, its = ({name: x.cpu() for name, x in one.items()} for one in both)
            words.append((mine, at))
            scales.append((its, at))
        return _joined(words), _joined(scales)

    def set_statics(self, group: int, statics: Parts) -> None:
        for part, at in self.of_group(group):
            part.set_statics(group, _chosen(statics, at))

    def poison(self, group: int, pages: Tensor, first_slot: int = 0) -> None:
        for part, _ in self.of_group(group):
            part.poison(group, pages.to(part.device), first_slot)

    def is_poisoned(self, group: int, page: int, first_slot: int) -> bool:
        parts = self.of_group(group)
        return all(part.is_poisoned(group, page, first_slot) for part, _ in parts)


def _chosen(parts: Parts, layers: list[int]) -> Parts:
    """Returns the parts of some layers of a group."""
    return {name: part[layers] for name, part in parts.items()}


def _joined(each: Sequence[tuple[Parts, list[int]]]) -> Parts:
    """Joins parts that have some layers of a group each into parts of all its layers."""
    order = np.argsort([i for _, at in each for i in at]).tolist()
    return {name: torch.cat([part[name] for part, _ in each])[order] for name in each[0][0]}


class _DividedBounds:
    """The key bounds of all layers; a layer's call uses the bounds on its own device."""

    def __init__(self, storage: DividedStorage) -> None:
        self._of_group = storage.of_group

    def update(self, group: int, pages: Ints) -> None:
        for part, _ in self._of_group(group):
            part.bounds.update(group, pages)

    def check(self, group: int, pages: Tensor) -> None:
        for part, _ in self._of_group(group):
            part.bounds.check(group, pages.to(part.device))


class _DividedMemory:
    """The memory of all devices, which grows on all of them or on none; see `PageMemory`."""

    def __init__(self, memories: list[Any]) -> None:
        self._memories = memories

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memories)

    def require_resizable(self) -> None:
        for memory in self._memories:
            memory.require_resizable()

    def resize(self, pages: Sequence[int]) -> None:
        before = [memory.pages for memory in self._memories]
        try:
            for memory in self._memories:
                memory.resize(pages)
        except BaseException:
            for memory, count in zip(self._memories, before):
                memory.resize(count)
            raise

    def release(self, group: int, pages: Any) -> None:
        for memory in self._memories:
            memory.release(group, pages)
