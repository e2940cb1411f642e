"""Slots of recurrent state: who has which, which are shared, and which are kept as checkpoints.

A *state* is what all state layers of a sequence know at one length; it lives in a *slot*. A step
replaces the whole state, so nothing is ever copied: forks share a slot, and the first step of each
side writes to a slot of its own. A *checkpoint* keeps the slot of a prefix after its sequence went
on: a prompt is found up to the longest prefix that has pages **and** a checkpoint, since a state at
another length is of no use. Checkpoints are reused for rows that need a slot, least recently used
first. Like pages, slots are integers here; their bytes are in `storage/states.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np

from pagedkv.arrays import Bools, Ints
from pagedkv.errors import CorruptCacheError, OutOfPagesError

from .checkpoints import Checkpoints, PrefixKey

NO_SLOT = -1  # of a row without tokens: its state is zero


class StateSlots:
    """Slots and their owners.

    Args:
        num_slots: slots there may be.
        max_sequences: rows, as of the page tables.

    Attributes:
        slot: `[rows]`, the slot of each row's committed state; -1: none yet.
        target: `[rows]`, the slot that the open step writes; -1: none.
        promised: `[rows]`, rows that get a slot whatever happens.
        checkpoints: prefixes of which the slot is kept.
        version: `[slots + 1]`, a number of each slot's contents: equal versions mean equal bytes.
        used: slots up to the last one that was ever taken: what needs memory.
    """

    def __init__(self, num_slots: int, max_sequences: int) -> None:
        self.num_slots = num_slots
        self.refcount = np.zeros(num_slots + 1, dtype=np.int64)  # the last has no owner: slot -1
        self.slot = np.full(max_sequences, NO_SLOT, dtype=np.int64)
        self.target = np.full(max_sequences, NO_SLOT, dtype=np.int64)
        self.promised = np.zeros(max_sequences, dtype=bool)
        self.checkpoints = Checkpoints(max_sequences)
        self.version = np.zeros(num_slots + 1, dtype=np.int64)
        self.used = 0
        self._free: list[int] = []
        self._versions = count(1)

    # ------------------------------------------------------------------ room

    def room(self, rows: Ints | None = None) -> int:
        """Slots that a call may have.

        Args:
            rows: sequences that ask; what is promised to them is theirs.
        """
        promised = self.promised
        if rows is not None:
            promised = promised.copy()
            promised[rows] = False
        return self._room(self._owners(), self.slot, promised)

    def _owners(self) -> Ints:
        """`[slots + 1]`, references of each slot, those of checkpoints left out."""
        owners = self.refcount.copy()
        owners[list(self.checkpoints.slots.values())] -= 1
        return owners

    def _room(self, owners: Ints, slot: Ints, promised: Bools) -> int:
        """Slots that are free, or only kept, and not owed to a row."""
        # A row that shares its slot with a checkpoint alone needs no other: the checkpoint goes.
        owed = promised & ((slot < 0) | (owners[slot] > 1))
        owed &= (self.target < 0) | (self.target == slot)  # else it has what it is owed
        spare = int((owners[list(self.checkpoints.slots.values())] == 0).sum())
        return len(self._free) + self.num_slots - self.used + spare - int(owed.sum())

    def require_room(self, rows: Ints) -> None:
        """Raises `OutOfPagesError` unless a step of these rows can have its slots."""
        needed, room = int(self._writes_elsewhere(rows).sum()), self.room(rows)
        if needed > room and needed - len(self._given_up(rows)) > room:
            raise self.out_of_slots("prepare", needed, room)

    def _given_up(self, rows: Ints) -> list[PrefixKey]:
        """Checkpoints that rows can do without: then they write where their own state is."""
        mine = set(self.slot[rows].tolist())
        kept = self.checkpoints.slots.items()
        return [key for key, slot in kept if slot in mine and self.refcount[slot] == 2]

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
            kept = self.checkpoints.slots.items()
            key = next(key for key, slot in kept if self.refcount[slot] == 1)
            self.forget(key)
            slot = self._free.pop()
        self.refcount[slot] = 1
        self.version[slot] = next(self._versions)
        return slot

    def _drop(self, slot: int) -> None:
        if slot < 0:
            return
        self.refcount[slot] -= 1
        if not self.refcount[slot]:
            self._free.append(slot)

    # ------------------------------------------------------------------ one step

    def prepare(self, rows: Ints) -> None:
        """Gives each row of a step the slot that it will write, after `require_room`."""
        short = int(self._writes_elsewhere(rows).sum()) - self.room(rows)
        for key in self._given_up(rows)[: max(0, short)]:
            self.forget(key)
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
            else:
                self.version[self.slot[row]] = next(self._versions)
        self.target[rows] = NO_SLOT

    # ------------------------------------------------------------------ sequences

    def begin(self, row: int, length: int, key: PrefixKey | None, promise: bool) -> bool:
        """Starts a row, on the checkpoint that was found for it, if there is room.

        Without a checkpoint there is: the caller has asked for the slot of a promise.

        Args:
            length: tokens found; `key` is theirs, None if none were.
            promise: whether the row gets a slot whatever happens.
        """
        if key is not None:
            self.slot[row] = self._use(key)
            self.checkpoints.mark(row, length, key)
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
            self.checkpoints.copy_marks(source, row)
        if self.room() >= 0:
            return True
        self.release(np.asarray(rows))
        return False

    def release(self, rows: Ints) -> None:
        """Takes the states from rows; their checkpoints stay."""
        for row in rows.tolist():
            self._drop(int(self.slot[row]))
            self._unmark(row)
        self.slot[rows] = NO_SLOT
        self.promised[rows] = False

    # ------------------------------------------------------------------ elsewhere and back

    def leave(self, rows: Ints) -> None:
        """Takes slots and promises from rows, which keep their checkpoints."""
        for row in rows.tolist():
            self._drop(int(self.slot[row]))
        self.slot[rows] = NO_SLOT
        self.promised[rows] = False

    def require_return(self, what: str, rows: Ints, versions: Ints, promised: Bools) -> None:
        """Raises `OutOfPagesError` unless rows can have the states of these versions again.

        Args:
            what: the call, for the error.
            versions: of each row's state; -1 for a row that has none.
            promised: which rows get a slot whatever happens.
        """
        owners, slot, promises = self._owners(), self.slot.copy(), self.promised.copy()
        slot[rows] = found = np.asarray([self._holding(version) for version in versions.tolist()])
        np.add.at(owners, found[found >= 0], 1)
        promises[rows] = promised
        missing, count = np.unique(versions[(versions >= 0) & (found < 0)], return_counts=True)
        alone = np.isin(versions, missing[count == 1]) & promised  # owed what it gets now
        needed, room = missing.size - int(alone.sum()), self._room(owners, slot, promises)
        if needed > room:
            raise self.out_of_slots(what, needed, room)

    def come_back(self, rows: Ints, versions: Ints, promised: Bools) -> list[tuple[int, int]]:
        """Gives rows the states of these versions, after `require_return`.

        Returns:
            Slots whose bytes have to be brought, and their versions; rows share a state that they
            shared, and one that is still here.
        """
        fresh = []
        for row, version in zip(rows.tolist(), versions.tolist()):
            slot = self._holding(version)
            if slot >= 0:
                self.refcount[slot] += 1
            elif version >= 0:
                slot = self._take()
                self.version[slot] = version
                fresh.append((slot, version))
            self.slot[row] = slot
        self.promised[rows] = promised
        return fresh

    def require_slot(self, what: str) -> None:
        """Raises `OutOfPagesError` unless a call can have one slot."""
        if (room := self.room()) < 1:
            raise self.out_of_slots(what, 1, room)

    def receive(self, row: int) -> int:
        """The slot of a row for a state that was never here, after `require_slot`."""
        self.slot[row] = self._take()
        return int(self.slot[row])

    def _holding(self, version: int) -> int:
        """The slot in use that holds a version, or -1."""
        found = np.flatnonzero((self.version == version) & (self.refcount > 0))
        return int(found[0]) if found.size and version >= 0 else NO_SLOT

    # ------------------------------------------------------------------ checkpoints

    def keep(self, row: int, length: int, key: PrefixKey | None) -> None:
        """Keeps the state that a row has now.

        Args:
            length: tokens of the row.
            key: of these tokens; None if their ids are not known.
        """
        slot = int(self.slot[row])
        self.refcount[slot] += self.checkpoints.keep(row, length, slot, key)

    def require_way_back(self, row: int, length: int) -> None:
        """Raises `OutOfPagesError` if another row is promised the slot of a row's checkpoint."""
        owners, slot, promised = self._owners(), self.slot.copy(), self.promised.copy()
        left = slot[row]
        slot[row] = self.checkpoints.slots[self.checkpoints.key_at(row, length)]
        owners[[left, slot[row]]] += -1, 1
        promised[row] = False
        freed = int(self.refcount[left] == 1)
        if (room := self._room(owners, slot, promised) + freed) < 0:
            raise self.out_of_slots("truncate", 1, room + 1)

    def go_back(self, row: int, length: int) -> None:
        """Gives a row the state that it had at a length: 0, or that of a checkpoint.

        After `require_way_back`, where it is a checkpoint.
        Where others have that state too, and no slot is left for a copy, its promise ends.
        """
        slot = self._use(self.checkpoints.key_at(row, length)) if length else NO_SLOT
        self._drop(int(self.slot[row]))
        self.slot[row] = slot
        self._unmark(row, length)
        if self.promised[row] and self.room() < 0:
            self.promised[row] = False

    def clear(self) -> None:
        """Forgets all checkpoints."""
        for key in list(self.checkpoints.slots):
            self.forget(key)
        self.checkpoints.unmark_all()

    def forget(self, key: PrefixKey) -> None:
        """Forgets a checkpoint."""
        self._drop(self.checkpoints.forget(key))

    def _use(self, key: PrefixKey) -> int:
        slot = self.checkpoints.use(key)
        self.refcount[slot] += 1
        return slot

    def _unmark(self, row: int, length: int = -1) -> None:
        for key in self.checkpoints.unmark(row, length):
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
        np.add.at(owners, np.fromiter(self.checkpoints.slots.values(), np.int64), 1)
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
        self.checkpoints.check()
        if ((self.slot[rows] >= 0) != (lengths[rows] > 0)).any():
            raise CorruptCacheError("a sequence has tokens and no state, or the reverse")
        if self.room() < 0:
            raise CorruptCacheError("more state slots are promised than there are")
