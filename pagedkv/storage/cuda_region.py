"""Pages in device memory that grow in place: CUDA's virtual memory, through cuda-bindings.

A tensor is one reservation of addresses for all pages of all layers. Memory comes in chunks of the
device's granularity, mostly 2 MiB: a chunk is mapped when the first page in it begins to exist, and
unmapped when the last one goes, so growths by less than a chunk share it. A layer begins at a
chunk. But layers smaller than a chunk lie close together: then nearly every chunk holds some
layer's first page, so such a tensor is mapped whole from the start. Separate chunks took more.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class VirtualRegion:
    """A tensor in device memory whose first pages exist; see `memory.Region`.

    Raises:
        MemoryError: no room for its addresses, or for the first pages.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pages: int
    ) -> None:
        layers, most, *page = shape
        self._page = math.prod(page) * dtype.itemsize
        layer = most * self._page
        chunk = _granularity(device)
        apart = layer >= chunk
        stride = -(-layer // chunk) * chunk if apart else layer
        self._memory = _Memory(-(-layers * stride // chunk), chunk, device)
        # A row of chunks is a layer or, where layers lie close together, all of them.
        self._row = stride // chunk if apart else self._memory.chunks
        self._apart = apart
        self.pages = 0
        self.resize(pages)
        values = self._memory.tensor()[: layers * stride].view(dtype).view(layers, -1)
        self.tensor = values[:, : layer // dtype.itemsize].unflatten(1, shape[1:])

    def cost(self, pages: int) -> int:
        return sum(map(len, self._between(self.pages, pages))) * self._memory.chunk

    def resize(self, pages: int) -> None:
        new, gone = self._between(self.pages, pages), self._between(pages, self.pages)
        if gone:
            self.pages = pages  # first: these pages stay good even if the next calls fail
            torch.cuda.synchronize(self._memory.device)  # running kernels may use pages that go
            self._memory.unmap(gone)
        self._memory.map(new)
        self.pages = pages

    def release(self, first: int, stop: int) -> None:
        """Does nothing: device memory that was given back would not return when it is written."""

    def _between(self, few: int, many: int) -> list[range]:
        """Returns, as a run for each row, the chunks that only the larger number of pages takes."""
        start, stop = self._taken(few), self._taken(many)
        rows = range(0, self._memory.chunks, self._row)
        return [range(row + start, row + stop) for row in rows] if stop > start else []

    def _taken(self, pages: int) -> int:
        """Counts the chunks of a row that `pages` pages take."""
        whole = pages and not self._apart
        return self._row if whole else -(-pages * self._page // self._memory.chunk)


class _Memory:
    """Addresses of chunks, some of which are mapped; the tensor on them keeps it alive.

    Raises:
        MemoryError: there are no addresses left.
    """

    def __init__(self, chunks: int, chunk: int, device: torch.device) -> None:
        self.chunks = chunks
        self.chunk = chunk  # bytes
        self.device = device
        self._start = int(_call("cuMemAddressReserve", chunks * chunk, chunk, 0, 0))
        self._mapped: set[int] = set()
        rest = self._start, chunks, chunk, self._mapped, device
        # At exit other code may still use the memory; it ends with the process.
        weakref.finalize(self, _free, *rest).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """All addresses, mapped or not, as bytes."""
        data = self._start, False
        return {"version": 3, "shape": (self.chunks * self.chunk,), "typestr": "|u1", "data": data}

    def tensor(self) -> Tensor:
        """Returns `[bytes]` on all addresses, mapped or not; the tensor keeps this object alive."""
        tensor = torch.as_tensor(self, device=self.device)
        assert tensor.data_ptr() == self._start, "torch made a copy"
        return tensor

    def map(self, runs: Sequence[range]) -> None:
        """Puts memory behind runs of chunks; if it raises, behind none of them."""
        try:
            for run in runs:
                for index in run:
                    if index not in self._mapped:
                        self._map(index)
                size = len(run) * self.chunk
                _call("cuMemSetAccess", self._address(run.start), size, [_access(self.device)], 1)
        except BaseException:
            self.unmap(runs)
            raise

    def unmap(self, runs: Sequence[range]) -> None:
        """Gives the memory of mapped chunks back to the device."""
        for index in [index for run in runs for index in run if index in self._mapped]:
            _call("cuMemUnmap", self._address(index), self.chunk)
            self._mapped.remove(index)

    def _map(self, index: int) -> None:
        handle = _call("cuMemCreate", self.chunk, _allocation(self.device), 0)
        try:
            _call("cuMemMap", self._address(index), self.chunk, 0, handle, 0)
            self._mapped.add(index)
        finally:
            _call("cuMemRelease", handle)  # a mapping keeps its memory until it is unmapped

    def _address(self, index: int) -> int:
        return self._start + index * self.chunk


def _free(start: int, chunks: int, chunk: int, mapped: set[int], device: torch.device) -> None:
    """Gives back memory and addresses that no tensor uses any more."""
    with contextlib.suppress(RuntimeError):  # a failed device has nothing to give back
        if torch.cuda.is_current_stream_capturing():
            return  # waiting would break the capture; the memory is lost until the process ends
        torch.cuda.synchronize(device)  # running kernels may still use the memory
        for index in mapped:
            _call("cuMemUnmap", start + index * chunk, chunk)
        _call("cuMemAddressFree", start, chunks * chunk)


def why_not(device: torch.device) -> str | None:
    """Says why pages on a CUDA device cannot grow; None if they can."""
    if torch.version.hip:
        return "there is a way for CUDA only, not for ROCm"
    try:
        attributes = _driver().CUdevice_attribute
    except ImportError:
        return "cuda-bindings is not installed"
    _call("cuInit", 0)
    wanted = attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    if not _call("cuDeviceGetAttribute", wanted, _call("cuDeviceGet", device.index)):
        return "its driver offers no virtual memory management"
    return None


# ------------------------------------------------------------------ the driver


def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _call(name: str, *args: Any) -> Any:
    """Calls a function of the driver; MemoryError if memory or addresses run out."""
    driver = _driver()
    status, *results = getattr(driver, name)(*args)
    if status != driver.CUresult.CUDA_SUCCESS:
        out_of_memory = status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        raise (MemoryError if out_of_memory else RuntimeError)(f"{name}: {status.name}")
    return results[0] if results else None


def _granularity(device: torch.device) -> int:
    """Returns the chunk size in bytes: all sizes and addresses are multiples of it."""
    least = _driver().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(_call("cuMemGetAllocationGranularity", _allocation(device), least))


def _allocation(device: torch.device) -> Any:
    """Describes memory of a device for the driver."""
    driver = _driver()
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    _locate(wanted.location, device)
    return wanted


def _access(device: torch.device) -> Any:
    """Describes read and write access of a device for the driver."""
    driver = _driver()
    wanted = driver.CUmemAccessDesc()
    wanted.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    _locate(wanted.location, device)
    return wanted


def _locate(location: Any, device: torch.device) -> None:
    location.type = _driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device.index
