"""Reads a trace: its header, and its events one after another.

The file is not trusted, and only one line of it is in memory at a time. Lines longer than `LONGEST`
are refused, and so is a packed file of which a part unpacks to more than `RATIO` times its size.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from pagedkv.errors import CorruptFileError, ForeignFileError, NewerFileError
from pagedkv.recording.lines import FORMAT, LONGEST, OPS, VERSION

Event = dict[str, Any]  # JSON
RATIO, ALWAYS = 16, 1 << 20  # traces pack 4 to 8 to 1; up to `ALWAYS` bytes any ratio is allowed


class Trace:
    """A trace on disk; iterating reads its events from the first on.

    Attributes:
        header: the first line.
        torn: whether the last line was cut off, because the process was killed; known once all
            events were read.

    Raises:
        ForeignFileError, NewerFileError: it is no trace, or one of another version.
        CorruptFileError: a line is damaged; the message says which.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.torn = Path(path), False
        self.name = self.path.name
        first = next(self._lines(), b"")
        try:
            header = json.loads(first)
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ForeignFileError(f"{path}: expected a trace, as `trace=` writes it")
        version = header.get("version")
        if not isinstance(version, int):
            raise CorruptFileError(f"{path}: line 1 tells no version")
        if version > VERSION:
            raise NewerFileError(f"{path}: of version {version}, this can read {VERSION}")
        if version < VERSION:
            raise ForeignFileError(
                f"{path}: of version {version}, a list of calls to be made again, which this "
                f"cannot read: record the job anew"
            )
        self.header: Event = header

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        lines = self._lines()
        next(lines, None)
        for number, line in enumerate(lines, start=2):
            try:
                event = json.loads(line)
                if event["op"] not in OPS or not 0 <= event["us"] < 1 << 62:
                    raise ValueError(
                        "expected a call's name and its microseconds, got "
                        f"{event['op']!r:.60} and {event['us']!r:.60}"
                    )
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise CorruptFileError(f"{self.path}: line {number} is no event: {error}") from None
            yield number, event

    def _lines(self) -> Iterator[bytes]:
        """Yields whole lines, and notes whether there are bytes behind the last one."""
        with open(self.path, "rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            file = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
            number = size = 0
            try:
                while line := file.readline(LONGEST + 1):
                    number, size = number + 1, size + len(line)
                    if len(line) > LONGEST:
                        raise CorruptFileError(f"{self.path}: line {number} is too long for one")
                    if packed and size > RATIO * raw.tell() + ALWAYS:
                        raise CorruptFileError(f"{self.path}: packed more than {RATIO} to 1")
                    self.torn = not line.endswith(b"\n")
                    if not self.torn:
                        yield line
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise CorruptFileError(f"{self.path}: damaged within: {error}") from None
