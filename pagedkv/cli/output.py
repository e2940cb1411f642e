"""The output file of a batch job: JSON lines that survive a kill and are never written twice.

Every finished row is one line, written in one piece. A restart reads the file, and finds the rows
that are left to do. It drops empty lines, lines that a kill tore, and rows with an error that may
go away on another try. `job_rows.py` says which rows these are.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

from filelock import FileLock, Timeout

from .answers import CAUSE, KEY, MADE
from .errors import UsageError
from .job_rows import JobRows, is_torn, refuse, row_in

# After a power cut, rows of so many seconds are computed again; a kill loses none. Waiting for the
# disk at every row would take longer than many rows take.
SYNCED_EVERY = 1.0


class Output:
    """An open output file, which no other process can have open at the same time.

    Args:
        path: the file; made if it is not there.
        job: the job's rows.
        beside: other files with rows of the same job; they are only read, and their rows are done.

    Attributes:
        assigned: indices of the prompts whose rows belong in the file; all unless it is set.
        causes: why rows have errors that stay, by the prompt's index.

    Raises:
        UsageError: the file cannot be written, or was written for another job.
    """

    def __init__(self, path: Path, job: JobRows, beside: Sequence[Path] = ()) -> None:
        # Links are followed: a link stays a link, and all links to a file share one lock.
        self.path = Path(os.path.realpath(path))
        self.job, self.beside = job, beside
        self.causes: dict[int, str] = {}
        self.assigned: Sequence[int] = range(len(job.keys))
        self._lock = FileLock(self.path.parent / f".{self.path.name}.lock")  # "/" has no name
        try:
            if not self.path.parent.is_dir():
                raise OSError(f"there is no folder {self.path.parent}")
            with suppress(FileNotFoundError):  # asked once: another process may remove it
                if not stat.S_ISREG(os.stat(path).st_mode):  # a link may lead to a pipe
                    raise OSError("it is no plain file")
            self._lock.acquire(blocking=False)
        except Timeout:
            raise UsageError(f"--out: another process is writing {path}") from None
        except OSError as error:
            raise UsageError(f"--out: cannot write {path}: {error}") from error
        self._synced = monotonic()
        self._made = not self.path.exists()
        try:
            self.done: set[tuple[int, int]] = set()
            kept, others = self._read()
            for _ in self._lines_beside():
                pass  # reading a row notes that it is done
            if others:
                self._rewrite(kept.values())
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            self._size = os.fstat(self._file).st_size
        except BaseException as error:
            if self._made:  # and nothing was written
                self._remove()
            self._unlock()
            if isinstance(error, OSError):
                raise UsageError(f"--out: cannot write {path}: {error}") from error
            raise

    def unfinished(self) -> list[int]:
        """Indices of the prompts that still miss a row."""
        samples = range(self.job.samples)
        return [i for i in self.assigned if any((i, sample) not in self.done for sample in samples)]

    def skip(self, indices: Collection[int]) -> None:
        """Leaves prompts out: the file gets no rows for them."""
        self.assigned = [i for i in self.assigned if i not in indices]

    def failed(self) -> dict[int, str]:
        """The causes of errors that stay, by index, for prompts whose rows belong in the file."""
        return {i: self.causes[i] for i in self.assigned if i in self.causes}

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields the rows of its prompts, from this file and from the files beside it.

        Raises:
            OSError: a file no longer has rows that it had.
        """
        self._require_whole()
        mine = set(self.assigned)  # added prompts change shards: it may have rows of other shards
        missing = {place for place in self.done if place[0] in mine}
        for line in self.path.read_bytes().splitlines():
            row = json.loads(line)
            if (place := (row["index"], row["sample"])) in missing:
                missing.remove(place)
                yield row
        for place, line in self._lines_beside() if missing else ():
            if place in missing:
                missing.remove(place)
                yield json.loads(line)
        if missing:
            raise OSError(
                f"{len(missing)} rows are gone from the files beside {self.path}; run it again"
            )

    def write(self, row: dict[str, Any]) -> None:
        """Appends one row, unless the file has it.

        Raises:
            OSError: the disk is full, for example, and a torn line may stay; or another program
                changed the file.
        """
        place = row["index"], row["sample"]
        if place in self.done:
            return
        key = {KEY: self.job.keys[row["index"]]}
        row = {**key, **row, **key}
        row.pop(MADE, None)
        # Another try removes a row with an error, and what it tells with it.
        tells = not self._told and not row.get("error")
        if tells:
            row[MADE] = self.job.made_with
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        while line:
            written = os.write(self._file, line)
            self._size += written
            line = line[written:]
        self._told |= tells
        self._add(place, row)
        if monotonic() >= self._synced + SYNCED_EVERY:
            self.sync()

    def sync(self) -> None:
        """Waits until the disk has what was written.

        Raises:
            OSError: writing failed, or another program changed the file.
        """
        os.fsync(self._file)
        self._synced = monotonic()
        self._require_whole()

    def keep(self) -> None:
        """Lets the file stay even if it has no row."""
        self._made = False

    def close(self) -> None:
        """Closes the file; one that was made here and got no row is removed."""
        with suppress(OSError):  # a write, or the sync behind the last row, reported it
            self.sync()
        if self._made and not os.fstat(self._file).st_size:
            self._remove()
        os.close(self._file)
        self._unlock()

    def _add(self, place: tuple[int, int], row: dict[str, Any]) -> None:
        self.done.add(place)
        if row.get(CAUSE) in self.job.final:
            self.causes[place[0]] = row[CAUSE]

    def _require_whole(self) -> None:
        """Raises if the path no longer leads to all that was written: rows would be lost unseen."""
        size = 0
        with suppress(FileNotFoundError):
            size = self.path.stat().st_size
        if size != self._size:
            raise OSError(
                f"{self.path} has {size:,} bytes in place of {self._size:,}: another program "
                "changed, replaced or removed it; the same command computes the rows that it lacks"
            )

    def _remove(self) -> None:
        with suppress(OSError):  # where it cannot be, an empty file stays
            self.path.unlink()

    def _unlock(self) -> None:
        # The file is removed before the release: afterwards another process may hold the lock.
        with suppress(OSError):  # if a system cannot remove open files, the file stays
            os.unlink(self._lock.lock_file)
        self._lock.release()

    def _read(self) -> tuple[dict[tuple[int, int], bytes], bool]:
        """Returns the lines to keep, by index and sample, and whether the file has others."""
        with self.path.open("a+b") as file:  # "a", so that a file without write access is refused
            file.seek(0)
            *lines, last = file.read().split(b"\n")
        if not is_torn(last):
            refuse(self.path, len(lines) + 1)
        found = {
            number: row_in(self.path, number, line)
            for number, line in enumerate(lines, start=1)
            if line.strip()
        }
        rows = [row for row, _ in found.values()]
        told = [row[MADE] for row in rows if isinstance(row.get(MADE), dict)]
        self._told = bool(told)
        for other in told:
            self.job.require_same(self.path, other)
        kept: dict[tuple[int, int], bytes] = {}
        for number, (row, line) in found.items():
            place = row["index"], row["sample"]
            if self.job.stays(self.path, number, row, self._told):
                kept.setdefault(place, line)
                self._add(place, row)
        return kept, bool(last) or [*kept.values()] != lines

    def _lines_beside(self) -> Iterator[tuple[tuple[int, int], bytes]]:
        """Yields the rows of the files beside it, which other processes may be writing."""
        for path in self.beside:
            told = False
            with suppress(FileNotFoundError), path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if not line.endswith(b"\n"):
                        break
                    if not line.strip():
                        continue
                    row, line = row_in(path, number, line.rstrip(b"\n"))
                    if isinstance(row.get(MADE), dict):
                        told = True
                        self.job.require_same(path, row[MADE])
                    if self.job.stays(path, number, row, told):
                        place = row["index"], row["sample"]
                        self._add(place, row)
                        yield place, line

    def _rewrite(self, lines: Iterable[bytes]) -> None:
        """Replaces the file by one with these lines only, whole or not at all."""
        mode = self.path.stat().st_mode
        with replacing(self.path) as fresh:
            fresh.write_bytes(b"".join(line + b"\n" for line in lines))
            fresh.chmod(mode)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path to write to; at the end its file replaces another, whole or not at all."""
    fresh = path.with_name(f".{path.name}.partial")
    try:
        yield fresh
        with fresh.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
