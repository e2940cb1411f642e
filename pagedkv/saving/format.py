"""The file of a saved sequence: safetensors, one checksum over every byte, never pickle.

This module writes and reads it itself, so that a full disk raises OSError, a header that
contradicts itself raises `CorruptFileError`, and nothing is copied on the way.

The header's one entry is JSON under `MARK`. In every version of the format its `sha256` is that of
the whole file with these 64 digits written as zeros, and it is checked before anything is used.
It shows damage, not forgery: a program that can write the file can write its checksum. A file is
read into memory once and checked there, so exactly the checked bytes are used.

A file appears whole or not at all. It is written under another name, flushed to the disk, then
renamed; a kill in between leaves the old file, and at most a `.tmp` that nobody reads.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from contextlib import ExitStack, suppress
from hashlib import sha256
from math import prod
from operator import index
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from pagedkv.errors import CorruptFileError, ForeignFileError, HostMemoryError, NewerFileError
from pagedkv.interrupt import Uninterrupted
from pagedkv.storage.memory import available_memory

MARK = "pagedkv.sequence"
VERSION = 1
START = 1024  # the first bytes of a file, which hold `MARK`
LONGEST = 1 << 24  # bytes of a header at most
NO_DIGEST = "0" * 64
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
    "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write(path: str | os.PathLike[str], header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes or replaces a file, which only its owner can read.

    A link is followed: the file that it names is replaced.

    Args:
        header: JSON values by name, without `sha256` and `version`.
        tensors: contiguous, in host memory.

    Raises:
        OSError: the file cannot be written; an older file stays as it was.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(f"{path}: expected a file or a free name; only files are replaced")
    begin = f".{path.name[:60]}."  # a name may be 255 bytes, of up to 4 each
    name = ""
    try:
        with ExitStack() as opened:
            with Uninterrupted():
                handle, name = tempfile.mkstemp(dir=path.parent, prefix=begin, suffix=".tmp")
                file = opened.enter_context(os.fdopen(handle, "wb"))
            fill(file, header, tensors)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
    _flush_folder(path.parent)


def fill(file: BinaryIO, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes a file for `read` into an empty file; arguments as for `write`."""
    start = {"sha256": NO_DIGEST, "version": VERSION}
    text = _header_text({**start, **header}, tensors)
    digest = sha256()
    bytes_of = (x.reshape(-1).view(torch.uint8).numpy() for _, x in _in_order(tensors))
    parts: list[Any] = [len(text).to_bytes(8, "little"), text, *bytes_of]
    for part in parts:
        file.write(part)
        digest.update(part)
    file.seek(8 + text.index(NO_DIGEST.encode()))
    file.write(digest.hexdigest().encode())


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads and verifies a file; returns its header and tensors.

    Raises:
        CorruptFileError, ForeignFileError, NewerFileError: it is not as `write` wrote it.
        HostMemoryError: it does not fit into free memory.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        found = os.fstat(file.fileno())
        size, start = found.st_size, file.read(START) if stat.S_ISREG(found.st_mode) else b""
        if not _is_ours(start):  # it may be many gigabytes of something else
            raise ForeignFileError(f"{path}: expected a sequence that PagedKVCache.save wrote")
        file.seek(8)
        text = file.read(min(LONGEST, int.from_bytes(start[:8], "little")))
        if size != 8 + len(text) + _bytes_said(text):  # it may have a terabyte of holes
            raise CorruptFileError(f"{path}: its {size:,} bytes are not those of its header")
        # A system may promise more than there is, and end the process that takes it.
        if size > (free := available_memory(torch.device("cpu"))):
            raise HostMemoryError(
                f"{path}: expected at most {free:,} bytes, as are free, got {size:,}"
            )
        file.seek(0)
        data = bytearray(size)
        file.readinto(data)
    header = verify(data, str(path))
    try:
        return header, _tensors(data)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptFileError(f"{path}: contradicts itself: {error!s:.300}") from error


def verify(data: bytes | bytearray, name: str = "file") -> dict[str, Any]:
    """Checks every byte of a saved sequence and returns its header."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = _header(data[8:end])
    if header is None:
        if _is_ours(data[:START]):
            raise CorruptFileError(f"{name}: the header is damaged")
        raise ForeignFileError(f"{name}: expected a sequence that PagedKVCache.save wrote")
    digest = header.get("sha256")
    if not isinstance(digest, str) or len(digest) != 64 or data[8:end].count(digest.encode()) != 1:
        raise CorruptFileError(f"{name}: the header names no checksum")
    if _digest(data, digest) != digest:
        raise CorruptFileError(f"{name}: the bytes are not those that were written (sha256)")
    version = header.get("version")
    if type(version) is not int or version < 1:
        raise CorruptFileError(f"{name}: expected a format version, got {version!r:.60}")
    if version > VERSION:
        raise NewerFileError(f"{name}: format version {version}, this pagedkv reads {VERSION}")
    return header


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file or a pipe without waiting for a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _bytes_said(text: bytes) -> int:
    """Returns how many bytes a header says are behind it; -1 if it is damaged."""
    try:
        entries = [x for name, x in json.loads(text).items() if name != "__metadata__"]
        return max((int(entry["data_offsets"][1]) for entry in entries), default=0)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return -1


def _is_ours(start: bytes | bytearray) -> bool:
    return MARK.encode() in start


def _header(text: bytes | bytearray) -> dict[str, Any] | None:
    """Reads the header of a file; None if it cannot be read or is not ours."""
    try:
        header = json.loads(json.loads(text)["__metadata__"][MARK])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return header if isinstance(header, dict) else None


def _digest(data: bytes | bytearray, digest: str) -> str:
    at = data.index(digest.encode())
    total = sha256(memoryview(data)[:at])
    total.update(NO_DIGEST.encode())
    total.update(memoryview(data)[at + len(digest) :])
    return total.hexdigest()


def _header_text(header: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    """Returns the text that stands before the tensors, behind its own length."""
    # A configuration may have numpy numbers.
    entries: dict[str, Any] = {"__metadata__": {MARK: json.dumps(header, default=index)}}
    end = 0
    for name, tensor in _in_order(tensors):
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    return text + b" " * (-len(text) % 8)


def _in_order(tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Sorts tensors by element size, so that each begins at a multiple of its element size."""
    return sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))


def _tensors(data: bytearray) -> dict[str, Tensor]:
    """Returns the tensors of a file, as views of its bytes.

    Raises:
        LookupError, TypeError, ValueError, RuntimeError: the header contradicts itself.
    """
    begin = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:begin]).items():
        if name == "__metadata__":
            continue
        dtype, shape, (start, stop) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        numbers = start, stop, *shape
        if type(shape) is not list or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise ValueError(f"{name}: expected whole numbers, got {entry!r:.200}")
        if prod(shape) * dtype.itemsize != stop - start or begin + stop > len(data):
            raise ValueError(f"{name}: its bytes are not those of {entry!r:.200}")
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        if stop > start:
            count = prod(shape)
            tensor = torch.frombuffer(data, dtype=dtype, count=count, offset=begin + start)
        tensors[name] = tensor.view(shape)
    return tensors


def _flush_folder(folder: Path) -> None:
    """Flushes a folder, so that a rename in it lasts; does nothing if it cannot be flushed."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
