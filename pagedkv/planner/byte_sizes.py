"""Reads and prints sizes of memory as people write them, and finds the largest number that fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

SMALLEST = 100_000  # a plain number below it was meant in another unit than bytes
POWERS = {letter: i for i, letter in enumerate("kmgt", 1)}
SIZE = re.compile(r"\s*(\d{1,18})(\.\d{0,18})?\s*(?:([kmgt])(i?)b?|(b))?\s*", re.IGNORECASE)


def size_in_bytes(parameter: str, value: Any) -> int:
    """Returns the bytes of `8GiB`, `8 GiB`, `8GB`, `8gb`, `8G`, `500MiB` or an int.

    A unit with an `i` is a power of 1024, a unit without it a power of 1000.

    Raises:
        ValueError: it is none of these, or not positive, or a number without a unit that is too
            small to mean bytes.
    """
    said = SIZE.fullmatch(value) if isinstance(value, str) else None
    unit = ""
    if said:
        digits, fraction, letter, binary, byte = said.groups()
        unit = letter or byte or ""
        scale = (1024 if binary else 1000) ** POWERS.get(unit.lower(), 0)
        value = int(float(digits + fraction) * scale) if fraction else int(digits) * scale
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63:
        big = isinstance(value, int) and value.bit_length() > 63  # Python may refuse to print it
        got = f"one of {value.bit_length()} bits" if big else format(repr(value), ".60")
        raise ValueError(
            f"{parameter}: expected bytes as a positive int, or text like '8GiB', got {got}"
        )
    if not unit and value < SMALLEST:
        meant = f"{value}GiB" if value < 1024 else f"{value}MiB"
        raise ValueError(
            f"{parameter}: {value} without a unit are bytes, less than any model needs; "
            f"did you mean {meant!r}?"
        )
    return value


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Returns the largest number below `high` that fits, by halving; `low` has to fit."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def readable(nbytes: float) -> str:
    """Writes bytes for people: `8.00 GiB`, `143.1 MiB`, `12 bytes`."""
    if nbytes >= 1 << 30:
        return f"{nbytes / 2**30:.2f} GiB"
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 1 << 20 else f"{int(nbytes):,} bytes"


def rounded_up(nbytes: int) -> str:
    """Writes a size rounded up to whole MiB, as arguments take it."""
    return f"{-(-nbytes // 2**20)}MiB"
