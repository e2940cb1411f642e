"""The order of a job that is known beforehand and whose prompts do not fit into the pages together.

Prompts that begin alike are put together, so that what they share is computed once however few
prefixes the pages hold. Who came first goes first: among prefixes, and among those behind each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    left = [(part, 0) for part in _parted(range(len(texts)), texts, salts, 0, page)]
    while left:
        alike, known = left.pop()  # and the ids that all of these begin with
        first, *others = alike
        depth = len(texts[first])
        for i in others:
            depth = min(depth, shared_tokens(salts[first], salts[i], page))
            depth = _shared(texts[first], texts[i], known, depth)
            if depth < known + page:
                break
        depth = max(depth // page * page, known)
        parts = _parted(alike, texts, salts, depth, page)
        if len(alike) < 3 or len(parts) == 1:
            found += alike
        else:
            whole = depth + page
            left += [(part, min(whole, len(texts[part[0]]) // page * page)) for part in parts]
    return found


def _parted(
    places: Iterable[int], texts: Sequence[Ints], salts: Sequence[Salt], depth: int, page: int
) -> list[list[int]]:
    """Places by their page at a depth, with its salts; the part that comes first is the last."""
    parts: dict[tuple[Salt, bytes], list[int]] = {}
    for place in places:
        text, end = texts[place], depth + page
        salt = up_to(salts[place], max(1, min(end, len(text))))  # what begins behind it is nothing
        parts.setdefault((salt, text[depth:end].tobytes()), []).append(place)
    return [*parts.values()][::-1]


def _shared(text: Ints, other: Ints, known: int, most: int) -> int:
    """Ids that two texts begin with alike, `most` at most; the first `known` are."""
    end = min(most, len(other))
    same = text[known:end] == other[known:end]
    return end if same.all() else known + int(same.argmin())
