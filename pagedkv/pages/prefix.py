"""Finds pages by the tokens they hold.

A full page has the key sha256(key of the page before, its tokens). The first page has the root in
place of the key before; the root is made of the model's fingerprint and a salt, so models and salts
share nothing. If a region of the salt begins in the page (`salts.py`), its bytes stand between key
and tokens. A page with a committed token is also listed under its *partial key*, (key of the page
before, its first token). It finds a page, full or not, by comparing its tokens up to `filled`.

Invariant: all tokens that can be found here are committed and lie below `filled`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.arrays import Bools, Ints, Tokens

from .salts import Chain, Salt, first_of, mixed_in

UNKNOWN_TOKEN = -1
# At most so many pages are listed under one partial key. A lookup compares the tokens of all of
# them, about 6 us for each (one core of an AMD EPYC), and every prompt is looked up: many texts
# that begin alike must not slow lookups down. Keys find full pages at any number.
MAX_PARTIAL = 8
MOST_RECYCLED = 1 << 16  # keys of reused pages that are remembered, 8 MB at most


def page_key(before: bytes, tokens: bytes) -> bytes:
    """Returns the key of a full page; `before` is the key before it, `tokens` its ids."""
    return sha256(before + tokens).digest()


def page_keys(chain: Chain, tokens: Tokens, size: int) -> list[bytes]:
    """Returns the keys of all full pages of a text, or of its pieces of any other size."""
    key, found = chain.root, []
    for column in range(tokens.size // size):
        before = chain.before(key, column)
        key = page_key(before, tokens[column * size : (column + 1) * size].tobytes())
        found.append(key)
    return found


def leading(same: Bools) -> int:
    """Counts the true entries before the first false one."""
    return same.size if same.all() else int(same.argmin())


class Match(NamedTuple):
    """The longest findable prefix of a prompt.

    Attributes:
        length: tokens matched.
        keys: the keys of the full pages matched.
        pages: `[groups, n]` page ids covering `length`; -1 where a window needs none.
    """

    length: int
    keys: list[bytes]
    pages: Ints


class PrefixIndex:
    """The tokens of every page, and the keys by which committed tokens are found.

    Args:
        windows: window of each group, None for a group that keeps everything.
        num_pages: pages of all groups together.
        page_size: token slots per page.
        fingerprint: identity of the weights.

    Attributes:
        findable: `[pages + 1]`, whether each page is found by a key or a partial key.
        recycled: keys of pages that were reused, the latest last; for `explain` alone.
        forgotten: keys that `clear` forgot; for `explain` alone.
    """

    def __init__(
        self, windows: list[int | None], num_pages: int, page_size: int, fingerprint: bytes
    ) -> None:
        self.page_size = page_size
        self.tokens = np.full((num_pages + 1, page_size), UNKNOWN_TOKEN, dtype=np.int32)
        self._windows = windows
        self._fingerprint = sha256(fingerprint).digest()
        self._full: list[dict[bytes, int]] = [{} for _ in windows]
        self._partial: list[dict[bytes, tuple[int, ...]]] = [{} for _ in windows]
        self._key_of: dict[int, bytes] = {}
        self._partial_of: dict[int, bytes] = {}
        self.findable = np.zeros(num_pages + 1, dtype=bool)
        self.recycled: deque[bytes] = deque(maxlen=min(int(num_pages), MOST_RECYCLED))
        self.forgotten: frozenset[bytes] = frozenset()

    def root(self, salt: bytes) -> bytes:
        """The key before the first page."""
        return sha256(self._fingerprint + salt).digest()

    def chain(self, salt: Salt) -> Chain:
        """Returns the chain of keys of texts under a salt."""
        if isinstance(salt, bytes):
            return Chain(self.root(salt))
        return Chain(self.root(first_of(salt)), mixed_in(salt, self.page_size))

    def publish_full(
        self, pages: Ints, prefix_keys: list[list[bytes]], tokens: list[bytes]
    ) -> list[tuple[int, int]]:
        """Makes full, committed pages findable by their keys.

        Args:
            pages: `[groups, n]`.
            prefix_keys: for each of the n pages the keys of its text up to the page before it; the
                page's own key is appended.
            tokens: the raw ids of each page; the bytes of `Chain.mixed` for it come before them.

        Returns:
            `(group, i)` of each page whose key another page already has and keeps; `find` returns
            this page.
        """
        keys = []
        for earlier, raw in zip(prefix_keys, tokens):
            key = sha256(earlier[-1] + raw).digest()  # `page_key`, without its call
            earlier.append(key)
            keys.append(key)
        duplicates = []
        for group, (full, column) in enumerate(zip(self._full, pages.tolist())):
            owners = list(map(full.setdefault, keys, column))
            if owners == column:
                self._key_of.update(zip(column, keys))
                self.findable[pages[group]] = True
                continue
            for i, (page, owner) in enumerate(zip(column, owners)):
                if page == owner:
                    self._key_of[page] = keys[i]
                    self.findable[page] = True
                else:
                    duplicates.append((group, i))
        return duplicates

    def publish_partial(self, pages: Ints, partials: list[bytes]) -> None:
        """Makes the committed tokens of pages findable by the first token of each page.

        At most `MAX_PARTIAL` pages are listed under one partial key; further ones are left out.

        Args:
            pages: `[groups, n]`.
            partials: the partial key of each page: the bytes of `Chain.before`, and the page's
                first raw id.
        """
        for group, (known, column) in enumerate(zip(self._partial, pages.tolist())):
            alone = list(zip(column))
            listed = list(map(known.setdefault, partials, alone))
            if listed == alone:
                self._partial_of.update(zip(column, partials))
                self.findable[pages[group]] = True
                continue
            for page, partial in zip(column, partials):
                others = known[partial]
                if page not in others:
                    if len(others) == MAX_PARTIAL:
                        continue
                    known[partial] = (*others, page)
                self._partial_of[page] = partial
                self.findable[page] = True

    def publish(self, group: int, page: int, key: bytes | None, partial: bytes | None) -> None:
        """Makes one page findable by its keys.

        Args:
            key: a full page's key; ignored if another page has it.
            partial: the page's partial key.
        """
        if key is not None and self._full[group].setdefault(key, page) == page:
            self._key_of[page] = key
            self.findable[page] = True
        others = () if partial is None else self._partial[group].get(partial, ())
        if partial is not None and len(others) < MAX_PARTIAL:
            self._partial[group][partial] = (*others, page)
            self._partial_of[page] = partial
            self.findable[page] = True

    def keys_of(self, page: int) -> tuple[bytes | None, bytes | None]:
        """Returns the key and the partial key of a page; None for a key that does not find it."""
        return self._key_of.get(page), self._partial_of.get(page)

    def find(self, group: int, key: bytes | None) -> int:
        """Returns the full page that has a key, or -1."""
        return -1 if key is None else self._full[group].get(key, -1)

    def find_all(self, keys: Sequence[bytes]) -> Ints:
        """Returns each group's full page for each key, or -1: `[groups, n]`."""
        found = np.array(self._columns(keys), dtype=np.int64)
        return found.reshape(len(self._full), len(keys))

    def forget(self, group: int, pages: list[int]) -> None:
        """Takes pages of a group out of the index, under all of their keys."""
        full, partials = self._full[group], self._partial[group]
        for page in pages:
            key, partial = self._key_of.pop(page, None), self._partial_of.pop(page, None)
            if key is not None:
                del full[key]
            if partial is not None:
                others = partials.pop(partial)
                if len(others) > 1:
                    partials[partial] = tuple(other for other in others if other != page)
        self.findable[pages] = False

    def recycle(self, group: int, pages: list[int]) -> None:
        """Takes pages of a group out of the index, because they are reused for other texts."""
        self.recycled.extend(filter(None, map(self._key_of.get, pages)))
        self.forget(group, pages)

    def forget_full(self, group: int, page: int) -> None:
        """Withdraws a full page's key; the page stays findable by its partial key."""
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._full[group][key]
            self.findable[page] = page in self._partial_of

    def clear(self) -> None:
        """Forgets everything."""
        self.forgotten = frozenset().union(*self._full)
        self.recycled.clear()
        known: list[dict[Any, Any]] = [*self._full, *self._partial, self._key_of, self._partial_of]
        for each in known:
            each.clear()
        self.findable[:] = False

    def match(self, chain: Chain, tokens: Tokens, filled: npt.NDArray[np.int32]) -> Match:
        """Finds the longest prefix for which every group still has the pages that it needs."""
        keys, columns = self._match_full(chain, tokens)
        n = self._covered(columns, len(keys))
        columns = [column[:n] for column in columns]
        keys, length = keys[:n], n * self.page_size
        while True:
            before = chain.before(keys[-1] if keys else chain.root, len(keys))
            rest = tokens[length:]
            more, agreed = self._match_partial(before, rest, filled)
            if not agreed:
                break
            for column, page in zip(columns, more):
                column.append(page)
            length += agreed
            if agreed < self.page_size:
                break
            # A full page is missing under its key if another page held the key and was reused.
            keys.append(page_key(before, rest[:agreed].tobytes()))
        covered = -(-length // self.page_size)
        pages = np.array(columns, dtype=np.int64).reshape(len(columns), covered)
        for group, window in enumerate(self._windows):
            if window is not None:
                pages[group, : max(0, length - window) // self.page_size] = -1
        return Match(length, keys, pages)

    # ------------------------------------------------------------------ explain

    def follow(self, key: bytes, tokens: Tokens, filled: npt.NDArray[np.int32]) -> int:
        """Counts tokens that some group has behind a key, even if `match` would not find them."""
        length = 0
        for own in page_keys(Chain(key), tokens, self.page_size):
            if not any(own in full for full in self._full):
                break
            key, length = own, length + self.page_size
        rest = tokens[length:]
        agreed = [self._nearest(group, key, rest, filled)[1] for group in range(len(self._full))]
        return length + max(agreed) if rest.size else length

    def listed_behind(self, parent: bytes) -> Ints:
        """Returns pages that are listed under any partial key that begins with a key."""
        found = (
            page
            for partials in self._partial
            for partial, pages in partials.items()
            if partial.startswith(parent)
            for page in pages
        )
        return np.fromiter(found, np.int64)

    # ------------------------------------------------------------------ helpers

    def _match_full(self, chain: Chain, tokens: Tokens) -> tuple[list[bytes], list[list[int]]]:
        """Returns keys of leading full pages, and their page in each group, or -1.

        The keys end before the first page that a group without a window lacks.
        """
        size = self.page_size
        raw = tokens.tobytes()
        unbounded = [full for full, w in zip(self._full, self._windows) if w is None]
        keys: list[bytes] = []
        key, first, end = chain.root, 0, tokens.size // size
        stops = sorted(column for column in chain.mixed if 0 < column < end)
        for stop in [*stops, end]:
            key = chain.before(key, first)
            for start in range(4 * size * first, 4 * size * stop, 4 * size):
                key = page_key(key, raw[start : start + 4 * size])
                for full in unbounded:
                    if key not in full:
                        return keys, self._columns(keys)
                keys.append(key)
            first = stop
        return keys, self._columns(keys)

    def _columns(self, keys: Sequence[bytes]) -> list[list[int]]:
        return [[full.get(key, -1) for key in keys] for full in self._full]

    def _covered(self, columns: list[list[int]], most: int) -> int:
        """Returns the largest number of pages at whose end every window has all its pages."""
        bounded = [(column, w) for column, w in zip(columns, self._windows) if w is not None]
        runs = []
        for column, _ in bounded:
            run = [0]
            for page in column[:most]:
                run.append(run[-1] + 1 if page >= 0 else 0)
            runs.append(run)
        for n in range(most, 0, -1):
            tokens = n * self.page_size
            if all(
                run[n] >= n - max(0, tokens - window) // self.page_size
                for run, (_, window) in zip(runs, bounded)
            ):
                return n
        return 0

    def _match_partial(
        self, before: bytes, rest: Tokens, filled: npt.NDArray[np.int32]
    ) -> tuple[list[int], int]:
        """Returns each group's page that agrees longest with `rest`, and how far all agree."""
        if not rest.size:
            return [], 0
        chosen, least = [], self.page_size
        for group in range(len(self._partial)):
            best, most = self._nearest(group, before, rest, filled)
            chosen.append(best)
            least = min(least, most)
        return chosen, least

    def _nearest(
        self, group: int, before: bytes, rest: Tokens, filled: npt.NDArray[np.int32]
    ) -> tuple[int, int]:
        """Returns a group's page that agrees longest with `rest`, and how far it agrees."""
        best, most = -1, 0
        for page in self._partial[group].get(before + rest[:1].tobytes(), ()):
            size = min(int(filled[page]), rest.size)
            agreed = leading(self.tokens[page, :size] == rest[:size])
            if agreed > most:
                best, most = page, agreed
        return best, most
