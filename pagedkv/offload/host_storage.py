"""Pages in host memory, and the copies between them and a device.

A host page is one run of bytes for each part of a page, all layers together, in memory that is
taken when it is first needed: pinned if the device is a card, else plain. On a card copies run on
their own stream. This stream waits for work that was launched before the copy, and later work waits
only for the part of the copy that it depends on: pages that were copied out may be overwritten once
they are read, pages that were copied in may be read once they are written. Copies of one cache
follow each other, so a host page can be reused at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.storage.dense import DenseStorage
from pagedkv.storage.memory import runs_of

from .rate import Rate

# Bytes of device memory that a copy may borrow: the cache may have taken nearly all memory. The
# number was not tuned: at 25 GB/s a chunk takes some 3 ms, hundreds of times as long as its calls.
CHUNK = 64 << 20


class HostStorage:
    """The bytes of host pages.

    Args:
        storage: the device's pages, which are copied.
        num_pages: by group and kind, how many host pages there are.
    """

    def __init__(self, storage: DenseStorage, num_pages: Sequence[Sequence[int]]) -> None:
        self._storage = storage
        self._num_pages = num_pages
        self._slabs: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._on_card = storage.device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(storage.device) if self._on_card else None
        self.out, self.into = Rate(self._on_card), Rate(self._on_card)  # bytes in seconds

    @property
    def nbytes(self) -> int:
        """Bytes of all host pages, taken or not."""
        counts = enumerate(self._num_pages)
        return sum(n * self.page_bytes(g, k) for g, kinds in counts for k, n in enumerate(kinds))

    def take(self) -> None:
        """Takes the memory of all host pages now.

        Raises:
            MemoryError: there is too little.
        """
        for group, kinds in enumerate(self._num_pages):
            for kind in range(len(kinds)):
                self._slab(group, kind)

    def page_bytes(self, group: int, kind: int) -> int:
        """Bytes of one host page."""
        layout = self._storage.layout(group, kind, 1, self._storage.page_size)
        return sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in layout.values())

    def keep(self, group: int, kind: int, pages: Ints, hosts: Ints) -> None:
        """Copies device pages, counted within their group, to host pages of their kind.

        Raises:
            MemoryError: there is no memory for host pages.
        """
        slabs, caller = self._slab(group, kind), self._current()
        pages, hosts = _in_order(pages, hosts)
        with self._copying(), self.out(pages.size * self.page_bytes(group, kind)):
            for part in self._chunks(group, kind, pages.size):
                taken = self._storage.take_out(group, pages[part], kind, self._storage.device)
                by_page = {name: x.transpose(0, 1).contiguous() for name, x in taken.items()}
                if self._on_card and part.stop >= pages.size:
                    caller.wait_event(self._stream.record_event())
                for at, here in runs_of(hosts[part]):
                    for name, slab in slabs.items():
                        slab[at].copy_(by_page[name][here], non_blocking=True)

    def bring(self, group: int, kind: int, pages: Ints, hosts: Ints) -> None:
        """Copies host pages back to device pages; arguments as for `keep`."""
        slabs = self._slab(group, kind)
        pages, hosts = _in_order(pages, hosts)
        with self._copying(), self.into(pages.size * self.page_bytes(group, kind)):
            for part in self._chunks(group, kind, pages.size):
                parts = {}
                for name, slab in slabs.items():
                    shape = (hosts[part].size, *slab.shape[1:])
                    new = torch.empty(shape, dtype=slab.dtype, device=self._storage.device)
                    for at, here in runs_of(hosts[part]):
                        new[here].copy_(slab[at], non_blocking=True)
                    parts[name] = new.transpose(0, 1)
                self._storage.put_in(group, pages[part], parts, kind)
        if self._on_card:
            self._current().wait_stream(self._stream)

    def _slab(self, group: int, kind: int) -> dict[str, Tensor]:
        """Returns the host pages by part, `[H, L, ...]`; allocates them at first."""
        if (group, kind) not in self._slabs:
            count, slabs = self._num_pages[group][kind], {}
            layout = self._storage.layout(group, kind, 1, self._storage.page_size)
            try:
                with torch.inference_mode(False):  # must be usable outside of it, too
                    for name, (dtype, (layers, _, *rest)) in layout.items():
                        shape = (count, layers, *rest)
                        slabs[name] = torch.empty(
                            shape, dtype=dtype, device="cpu", pin_memory=self._on_card
                        )
            except RuntimeError as error:  # torch raises this if memory runs out
                raise MemoryError(f"host_tokens: {error}") from error
            self._slabs[group, kind] = slabs
        return self._slabs[group, kind]

    def _chunks(self, group: int, kind: int, count: int) -> Iterator[slice]:
        step = max(1, CHUNK // (2 * self.page_bytes(group, kind)))
        return (slice(at, at + step) for at in range(0, count, step))

    def _copying(self) -> Any:
        """Returns a context whose work runs on the copy stream, behind all work launched so far."""
        if not self._on_card:
            return nullcontext()
        self._stream.wait_stream(self._current())
        return torch.cuda.stream(self._stream)

    def _current(self) -> Any:
        """Returns the stream that the caller works on."""
        return torch.cuda.current_stream(self._storage.device) if self._on_card else None


def _in_order(pages: Ints, hosts: Ints) -> tuple[Ints, Ints]:
    """Returns both in the order of host pages, so that neighbours are copied together.

    A pool hands out the pages that were freed last first: one copy for each of them keeps a card
    busy for 0.7 of the link.
    """
    order = np.argsort(hosts)
    return pages[order], hosts[order]
