"""Reports options, files and arguments that cannot be used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from pagedkv.errors import PagedKVError

from .report import SOME_FAILED, USAGE


class UsageError(Exception):
    """An option, a file or an argument cannot be used.

    Attributes:
        code: the command's exit code.
    """

    code = USAGE


@contextmanager
def refusing(
    *usage: type[Exception],
    failed: tuple[type[Exception], ...] = (),
    says: Callable[[str], str] = str,
) -> Iterator[None]:
    """A region whose errors are printed, without a traceback, and end the command.

    Args:
        usage: errors, beside `UsageError`, that say that something given cannot be used.
        failed: errors of a command that had begun its work.
        says: makes the text to print of the error's own.
    """
    wrong: tuple[type[Exception], ...] = (UsageError, *usage)
    try:
        yield
    except wrong as error:
        code, said = USAGE, error
    except failed as error:
        code, said = SOME_FAILED, error
    else:
        return
    typer.echo(f"pagedkv: {says(str(said))}", err=True)
    raise typer.Exit(code)


def words_of(error: Exception) -> str:
    """Returns an error's text, with its class if the text alone may not say enough."""
    if isinstance(error, (ValueError, TypeError, OSError, PagedKVError)) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"


def require_apart(option: str, path: Path | None, *others: tuple[str, Path | None]) -> None:
    """Raises if a file to be written would take the place of another one."""
    for other, taken in others:
        if path and taken and os.path.realpath(path) == os.path.realpath(taken):
            raise UsageError(f"{option}: expected another file than that of {other}, got {path}")
