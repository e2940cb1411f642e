"""The output file of a batch job: JSON lines that survive a kill and are never written twice.

Every finished row is one line, written in one piece. A restart reads what is there, drops a line
that a kill tore and rows that ended in an error, and tells which rows are left to do. Each line
carries a key of its model, prompt and options, so that a file is not continued with other ones.
"""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .prompts import UsageError


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
        self.path, self.keys, self.samples = path, keys, samples
        self._lock = FileLock(path.with_name(f".{path.name}.lock"))
        try:
            self._lock.acquire(blocking=False)
            kept, torn = self._read()
            self.done = {(row["index"], row["sample"]) for row in kept}
            if torn:
                self._rewrite(kept)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except Timeout:
            raise UsageError(f"--out: another process is writing {path}") from None
        except OSError as error:
            self._lock.release()
            raise UsageError(f"--out: cannot write {path}: {error}") from error
        except BaseException:
            self._lock.release()
            raise

    def unfinished(self) -> list[int]:
        """Indices of the prompts that still miss a row."""
        samples = range(self.samples)
        every = range(len(self.keys))
        return [i for i in every if any((i, sample) not in self.done for sample in samples)]

    def write(self, row: dict[str, Any]) -> None:
        """Appends one row, unless the file has it."""
        place = row["index"], row["sample"]
        if place in self.done:
            return
        line = json.dumps({**row, "key": self.keys[row["index"]]}, ensure_ascii=False) + "\n"
        os.write(self._file, line.encode())
        os.fsync(self._file)
        self.done.add(place)

    def close(self) -> None:
        os.close(self._file)
        self._lock.release()
        Path(self._lock.lock_file).unlink(missing_ok=True)

    def _read(self) -> tuple[list[dict[str, Any]], bool]:
        """Rows to keep, and whether the file holds anything else."""
        if not self.path.exists():
            return [], False
        *lines, last = self.path.read_bytes().split(b"\n")
        rows = [self._row(number, line) for number, line in enumerate(lines, start=1)]
        kept = [row for row in rows if not row.get("error")]
        return kept, bool(last) or len(kept) < len(rows)

    def _row(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
            index, sample, key = row["index"], row["sample"], row["key"]
            mine = 0 <= index < len(self.keys) and sample < self.samples and key == self.keys[index]
        except (ValueError, LookupError, TypeError):
            raise UsageError(
                f"--out: line {number} of {self.path} is not a row of this command; "
                "give another file"
            ) from None
        if not mine:
            raise UsageError(
                f"--out: {self.path} was written for another model, other prompts or options (line "
                f"{number}); give another file"
            )
        return row

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        """Puts a file without the dropped lines in place of the old one, whole or not at all."""
        fresh = self.path.with_name(f".{self.path.name}.partial")
        with fresh.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self.path)
