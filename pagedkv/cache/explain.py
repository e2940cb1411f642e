"""Explains how much of a prompt `add` would find, and why it would not find more.

While a cache works, it notes only the keys of pages that were reused (`PrefixIndex.recycled`).
Everything else is read from the index when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv.arrays import Ints, Tokens
from pagedkv.pages import restore, sequences
from pagedkv.pages.checkpoints import PrefixKey
from pagedkv.pages.prefix import PrefixIndex, leading, page_key, page_keys
from pagedkv.pages.salts import Salt, first_of

from .stored_prefixes import SaltedText

BESIDE = 8  # ids that are shown where texts part
MOST_OTHERS = 256  # at most so many pages under other salts are followed

# Reasons why no more tokens are found. If two reach equally far, the first one is given.
REASONS = {
    "found": "All of it is found that can be: the last token is always computed.",
    "state": "The pages are there, but no recurrent state is kept at a later length: `checkpoint` "
    "keeps one.",
    "window": "Layers with a window have dropped pages that a longer prefix needs: `rollback` "
    "keeps more of them.",
    "computing": "A sequence has that text and has not computed it: it is found once a step "
    "commits it.",
    "evicted": "A sequence has that text, but a policy evicted tokens of it, and what is computed "
    "behind them belongs to it alone.",
    "weights": "That text was computed, and forgotten since: the weights changed, or "
    "`clear_prefixes` was called.",
    "recycled": "That text was computed, and its pages were reused for others since: more "
    "`max_tokens` or `host_tokens` keep it longer.",
    "adapter": "That text was computed without the adapters that act now.",
    "salt": "That text is stored under another salt, or was computed with other adapters.",
    "parts": "",
    "ends": "No stored text goes on from there.",
    "new": "Nothing that begins like it is stored under this salt.",
}


@dataclass(frozen=True)
class Explanation:
    """How much of a prompt `add` would find, and why not more; `str` gives plain sentences.

    It may reveal texts under other salts: show it to the operator of the cache, not to the sender
    of the prompt.

    Attributes:
        tokens: tokens of the prompt.
        found: tokens that would be found, on the device, in host memory or in the prefix store.
        from_host: found tokens that host memory has and the device has not.
        from_store: found tokens that only the prefix store has.
        agrees: leading tokens that the prompt shares with the nearest known text; tokens between
            `found` and `agrees` are known, but not found, for the `reason`.
        given: ids of the prompt from `agrees` on, at most 8.
        stored: ids that the nearest stored text has from there on, at most 8; none if it ends.
        reason: a key of `REASONS`.
        store: `on`, `none`, or `off` if it is unknown which model's K and V would be stored.
    """

    tokens: int
    found: int
    from_host: int
    from_store: int
    agrees: int
    given: tuple[int, ...]
    stored: tuple[int, ...]
    reason: str
    store: str

    def __str__(self) -> str:
        return self.told(lambda ids: ", ".join(map(str, ids)))

    def told(self, decode: Callable[[tuple[int, ...]], str]) -> str:
        """Returns plain sentences; `decode` turns ids into text to show."""
        where = [
            f"{count} {place}"
            for count, place in (
                (self.from_host, "in host memory"),
                (self.from_store, "in the prefix store"),
            )
            if count
        ]
        listed = f" ({', '.join(where)})" if where else ""
        said = [f"Of {self.tokens} tokens {self.found} are found{listed}."]
        if self.reason == "parts":
            said.append(
                f"At token {self.agrees} the nearest stored text parts: it goes on with "
                f"{decode(self.stored)}, this one with {decode(self.given)}."
            )
        else:
            if self.agrees > self.found:
                said.append(f"The first {self.agrees} are those of a text that is known.")
            said.append(REASONS[self.reason])
        if self.store == "off":
            said.append("The prefix store is not asked: nobody can tell whose K and V these are.")
        elif self.store == "none" and self.reason == "new":
            said.append("There is no prefix store: what other processes computed is not found.")
        return " ".join(said)


def explain(cache: Any, tokens: Tokens, salt: Salt) -> Explanation:
    """Explains what `add` would find of a prompt; changes nothing."""
    if not tokens.size:
        raise ValueError("tokens: expected at least one id, got none")
    search = _Search(cache, tokens, salt)
    device, host, store = search.on_device, search.on_host(), search.in_store()
    found = max(device, host, store)
    reaches = {"found": found}
    if found < search.wanted.size:
        reaches = search.not_found()
    reason = max(reaches, key=reaches.__getitem__)
    agrees, stored = max(found, reaches[reason]), tuple[int, ...]()
    if agrees == found < search.wanted.size:
        stored = search.beside(found)
        reason = "parts" if stored else "ends" if found else "new"
    prefixes = cache._prefixes
    return Explanation(
        tokens=tokens.size,
        found=found,
        from_host=max(0, host - device),
        from_store=max(0, store - max(device, host)),
        agrees=agrees,
        given=tuple(tokens[agrees : agrees + BESIDE].tolist()),
        stored=stored,
        reason=reason,
        store="none" if prefixes is None else "on" if prefixes.is_on(cache) else "off",
    )


class _Search:
    """Counts the tokens of a prompt that a cache knows, from the prompt's beginning on."""

    def __init__(self, cache: Any, tokens: Tokens, salt: Salt) -> None:
        self.cache, self.tables, self.tokens = cache, cache._tables, tokens
        self.wanted = tokens[:-1]  # the last one is always computed
        self.index: PrefixIndex = self.tables.index
        self.size, self.filled = self.tables.page_size, self.tables.pool.filled
        self.salt, self.salted = salt, cache.identity.salted(salt)
        self.chain = self.index.chain(self.salted)
        self.keys = [self.chain.root, *page_keys(self.chain, self.wanted, self.size)]
        held = sequences.stored_prefix(self.tables, tokens, self.salted)
        self.with_pages, self.on_device = held
        self._here = self.index.find_all(self.keys[1:]) >= 0

    def not_found(self) -> dict[str, int]:
        """For each reason, counts tokens of known texts that `add` would not find."""
        return {
            "state": self.with_pages,
            "window": self._behind_windows(),
            "computing": self._computing(),
            "evicted": self._evicted(),
            "weights": self._lost(self.index.forgotten),
            "recycled": self._lost(frozenset(self.index.recycled)),
            **self._elsewhere(),
        }

    def on_host(self) -> int:
        """Counts also tokens of pages that `add` would bring back from host memory."""
        tier, full = self.cache._tier, self.on_device // self.size
        if tier is None or tier.states is not None:
            return self.on_device
        rest = self.wanted[full * self.size :]
        behind = self.chain.behind(self.keys[full], full)
        length = full * self.size + tier.pages.match(behind, rest).length
        return max(self.on_device, int(length))

    def in_store(self) -> int:
        """Counts also tokens that `add` would bring from the prefix store."""
        prefixes = self.cache._prefixes
        if prefixes is None:
            return 0
        return min(
            self.wanted.size, prefixes.reach(SaltedText(self.cache, self.tokens, self.salted))
        )

    def _behind_windows(self) -> int:
        """Counts tokens of pages that every layer group without a window has."""
        whole = [here for here, w in zip(self._here, self.tables.windows) if w is None]
        if len(whole) == len(self._here):
            return 0
        return self.size * leading(np.all(whole, axis=0) if whole else self._here.any(0))

    def _lost(self, keys: Any) -> int:
        """Counts tokens of pages that are here, or whose keys are among these lost ones."""
        gone = np.fromiter((key in keys for key in self.keys[1:]), bool, len(self.keys) - 1)
        return self.size * leading(gone | self._here.any(0))

    def _computing(self) -> int:
        """Counts tokens of prompts that sequences have and have not computed."""
        best = 0
        for row, pending in self.tables.pending.items():
            key = None if row in self.tables.offloaded else self.tables.prefix_key(row)
            start = min(int(self.tables.lengths[row]), self.wanted.size)
            columns = start // self.size
            tail = self.wanted[columns * self.size : start].tobytes()
            own = PrefixKey.of(self.chain, self.keys[columns], columns, tail)
            if key == own:
                best = max(best, start + _agreed(pending, self.wanted[start:]))
        return best

    def _evicted(self) -> int:
        """Counts tokens of sequences' texts from which a policy evicted tokens."""
        best, tables = 0, self.tables
        for row in tables.live_rows().tolist() if tables.compacted else ():
            own_root = tables.prefix_keys[row][:1] == self.keys[:1]
            if own_root and tables.evicted[:, row].any():
                text = restore.text_of(tables, row)[: self.wanted.size]
                text = np.where(text < 0, self.wanted[: text.size], text)
                best = max(best, _agreed(text, self.wanted))
        return best

    def _elsewhere(self) -> dict[str, int]:
        """Counts tokens of texts under other salts or adapters, where a salt may begin."""
        best = {"adapter": 0, "salt": 0}
        columns = {0, self.on_device // self.size, *self.chain.mixed}
        for column in (c for c in columns if c * self.size < self.wanted.size):
            for name, reach in self._others_at(column):
                best[name] = max(best[name], column * self.size + reach)
        return best

    def _others_at(self, column: int) -> Iterator[tuple[str, int]]:
        """Yields why pages of others are not found, and how many tokens from a column on agree."""
        rest = self.wanted[column * self.size :]
        begin, before = rest[: self.size], self.chain.before(self.keys[column], column)
        plain = self.index.root(first_of(self.salt))  # without adapters
        adapted = not column and plain != self.chain.root
        pages = np.flatnonzero(self.index.findable & (self.index.tokens[:, 0] == begin[0]))
        same = self.index.tokens[pages, : begin.size] == begin
        same &= np.arange(begin.size) < self.filled[pages, None]
        agreed = np.cumprod(same, axis=1).sum(1)
        for i in np.argsort(-agreed, kind="stable")[:MOST_OTHERS].tolist():
            reach = int(agreed[i])
            key, partial = self.index.keys_of(int(pages[i]))
            theirs = None if partial is None else partial[: -begin.itemsize]
            whole = key is not None and reach == self.size
            if theirs == before or (whole and key == self.keys[column + 1]):
                continue  # a page of this text
            parent = None if theirs is None else theirs[: len(self.keys[0])]
            if (parent != self.keys[column]) if column else self._is_page(parent):
                continue  # a page of another text, or from the middle of one
            is_plain = theirs == plain or (whole and key == page_key(plain, begin.tobytes()))
            if key is not None and whole:
                reach += self.index.follow(key, rest[self.size :], self.filled)
            yield "adapter" if adapted and is_plain else "salt", reach

    def _is_page(self, key: bytes | None) -> bool:
        return key is not None and bool((self.index.find_all([key]) >= 0).any())

    def beside(self, length: int) -> tuple[int, ...]:
        """Ids that a stored text has behind the first `length` tokens of this one."""
        column, offset = divmod(length, self.size)
        own = self.wanted[column * self.size : length]
        indices = [(self.index, self.filled)]
        if self.cache._tier is not None:
            host = self.cache._tier.pages
            indices.append((host.index, host.pool.filled))
        for index, filled in indices:
            pages = index.listed_behind(self.chain.before(self.keys[column], column))
            held = pages[filled[pages] > offset]
            held = held[(index.tokens[held, :offset] == own).all(1)]
            if held.size:
                end = min(offset + BESIDE, int(filled[held[0]]))
                return tuple(index.tokens[held[0], offset:end].tolist())
        return ()


def _agreed(one: Tokens | Ints, other: Tokens) -> int:
    """How many tokens two texts have in common at their beginning."""
    least = min(one.size, other.size)
    return leading(one[:least] == other[:least])
