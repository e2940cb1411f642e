"""How much of their work tests do: a taste of it in `make test`, all of it in `make test-all`.

The fast tests leave out what is marked `slow`, and try fewer examples where `sampled` is marked.
`make test-part` runs one part of both whole, as `make test-all` would. Which part follows from the
hour of the last commit, so changes that land one after another run other parts.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

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


def in_part(items: Iterable[pytest.Item], part: int, parts: int) -> set[pytest.Item]:
    """Returns the cases in a part, which has its share of the cases of each test."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    chosen: set[pytest.Item] = set()
    for name, cases in tests.items():
        # Not in their own order, in which every seventh may have one of two arguments in common.
        cases.sort(key=lambda item: crc32(item.nodeid.encode()))
        chosen.update(cases[(part - crc32(name.encode())) % parts :: parts])
    return chosen


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
