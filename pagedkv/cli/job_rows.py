"""The rows of a job, told from those of any other: which lines of a file are rows, and which stay.

Each line carries a key of its model, prompt and options, so that no other job continues the file.
One line also spells out the model and options, so that an error can name the one that differs.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from .answers import CAUSE, KEY, SIDE
from .errors import UsageError

START = b'{"key": "'  # begins every line, and so tells a torn last line from a foreign one
LONGEST = 60  # characters of a value that a message spells out


def key_of(*parts: Any) -> str:
    """A short digest of what a row was computed from."""
    return sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass
class JobRows:
    """The rows of a job.

    Attributes:
        keys: the key of every prompt, by the prompt's index.
        samples: rows per prompt.
        made_with: the model and options that all rows have in common, by name, as JSON values.
        final: causes of errors that stay, because another try would not help.
        side: the end at which prompts that are too long are cut, if they are.
    """

    keys: list[str]
    samples: int
    made_with: dict[str, Any]
    final: Collection[str] = ()
    side: str | None = None

    def require_same(self, path: Path, other: dict[str, Any]) -> None:
        """Raises if a file was made with other options, and names those that differ."""
        mine = self.made_with
        every = sorted(other.keys() | mine.keys())
        names = [name for name in every if other.get(name, ...) != mine.get(name, ...)]
        if not names:
            return
        parts = [f"{name}: {_said(other, name)} there, {_said(mine, name)} here" for name in names]
        raise UsageError(
            f"--out: {path} was written for another job ({'; '.join(parts)}); give another "
            "file, or what this one was written with"
        )

    def stays(self, path: Path, number: int, row: dict[str, Any], told: bool) -> bool:
        """Whether a row is kept, and not computed again.

        Args:
            told: whether the file says what its rows were made with.

        Raises:
            UsageError: it is of another job.
        """
        index, key = row["index"], row[KEY]
        is_bad = bool(row.get("error")) and row.get(CAUSE) is not None
        # The user may have mended a bad prompt since.
        if is_bad and index in range(len(self.keys)) and key != self.keys[index]:
            return False
        self._require_mine(path, number, row, told)
        if row.get(SIDE) not in (None, self.side):
            raise UsageError(
                f"--out: the prompt of line {number} of {path} was cut with --too-long "
                f"{row[SIDE]}; give that again, or another file"
            )
        return not row.get("error") or row.get(CAUSE) in self.final

    def _require_mine(self, path: Path, number: int, row: dict[str, Any], told: bool) -> None:
        index, sample = row["index"], row["sample"]
        if index not in range(len(self.keys)) or sample not in range(self.samples):
            what = f"is of prompt {index}, sample {sample}; this job has {len(self.keys)} prompts"
        elif row[KEY] == self.keys[index]:
            return
        elif told:
            what = f"answers another prompt {index}, or with other options of its own"
        else:
            what = "was written for another job; no line of the file says for which"
        raise UsageError(f"--out: line {number} of {path} {what}; give another file")


def row_in(path: Path, number: int, line: bytes) -> tuple[dict[str, Any], bytes]:
    """Reads a row; in files that `cat` joined, a torn row may stand before it in the line."""
    begin = 0
    while begin >= 0 and is_torn(line[:begin]):
        with suppress(ValueError, AttributeError, RecursionError):
            row: dict[str, Any] = json.loads(line[begin:])
            if _is_row(row):
                return row, line[begin:]
        begin = line.find(START, begin + 1)
    refuse(path, number)


def refuse(path: Path, number: int) -> NoReturn:
    """Raises for a line that is no row."""
    raise UsageError(
        f"--out: line {number} of {path} is not a row of this command; give another file"
    )


def _is_row(row: dict[str, Any]) -> bool:
    """Whether a line is a row of this command: its places are integers; table programs say 1.0."""
    places = row.get("index"), row.get("sample")
    return isinstance(row.get(KEY), str) and all(type(place) is int for place in places)


def is_torn(text: bytes) -> bool:
    """Whether a text can be the beginning of a row."""
    return text.startswith(START) or START.startswith(text)


def _said(made_with: dict[str, Any], name: str) -> str:
    if name not in made_with:
        return "not given"
    text = json.dumps(made_with[name], ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
