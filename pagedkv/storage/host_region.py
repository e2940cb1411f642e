"""Pages in host memory that grow in place: addresses first, memory as pages are written.

A tensor is one anonymous mapping. Pages that do not exist are inaccessible, so that a stray write
to one faults at once. Only a missing page that shares a page of the system (mostly 4 KiB) with an
existing one stays accessible.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import mmap
import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch

READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
NONE = 0  # mmap has no name for it
FAILED = ctypes.c_void_p(-1).value


class LazyRegion:
    """A tensor in host memory whose first pages exist; see `memory.Region`.

    Raises:
        MemoryError: no room for its addresses, or for the first pages.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pages: int
    ) -> None:
        layers, most, *page = shape
        self._page = math.prod(page) * dtype.itemsize
        self._layer = most * self._page
        nbytes = layers * self._layer
        self._address = _reserve(nbytes)
        buffer = (ctypes.c_char * nbytes).from_address(self._address)
        # The tensor keeps the buffer alive; at exit other code may still read it.
        weakref.finalize(buffer, _libc().munmap, self._address, nbytes).atexit = False
        self._layers = range(0, nbytes, self._layer)
        self.tensor = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)
        self.pages = 0
        self.resize(pages)

    def cost(self, pages: int) -> int:
        return sum(stop - start for start, stop in self._between(self.pages, pages))

    def resize(self, pages: int) -> None:
        gone = list(self._between(pages, self.pages))
        for start, stop in gone:
            self._call("madvise", start, stop, mmap.MADV_DONTNEED)
            self._call("mprotect", start, stop, NONE)
        try:
            for start, stop in self._between(self.pages, pages):
                self._call("mprotect", start, stop, READ_WRITE)
        except MemoryError:
            for start, stop in self._between(self.pages, pages):
                self._call("mprotect", start, stop, NONE)
            raise
        self.pages = pages

    def release(self, first: int, stop: int) -> None:
        for layer in self._layers:
            start, end = _up(layer + first * self._page), _down(layer + stop * self._page)
            if end > start:
                self._call("madvise", start, end, mmap.MADV_DONTNEED)

    def _between(self, few: int, many: int) -> Iterator[tuple[int, int]]:
        """Yields each layer's bytes that only the larger number of pages takes.

        The bounds are those of system pages; in one of these a layer may end and the next begin.
        """
        for layer in self._layers:
            start = _up(layer + few * self._page) if few else _down(layer)
            stop = min(_up(layer + many * self._page), self._start_of_next(layer))
            if stop > start:
                yield start, stop

    def _start_of_next(self, layer: int) -> int:
        """Returns where the system page with the next layer's begin starts, or the end."""
        after = layer + self._layer
        return _up(after) if after == self._layers.stop else _down(after)

    def _call(self, name: str, start: int, stop: int, argument: int) -> None:
        _call(name, self._address + start, stop - start, argument)


def _up(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _down(nbytes: int) -> int:
    return nbytes // mmap.PAGESIZE * mmap.PAGESIZE


def _reserve(nbytes: int) -> int:
    """Reserves addresses without memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _libc().mmap(None, nbytes, NONE, flags, -1, 0)
    if address == FAILED:
        raise MemoryError(f"no {nbytes:,} bytes of addresses: {os.strerror(ctypes.get_errno())}")
    return address


def _call(name: str, *args: int) -> None:
    if getattr(_libc(), name)(*args):
        number = ctypes.get_errno()
        error = MemoryError if number == errno.ENOMEM else OSError
        raise error(f"{name}: {os.strerror(number)}")


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    libc.mmap.restype = address
    libc.munmap.argtypes = [address, size]
    libc.mprotect.argtypes = libc.madvise.argtypes = [address, size, number]
    return libc
