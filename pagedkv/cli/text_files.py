"""Reads and decodes text files; refuses some, and says what is wrong with them."""

from __future__ import annotations

import codecs
import os
import re
import stat
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

from pagedkv.names import meant

from .errors import UsageError

UNDECODED = re.compile("[\udc80-\udcff]")  # a byte that is no text becomes one of these


def text_of(file: str, option: str, encoding: str | None = None) -> str:
    """The text of a file as `exact_text_of`, without the returns of Windows' line ends."""
    return exact_text_of(file, option, encoding).replace("\r\n", "\n")


def exact_text_of(file: str, option: str, encoding: str | None = None) -> str:
    """The text of a file, without a byte order mark.

    Bytes that are no text become the surrogates U+DC80 to U+DCFF: they spoil a row, not a file.

    Args:
        encoding: without one UTF-8, or UTF-16 if a byte order mark says so.
    """
    if file == "-" and sys.stdin is None:
        raise UsageError(f"{option}: cannot read standard input, it is closed")
    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as stream:
            _require_end(stream, file, option)
            data = stream.read()
        if encoding is None:
            is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            encoding = "UTF-16" if is_wide else "UTF-8"
        text = data.decode(encoding, "surrogateescape").removeprefix("\ufeff")
        if "\0" in text:
            raise ValueError(f"a zero byte, at position {text.index(chr(0))}")
    except OSError as error:
        raise UsageError(
            f"{option}: cannot read {file}: {said_by(error)}{near_to(file, error)}"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"{option}: cannot read {file}: expected text in {encoding}, got {error}"
        ) from error
    return text


def _require_end(stream: BinaryIO, file: str, option: str) -> None:
    """Raises for a device that gives bytes for ever, such as /dev/zero; a terminal ends."""
    try:
        kind = os.fstat(stream.fileno())
    except OSError:  # a stream in memory
        return
    is_empty = kind.st_rdev == os.stat(os.devnull).st_rdev
    if stat.S_ISCHR(kind.st_mode) and not is_empty and not stream.isatty():
        said = "standard input" if file == "-" else file
        raise UsageError(
            f"{option}: expected a file or a pipe, got {said}, a device that may never end"
        )


def undecoded(byte: re.Match[str], encoding: str | None = None) -> str:
    """Says that a byte is no text, and which option helps."""
    return (
        f"expected text in {encoding or 'UTF-8'}, got the byte {ord(byte[0]) & 0xFF:#04x}; "
        "--encoding says what else it is in, such as cp1252"
    )


def encoding_of(name: str) -> str:
    """The encoding that --encoding gives."""
    try:
        "a".encode(name)  # for an empty text Python would not look the name up
    except (LookupError, UnicodeError):  # Python has one, `undefined`, that encodes nothing
        raise UsageError(
            f"--encoding: expected the name of one, such as cp1252 or utf-16, got {name!r}"
        ) from None
    return name


def said_by(error: Exception) -> str:
    """Returns an error's message without the name of the file."""
    return str(getattr(error, "strerror", None) or error)


def near_to(file: str, error: OSError) -> str:
    """Suggests a file that is spelt nearly like one that is missing."""
    folder = Path(file).parent
    if not isinstance(error, FileNotFoundError) or not folder.is_dir():
        return ""
    return meant(Path(file).name, (path.name for path in folder.iterdir()))
