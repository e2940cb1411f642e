"""Checkpoints: prefixes whose state is kept, and the sequences that can go back to them."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

import numpy as np

from pagedkv.arrays import Tokens
from pagedkv.errors import CorruptCacheError

from .prefix import Match
from .salts import Chain


class PrefixKey(NamedTuple):
    """A prefix of any length: the key of its complete pages, and the ids behind them.

    Attributes:
        pages: the key of the complete pages; with a tail, also the salt that begins behind them.
            Empty for a text whose ids are not known: only its own sequences find it.
        tail: ids behind the complete pages, as bytes; for a text whose ids are not known, a number
            that no other key has.
    """

    pages: bytes
    tail: bytes

    @classmethod
    def of(cls, chain: Chain, key: bytes, columns: int, tail: bytes) -> PrefixKey:
        """Makes the key of a text of `columns` complete pages; `key` is the last page's."""
        return cls(chain.before(key, columns) if tail else key, tail)


class Checkpoints:
    """The state slots of the prefixes that are kept; a slot has at most one checkpoint.

    Args:
        num_slots: how many slots there are.
        max_sequences: rows, as in the page tables.

    Attributes:
        slots: slots by prefix, in the order in which they were kept.
        key_of: prefixes by slot.
        findable: `[slots + 1]`, whether each slot has a checkpoint.
    """

    def __init__(self, num_slots: int, max_sequences: int) -> None:
        self.slots: dict[PrefixKey, int] = {}
        self.key_of: dict[int, PrefixKey] = {}
        self.findable = np.zeros(num_slots + 1, dtype=bool)
        self._tails: dict[bytes, set[bytes]] = {}  # by `pages`
        self._marks: list[dict[int, PrefixKey]] = [{} for _ in range(max_sequences)]
        self._private = count()

    def __len__(self) -> int:
        return len(self.slots)

    # ------------------------------------------------------------------ which there are

    def keep(self, row: int, length: int, slot: int, key: PrefixKey | None) -> int:
        """Keeps a slot as the checkpoint of a row's first tokens, if no other slot is that.

        Args:
            length: how many tokens.
            key: the key of these tokens; None if their ids are not known.

        Returns:
            The slot that has these tokens' state.
        """
        if key is None:  # perhaps another sequence keeps the same state
            key = self.key_of.get(slot)
            key = key or PrefixKey(b"", next(self._private).to_bytes(8, "big"))
        self._marks[row][length] = key
        if key not in self.slots:
            self.slots[key], self.key_of[slot] = slot, key
            self.findable[slot] = True
            self._tails.setdefault(key.pages, set()).add(key.tail)
        return self.slots[key]

    def forget(self, key: PrefixKey) -> int:
        """Forgets a checkpoint; returns its slot."""
        tails = self._tails[key.pages]
        tails.discard(key.tail)
        if not tails:
            del self._tails[key.pages]
        slot = self.slots.pop(key)
        del self.key_of[slot]
        self.findable[slot] = False
        return slot

    def recycle(self, group: int, pages: list[int]) -> None:
        """Forgets the checkpoints of slots that are reused; the `PagePool` calls this."""
        for slot in pages:
            self.forget(self.key_of[slot])

    def find(self, chain: Chain, tokens: Tokens, match: Match, page_size: int) -> int:
        """Finds the longest prefix with a checkpoint within a match of pages: its length, or 0."""
        for columns in range(match.length // page_size, -1, -1):
            pages = match.keys[columns - 1] if columns else chain.root
            first = columns * page_size
            best = first if b"" in self._tails.get(pages, ()) else 0
            for tail in self._tails.get(chain.before(pages, columns), ()):
                end = first + len(tail) // tokens.itemsize
                fits = best < end <= match.length
                if fits and tokens[first:end].tobytes() == tail:
                    best = end
            if best:
                return best
        return 0

    # ------------------------------------------------------------------ which a row can go back to

    def mark(self, row: int, length: int, key: PrefixKey) -> None:
        """Notes that a checkpoint has a row's first `length` tokens."""
        self._marks[row][length] = key

    def copy_marks(self, source: int, row: int) -> None:
        """Lets a row go back to the checkpoints of another row."""
        self._marks[row] = dict(self._marks[source])

    def lengths(self, row: int) -> list[int]:
        """Lengths, ascending, at which a state of this row's text is kept."""
        return sorted(n for n, key in self._marks[row].items() if key in self.slots)

    def key_at(self, row: int, length: int) -> PrefixKey:
        """The checkpoint at one of `lengths`."""
        return self._marks[row][length]

    def unmark(self, row: int, length: int = -1) -> list[PrefixKey]:
        """Forgets a row's checkpoints beyond a length; by default all of them.

        Returns:
            Checkpoints that nobody can find any more.
        """
        marks = self._marks[row]
        gone = [marks.pop(n) for n in list(marks) if n > length]
        unfindable = [key for key in dict.fromkeys(gone) if not key.pages and key in self.slots]
        return [key for key in unfindable if not any(key in m.values() for m in self._marks)]

    def unmark_all(self) -> None:
        """Forgets all rows' checkpoints: equal keys that are made later belong to other states."""
        for marks in self._marks:
            marks.clear()

    # ------------------------------------------------------------------ explain

    def check(self) -> None:
        """Raises `CorruptCacheError` if the records of checkpoints contradict each other."""
        kept = {slot: key for key, slot in self.slots.items()}
        if len(kept) < len(self.slots):
            raise CorruptCacheError("a state slot is kept by two checkpoints")
        if kept != self.key_of or set(np.flatnonzero(self.findable).tolist()) != kept.keys():
            raise CorruptCacheError("checkpoints differ from the slots that can be found")
        listed = {PrefixKey(pages, tail) for pages, tails in self._tails.items() for tail in tails}
        if listed != self.slots.keys():
            raise CorruptCacheError("checkpoints differ from the prefixes they are found by")
