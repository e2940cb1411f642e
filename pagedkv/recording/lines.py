"""A trace as a file: a line of JSON that says what is recorded, then one for each event.

A line is written by one system call as its event ends, so a process that is killed leaves every
event but perhaps half of the last one. A trace that cannot be written any more, because the disk is
full, never ends the job it records: recording stops, with a warning, and what was written is good.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from pagedkv.errors import ForeignFileError

FORMAT, VERSION = "pagedkv trace", 1


class TraceFile:
    """Appends events to a new trace.

    Attributes:
        stopped: why nothing is recorded any more; empty while it is.
    """

    def __init__(self, path: str | os.PathLike[str], header: dict[str, Any]) -> None:
        self.path, self.stopped = Path(path), ""
        _require_no_other_file(self.path)
        if self.path.is_file():
            # Whoever still writes the older one goes on in a file without a name.
            with suppress(PermissionError):
                os.unlink(self.path.resolve())
        self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115
        self._process, self._lock = os.getpid(), threading.Lock()
        self._start, self._count = perf_counter_ns(), 0
        self.write({"format": FORMAT, "version": VERSION, **header})

    def write(self, event: dict[str, Any]) -> None:
        """Appends one event. A forked child records nothing: the file is its parent's."""
        if self.stopped or os.getpid() != self._process:
            return
        with self._lock:
            if self._count:
                event["us"] = (perf_counter_ns() - self._start) // 1000
            line = json.dumps(event, separators=(",", ":"), default=_plain).encode() + b"\n"
            try:
                written = self._file.write(line)
            except (OSError, ValueError) as error:  # ValueError: closed, by `close`
                return self.stop(str(error))
            if written != len(line):
                return self.stop("the device is full")
            self._count += 1

    def stop(self, why: str) -> None:
        """Records no more, and says so."""
        self.stopped = why
        warnings.warn(
            f"trace: {self.path} ends after {max(0, self._count - 1)} events, the job goes on: "
            f"{why}",
            RuntimeWarning,
            stacklevel=2,
        )

    def close(self) -> None:
        """Ends the recording."""
        self.stopped = self.stopped or "closed"
        self._file.close()


def _plain(number: np.generic) -> Any:
    """A number of numpy's as JSON takes it; configurations may hold some."""
    return number.item()


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
