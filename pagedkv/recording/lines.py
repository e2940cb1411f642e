"""A trace as a file: a line of JSON that describes the cache, then one for each event.

One system call writes a line when its event ends, so a killed process leaves every event, except
perhaps half of the last one. If a trace cannot be written any more, because the disk is full, the
job goes on: recording stops with a warning, and the written lines stay valid.
"""

from __future__ import annotations

import json
import os
import stat
import warnings
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from pagedkv.errors import ForeignFileError

FORMAT, VERSION = "pagedkv trace", 2
OPS = {
    "add", "fork", "load", "prepare", "commit", "abort", "truncate", "splice", "checkpoint",
    "offload", "restore", "free", "clear", "shrink", "failed",
}  # fmt: skip
LONGEST = 1 << 24  # bytes of a line at most, so that a reader can refuse longer ones


class TraceFile:
    """Appends events to a new trace.

    Attributes:
        stopped: why recording stopped; empty while it goes on.
    """

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, object]) -> None:
        self.path, self.stopped = Path(path), ""
        self._file = _begun(self.path)
        self._process, self._start, self._count = os.getpid(), perf_counter_ns(), -1
        self.write({"format": FORMAT, "version": VERSION, **header})

    def write(self, event: dict[str, object]) -> None:
        """Appends one event. A forked child writes nothing: the file belongs to its parent."""
        if self.stopped or os.getpid() != self._process:
            return
        if self._count >= 0:
            event["us"] = (perf_counter_ns() - self._start) // 1000
        line = _JSON.encode(event).encode() + b"\n"
        if len(line) > LONGEST:
            return self.stop(f"an event of {len(line):,} bytes is longer than a line may be")
        try:
            written = self._file.write(line)
        except (OSError, ValueError) as error:  # ValueError: closed, by `close`
            return self.stop(str(error))
        if written != len(line):
            return self.stop("the device is full")
        self._count += 1

    def stop(self, why: str) -> None:
        """Stops recording, with a warning."""
        self.stopped = why
        warnings.warn(
            f"trace: {self.path} ends after {max(0, self._count)} events, the job goes on: {why}",
            RuntimeWarning,
            stacklevel=2,
        )

    def close(self) -> None:
        """Ends the recording."""
        self.stopped = self.stopped or "closed"
        self._file.close()


def _plain(number: np.generic) -> object:
    """Converts a numpy number, which configurations may hold, for JSON."""
    found: object = number.item()
    return found


_JSON = json.JSONEncoder(separators=(",", ":"), default=_plain)  # made once, because this is slow


def _begun(path: Path) -> FileIO:
    """Opens a new file of this name; of processes that do so at once each gets its own.

    A process that still writes the older file goes on in a file without a name.
    """
    while True:
        _require_no_other_file(path)
        if path.exists() and not path.is_file():
            return open(path, "wb", buffering=0)
        real = os.path.realpath(path)  # a link stays a link
        try:
            with suppress(FileNotFoundError):
                os.unlink(real)
        except PermissionError:
            return open(path, "wb", buffering=0)
        with suppress(FileExistsError):
            return open(real, "xb", buffering=0)


def _require_no_other_file(path: Path) -> None:
    """Raises unless there is nothing to lose: no file, an empty one, a device, or an old trace."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return
        with open(path, "rb") as file:
            begin = file.read(64)
    except FileNotFoundError:
        return
    if begin and f'"format":"{FORMAT}"'.encode() not in begin:
        raise ForeignFileError(
            f"trace: expected a new file or an older trace to replace, {path} is something else"
        )
