"""Messages for what was given and cannot be used."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from .report import USAGE


class UsageError(Exception):
    """An option, a file or an argument cannot be used.

    Attributes:
        code: with which the command ends.
    """

    code = USAGE


def meant(word: str, known: Iterable[str], option: str = "") -> str:
    """The end of a message: the known name that is spelt nearly like a word, if there is one."""
    spelt = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), spelt, n=1, cutoff=0.7)
    return f"; did you mean {option}{spelt[close[0]]}?" if close else ""


def require_apart(option: str, path: Path | None, *others: tuple[str, Path | None]) -> None:
    """Raises where a file that is written would take the place of another one."""
    for other, taken in others:
        if path and taken and os.path.realpath(path) == os.path.realpath(taken):
            raise UsageError(f"{option}: expected another file than that of {other}, got {path}")
