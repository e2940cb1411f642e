"""The output file of a batch job: JSON lines that survive a kill and are never written twice.

Every finished row is one line, written in one piece. A restart reads what is there, drops a line
that a kill tore, an empty one and rows that ended in an error which trying again may mend, and
tells which rows are left to do. Each line carries a key of its model, prompt and options, so that a
file is not continued with other ones, and one line what they are, so that the one that differs can
be named.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from .answers import CAUSE, KEY, MADE, SIDE
from .errors import UsageError

START = b'{"key": "'  # every line begins with it: so a torn last line is told from a foreign one
# Seconds of rows that are computed again after a power cut; a kill loses none. To wait for the disk
# at every row takes longer than many a row does.
SYNCED_EVERY = 1.0
LONGEST = 60  # characters of a value that a message spells out


def key_of(*parts: Any) -> str:
    """A short digest of what a row was computed from."""
    return sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Output:
    """An open output file, which no other process can have open at the same time.

    Args:
        path: the file; made if it is not there.
        keys: the key of every prompt, by the prompt's index.
        samples: rows per prompt.
        made_with: the model and options that all rows have in common, by name, as JSON values.
        beside: other files with rows of the same job, which are read only; what they have is done.
        final: causes of errors that stay, as trying again would not mend them.
        side: where prompts that are too long are cut, if they are.

    Attributes:
        mine: indices of the prompts whose rows the file is for; those of all unless it is set.
        causes: of the errors that stay, by the prompt's index.

    Raises:
        UsageError: the file cannot be written, or was written for another job.
    """

    def __init__(
        self,
        path: Path,
        keys: list[str],
        samples: int,
        made_with: dict[str, Any],
        beside: Sequence[Path] = (),
        final: Collection[str] = (),
        side: str | None = None,
    ) -> None:
        # Links are followed: a link stays a link, and all links to a file share one lock.
        self.path = Path(os.path.realpath(path))
        self.keys, self.samples, self.made_with = keys, samples, made_with
        self.beside, self.final, self.side = beside, final, side
        self.causes: dict[int, str] = {}
        self.mine: Sequence[int] = range(len(keys))
        self._lock = FileLock(self.path.parent / f".{self.path.name}.lock")  # "/" has no name
        try:
            if not self.path.parent.is_dir():
                raise OSError(f"there is no folder {self.path.parent}")
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(os.stat(path).st_mode):  # what a link names may be a pipe
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
                pass  # each is done
            if others:
                self._rewrite(kept.values())
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            self._size = os.fstat(self._file).st_size
        except BaseException as error:
            if self._made:  # and nothing was written
                self.path.unlink(missing_ok=True)
            self._unlock()
            if isinstance(error, OSError):
                raise UsageError(f"--out: cannot write {path}: {error}") from error
            raise

    def unfinished(self) -> list[int]:
        """Indices of the prompts that still miss a row."""
        samples = range(self.samples)
        return [i for i in self.mine if any((i, sample) not in self.done for sample in samples)]

    def skip(self, indices: Collection[int]) -> None:
        """Leaves prompts out: it has no rows of theirs."""
        self.mine = [i for i in self.mine if i not in indices]

    def failed(self) -> dict[int, str]:
        """The causes of errors that stay, by the index of the prompt, of those the file is for."""
        return {i: self.causes[i] for i in self.mine if i in self.causes}

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of its prompts, of this file and of those beside it.

        Raises:
            OSError: a file no longer has what it had.
        """
        self._require_whole()
        mine = set(self.mine)  # not so all its rows where prompts were added: shards differ then
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
            OSError: the disk is full, say; a part of the row that got there is a torn line. Or
                another program changed the file.
        """
        place = row["index"], row["sample"]
        if place in self.done:
            return
        key = {KEY: self.keys[row["index"]]}
        row = {**key, **row, **key}
        row.pop(MADE, None)
        # A row with an error that is tried again is removed, and this with it.
        tells = not self._told and not row.get("error")
        if tells:
            row[MADE] = self.made_with
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
            OSError: it has not, or another program changed the file.
        """
        os.fsync(self._file)
        self._synced = monotonic()
        self._require_whole()

    def keep(self) -> None:
        """Lets the file stay even if it has no row."""
        self._made = False

    def close(self) -> None:
        """Closes the file; one that was made here and got no row is removed."""
        with suppress(OSError):  # reported when a row was written, or behind the last one
            self.sync()
        if self._made and not os.fstat(self._file).st_size:
            self.path.unlink(missing_ok=True)
        os.close(self._file)
        self._unlock()

    def _add(self, place: tuple[int, int], row: dict[str, Any]) -> None:
        self.done.add(place)
        if row.get(CAUSE) in self.final:
            self.causes[place[0]] = row[CAUSE]

    def _require_whole(self) -> None:
        """Raises where rows would be lost unseen: the name has not what was written to the file."""
        size = 0
        with suppress(FileNotFoundError):
            size = self.path.stat().st_size
        if size != self._size:
            raise OSError(
                f"{self.path} has {size:,} bytes in place of {self._size:,}: another program "
                "changed, replaced or removed it; the same command computes the rows that it lacks"
            )

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
        if not _is_torn(last):
            self._refuse(self.path, len(lines) + 1)
        found = {
            number: self._row(self.path, number, line)
            for number, line in enumerate(lines, start=1)
            if line.strip()
        }
        rows = [row for row, _ in found.values()]
        told = [row[MADE] for row in rows if isinstance(row.get(MADE), dict)]
        self._told = bool(told)
        for other in told:
            self._require_same(self.path, other)
        kept: dict[tuple[int, int], bytes] = {}
        for number, (row, line) in found.items():
            place = row["index"], row["sample"]
            if self._stays(self.path, number, row, self._told):
                kept.setdefault(place, line)
                self._add(place, row)
        return kept, bool(last) or [*kept.values()] != lines

    def _lines_beside(self) -> Iterator[tuple[tuple[int, int], bytes]]:
        """The rows of the files beside, which other processes may be writing."""
        for path in self.beside:
            told = False
            with suppress(FileNotFoundError), path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if not line.endswith(b"\n"):
                        break
                    if not line.strip():
                        continue
                    row, line = self._row(path, number, line.rstrip(b"\n"))
                    if isinstance(row.get(MADE), dict):
                        told = True
                        self._require_same(path, row[MADE])
                    if self._stays(path, number, row, told):
                        place = row["index"], row["sample"]
                        self._add(place, row)
                        yield place, line

    def _row(self, path: Path, number: int, line: bytes) -> tuple[dict[str, Any], bytes]:
        """Reads a row; in files that `cat` joined, a torn row may stand before it in the line."""
        begin = 0
        while begin >= 0 and _is_torn(line[:begin]):
            with suppress(ValueError, AttributeError, RecursionError):
                row: dict[str, Any] = json.loads(line[begin:])
                if _is_row(row):
                    return row, line[begin:]
            begin = line.find(START, begin + 1)
        self._refuse(path, number)

    def _require_same(self, path: Path, other: dict[str, Any]) -> None:
        """Names what differs from what the file was made with."""
        mine = self.made_with
        every = sorted(other.keys() | mine.keys())
        names = [name for name in every if other.get(name, ...) != mine.get(name, ...)]
        if not names:
            return
        if "answer" in mine and not {"answer", "command"} & other.keys():  # as score's have
            raise UsageError(
                f"--out: {path} was written by an older pagedkv, whose rows have other columns; "
                "finish it with that one, or give another file"
            )
        parts = [f"{name}: {_said(other, name)} there, {_said(mine, name)} here" for name in names]
        raise UsageError(
            f"--out: {path} was written for another job ({'; '.join(parts)}); give another "
            "file, or what this one was written with"
        )

    def _stays(self, path: Path, number: int, row: dict[str, Any], told: bool) -> bool:
        """Whether a row is kept, and not computed again.

        Raises:
            UsageError: it is of another job.
        """
        index, key = row["index"], row[KEY]
        is_bad = bool(row.get("error")) and row.get(CAUSE) is not None
        # A cell that was no prompt may have been mended since.
        if is_bad and index in range(len(self.keys)) and key != self.keys[index]:
            return False
        self._require_mine(path, number, index, row["sample"], key, told)
        if row.get(SIDE) not in (None, self.side):
            raise UsageError(
                f"--out: the prompt of line {number} of {path} was cut with --too-long "
                f"{row[SIDE]}; give that again, or another file"
            )
        return not row.get("error") or row.get(CAUSE) in self.final

    def _require_mine(
        self, path: Path, number: int, index: Any, sample: Any, key: Any, told: bool
    ) -> None:
        if index not in range(len(self.keys)) or sample not in range(self.samples):
            what = f"is of prompt {index}, sample {sample}; this job has {len(self.keys)} prompts"
        elif key == self.keys[index]:
            return
        elif told:
            what = f"answers another prompt {index}, or with other options of its own"
        else:
            what = (
                "was written for another model, other prompts or options; the file does not say "
                "which, older ones did not"
            )
        raise UsageError(f"--out: line {number} of {path} {what}; give another file")

    def _refuse(self, path: Path, number: int) -> NoReturn:
        raise UsageError(
            f"--out: line {number} of {path} is not a row of this command; give another file"
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


def _is_row(row: dict[str, Any]) -> bool:
    """Whether a line says whose row it is, in this command's words; table programs say 1.0."""
    places = row.get("index"), row.get("sample")
    return isinstance(row.get(KEY), str) and all(type(place) is int for place in places)


def _is_torn(text: bytes) -> bool:
    """Whether it can be the beginning of a row."""
    return text.startswith(START) or START.startswith(text)


def _said(made_with: dict[str, Any], name: str) -> str:
    if name not in made_with:
        return "not given"
    text = json.dumps(made_with[name], ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
