"""Counts the memory behind addresses, as the system does."""

import ctypes
import mmap


def resident(memory) -> int:
    """Bytes of memory behind the addresses of a `RowMemory`."""
    begin, size = memory.tensor.data_ptr(), memory.tensor.nbytes
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), pages) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in pages)
