"""A trace as it was written: its header, and its events in order."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.arrays import Tokens
from pagedkv.errors import CorruptFileError, ForeignFileError, NewerFileError
from pagedkv.recording.lines import FORMAT, VERSION

Event = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """A trace in memory.

    Attributes:
        config: what `recorder.describe` said of the cache.
        events: one dictionary each, as `docs/trace.md` describes them.
        torn: whether the last line was cut, as that of a process that was killed.
    """

    name: str
    config: dict[str, Any]
    events: list[Event]
    torn: bool

    @contextmanager
    def configuration(self) -> Iterator[dict[str, Any]]:
        """The configuration; what is raised while it is used says that it is damaged."""
        try:
            yield self.config
        except Exception as error:
            raise CorruptFileError(
                f"{self.name}: line 1 has a configuration that no cache has: "
                f"{type(error).__name__}: {error}"
            ) from error


def read(path: str | os.PathLike[str]) -> Trace:
    """Reads a trace; one that was compressed with gzip as well.

    Raises:
        ForeignFileError, NewerFileError: it is no trace, or one of a later version.
        CorruptFileError: a line is damaged; the message says which.
    """
    path = Path(path)
    data = path.read_bytes()
    try:
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (EOFError, OSError, zlib.error) as error:
        raise CorruptFileError(f"{path}: damaged within: {error}") from error
    lines = data.split(b"\n")
    torn = bool(lines.pop())  # what stands behind the last end of a line
    try:
        header = json.loads(lines[0]) if lines else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ForeignFileError(f"{path}: expected a trace, as `trace=` writes it")
    version, config = header.get("version"), header.get("config")
    if not isinstance(version, int) or not isinstance(config, dict):
        raise CorruptFileError(f"{path}: line 1 tells no version or no configuration")
    if version > VERSION:
        raise NewerFileError(f"{path}: of version {version}, this can read {VERSION}")
    events = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            event = json.loads(line)
            event["op"]
            if not 0 <= event.get("us", 0) < 1 << 62:
                raise ValueError("us: expected microseconds")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptFileError(f"{path}: line {number} is no event: {error}") from error
        events.append(event)
    return Trace(path.name, config, events, torn)


def ids_of(text: str) -> Tokens:
    """Token ids as they stand in an event, each in disguise; -1 where unknown."""
    return np.frombuffer(b64decode(text), dtype=np.int32)
