"""The order of a job that is known beforehand and whose prompts do not fit into the pages together.

Prompts that begin alike are put together, so that what they share is computed once however few
prefixes the pages hold. Who came first goes first: among prefixes, and among those behind each.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from pagedkv.arrays import Ints
from pagedkv.pages.salts import Salt, shared_tokens, up_to


def by_prefix(texts: Sequence[Ints], salts: Sequence[Salt], page: int) -> list[int]:
    """The places of prompts in an order in which prefixes stand together.

    Args:
        texts: ids of each.
        salts: of each; texts share what is under equal ones.
        page: ids of a page; what is shorter does not count.
    """
    found: list[int] = []
    left = _parted(range(len(texts)), (up_to(salt, page) for salt in salts))
    while left:
        alike = left.pop()
        first, *others = alike
        same = (
            min(_shared(texts[first], texts[i]), shared_tokens(salts[first], salts[i], page))
            for i in others
        )
        depth = min(same, default=0) // page * page
        end = depth + page
        keys = ((up_to(salts[i], end), texts[i][depth:end].tobytes()) for i in alike)
        parts = _parted(alike, keys)
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


def _shared(text: Ints, other: Ints) -> int:
    """Ids that two texts begin with alike."""
    size = min(len(text), len(other))
    same = text[:size] == other[:size]
    return size if same.all() else int(same.argmin())
