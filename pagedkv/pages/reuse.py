"""What happens to a cached page when it is about to be reused: it is forgotten, perhaps noted."""

from __future__ import annotations

from typing import NamedTuple

from pagedkv.arrays import Tokens

from .pool import PagePool
from .prefix import PrefixIndex


class Record(NamedTuple):
    """All that is known of a page.

    Attributes:
        stretch: of the pool.
        born: tells its contents from others that the page had or will have.
        filled: committed slots, `tokens` their ids.
        key, head: under which it is found, if it is.
    """

    page: int
    stretch: int
    born: int
    filled: int
    tokens: Tokens
    key: bytes | None
    head: bytes | None


class Reuse:
    """Forgets pages for a pool. It refers to no pool, so that both end when their owner does.

    Attributes:
        noted: pages that were forgotten, if somebody asks for them; else None.
    """

    def __init__(self, index: PrefixIndex, kinds: int) -> None:
        self.noted: list[Record] | None = None
        self._index, self._kinds = index, kinds

    def watch(self, pool: PagePool) -> None:
        """Says whose pages they are."""
        self._group_of, self._born, self._filled = pool.group_of, pool.born, pool.filled

    def __call__(self, stretch: int, page: int) -> None:
        if self.noted is not None:
            self.noted.append(self.record(page))
        self._index.forget(stretch // self._kinds, page)

    def record(self, page: int) -> Record:
        """What is known of a page now."""
        key, head = self._index.names(page)
        place = int(self._group_of[page]), int(self._born[page]), int(self._filled[page])
        return Record(page, *place, self._index.tokens[page].copy(), key, head)
