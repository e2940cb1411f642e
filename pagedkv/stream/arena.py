"""`HostArena`: host memory into which files are read, and from which a device may copy."""

from __future__ import annotations

import mmap
import warnings
import weakref
from contextlib import suppress

import torch
from torch import Tensor


class HostArena:
    """A piece of host memory, as bytes and as a tensor over the same bytes.

    It is mapped, not allocated: exactly as large as asked, on page boundaries, on huge pages if
    there are any, and pinned in place. torch would round pinned memory up to a power of two.

    Args:
        pin: lock it, so that a CUDA device copies from it without the host; if that fails, a
            warning says so, and copies are slower.
    """

    def __init__(self, nbytes: int, pin: bool = False) -> None:
        memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = memoryview(memory)
        self.tensor: Tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.pinned = pin and _pin(self.tensor)
        if self.pinned:  # so that it is unpinned also if `close` is never called
            self._unpin = weakref.finalize(self, _unpin, self.tensor.data_ptr())

    def close(self) -> None:
        """Unlocks it; the memory goes with its last view. Idempotent."""
        if self.pinned:
            self._unpin()
            self.pinned = False


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def _pin(tensor: Tensor) -> bool:
    failed = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if not failed:
        return True
    warnings.warn(
        f"staging: {tensor.nbytes:,} bytes of host memory could not be pinned (CUDA error "
        f"{failed}); copies to the device will be slower",
        stacklevel=4,
    )
    with suppress(RuntimeError):  # else the next kernel would report it as its own
        torch.zeros(1, device="cuda")
    return False
