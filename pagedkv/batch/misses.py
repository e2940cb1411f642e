"""The prompts for which a job computed the most tokens, and why (`PagedKVCache.explain`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pagedkv.cache.cache import PagedKVCache
from pagedkv.cache.explain import Explanation

MOST = 10


class Misses:
    """The most expensive misses of some prompts, as they join.

    Args:
        prompts: ids of each.
    """

    def __init__(self, prompts: Iterable[Any]) -> None:
        self._places: dict[bytes, int] = {}
        for place, ids in enumerate(prompts):
            self._places.setdefault(np.asarray(ids, np.int32).tobytes(), place)
        self._found: list[tuple[int, Explanation]] = []

    @contextmanager
    def watching(self, cache: PagedKVCache) -> Iterator[None]:
        """Explains every prompt just before it is added to a cache."""
        add: Any = cache.add

        def explained(tokens: Any = None, **options: Any) -> int:
            # A row that was put back or found no room is added again: only its first time counts.
            known = tokens is not None and np.asarray(tokens, np.int32).tobytes()
            place = self._places.pop(known, None) if known else None
            if place is not None:
                self._take(place, cache.explain(tokens, salt=options.get("salt", b"")))
            seq: int = add(tokens, **options)
            return seq

        cache.add = explained  # type: ignore[method-assign]
        try:
            yield
        finally:
            del cache.add

    def _take(self, place: int, explanation: Explanation) -> None:
        if explanation.reason != "found":
            self._found.append((place, explanation))
            self._found.sort(key=lambda one: one[1].found - one[1].tokens)
            del self._found[MOST:]

    def __iter__(self) -> Iterator[tuple[int, Explanation]]:
        """Gives the places of prompts with their explanations, the most expensive first."""
        return iter(self._found)
