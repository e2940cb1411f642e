"""The output file of a batch job: JSON lines that survive a kill and are never written twice.

Every finished row is one line, written in one piece. A restart reads what is there, drops a line
that a kill tore and rows that ended in an error, and tells which rows are left to do. Each line
carries a key of its model, prompt and options, so that a file is not continued with other ones,
and one line what they are, so that the one that differs can be named.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from .usage import UsageError

START = b'{"key": "'  # every line begins with it: so a torn last line is told from a foreign one
# Seconds of rows that are computed again after a power cut; a kill loses none. To wait for the disk
# at every row takes longer than many a row does.
SYNCED_EVERY = 1.0
LONGEST = 60  # characters of a value that a message spells out
MADE = "made_with"  # key of the job's own options, in the first line that is kept


def key_of(*parts: Any) -> str:
    """A short digest of what a row was computed from."""
    return sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Output:
    """An open output file; nobody else can have it open at the same time.

    Args:
        path: the file; made if it is not there.
        keys: the key of every prompt, by the prompt's index.
        samples: rows per prompt.
        made_with: the model and options that all rows have in common, by name, as JSON values.

    Raises:
        UsageError: the file cannot be written, or was written for another job.
    """

    def __init__(
        self, path: Path, keys: list[str], samples: int, made_with: dict[str, Any]
    ) -> None:
        # Links are followed: a link stays a link, and all links to a file share one lock.
        self.path = Path(os.path.realpath(path))
        self.keys, self.samples, self.made_with = keys, samples, made_with
        self._lock = FileLock(self.path.with_name(f".{self.path.name}.lock"))
        try:
            if not self.path.parent.is_dir():
                raise OSError(f"there is no folder {self.path.parent}")
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(self.path.stat().st_mode):
                    raise OSError("it is no plain file")
            self._lock.acquire(blocking=False)
        except Timeout:
            raise UsageError(f"--out: another process is writing {path}") from None
        except OSError as error:
            raise UsageError(f"--out: cannot write {path}: {error}") from error
        self._synced = monotonic()
        self._made = not self.path.exists()
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
        row = {**key, **row, **key}
        row.pop(MADE, None)
        # Not in a row that will be tried again: it goes.
        tells = not self._told and not row.get("error")
        if tells:
            row[MADE] = self.made_with
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        while line:
            line = line[os.write(self._file, line) :]
        if monotonic() >= self._synced + SYNCED_EVERY:
            self._sync()
        self._told |= tells
        self.done.add(place)

    def close(self) -> None:
        """Lets go of the file; one that was made and got no row goes."""
        with suppress(OSError):  # a disk that is full has been said
            self._sync()
        if self._made and not os.fstat(self._file).st_size:
            self.path.unlink(missing_ok=True)
        os.close(self._file)
        self._unlock()

    def _sync(self) -> None:
        os.fsync(self._file)
        self._synced = monotonic()

    def _unlock(self) -> None:
        # Removed while the lock is held: afterwards another process may hold it.
        with suppress(OSError):  # where open files cannot be removed, the file stays
            os.unlink(self._lock.lock_file)
        self._lock.release()

    def _read(self) -> tuple[dict[tuple[int, int], bytes], bool]:
        """The lines to keep by index and sample, and whether the file holds anything else."""
        with self.path.open("a+b") as file:  # "a", so that a file without write access is refused
            file.seek(0)
            *lines, last = file.read().split(b"\n")
        if not (last.startswith(START) or START.startswith(last)):
            self._refuse(len(lines) + 1)
        rows = [self._row(number, line) for number, line in enumerate(lines, start=1)]
        told = [row[MADE] for row in rows if isinstance(row.get(MADE), dict)]
        self._told = bool(told)
        for other in told:
            self._require_same(other)
        kept: dict[tuple[int, int], bytes] = {}
        for number, (row, line) in enumerate(zip(rows, lines), start=1):
            place = row["index"], row["sample"]
            self._require_mine(number, *place, row["key"])
            if not row.get("error"):
                kept.setdefault(place, line)
        return kept, bool(last) or len(kept) < len(lines)

    def _row(self, number: int, line: bytes) -> dict[str, Any]:
        with suppress(ValueError, AttributeError, RecursionError):
            row: dict[str, Any] = json.loads(line)
            if {"key", "index", "sample"} <= row.keys():
                return row
        self._refuse(number)

    def _require_same(self, other: dict[str, Any]) -> None:
        """Names what differs from what the file was made with."""
        mine = self.made_with
        every = sorted(other.keys() | mine.keys())
        names = [name for name in every if other.get(name, ...) != mine.get(name, ...)]
        if not names:
            return
        parts = [f"{name}: {_said(other, name)} there, {_said(mine, name)} here" for name in names]
        raise UsageError(
            f"--out: {self.path} was written for another job ({'; '.join(parts)}); give another "
            "file, or what this one was written with"
        )

    def _require_mine(self, number: int, index: Any, sample: Any, key: Any) -> None:
        if index not in range(len(self.keys)) or sample not in range(self.samples):
            what = f"is of prompt {index}, sample {sample}; this job has {len(self.keys)} prompts"
        elif key == self.keys[index]:
            return
        elif self._told:
            what = f"answers another prompt {index}, or with other options of its own"
        else:
            what = (
                "was written for another model, other prompts or options; the file does not say "
                "which, older ones did not"
            )
        raise UsageError(f"--out: line {number} of {self.path} {what}; give another file")

    def _refuse(self, number: int) -> NoReturn:
        raise UsageError(
            f"--out: line {number} of {self.path} is not a row of this command; give another file"
        )

    def _rewrite(self, lines: Iterable[bytes]) -> None:
        """Replaces the file by one with these lines only, whole or not at all."""
        mode = self.path.stat().st_mode
        with replacing(self.path) as fresh:
            fresh.write_bytes(b"".join(line + b"\n" for line in lines))
            fresh.chmod(mode)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, whose file takes the place of another at the end, whole or not at all."""
    fresh = path.with_name(f".{path.name}.partial")
    try:
        yield fresh
        with fresh.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def _said(made_with: dict[str, Any], name: str) -> str:
    if name not in made_with:
        return "not given"
    text = json.dumps(made_with[name], ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
