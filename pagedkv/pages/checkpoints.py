"""Checkpoints: prefixes of which the state is kept, and which sequences can go back to them."""

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
        pages: the key of the complete pages, and the salt that begins behind them if there is a
            tail; empty for a text whose ids are not known, which only its own sequences find.
        tail: ids behind the complete pages, as bytes; a number that nobody else has where the ids
            are not known.
    """

    pages: bytes
    tail: bytes

    @classmethod
    def of(cls, chain: Chain, key: bytes, columns: int, tail: bytes) -> PrefixKey:
        """Makes the key of a text of `columns` complete pages, the last of which has `key`."""
        return cls(chain.before(key, columns) if tail else key, tail)


class Checkpoints:
    """The state slot of each prefix that is kept; a slot is that of one checkpoint at most.

    Args:
        num_slots: slots there may be.
        max_sequences: rows, as of the page tables.

    Attributes:
        slots: by prefix, in the order in which they were kept.
        key_of: prefixes by slot.
        findable: `[slots + 1]`, whether each slot is that of a checkpoint.
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
        """Keeps the state in a slot, if no other has it, as that of a row's first tokens.

        Args:
            length: how many tokens.
            key: of these tokens; None if their ids are not known.

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
        """Forgets the checkpoints of slots that are reused, as a `PagePool` asks for it."""
        for slot in pages:
            self.forget(self.key_of[slot])

    def find(self, chain: Chain, tokens: Tokens, match: Match, page_size: int) -> int:
        """The longest prefix within a match of pages that has a checkpoint: its length, or 0."""
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
        """Notes that a row's first `length` tokens are those of a checkpoint."""
        self._marks[row][length] = key

    def copy_marks(self, source: int, row: int) -> None:
        """Lets a row go back where another can."""
        self._marks[row] = dict(self._marks[source])

    def lengths(self, row: int) -> list[int]:
        """Lengths, ascending, at which a state of this row's text is kept."""
        return sorted(n for n, key in self._marks[row].items() if key in self.slots)

    def key_at(self, row: int, length: int) -> PrefixKey:
        """The checkpoint at one of `lengths`."""
        return self._marks[row][length]

    def unmark(self, row: int, length: int = -1) -> list[PrefixKey]:
        """Forgets where a row could go back to beyond a length; by default everywhere.

        Returns:
            Checkpoints that nobody can find any more.
        """
        marks = self._marks[row]
        gone = [marks.pop(n) for n in list(marks) if n > length]
        unfindable = [key for key in dict.fromkeys(gone) if not key.pages and key in self.slots]
        return [key for key in unfindable if not any(key in m.values() for m in self._marks)]

    def unmark_all(self) -> None:
        """Forgets where any row could go back to: equal keys made later are not of these texts."""
        for marks in self._marks:
            marks.clear()

    # ------------------------------------------------------------------ explain

    def check(self) -> None:
        """Raises `CorruptCacheError` if what is known of checkpoints contradicts itself."""
        kept = {slot: key for key, slot in self.slots.items()}
        if len(kept) < len(self.slots):
            raise CorruptCacheError("a state slot is kept by two checkpoints")
        if kept != self.key_of or set(np.flatnonzero(self.findable).tolist()) != kept.keys():
            raise CorruptCacheError("checkpoints differ from the slots that can be found")
        listed = {PrefixKey(pages, tail) for pages, tails in self._tails.items() for tail in tails}
        if listed != self.slots.keys():
            raise CorruptCacheError("checkpoints differ from the prefixes they are found by")
