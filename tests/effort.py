"""How much of their work tests do: a taste of it in `make test`, all of it in `make test-slow`.

`make test-slow` sets `PAGEDKV_TESTS=all`. It runs what is marked `slow`, which the fast tests leave
out, and what is marked `sampled`, which they run with fewer examples.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

ALL = os.environ.get("PAGEDKV_TESTS") == "all"

sampled = pytest.mark.sampled


def examples(n: int, taste: int | None = None) -> int:
    """How many examples, operations or seeds a test marked `sampled` tries, of `n`.

    The fast tests try `taste`; where none is given, one in five.
    """
    if ALL:
        return n
    return -(-n // 5) if taste is None else taste


def slow(*cases: Any) -> list[Any]:
    """Cases that the fast tests do without."""
    each = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=pytest.mark.slow) for case in each]


def few(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """All cases of one argument, of which the fast tests run those that are chosen."""
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(case, marks=marks[case in chosen]) for case in cases]


def each_value(*axes: Iterable[Any]) -> list[Any]:
    """All cases of a grid; the fast tests run some, among which every value occurs."""
    return _covering([list(axis) for axis in axes], 1)


def each_pair(*axes: Iterable[Any]) -> list[Any]:
    """All cases of a grid; the fast tests run some, in which any two values meet."""
    return _covering([list(axis) for axis in axes], 2)


def _covering(axes: list[Sequence[Any]], together: int) -> list[Any]:
    def met_in(case: tuple[int, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(case), together))

    grid = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing = set().union(*map(met_in, grid))
    fast = set()
    while missing:
        best = max(grid, key=lambda case: len(missing & met_in(case)))
        fast.add(best)
        missing -= met_in(best)
    cases = ((case, tuple(axis[i] for axis, i in zip(axes, case))) for case in grid)
    return [pytest.param(*v) if case in fast else slow(v)[0] for case, v in cases]
