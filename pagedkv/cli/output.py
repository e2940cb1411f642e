"""The output file of a batch job: JSON lines that survive a kill and are never written twice.

Every finished row is one line, written in one piece. A restart reads what is there, drops a line
that a kill tore and rows that ended in an error, and tells which rows are left to do. Each line
carries a key of its model, prompt and options, so that a file is not continued with other ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from .prompts import UsageError

START = b'{"key": "'  # of every line, by which a torn one is known


def key_of(*parts: Any) -> str:
    """A short digest of what a row was computed from."""
    return sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Output:
    """An open output file; nobody else can have it open at the same time.

    Args:
        path: the file; made if it is not there.
        keys: of every prompt, by its index.
        samples: rows per prompt.

    Raises:
        UsageError: it cannot be written, or was written for another job.
    """

    def __init__(self, path: Path, keys: list[str], samples: int) -> None:
        # What a link leads to: it stays a link, and all that lead there have one lock.
        self.path, self.keys, self.samples = Path(os.path.realpath(path)), keys, samples
        if not self.path.parent.is_dir():
            raise UsageError(f"--out: cannot write {path}: there is no folder {self.path.parent}")
        if self.path.exists() and not self.path.is_file():
            raise UsageError(f"--out: cannot write {path}: it is no plain file")
        self._lock = FileLock(self.path.with_name(f".{self.path.name}.lock"))
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise UsageError(f"--out: another process is writing {path}") from None
        except OSError as error:
            raise UsageError(f"--out: cannot write {path}: {error}") from error
        try:
            kept, others = self._read()
            self.done = set(kept)
            if others:
                self._rewrite(kept.values())
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        except BaseException as error:
            self._unlock()
            if isinstance(error, OSError):
                raise UsageError(f"--out: cannot write {path}: {error}") from error
            raise

    def unfinished(self) -> list[int]:
        """Indices of the prompts that still miss a row."""
        samples = range(self.samples)
        every = range(len(self.keys))
        return [i for i in every if any((i, sample) not in self.done for sample in samples)]

    def write(self, row: dict[str, Any]) -> None:
        """Appends one row, unless the file has it.

        Raises:
            OSError: the disk is full, say; a part of the row that got there is a torn line.
        """
        place = row["index"], row["sample"]
        if place in self.done:
            return
        key = {"key": self.keys[row["index"]]}
        line = (json.dumps({**key, **row, **key}, ensure_ascii=False) + "\n").encode()
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)
        self.done.add(place)

    def close(self) -> None:
        os.close(self._file)
        self._unlock()

    def _unlock(self) -> None:
        # While it is held: afterwards it may be somebody else's.
        with suppress(OSError):  # where open files cannot be removed, it stays
            os.unlink(self._lock.lock_file)
        self._lock.release()

    def _read(self) -> tuple[dict[tuple[int, int], bytes], bool]:
        """The lines to keep by index and sample, and whether the file holds anything else."""
        with self.path.open("a+b") as file:  # so that one that cannot be written is refused here
            file.seek(0)
            *lines, last = file.read().split(b"\n")
        if not (last.startswith(START) or START.startswith(last)):
            self._refuse(len(lines) + 1)
        kept: dict[tuple[int, int], bytes] = {}
        for number, line in enumerate(lines, start=1):
            row = self._row(number, line)
            if not row.get("error"):
                kept.setdefault((row["index"], row["sample"]), line)
        return kept, bool(last) or len(kept) < len(lines)

    def _row(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
            index, sample, key = row["index"], row["sample"], row["key"]
            mine = index in range(len(self.keys)) and sample in range(self.samples)
            mine = mine and key == self.keys[index]
        except (ValueError, LookupError, TypeError):
            self._refuse(number)
        if not mine:
            raise UsageError(
                f"--out: {self.path} was written for another model, other prompts or options (line "
                f"{number}); give another file"
            )
        return row

    def _refuse(self, number: int) -> NoReturn:
        raise UsageError(
            f"--out: line {number} of {self.path} is not a row of this command; give another file"
        ) from None

    def _rewrite(self, lines: Iterable[bytes]) -> None:
        """Puts a file of these lines alone in place of the old one, whole or not at all."""
        fresh = self.path.with_name(f".{self.path.name}.partial")
        with fresh.open("wb") as file:
            file.writelines(line + b"\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        fresh.chmod(self.path.stat().st_mode)
        os.replace(fresh, self.path)
