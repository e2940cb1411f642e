"""`FileReader`: reads byte ranges of a checkpoint's files into given memory.

Neighbouring ranges of a file are one read, even if they go to different places in memory. Each read
first asks for the bytes that the file cache has, so that bytes from the disk can be counted.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from pagedkv.errors import CheckpointError, StreamError
from pagedkv.models.checkpoint import Checkpoint, TensorRange, read_header

MOST_PARTS = 1024  # buffers of one preadv at most
MOST_READ = 1 << 30  # bytes of one preadv; the kernel stops at 2 GiB
SAMPLES, SAMPLE_BYTES = 64, 64  # at how many places of a file how many bytes are compared


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a tensor.

    Attributes:
        source: the tensor in its file.
        offset: the first byte's offset in the file.
        nbytes: how many bytes.
        at: their offset in the target memory.
    """

    source: TensorRange
    offset: int
    nbytes: int
    at: int


@dataclass(frozen=True, slots=True)
class FileRun:
    """Parts that follow one another in a file."""

    file: int
    parts: tuple[Part, ...]


class FileReader:
    """The files of a checkpoint, open."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._of_thread = threading.local()
        self._can_ask = hasattr(os, "RWF_NOWAIT")
        files = sorted({tensor.file for tensor in checkpoint.tensors.values()})
        self._numbers = {file: number for number, file in enumerate(files)}
        self._files: list[int] = []
        weakref.finalize(self, _close, self._files)  # if the streamer is never closed
        self._stamps: list[_Stamp] = []
        self._samples: list[bytes] = []
        try:
            for file in files:
                self._open(file, checkpoint)
        except BaseException:
            self.close()
            raise

    def _open(self, file: Path, checkpoint: Checkpoint) -> None:
        """Opens a file; raises if its tensors are no longer where its header had them."""
        try:
            self._files.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
        self._stamps.append(_Stamp.of(self._files[-1]))
        self._samples.append(_samples(self._files[-1]))
        expected = {t for t in checkpoint.tensors.values() if t.file == file}
        if not expected.issubset(read_header(file, self._files[-1])):
            raise CheckpointError(f"{file}: was replaced while it was opened; open it again")

    @property
    def cold_bytes(self) -> int:
        """Bytes that this thread read so far and the file cache did not have."""
        return getattr(self._of_thread, "cold_bytes", 0)

    def close(self) -> None:
        """Closes the files. Idempotent."""
        _close(self._files)

    def require_unchanged(self) -> None:
        """Raises CheckpointError if a file was written to since it was opened.

        A file that was deleted, or replaced by another, can still be read as it was.
        """
        for i, (name, file) in enumerate(zip(self._numbers, self._files)):
            stamp, before = _Stamp.of(file), self._stamps[i]
            if stamp == before:
                continue
            # A new owner or link changes only the last time. So does a write after which the time
            # of writing was set back: sampled bytes tell the two apart.
            is_same = stamp[:2] == before[:2] and _samples(file) == self._samples[i]
            if is_same:
                self._stamps[i] = stamp
            else:
                raise CheckpointError(
                    f"{name}: was written to while its model streams, so old and new weights would "
                    "mix; open a new streamer. While one is open, replace files as a whole "
                    "(os.replace)"
                )

    def runs(self, parts: Iterable[Part]) -> tuple[FileRun, ...]:
        """Sorts parts by file and offset, and joins neighbours."""
        ordered = sorted(parts, key=lambda part: (self._numbers[part.source.file], part.offset))
        joined: list[list[Part]] = []
        room = 0
        for part in ordered:
            last = joined[-1][-1] if joined else None
            follows = (
                last is not None
                and last.source.file == part.source.file
                and last.offset + last.nbytes == part.offset
            )
            if follows and room >= part.nbytes and len(joined[-1]) < MOST_PARTS:
                joined[-1].append(part)
            else:
                joined.append([part])
                room = MOST_READ
            room -= part.nbytes
        return tuple(FileRun(self._numbers[run[0].source.file], tuple(run)) for run in joined)

    def run_of(self, part: Part) -> FileRun:
        """Returns a part as a run of its own."""
        return FileRun(self._numbers[part.source.file], (part,))

    def announce(self, runs: Iterable[FileRun]) -> None:
        """Lets the system fetch runs into the file cache, all at once, before they are read."""
        if not hasattr(os, "posix_fadvise"):
            return
        for run in runs:
            begin, total = run.parts[0].offset, sum(part.nbytes for part in run.parts)
            os.posix_fadvise(self._files[run.file], begin, total, os.POSIX_FADV_WILLNEED)

    def read(self, unit: str, run: FileRun, memory: memoryview) -> None:
        """Reads a run into memory.

        Args:
            unit: name of the unit that the run belongs to, for errors.

        Raises:
            CheckpointError: the file is shorter than it was, or cannot be read.
            StreamError: the reader was closed.
        """
        if not self._files:
            raise StreamError("the streamer of this model was closed")
        views = [memory[part.at : part.at + part.nbytes] for part in run.parts]
        begin, total = run.parts[0].offset, sum(part.nbytes for part in run.parts)
        done, flags = 0, os.RWF_NOWAIT if self._can_ask else 0
        while done < total:
            try:
                count = os.preadv(self._files[run.file], views, begin + done, flags)
            except BlockingIOError:
                flags = 0
                continue
            except OSError as error:
                if flags:  # the file system cannot tell what the file cache has
                    self._can_ask, flags = False, 0
                    continue
                raise CheckpointError(f"{_where(unit, run, begin + done)}: {error}") from error
            if not count:
                raise CheckpointError(f"{_where(unit, run, begin + done)}: the file ends there")
            if not flags:
                self._of_thread.cold_bytes = self.cold_bytes + count
            done, flags = done + count, 0
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())


class _Stamp(NamedTuple):
    """Facts about a file that a write changes; no program can set `changed`."""

    size: int
    written: int
    changed: int

    @classmethod
    def of(cls, file: int) -> _Stamp:
        found = os.fstat(file)
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _samples(file: int) -> bytes:
    """Returns a digest of a few bytes in each of `SAMPLES` parts of a file."""
    step = max(1, os.fstat(file).st_size // SAMPLES)
    digest = sha256()
    for number in range(SAMPLES):
        digest.update(os.pread(file, SAMPLE_BYTES, number * step + step // 2))
    return digest.digest()


def _where(unit: str, run: FileRun, offset: int) -> str:
    """Names the tensor whose bytes could not be read."""
    part = next(part for part in run.parts if part.offset + part.nbytes > offset)
    source = part.source
    return (
        f"{unit}: tensor {source.name} in {source.file}: expected {source.nbytes:,} bytes at "
        f"offset {source.offset:,}, could not read at {offset:,}"
    )
