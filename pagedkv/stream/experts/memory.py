"""Memory of experts on a CPU: a module's rows, of which some have memory, and one whole layer.

`RowMemory` has addresses for all rows and memory for some. An evicted row gives its memory to the
row that comes, because reading into new memory takes several times as long: the system handles a
fault for each page, and zeroes it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Container, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pagedkv.stream.arena import HostArena
from pagedkv.stream.weights import Place

PAGE = mmap.PAGESIZE
NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which not every Python has
AS_MAPPED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", NORESERVE)
MAY_MOVE, TO_ADDRESS, LEAVE_MAPPED = 1, 2, 4  # flags of mremap
INTO_A_HOLE = 0x100000  # flag of mmap: at this address, if nothing is mapped there
FAILED = ctypes.c_void_p(-1).value
USUAL_MAPPINGS = 65_530  # Linux's default limit for a process
FEW = 8  # pages: fewer are not moved, because the system makes new ones in the same time


class RowMemory:
    """Addresses for the rows of some tensors, and memory for the rows in use.

    Args:
        places: places of the tensors; each begins on a page.
        nbytes: where the last one ends.
        moves: whether a row's memory may become another's; then each row may become a mapping of
            its own.

    Attributes:
        bytes: all addresses, as bytes.
        tensor: all addresses, as a tensor.

    Raises:
        OSError: there are no such addresses.
    """

    def __init__(self, places: Sequence[Place], nbytes: int, moves: bool) -> None:
        self._places, self._moves = places, moves
        self._map: mmap.mmap | None = mmap.mmap(-1, nbytes, flags=AS_MAPPED)
        self._without_huge_pages(0, nbytes)
        self.bytes = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def move(self, old: int, new: int, used: Container[int]) -> None:
        """Gives the memory of a row to another; neither is in use, and both lose their bytes.

        Args:
            used: rows that are in use.
        """
        for place in self._places if self._moves else ():
            count = _pages_of_a_row(place)
            if count >= FEW:
                first, other = (-(-place.row(row) // PAGE) * PAGE for row in (old, new))
                self._move_pages(first, other, count * PAGE)
        self.give_back(old, used)

    def give_back(self, row: int, used: Container[int]) -> None:
        """Gives back a row's pages except the pages that it shares with rows in use."""
        if self._map is None:  # it was closed within the pass
            return
        for place in self._places:
            begin, width = place.offset, place.row_bytes
            low = (begin + row * width) // PAGE * PAGE
            high = -(-(begin + (row + 1) * width) // PAGE) * PAGE
            before = range((low - begin) // width, row)
            behind = range(row + 1, min(place.shape[0], -(-(high - begin) // width)))
            low += PAGE * any(other in used for other in before)
            high -= PAGE * any(other in used for other in behind)
            if high > low:
                self._map.madvise(mmap.MADV_DONTNEED, low, high - low)

    def close(self) -> None:
        """Gives all memory back as soon as no tensor uses it. Idempotent."""
        self.bytes, self.tensor, self._map = memoryview(b""), torch.empty(0, device="cpu"), None

    def _move_pages(self, source: int, target: int, nbytes: int) -> None:
        """Moves memory to other addresses; the old addresses stay mapped."""
        begin, calls = self.tensor.data_ptr(), _calls()
        if calls is None or self._map is None:
            return
        flags = MAY_MOVE | TO_ADDRESS | LEAVE_MAPPED
        if calls.mremap(begin + source, nbytes, nbytes, flags, begin + target) != FAILED:
            return
        self._moves = False  # the process has no mapping left
        there = (ctypes.c_ubyte * (nbytes // PAGE))()
        if calls.mincore(begin + target, nbytes, there) == 0:
            return
        # The failed call has unmapped the target.
        readable = mmap.PROT_READ | mmap.PROT_WRITE
        found = calls.mmap(begin + target, nbytes, readable, AS_MAPPED | INTO_A_HOLE, -1, 0)
        if found == FAILED:
            raise OSError(
                ctypes.get_errno(), "expert_slots: this process may have no more mappings of memory"
            )
        self._without_huge_pages(target, nbytes)

    def _without_huge_pages(self, begin: int, nbytes: int) -> None:
        """Asks for small pages: a huge page would span rows that have no memory."""
        if self._map is not None:
            with suppress(OSError):  # a system without huge pages
                self._map.madvise(mmap.MADV_NOHUGEPAGE, begin, nbytes)


def _pages_of_a_row(place: Place) -> int:
    """Counts the whole pages that are within each row, wherever it begins.

    The count is the same for all rows, because a move must not cross borders of earlier moves.
    """
    return place.row_bytes // PAGE - bool(place.row_bytes % PAGE)


def mappings_of(places: Sequence[Place]) -> int:
    """Counts the mappings that rows of some tensors become at most, if their memory moves."""
    moved = (place for place in places if _pages_of_a_row(place) >= FEW)
    return sum(place.shape[0] * (2 if place.row_bytes % PAGE else 1) for place in moved)


def moves(nbytes: int) -> bool:
    """Whether memory of rows of `nbytes` moves, if enough mappings are left."""
    return nbytes // PAGE >= FEW and most_mappings() > 0


def most_mappings() -> int:
    """Returns how many mappings all rows may become: half of the process's limit."""
    if _calls() is None:
        return 0
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text()) // 2
    except (OSError, ValueError):
        return USUAL_MAPPINGS // 2


@cache
def _calls() -> Any:
    """Returns Linux's calls if they can move memory; else None."""
    try:
        calls = ctypes.CDLL(None, use_errno=True)
        size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
        calls.mremap.restype = calls.mmap.restype = pointer
        calls.mremap.argtypes = [pointer, size, size, number, pointer]
        calls.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
        calls.mincore.argtypes = [pointer, size, pointer]
    except (OSError, AttributeError):
        return None
    probe = torch.frombuffer(mmap.mmap(-1, 2 * PAGE, flags=AS_MAPPED), dtype=torch.uint8)
    probe[:PAGE] = 1
    begin, flags = probe.data_ptr(), MAY_MOVE | TO_ADDRESS | LEAVE_MAPPED
    moved = calls.mremap(begin, PAGE, PAGE, flags, begin + PAGE) == begin + PAGE
    return calls if moved and not probe[:PAGE].any() and probe[PAGE:].all() else None


class WideMemory:
    """Memory that layers use in turn, so that it is made once and not for each layer.

    Its content is valid only for the layer that filled it last, while this layer computes.
    """

    def __init__(self) -> None:
        self._nbytes = 0
        self._arena: HostArena | None = None

    def reserve(self, nbytes: int) -> None:
        """Makes the memory at least `nbytes` large, from its first use on."""
        self._nbytes = max(self._nbytes, nbytes)

    def writable(self) -> HostArena:
        """Returns the memory, and makes it at the first use."""
        if self._arena is None:
            self._arena = HostArena(self._nbytes)
        return self._arena

    def give_back(self) -> None:
        """Gives the memory back as soon as no tensor uses it. Idempotent."""
        self._arena = None
