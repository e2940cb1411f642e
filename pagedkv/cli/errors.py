"""Messages for what was given and cannot be used."""

from __future__ import annotations

import os
from pathlib import Path

from .report import USAGE


class UsageError(Exception):
    """An option, a file or an argument cannot be used.

    Attributes:
        code: with which the command ends.
    """

    code = USAGE


def require_apart(option: str, path: Path | None, *others: tuple[str, Path | None]) -> None:
    """Raises where a file that is written would take the place of another one."""
    for other, taken in others:
        if path and taken and os.path.realpath(path) == os.path.realpath(taken):
            raise UsageError(f"{option}: expected another file than that of {other}, got {path}")
