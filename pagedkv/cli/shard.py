"""One shard of a job: its number, the names of its files, its prompts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UsageError
from .prompts import Prompt

AT_ONCE = 1024  # prompts encoded together; lists of ids are ten times as large as their keys
LONGEST = 2**24  # tokens of an answer; a larger limit means none, and sums of it would overflow


@dataclass(frozen=True)
class Shard:
    """One of the shards of a job; the first is 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def _mark(self) -> str:
        return f"-{self.index:05}-of-{self.count:05}"

    def named(self, path: Path) -> Path:
        """The file of this shard, in Hugging Face's manner: answers-00000-of-00004.jsonl."""
        return path.with_name(f"{path.stem}{self._mark}{path.suffix}")

    def beside(self, rows: Path) -> list[Path]:
        """The files with rows of the same job: of other shards, of any count, and of the whole.

        Args:
            rows: the file with the rows of this shard.
        """
        before, _, after = rows.name.rpartition(self._mark)
        names = rf"{re.escape(before)}(-\d{{5,}}-of-\d{{5,}})?{re.escape(after)}"
        if not rows.parent.is_dir():
            return []
        found = (path for path in rows.parent.iterdir() if re.fullmatch(names, path.name))
        return sorted(path for path in found if path.name != rows.name)


def shard_of(text: str, out: Path | None) -> Shard:
    """The shard that --shard gives.

    Raises:
        UsageError: it gives no shard.
    """
    if out is None:
        raise UsageError(
            "--shard: expected with --out FILE, whose rows say which prompt they answer"
        )
    if text == "slurm":
        return _of_array(os.environ)
    given = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
    if given is None:
        raise UsageError(f"--shard: expected I/N, such as 0/4, or slurm, got {text!r}")
    index, count = map(int, given.groups())
    if index >= count:
        said = f"; the shards of {count} are 0/{count} to {count - 1}/{count}" if count else ""
        raise UsageError(f"--shard: expected I/N with I from 0 and below N, got {text}{said}")
    return Shard(index, count)


def _of_array(environment: Any) -> Shard:
    """The shard of a task in a Slurm array, which may begin at any number."""
    names = [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "COUNT")]
    missing = [name for name in names if not environment.get(name, "").isdecimal()]
    if missing:
        raise UsageError(
            f"--shard: slurm is for a task of a job array (sbatch --array=0-3), got no number in "
            f"{missing[0]}; elsewhere give I/N"
        )
    task, first, last, count = (int(environment[name]) for name in names)
    if not first <= task <= last:  # somebody set another number, or this is a job within a task
        raise UsageError(
            f"--shard: slurm needs a task of its array, got task {task} of {first} to {last}; "
            "give I/N"
        )
    if count != last - first + 1:  # no variable says which numbers are missing
        raise UsageError(
            f"--shard: slurm needs an array without gaps, such as --array=0-3, got {count} tasks "
            f"from {first} to {last}; give I/N"
        )
    return Shard(task - first, count)


def rows_of_shard(
    shard: Shard,
    prompts: Sequence[Prompt],
    new_tokens: Sequence[int],
    encode: Callable[[dict[int, Prompt]], None],
) -> list[int]:
    """Returns the indices of the shard's prompts, ordered so that equal prefixes are together.

    Args:
        new_tokens: tokens that each prompt may get.
        encode: sets the ids of prompts, given by index; they are not kept.
    """
    from pagedkv.planner.shards import packed, shards_of  # numpy, for which --help does not wait

    keys = []
    for begin in range(0, len(prompts), AT_ONCE):
        some = prompts[begin : begin + AT_ONCE]
        encode(dict(enumerate(some, start=begin)))
        for prompt in some:
            keys.append(packed(prompt.ids))
            prompt.ids = []
    new = [min(n, LONGEST) for n in new_tokens]
    rows: list[int] = shards_of(keys, shard.count, new)[shard.index].tolist()
    return rows
