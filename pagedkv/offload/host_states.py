"""Recurrent states in host memory: offloaded sequences that share a state share its copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from pagedkv.arrays import Bools, Ints
from pagedkv.errors import CorruptCacheError
from pagedkv.pages.states import StateSlots
from pagedkv.storage.states import StateStorage


class HostStates:
    """States of offloaded sequences.

    A sequence comes back with the same bits: a state that is still on the device, with the same
    version, is shared there; any other state is copied to a slot, which its owners share.
    """

    def __init__(self, slots: StateSlots, storage: StateStorage) -> None:
        self._slots, self._storage = slots, storage
        self._versions: dict[int, int] = {}  # by row, its state's version; -1: none
        self._promised: dict[int, bool] = {}  # by row: had it a promised slot?
        self._bytes: dict[int, list[Tensor]] = {}  # by version

    def leave(self, rows: Sequence[int]) -> None:
        """Copies the states of sequences, which still keep their slots."""
        slots = self._slots.slot[list(rows)]
        versions = np.where(slots < 0, -1, self._slots.pool.version[slots])
        copied = {
            version: self._storage.take_out(slot)
            for slot, version in dict(zip(slots.tolist(), versions.tolist())).items()
            if version >= 0 and version not in self._bytes
        }
        self._bytes |= copied
        self._versions |= dict(zip(rows, versions.tolist()))
        self._promised |= dict(zip(rows, self._slots.promised[list(rows)].tolist()))

    def require_room(self, rows: Sequence[int], promise: bool) -> None:
        """Raises `OutOfPagesError` unless all of these sequences can come back together.

        Args:
            promise: whether all of them get a promised slot, or only those that had one.
        """
        self._slots.require_return("restore", *self._of(rows, promise))

    def come_back(self, rows: Sequence[int], promise: bool) -> None:
        """Gives sequences their states again, after `require_room`."""
        try:
            for slot, version in self._slots.come_back(*self._of(rows, promise)):
                self._storage.put_in(slot, self._bytes[version])
        except BaseException:
            self._slots.leave(np.asarray(rows))
            raise

    def forget(self, row: int) -> None:
        """Forgets a sequence that came back or is freed, and its copy if no other shares it."""
        version = self._versions.pop(row)
        del self._promised[row]
        if version not in self._versions.values():
            self._bytes.pop(version, None)

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(tensor.nbytes for copy in self._bytes.values() for tensor in copy)

    def check(self, rows: Sequence[int]) -> None:
        """Raises `CorruptCacheError` unless exactly the states of these sequences are here."""
        versions = set(self._versions.values()) - {-1}
        if set(rows) != self._versions.keys() or versions != self._bytes.keys():
            raise CorruptCacheError("host states differ from those of offloaded sequences")

    def _of(self, rows: Sequence[int], promise: bool) -> tuple[Ints, Ints, Bools]:
        versions = np.asarray([self._versions[row] for row in rows])
        promised = np.asarray([promise or self._promised[row] for row in rows])
        return np.asarray(rows), versions, promised
