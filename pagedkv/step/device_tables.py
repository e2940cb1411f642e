"""The page tables on the device, one row per sequence, and the buffers that send a step.

One packed copy sends all arrays of a step. Two host buffers take turns, so that no step waits for
the previous copy. The device buffers keep their addresses, because captured graphs read them.
`metadata.py` decides what is sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedkv.errors import CorruptCacheError
from pagedkv.pages.tables import PageTables

_handles = itertools.count()


class Lasting:
    """A buffer with a lasting address, and its slices that were made so far.

    Slices are kept because making one costs as much as a small copy.
    """

    MOST = 256  # slices kept at most, which bounds memory if every step has another length

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, pin: bool) -> None:
        with torch.inference_mode(False):  # it lasts, so it must be usable outside of it
            self.whole = torch.empty(size, dtype=dtype, device=device, pin_memory=pin)
        self._slices: dict[tuple[int, int], Tensor] = {}

    def __call__(self, stop: int, start: int = 0) -> Tensor:
        """Returns elements `start .. stop`."""
        view = self._slices.get((start, stop))
        if view is None:
            assert stop <= self.whole.numel()  # a slice would silently be shorter
            if len(self._slices) >= self.MOST:
                self._slices.clear()
            with torch.inference_mode(False):
                view = self._slices[start, stop] = self.whole[start:stop]
        return view


class DeviceTables:
    """The device's copy of the page tables, and the buffers of its steps."""

    def __init__(self, tables: PageTables, device: torch.device) -> None:
        self.device = device
        self.handle = next(_handles)
        first = torch.from_numpy(tables.first_staging - tables.base[:-1])
        self.first_staging = first[:, None].to(device)  # by group, as ids within the group
        rows = tables.tables.shape[1]
        with torch.inference_mode(False):
            self.tables = torch.full(tables.tables.shape, -1, dtype=torch.int32, device=device)
            self._flat = self.tables.view(-1)
        # A step of one token a row needs only these numbers 0, 1, ... as starts and row indices.
        self.counting = Lasting(rows + 1, torch.int64, device, pin=False)
        self.counting32 = Lasting(rows + 1, torch.int32, device, pin=False)
        for count in (self.counting.whole, self.counting32.whole):
            torch.arange(rows + 1, out=count, device=device)
        self.bytes_sent = 0
        self._kept: dict[str, Lasting] = {}
        self._all_kept: dict[str, Tensor] = {}
        starts = torch.from_numpy(tables.base[:-1].astype(np.int32))
        self._starts = starts[:, None, None].to(device) if len(starts) > 1 else None
        self.groups = torch.arange(len(starts), device=device)[:, None]
        self._capacity = 0
        self._turn = 0
        self._sent: list[torch.cuda.Event] = []

    def send(self, parts: list[npt.NDArray[Any]]) -> list[Tensor]:
        """Sends int32 arrays in one copy and returns them as views of one device buffer."""
        total = sum(part.size for part in parts)
        if total > self._capacity:
            self._reserve(2 * total)
        self._turn ^= 1
        host = self._host[self._turn]
        if self._sent:
            self._sent[self._turn].synchronize()  # two steps ago: long done
        np.concatenate(parts, out=self._arrays[self._turn][:total], casting="unsafe")
        self._buffer(total).copy_(host(total), non_blocking=True)
        if self._sent:
            self._sent[self._turn].record(torch.cuda.current_stream(self.device))
        self.bytes_sent = 4 * total
        ends = itertools.accumulate(part.size for part in parts)
        return [self._buffer(end, end - part.size) for part, end in zip(parts, ends)]

    def write(self, where: Tensor, pages: Tensor) -> None:
        """Changes entries of the tables; `where` has flat indices over all groups."""
        self._flat[where] = pages

    def forget(self, absent: list[tuple[int, int]]) -> None:
        """Takes pages that no longer exist out of the tables: rows may have them past their end.

        Args:
            absent: for each group, the first such page and the page behind the last.
        """
        for table, (first, stop) in zip(self.tables, absent):
            table.masked_fill_((table >= first) & (table < stop), -1)

    def check(self, tables: PageTables) -> None:
        """Raises `CorruptCacheError` if a used entry differs from the host's and is not marked."""
        known = self._flat.cpu().numpy() == tables.tables.reshape(-1)
        known[tables.changed.places()] = True
        groups, height, width = tables.tables.shape
        held = np.arange(width) < (tables.num_pages - tables.evicted)[..., None]
        strange = np.argwhere(held & ~known.reshape(groups, height, width))
        if strange.size:
            group, row, place = strange[0].tolist()
            raise CorruptCacheError(
                f"sequence {tables.seqs[row]} has page {tables.tables[group, row, place]} at place "
                f"{place} of group {group}, the device has {int(self.tables[group, row, place])}"
            )

    def keep(self, name: str, value: Tensor, most: int, dtype: torch.dtype | None = None) -> Tensor:
        """Copies a step's tensor to a lasting address, because captured graphs read it there.

        Args:
            most: the largest number of elements in any step.
            dtype: the dtype of the copy; by default the value's.
        """
        if name not in self._kept:
            self._kept[name] = Lasting(most, dtype or value.dtype, self.device, pin=False)
        return self._kept[name](value.numel()).copy_(value)

    def keep_all(self, name: str, values: Tensor, *most: int) -> Tensor:
        """Copies tensors `[groups, ...]` of a step to a lasting address with lasting strides.

        Args:
            most: the largest size of each axis but the first in any step.
        """
        if name not in self._all_kept:
            with torch.inference_mode(False):
                # Kernels want every group's part to begin at a multiple of 16 bytes.
                *sizes, last = most
                shape = len(values), *sizes, -(-last // 4) * 4
                self._all_kept[name] = torch.empty(shape, dtype=values.dtype, device=self.device)
        room = self._all_kept[name]
        for axis, size in enumerate(values.shape[1:], 1):
            room = room.narrow(axis, 0, size)
        return room.copy_(values)

    def rows(self, chosen: Tensor, width: int) -> Tensor:
        """Returns a batch's page tables, with ids within each group: `[groups, B, width]`."""
        tables = self.tables[:, :, :width].index_select(1, chosen)
        return tables if self._starts is None else tables.sub_(self._starts).clamp_(min=-1)

    def kept(self, name: str) -> Lasting:
        """Returns the buffer that `keep` copies to."""
        return self._kept[name]

    def kept_all(self, name: str) -> Tensor:
        """Returns the buffer that `keep_all` copies to."""
        return self._all_kept[name]

    def _reserve(self, capacity: int) -> None:
        """Takes larger buffers; where there is no memory for all of them, the others stay."""
        pin, cpu = self.device.type == "cuda", torch.device("cpu")
        buffer = Lasting(capacity, torch.int32, self.device, pin=False)
        host = [Lasting(capacity, torch.int32, cpu, pin) for _ in range(2)]
        arrays = [half.whole.numpy() for half in host]
        events = [torch.cuda.Event() for _ in range(2)] if pin else []
        self._buffer, self._host, self._arrays, self._sent = buffer, host, arrays, events
        self._capacity = capacity


class Devices(NamedTuple):
    """The tables and pages that steps use on each device of a cache.

    Attributes:
        each: the tables of each device, and the pages of its layers; steps begin on the first
            device.
        of_layer: the index of each layer's device in `each`; None if there is only one device.
    """

    each: Sequence[tuple[DeviceTables, Any]]
    of_layer: dict[int, int] | None
