"""CUDA's virtual memory on a machine without a card: what cuda-bindings has, over host memory.

Addresses are real, and inaccessible until something is mapped and access is given: a cache runs on
them, and a stray read is a fault. Rules are those of the driver's manual; a call that breaks one
gets the driver's answer, and is noted.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
from collections.abc import Iterator
from enum import IntEnum
from typing import Any
from unittest import mock

import torch

from pagedkv.storage import cuda_region as virtual
from pagedkv.storage import host_region as lazy
from pagedkv.storage import memory

DEVICE = torch.device("cuda", 1)
CHUNK = 64 << 10


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_LAUNCH_FAILED = 719


class CUmemAllocationType(IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAllocationGranularity_flags(IntEnum):
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUmemAccess_flags(IntEnum):
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102


class CUmemLocation:
    __slots__ = ("id", "type")


class CUmemAllocationProp:
    __slots__ = ("location", "type")

    def __init__(self) -> None:
        self.location = CUmemLocation()


class CUmemAccessDesc:
    __slots__ = ("flags", "location")

    def __init__(self) -> None:
        self.location = CUmemLocation()


class Opaque:
    """A handle as the driver hands them out: an int only if asked to be one."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __int__(self) -> int:
        return self.value


class BrokenRule(Exception):
    pass


