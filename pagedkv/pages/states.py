"""Slots of recurrent state: who has which, which are shared, and which are kept as checkpoints.

A *state* is what all state layers of a sequence know at one length; it lives in a *slot*. A step
replaces the whole state, so nothing is ever copied: forks share a slot, and the first step of each
side writes to a slot of its own. A *checkpoint* keeps the slot of a prefix after its sequence went
on: a prompt is found up to the longest prefix that has pages **and** a checkpoint, since a state at
another length is of no use. Checkpoints are reused for rows that need a slot, least recently used
first. Like pages, slots are integers here; their bytes are in `storage/states.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from pagedkv.arrays import Bools, Ints, Tokens
from pagedkv.errors import CorruptCacheError, OutOfPagesError

from .prefix import Match

NO_SLOT = -1  # of a row without tokens: its state is zero


class PrefixKey(NamedTuple):
    """A prefix of any length: the key of its complete pages, and the ids behind them.

    Attributes:
        pages: the key of the complete pages; empty for a text whose ids are not known, which only
            its own sequences find.
        tail: ids behind the complete pages, as bytes; a number that nobody else has where the ids
            are not known.
    """

    pages: bytes
    tail: bytes


class StateSlots:
    """Slots and their owners.

    Args:
        num_slots: slots there may be.
        max_sequences: rows, as of the page tables.

    Attributes:
        slot: `[rows]`, the slot of each row's committed state; -1: none yet.
        target: `[rows]`, the slot that the open step writes; -1: none.
        promised: `[rows]`, rows that get a slot whatever happens.
        checkpoints: the slot of each prefix that is kept, least recently used first.
        used: slots up to the last one that was ever taken: what needs memory.
    """

    def __init__(self, num_slots: int, max_sequences: int) -> None:
        self.num_slots = num_slots
        self.refcount = np.zeros(num_slots + 1, dtype=np.int64)  # the last is nobody's: slot -1
        self.slot = np.full(max_sequences, NO_SLOT, dtype=np.int64)
        self.target = np.full(max_sequences, NO_SLOT, dtype=np.int64)
        self.promised = np.zeros(max_sequences, dtype=bool)
        self.checkpoints: OrderedDict[PrefixKey, int] = OrderedDict()
        self.used = 0
        self._tails: dict[bytes, set[bytes]] = {}  # of the checkpoints, by `pages`
        self._marks: list[dict[int, PrefixKey]] = [{} for _ in range(max_sequences)]
        self._free: list[int] = []
        self._private = count()

    # ------------------------------------------------------------------ room

    def room(self, rows: Ints | None = None) -> int:
        """Slots that a call may have.

        Args:
            rows: sequences that ask; what is promised to them is theirs.
        """
        kept = np.fromiter(self.checkpoints.values(), np.int64, len(self.checkpoints))
        owners = self.refcount.copy()
        owners[kept] -= 1
        # A row that shares its slot with a checkpoint alone needs no other: the checkpoint goes.
        owed = self.promised & ((self.slot < 0) | (owners[self.slot] > 1))
        if rows is not None:
            owed[rows] = False
        spare = int((owners[kept] == 0).sum())
        return len(self._free) + self.num_slots - self.used + spare - int(owed.sum())

    def make_room(self, rows: Ints) -> None:
        """Sees to it that a step of these rows has its slots.

        Raises:
            OutOfPagesError: it cannot have them.
        """
        mine = set(self.slot[rows].tolist())
        own = [k for k, slot in self.checkpoints.items() if slot in mine]
        while (needed := int(self._writes_elsewhere(rows).sum())) > (room := self.room(rows)):
            key = next((k for k in own if self.refcount[self.checkpoints[k]] == 2), None)
            if key is None:
                raise self.out_of_slots("prepare", needed, room)
            self.forget(key)
            own.remove(key)

    def out_of_slots(self, what: str, needed: int, room: int) -> OutOfPagesError:
        """The error of a call that cannot have the slots it needs."""
        in_use = int((self.refcount > 0).sum())
        return OutOfPagesError(
            f"{what} needs {needed} state slots, {max(0, room)} of {self.num_slots} can be had: "
            f"{in_use} are in use, {int(self.promised.sum())} sequences have one promised. Free "
            "sequences, or build the cache with a larger max_states",
            pages_needed=needed,
            pages_free=max(0, room),
        )

    def _writes_elsewhere(self, rows: Ints) -> Bools:
        """Whether the next step of each row needs a slot other than the row's own."""
        slot = self.slot[rows]
        return (slot < 0) | (self.refcount[slot] > 1)

    def _take(self) -> int:
        if self._free:
            slot = self._free.pop()
        elif self.used < self.num_slots:
            slot, self.used = self.used, self.used + 1
        else:
            key = next(k for k, slot in self.checkpoints.items() if self.refcount[slot] == 1)
            self.forget(key)
            slot = self._free.pop()
        self.refcount[slot] = 1
        return slot

    def _drop(self, slot: int) -> None:
        if slot < 0:
            return
        self.refcount[slot] -= 1
        if not self.refcount[slot]:
            self._free.append(slot)

    # ------------------------------------------------------------------ one step

    def prepare(self, rows: Ints) -> None:
        """Gives each row of a step the slot that it will write, after `make_room`."""
        elsewhere = self._writes_elsewhere(rows)
        self.target[rows] = self.slot[rows]
        for row in rows[elsewhere].tolist():
            self.target[row] = self._take()

    def abort(self, rows: Ints) -> None:
        """Takes `prepare` back."""
        for row in rows[self.target[rows] != self.slot[rows]].tolist():
            self._drop(int(self.target[row]))
        self.target[rows] = NO_SLOT

    def commit(self, rows: Ints, kept: Ints) -> None:
        """Makes what a step wrote the state of its rows.

        Args:
            kept: `[B]`, tokens kept of each row; a row that keeps none has the state it had.
        """
        self.abort(rows[kept == 0])
        for row in rows[kept > 0].tolist():
            if self.slot[row] != self.target[row]:
                self._drop(int(self.slot[row]))
                self.slot[row] = self.target[row]
        self.target[rows] = NO_SLOT

    # ------------------------------------------------------------------ sequences

    def begin(self, row: int, length: int, key: PrefixKey | None, promise: bool) -> bool:
        """Starts a row, on the checkpoint that was found for it, if there is room.

        Args:
            length: tokens found; `key` is theirs, None if none were.
            promise: whether the row gets a slot whatever happens.
        """
        if key is not None:
            self.slot[row] = self._use(key)
            self._marks[row][length] = key
        self.promised[row] = promise
        if self.room() >= 0:
            return True
        self.release(np.asarray([row]))
        return False

    def share(self, source: int, rows: Sequence[int]) -> bool:
        """Gives rows without a state the state of another row, if there is room."""
        slot = int(self.slot[source])
        if slot >= 0:
            self.refcount[slot] += len(rows)
            self.slot[np.asarray(rows)] = slot
        for row in rows:
            self._marks[row] = dict(self._marks[source])
        if self.room() >= 0:
            return True
        self.release(np.asarray(rows))
        return False

    def receive(self, row: int) -> int:
        """A slot for a state that is brought. The caller has asked for room."""
        self.slot[row] = self._take()
        return int(self.slot[row])

    def release(self, rows: Ints) -> None:
        """Rows have no state any more; their checkpoints stay."""
        for row in rows.tolist():
            self._drop(int(self.slot[row]))
            marks, self._marks[row] = self._marks[row], {}
            self._forget_private(marks)
        self.slot[rows] = NO_SLOT
        self.promised[rows] = False

    # ------------------------------------------------------------------ checkpoints

    def keep(self, row: int, length: int, key: PrefixKey | None) -> None:
        """Keeps the state that a row has now.

        Args:
            length: tokens of the row.
            key: of these tokens; None if their ids are not known.
        """
        key = key or PrefixKey(b"", next(self._private).to_bytes(8, "big"))
        if key in self.checkpoints:
            self.checkpoints.move_to_end(key)
        else:
            self.checkpoints[key] = int(self.slot[row])
            self.refcount[self.slot[row]] += 1
            self._tails.setdefault(key.pages, set()).add(key.tail)
        self._marks[row][length] = key

    def lengths(self, row: int) -> list[int]:
        """Lengths, ascending, at which a state of this row's text is kept."""
        marks = self._marks[row]
        return sorted(length for length, key in marks.items() if key in self.checkpoints)

    def go_back(self, row: int, length: int) -> None:
        """Gives a row the state that it had at a length: 0, or one of `lengths`."""
        slot = NO_SLOT
        if length:
            slot = self._use(self._marks[row][length])
        self._drop(int(self.slot[row]))
        self.slot[row] = slot
        gone = {n: self._marks[row].pop(n) for n in list(self._marks[row]) if n > length}
        self._forget_private(gone)

    def find(self, root: bytes, tokens: Tokens, match: Match, page_size: int) -> int:
        """The longest prefix within a match of pages that has a checkpoint: its length, or 0."""
        for columns in range(match.length // page_size, -1, -1):
            pages = match.keys[columns - 1] if columns else root
            first = columns * page_size
            best = 0
            for tail in self._tails.get(pages, ()):
                end = first + len(tail) // tokens.itemsize
                fits = best < end <= match.length
                if fits and tokens[first:end].tobytes() == tail:
                    best = end
            if best:
                return best
        return 0

    def clear(self) -> None:
        """Forgets all checkpoints."""
        for key in list(self.checkpoints):
            self.forget(key)

    def forget(self, key: PrefixKey) -> None:
        """Forgets a checkpoint."""
        self._drop(self.checkpoints.pop(key))
        tails = self._tails[key.pages]
        tails.discard(key.tail)
        if not tails:
            del self._tails[key.pages]

    def _use(self, key: PrefixKey) -> int:
        self.checkpoints.move_to_end(key)
        slot = self.checkpoints[key]
        self.refcount[slot] += 1
        return slot

    def _forget_private(self, marks: dict[int, PrefixKey]) -> None:
        """Forgets checkpoints of unknown ids that no row can go back to any more."""
        for key in marks.values():
            private = not key.pages and key in self.checkpoints
            if private and not any(key in other.values() for other in self._marks):
                self.forget(key)

    # ------------------------------------------------------------------ explain

    def check(self, rows: Ints, lengths: Ints) -> None:
        """Raises `CorruptCacheError` if owners and references contradict each other.

        Args:
            rows: live rows.
            lengths: `[rows]`, committed tokens of all rows.
        """
        owners = np.zeros_like(self.refcount)
        held = self.slot[self.slot >= 0]
        np.add.at(owners, held, 1)
        own = (self.target >= 0) & (self.target != self.slot)
        np.add.at(owners, self.target[own], 1)
        np.add.at(owners, np.fromiter(self.checkpoints.values(), np.int64), 1)
        if (owners != self.refcount).any():
            slot = int((owners != self.refcount).argmax())
            raise CorruptCacheError(f"references differ from owners: state slot {slot}")
        free = np.zeros_like(self.refcount)
        np.add.at(free, np.asarray(self._free, np.int64), 1)
        if (free[: self.used] != (owners[: self.used] == 0)).any() or free[self.used :].any():
            raise CorruptCacheError("free state slots are miscounted")
        stateless = np.setdiff1d(np.flatnonzero(self.slot >= 0), rows)
        if stateless.size:
            raise CorruptCacheError(f"row {stateless[0]} has a state but no sequence")
        if ((self.slot[rows] >= 0) != (lengths[rows] > 0)).any():
            raise CorruptCacheError("a sequence has tokens and no state, or the reverse")
        if self.room() < 0:
            raise CorruptCacheError("more state slots are promised than there are")
