"""Free pages, reference counts and the order in which cached pages are reused.

One pool serves all layer groups: a page id is an index into flat arrays. Each layer group owns one
segment of them, or two adjacent ones if it has staging pages as well. To the pool every segment is
a group. Id -1 means "no page"; every array has one element more than there are pages, so that -1
reads the neutral value there. Slots of states have a pool of their own (`states.py`).

A page is *live* (referenced), *cached* (unreferenced but still findable as a prefix) or *free*.
Invariant, per group: live + cached + free = the pages that exist. These are the group's first
pages; in a pool of fixed size, all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagedkv.arrays import Bools, Ints


class Index(Protocol):
    """The index that finds pages: `PrefixIndex`, or `Checkpoints` for the slots of states."""

    findable: Bools

    def recycle(self, group: int, pages: list[int]) -> None:
        """Takes pages of a group out of the index, because they are reused for other texts."""


def within(counts: Ints) -> Ints:
    """Returns 0 .. count - 1 for each count, one after the other."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


class PagePool:
    """Hands out pages, counts their references, and reuses cached ones last.

    Args:
        num_pages: pages of each group.
        index: finds cached pages, and forgets those that are reused.
        kinds: segments of a layer group: 2 where it has staging pages, else 1.

    Attributes:
        before_reuse: called with the pool and the cached pages that are about to be reused; a
            host tier sets it.
    """

    def __init__(self, num_pages: Sequence[int], index: Index, kinds: int = 1) -> None:
        self.num_pages = np.asarray(num_pages, dtype=np.int64)
        self.base: Ints = np.concatenate([[0], np.cumsum(self.num_pages)])
        total = int(self.base[-1])
        self.refcount = np.zeros(total + 1, dtype=np.int32)
        self.filled = np.zeros(total + 1, dtype=np.int32)  # committed slots of each page
        # Changes whenever bytes of committed slots may: equal numbers mean equal contents.
        self.version = np.zeros(total + 1, dtype=np.int64)
        self._versions = 0
        self.findable = index.findable  # `[pages + 1]`, kept up to date by the index
        self.group_of = np.append(np.repeat(np.arange(len(num_pages)), self.num_pages), -1)
        self.existing = self.num_pages.copy()
        self.num_free = self.num_pages.copy()
        self.num_cached = np.zeros(len(num_pages), dtype=np.int64)
        # Each group has a stack, lowest id on top, so that prompts get consecutive pages.
        self._stack = np.concatenate(
            [np.arange(end - 1, start - 1, -1) for start, end in zip(self.base, self.base[1:])]
        )
        # Least recently freed first, as (stamp << bits | page): room for 2**40 frees of 2**23
        # pages. An entry with an older stamp than its page's is stale and skipped, so that a page
        # can leave from the middle in O(1).
        self._queue: list[deque[int]] = [deque() for _ in num_pages]
        self._stamp = np.full(total + 1, -1, dtype=np.int64)
        self._bits = total.bit_length()
        self._clock = 0
        self._index, self._kinds = index, kinds
        self.before_reuse: Callable[[PagePool, list[int]], None] | None = None

    def take(self, n: int, more: Sequence[tuple[int, int]] = ()) -> tuple[Ints, list[Ints]]:
        """Takes n pages of every group, and `more` of some groups, with one reference each.

        The caller has made sure that there are enough. One call takes all pages of a step, so that
        it gets all or none.

        Args:
            more: `(group, count)` pairs.

        Returns:
            `[groups, n]`, and one array per pair.
        """
        wanted = np.full(len(self.num_pages), n)
        for group, count in more:
            wanted[group] += count
        for group in np.flatnonzero(self.num_free < wanted).tolist():
            self._reuse_cached(group, int(wanted[group] - self.num_free[group]))
        self.num_free -= n
        start = self.base[:-1] + self.num_free
        pages = self._stack[start[:, None] + np.arange(n - 1, -1, -1)]
        self.refcount[pages] = 1
        self.renew(pages)
        single = []
        for group, count in more:
            self.num_free[group] -= count
            first = int(self.base[group] + self.num_free[group])
            single.append(self._stack[first : first + count][::-1].copy())
            self.refcount[single[-1]] = 1
            self.renew(single[-1])
        return pages, single

    def renew(self, pages: Ints | int) -> None:
        """Gives pages a new version, because their committed bytes are about to change."""
        self._versions += 1
        self.version[pages] = self._versions

    def add_owners(self, pages: Ints, owners: int) -> None:
        """Adds references to distinct live pages (-1 is skipped)."""
        self.refcount[pages] += owners
        self.refcount[-1] = 0

    def share(self, pages: Ints) -> None:
        """Adds one reference to distinct pages, bringing cached ones back to life."""
        revived = pages[self.refcount[pages] == 0]
        self.refcount[pages] += 1
        if revived.size:
            self._stamp[revived] = -1
            self.num_cached -= self.count(revived)

    def drop(self, pages: Ints) -> None:
        """Drops one reference per entry of `pages` (-1 is skipped, a page may occur repeatedly).

        Pages left without an owner become cached if they are findable, else free. Pages that are
        dropped together will be reused in the order in which their last owners drop them.
        """
        pages = pages[pages >= 0]
        np.subtract.at(self.refcount, pages, 1)
        gone = pages[self.refcount[pages] == 0]
        if gone.size == 0:
            return
        if gone.size > 1:
            gone = gone[::-1]
            gone = gone[np.sort(np.unique(gone, return_index=True)[1])][::-1]
        self._cache(gone[self.findable[gone]])
        self._release(gone[~self.findable[gone]])

    def is_kept(self, pages: Ints) -> npt.NDArray[np.bool_]:
        """Whether each page has an owner or is cached, so that `share` may be called."""
        return (self.refcount[pages] > 0) | (self._stamp[pages] >= 0)

    def forgotten(self, pages: Ints) -> None:
        """Frees the cached ones among some pages. The caller has made them unfindable."""
        cached = pages[(self._stamp[pages] >= 0) & (pages >= 0)]
        self.share(cached)
        self.drop(cached)

    def release_cached(self) -> None:
        """Frees every cached page. The caller has made them unfindable."""
        cached = np.flatnonzero(self._stamp[:-1] >= 0)
        self._stamp[cached] = -1
        self.num_cached[:] = 0
        for queue in self._queue:
            queue.clear()
        self._release(cached)

    def last_used(self) -> Ints:
        """Counts the pages of each group up to its last live or cached page."""
        used = (self.refcount[:-1] > 0) | (self._stamp[:-1] >= 0)
        segments = np.split(used, self.base[1:-1])
        return np.asarray([np.flatnonzero(part).max(initial=-1) + 1 for part in segments])

    def free_pages(self, group: int) -> Ints:
        """Free pages of a group, ascending."""
        start = int(self.base[group])
        return np.sort(self._stack[start : start + int(self.num_free[group])])

    def resize(self, existing: Ints) -> None:
        """Makes the first `existing` pages of each group exist; withdrawn pages must be free."""
        for group, (before, after) in enumerate(zip(self.existing.tolist(), existing.tolist())):
            start = int(self.base[group])
            kept = self.free_pages(group)
            kept = np.append(kept[kept < start + after], start + np.arange(before, after))
            # Lowest on top, so that the end of the pool becomes free again.
            self._stack[start : start + kept.size] = kept[::-1]
            self.num_free[group] = kept.size
        self.existing = existing.copy()

    def _release(self, pages: Ints) -> None:
        self.filled[pages] = 0
        for group in range(len(self.num_pages)):
            mine = pages[self.group_of[pages] == group] if len(self.num_pages) > 1 else pages
            start = int(self.base[group] + self.num_free[group])
            self._stack[start : start + mine.size] = mine[::-1]
            self.num_free[group] += mine.size

    def _cache(self, pages: Ints) -> None:
        stamps = self._clock + np.arange(pages.size)
        self._clock += pages.size
        self._stamp[pages] = stamps
        self.num_cached += self.count(pages)
        entries = (stamps << self._bits) | pages
        for group, queue in enumerate(self._queue):
            queue.extend(entries[self.group_of[pages] == group].tolist())
            if len(queue) > 2 * self.num_pages[group] + 64:  # mostly stale: rebuild
                kept = np.flatnonzero(self._stamp[self.base[group] : self.base[group + 1]] >= 0)
                kept += self.base[group]
                kept = kept[np.argsort(self._stamp[kept])]
                self._queue[group] = deque(((self._stamp[kept] << self._bits) | kept).tolist())

    def _reuse_cached(self, group: int, n: int) -> None:
        """Frees the n cached pages of a group that were cached first."""
        assert n <= self.num_cached[group], "the caller checks that the group has pages"
        queue, pages = self._queue[group], list[int]()
        while len(pages) < n:
            entries = np.asarray([queue.popleft() for _ in range(n - len(pages))])
            stamps, found = entries >> self._bits, entries & ((1 << self._bits) - 1)
            found = found[self._stamp[found] == stamps]
            self._stamp[found] = -1
            pages += found.tolist()
        if self.before_reuse is not None:
            self.before_reuse(self, pages)
        self._index.recycle(group // self._kinds, pages)
        self.num_cached[group] -= n
        self._release(np.asarray(pages))

    def count(self, pages: Ints) -> Ints:
        """Counts how many of some pages are in each group."""
        if len(self.num_pages) == 1:
            return np.asarray([pages.size], dtype=np.int64)
        return np.bincount(self.group_of[pages], minlength=len(self.num_pages))
