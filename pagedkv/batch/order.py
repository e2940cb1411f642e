"""Orders the prompts of a job that are known beforehand and do not fit into the pages together.

Prompts that begin alike are put together, so that what they share is computed once however few
prefixes the pages hold. Prefixes, and the prompts behind one, stay in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagedkv.arrays import Ints
from pagedkv.pages.prefix import leading
from pagedkv.pages.salts import Salt, shared_tokens, up_to


def by_prefix(texts: Sequence[Ints], salts: Sequence[Salt], page: int) -> list[int]:
    """Returns the places of prompts, ordered so that equal prefixes stand together.

    Args:
        texts: ids of each.
        salts: of each; texts share only tokens under equal salts.
        page: ids of a page; shorter prefixes do not count.
    """
    found: list[int] = []
    left = [(part, 0) for part in _parted(range(len(texts)), texts, salts, 0, page)]
    while left:
        alike, known = left.pop()  # `known`: how many ids all of these begin with
        first, *others = alike
        depth = len(texts[first])
        for i in others:
            depth = min(depth, shared_tokens(salts[first], salts[i], page))
            end = min(depth, len(texts[i]))
            depth = known + leading(texts[first][known:end] == texts[i][known:end])
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
    """Groups places by their page at a depth and its salts; the first to go is the last group."""
    parts: dict[tuple[Salt, bytes], list[int]] = {}
    for place in places:
        text, end = texts[place], depth + page
        salt = up_to(salts[place], max(1, min(end, len(text))))  # no salt behind the page
        parts.setdefault((salt, text[depth:end].tobytes()), []).append(place)
    return [*parts.values()][::-1]
