"""What memory rows should have, and how much is behind addresses by the system's count."""

import ctypes
from mmap import PAGESIZE as PAGE


def resident(memory) -> int:
    """Bytes of memory behind the addresses of a `RowMemory`."""
    begin, size = memory.tensor.data_ptr(), memory.tensor.nbytes
    pages = (ctypes.c_ubyte * -(-size // PAGE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), pages) == 0
    return PAGE * sum(page & 1 for page in pages)


def pages_of(places, rows):
    """Pages that rows lie on."""
    return {
        page
        for place in places
        for row in rows
        for page in range(place.row(row) // PAGE, -(-(place.row(row) + place.row_bytes) // PAGE))
    }