class FakeDriver:
    """Stands for `cuda.bindings.driver`.

    Attributes:
        calls: names of all calls, in order.
        broken: rules that were broken.
        capacity: bytes that may be taken.
        fails: the number of the call, counted from now, that fails, and with what.
        busy: addresses of chunks that launched work may still use.
        capturing: whether a graph is being captured.
    """

    def __init__(self, chunk: int = CHUNK) -> None:
        for kind in (CUresult, CUmemAllocationType, CUmemLocationType, CUmemAccess_flags):
            setattr(self, kind.__name__, kind)
        for kind in (CUmemAllocationGranularity_flags, CUdevice_attribute):
            setattr(self, kind.__name__, kind)
        self.CUmemAllocationProp = CUmemAllocationProp
        self.CUmemAccessDesc = CUmemAccessDesc
        self.chunk = chunk
        self.calls: list[str] = []
        self.broken: list[str] = []
        self.capacity = 1 << 40
        self.fails: tuple[int, CUresult] | None = None
        self.supported = True
        self.capturing = self.ready = False
        self.reserved: dict[int, int] = {}  # bytes, by address
        self.created: set[int] = set()  # handles that are not released
        self.mapped: dict[int, int] = {}  # handles, by address
        self.accessible: set[int] = set()  # addresses, of those mapped
        self.busy: set[int] = set()
        self._sizes: dict[int, int] = {}  # bytes of every handle there ever was

    def __getattr__(self, name: str) -> Any:
        function = getattr(type(self), "_" + name, None)
        if function is None or not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            status = CUresult.CUDA_SUCCESS
            if self.fails is not None:
                count, status = self.fails
                self.fails = (count - 1, status) if count else None
                status = CUresult.CUDA_SUCCESS if count else status
                # A handle is gone whatever the call reports of earlier work.
                if status and name != "cuMemRelease":
                    return status, None
            try:
                results = function(self, *args)
            except BrokenRule as error:
                self.broken.append(f"{name}: {error}")
                return CUresult.CUDA_ERROR_INVALID_VALUE, None
            except MemoryError:
                return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
            return status, *([] if results is None else [results])

        return call

    @property
    def taken(self) -> int:
        """Bytes that a mapping or a handle holds."""
        return sum(self._sizes[handle] for handle in {*self.created, *self.mapped.values()})

    def work(self) -> None:
        """Launches something that uses all there is."""
        self.busy |= self.accessible

    def is_capturing(self) -> bool:
        return self.capturing

    def synchronize(self, device: torch.device) -> None:
        assert device == DEVICE
        assert not self.capturing, "waiting spoils a capture"
        self.calls.append("synchronize")
        self.busy.clear()

    # ---- the functions, with the arguments that they have in cuda-bindings

    def _cuInit(self, flags: int) -> None:
        need(flags == 0, "flags")
        self.ready = True

    def _cuDeviceGet(self, ordinal: int) -> Opaque:
        need(self.ready, "cuInit comes first")
        need(ordinal == DEVICE.index, f"device {ordinal}")
        return Opaque(ordinal)

    def _cuDeviceGetAttribute(self, attrib: CUdevice_attribute, dev: Opaque) -> int:
        need(isinstance(attrib, CUdevice_attribute) and int(dev) == DEVICE.index, "arguments")
        return int(self.supported)

    def _cuMemGetAllocationGranularity(
        self, prop: CUmemAllocationProp, option: CUmemAllocationGranularity_flags
    ) -> int:
        need_device(prop.location)
        need(prop.type is CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, "pinned memory")
        need(isinstance(option, CUmemAllocationGranularity_flags), "option")
        return self.chunk

    def _cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> Opaque:
        need(size > 0 and size % mmap.PAGESIZE == 0, "size of whole pages of the system")
        need(alignment & (alignment - 1) == 0, "alignment by a power of two")
        need(addr == flags == 0, "no hint, no flags")
        need(alignment <= self.chunk, "no more than a chunk is tested")
        # Aligned by hand: a mapping of the system begins at some page.
        start = -(-lazy._reserve(size + self.chunk) // self.chunk) * self.chunk
        self.reserved[start] = size
        return Opaque(start)

    def _cuMemAddressFree(self, ptr: int, size: int) -> None:
        need(self.reserved.get(ptr) == size, "what was reserved")
        need(not any(ptr <= x < ptr + size for x in self.mapped), "nothing mapped")
        del self.reserved[ptr]
        assert lazy._libc().munmap(ptr, size) == 0

    def _cuMemCreate(self, size: int, prop: CUmemAllocationProp, flags: int) -> Opaque:
        self.need_chunks(size)
        need_device(prop.location)
        need(flags == 0, "no flags")
        if self.taken + size > self.capacity:
            raise MemoryError
        handle = 1000 + len(self._sizes)
        self._sizes[handle] = size
        self.created.add(handle)
        return Opaque(handle)

    def _cuMemMap(self, ptr: int, size: int, offset: int, handle: Opaque, flags: int) -> None:
        self.need_chunks(ptr, size)
        need(offset == flags == 0, "no offset, no flags")
        need(int(handle) in self.created, "a handle that is not released")
        need(self._sizes[int(handle)] == size == self.chunk, "all of a chunk")
        need(any(x <= ptr and ptr + size <= x + n for x, n in self.reserved.items()), "reserved")
        need(ptr not in self.mapped, "not mapped yet")
        self.mapped[ptr] = int(handle)

    def _cuMemRelease(self, handle: Opaque) -> None:
        need(int(handle) in self.created, "a handle that is not released")
        self.created.remove(int(handle))

    def _cuMemSetAccess(self, ptr: int, size: int, desc: list[CUmemAccessDesc], count: int) -> None:
        self.need_chunks(ptr, size)
        need(len(desc) == count == 1, "one description")
        need_device(desc[0].location)
        need(desc[0].flags is CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE, "flags")
        chunks = range(ptr, ptr + size, self.chunk)
        need(all(x in self.mapped for x in chunks), "mapped, all of it")
        for x in chunks:
            assert lazy._libc().mprotect(x, self.chunk, lazy.READ_WRITE) == 0
            if x not in self.accessible:
                ctypes.memset(x, 0xFF, self.chunk)  # memory that is new holds anything: here NaN
            self.accessible.add(x)

    def _cuMemUnmap(self, ptr: int, size: int) -> None:
        need(ptr in self.mapped and size == self.chunk, "what was mapped")
        need(ptr not in self.busy, "a device that has finished")
        del self.mapped[ptr]
        self.accessible.discard(ptr)
        assert lazy._libc().madvise(ptr, size, mmap.MADV_DONTNEED) == 0
        assert lazy._libc().mprotect(ptr, size, lazy.NONE) == 0

    def need_chunks(self, *numbers: int) -> None:
        need(all(n > 0 and n % self.chunk == 0 for n in numbers), "multiples of the granularity")


def need(condition: bool, rule: str) -> None:
    if not condition:
        raise BrokenRule(rule)


def need_device(location: CUmemLocation) -> None:
    need(location.type is CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, "a device")
    need(location.id == DEVICE.index, f"device {location.id}")


def on_host(owner: Any) -> torch.Tensor:
    """Makes a tensor of `__cuda_array_interface__`, as torch does on a card."""
    described = owner.__cuda_array_interface__
    (start, read_only), (size,) = described["data"], described["shape"]
    assert not read_only
    assert described["typestr"] == "|u1"
    buffer = (ctypes.c_char * size).from_address(start)
    buffer.owner = owner
    return torch.frombuffer(buffer, dtype=torch.uint8)


def region(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pages: int
) -> virtual.VirtualRegion:
    return virtual.VirtualRegion(shape, dtype, DEVICE, pages)


@contextlib.contextmanager
def card(chunk: int = CHUNK) -> Iterator[FakeDriver]:
    """Tensors of pools that grow lie on a fake card; in the end nothing of it may be held."""
    driver = FakeDriver(chunk)
    with (
        mock.patch.object(virtual, "_driver", return_value=driver),
        mock.patch.object(virtual._Memory, "tensor", on_host),
        mock.patch.object(torch.cuda, "synchronize", driver.synchronize),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", driver.is_capturing),
        mock.patch.object(memory, "_kind", return_value=region),
    ):
        yield driver
        gc.collect()
        assert driver.broken == []
        assert (len(driver.reserved), driver.taken) == (0, 0)
