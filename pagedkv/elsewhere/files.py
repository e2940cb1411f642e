"""What a saved sequence is as a file: safetensors, one checksum over every byte, never pickle.

The header's one entry is JSON under `MARK`. Its `sha256` is that of the whole file with those 64
digits written as zeros, in every version of the format: damage is told before anything is believed.
It shows damage, not forgery: whoever can write the file can write its checksum.

A file appears whole or not at all. It is written beside its place, flushed to the disk, then moved
there; a kill in between leaves the old file, and at most a `.tmp` that nobody reads.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from pagedkv.errors import CorruptFileError, ForeignFileError, NewerFileError

MARK = "pagedkv.sequence"
VERSION = 1
START = 1024  # bytes of a file that hold `MARK`, which safetensors writes before all else
NO_DIGEST = "0" * 64


def write(path: str | os.PathLike[str], header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Puts a file in place of whatever was there, readable by its owner alone.

    Args:
        header: JSON values by name, without `sha256` and `version`.
        tensors: contiguous, in host memory.
    """
    save_file = _safetensors().save_file
    path = Path(path)
    said = json.dumps({"sha256": NO_DIGEST, "version": VERSION, **header})
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    try:
        save_file(tensors, name, {MARK: said})
        _sign(name)
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
    _flush_folder(path.parent)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file that is as it was written.

    Raises:
        CorruptFileError, ForeignFileError, NewerFileError: it is not.
    """
    load = _safetensors().load
    with open(path, "rb") as file:
        if not _is_ours(file.read(START)):  # perhaps many gigabytes of something else
            raise ForeignFileError(f"{path}: expected a sequence that PagedKVCache.save wrote")
        file.seek(0)
        data = file.read()
    return verify(data, str(path)), load(data)


def verify(data: bytes, name: str = "file") -> dict[str, Any]:
    """The header of a saved sequence, once every byte of the file has been checked."""
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


def _is_ours(start: bytes) -> bool:
    return MARK.encode() in start


def _header(text: bytes) -> dict[str, Any] | None:
    """What the file says of itself, None if that cannot be read or is not ours."""
    try:
        header = json.loads(json.loads(text)["__metadata__"][MARK])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return header if isinstance(header, dict) else None


def _digest(data: bytes, digest: str) -> str:
    at = data.index(digest.encode())
    total = sha256(memoryview(data)[:at])
    total.update(NO_DIGEST.encode())
    total.update(memoryview(data)[at + len(digest) :])
    return total.hexdigest()


def _sign(name: str) -> None:
    """Writes the checksum into its place and everything to the disk."""
    with open(name, "r+b") as file:
        end = 8 + int.from_bytes(file.read(8), "little")
        at = 8 + file.read(end - 8).index(NO_DIGEST.encode())
        file.seek(0)
        digest = sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        file.seek(at)
        file.write(digest.hexdigest().encode())
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Makes a rename last, where folders can be flushed."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ImportError("save and load need safetensors: pip install 'pagedkv[hf]'") from error
    return safetensors.torch
