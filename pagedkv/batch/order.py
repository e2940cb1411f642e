"""The order of a job that is known beforehand and whose prompts do not fit into the pages together.

Prompts that begin alike are put together, so that what they share is computed once however few
prefixes the pages hold. Who came first goes first: among prefixes, and among those behind each.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np


def by_prefix(texts: Sequence[bytes], salts: Iterable[Hashable], page: int) -> list[int]:
    """The places of prompts in an order in which prefixes stand together.

    Args:
        texts: ids of each, as the bytes of int32.
        salts: of each; only those under one salt share anything.
        page: bytes of the ids of a page; what is shorter does not count.
    """
    found: list[int] = []
    left = _parted(range(len(texts)), salts)
    while left:
        alike = left.pop()
        some = [texts[i] for i in alike]
        depth = _common(min(some), max(some)) // page * page
        parts = _parted(alike, (text[depth : depth + page] for text in some))
        if len(alike) < 3 or len(parts) == 1:
            found += alike
        else:
            left += parts
    return found


def _parted(places: Iterable[int], keys: Iterable[Hashable]) -> list[list[int]]:
    """Places by their keys; the part that comes first is the last."""
    parts: dict[Hashable, list[int]] = {}
    for place, key in zip(places, keys):
        parts.setdefault(key, []).append(place)
    return [*parts.values()][::-1]


def _common(text: bytes, other: bytes) -> int:
    """Bytes that two texts begin with alike, in whole ids."""
    size = min(len(text), len(other))
    same = np.frombuffer(text, np.int32, size // 4) == np.frombuffer(other, np.int32, size // 4)
    return size if same.all() else 4 * int(same.argmin())
