"""Slots of recurrent state: which row has which, which are shared, and which are checkpoints.

A *state* holds the memory of all state layers of a sequence at one length, in a *slot*. A slot is a
page of a separate `PagePool`: rows own it. A slot without an owner is cached if a checkpoint
(`checkpoints.py`) has it, and else free. A step replaces the whole state, so nothing is ever
copied: forks share a slot, and the first step of each side writes to a slot of its own. A prompt is
found up to the longest prefix that has pages **and** a checkpoint, because a state is useless at
any other length. The bytes of slots are in `storage/states.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedkv.arrays import Bools, Ints
from pagedkv.errors import CorruptCacheError, OutOfPagesError

from .checkpoints import Checkpoints, PrefixKey
from .pool import PagePool

NO_SLOT = -1  # the slot of a row without tokens: its state is zero


class StateSlots:
    """Slots and their owners.

    Args:
        num_slots: how many slots there are.
        max_sequences: rows, as in the page tables.

    Attributes:
        pool: owners of slots. No two states ever have the same version.
        slot: `[rows]`, the slot of each row's committed state; -1: none yet.
        target: `[rows]`, the slot that the open step writes; -1: none.
        promised: `[rows]`, whether each row gets a slot in any case.
        checkpoints: prefixes whose slots are kept.
    """

    def __init__(self, num_slots: int, max_sequences: int) -> None:
        self.num_slots = num_slots
        self.slot = np.full(max_sequences, NO_SLOT, dtype=np.int64)
        self.target = np.full(max_sequences, NO_SLOT, dtype=np.int64)
        self.promised = np.zeros(max_sequences, dtype=bool)
        self.checkpoints = Checkpoints(num_slots, max_sequences)
        self.pool = PagePool([num_slots], self.checkpoints)

    @property
    def in_use(self) -> int:
        """Counts slots of rows, which may share them, and of checkpoints."""
        return self.num_slots - int(self.pool.num_free[0])

    # ------------------------------------------------------------------ room

    def room(self, rows: Ints | None = None) -> int:
        """Counts the slots that a call may have.

        Args:
            rows: rows of the sequences that ask; they may use slots promised to them.
        """
        promised = self.promised
        if rows is not None:
            promised = promised.copy()
            promised[rows] = False
        return self._room(self.pool.refcount, self.slot, promised)

    def _room(self, owners: np.ndarray, slot: Ints, promised: Bools) -> int:
        """Counts slots without owners and not owed to a row, if slots had these owners."""
        # A row that shares its slot only with a checkpoint needs no other: the checkpoint goes.
        owed = promised & ((slot < 0) | (owners[slot] > 1))
        owed &= (self.target < 0) | (self.target == slot)  # else the row has got its slot
        return int((owners[:-1] == 0).sum()) - int(owed.sum())

    def require_room(self, rows: Ints) -> None:
        """Raises `OutOfPagesError` unless a step of these rows can have its slots."""
        needed, room = int(self._writes_elsewhere(rows).sum()), self.room(rows)
        if needed > room and needed - self._given_up(rows).size > room:
            raise self.out_of_slots("prepare", needed, room)

    def _given_up(self, rows: Ints) -> Ints:
        """Returns rows' slots that could be written in place without their checkpoint."""
        mine = self.slot[rows]
        return mine[self.pool.findable[mine] & (self.pool.refcount[mine] == 1)]

    def out_of_slots(self, what: str, needed: int, room: int) -> OutOfPagesError:
        """The error of a call that cannot have the slots it needs."""
        return OutOfPagesError(
            f"{what} needs {needed} state slots, {max(0, room)} of {self.num_slots} can be had: "
            f"{self.in_use} are in use, {int(self.promised.sum())} sequences have one promised. "
            "Free sequences, or build the cache with a larger max_states",
            pages_needed=needed,
            pages_free=max(0, room),
        )

    def _writes_elsewhere(self, rows: Ints) -> Bools:
        """Whether the next step of each row needs a slot other than the row's own."""
        slot = self.slot[rows]
        return (slot < 0) | (self.pool.refcount[slot] > 1) | self.pool.findable[slot]

    def _take(self) -> int:
        _, (slots,) = self.pool.take(0, [(0, 1)])
        return int(slots[0])

    # ------------------------------------------------------------------ one step

    def prepare(self, rows: Ints) -> None:
        """Gives each row of a step the slot that it will write, after `require_room`."""
        elsewhere = self._writes_elsewhere(rows)
        if (short := int(elsewhere.sum()) - self.room(rows)) > 0:
            for slot in self._given_up(rows)[:short].tolist():
                self.forget(self.checkpoints.key_of[slot])
            elsewhere = self._writes_elsewhere(rows)
        self.target[rows] = self.slot[rows]
        for row in rows[elsewhere].tolist():
            self.target[row] = self._take()

    def abort(self, rows: Ints) -> None:
        """Takes `prepare` back."""
        self.pool.drop(self.target[rows[self.target[rows] != self.slot[rows]]])
        self.target[rows] = NO_SLOT

    def commit(self, rows: Ints, kept: Ints) -> None:
        """Makes what a step wrote the state of its rows.

        Args:
            kept: `[B]`, how many tokens each row keeps; a row that keeps none keeps its old state.
        """
        self.abort(rows[kept == 0])
        rows = rows[kept > 0]
        before, after = self.slot[rows], self.target[rows]
        self.pool.drop(before[before != after])
        for slot in after[before == after].tolist():
            self.pool.renew(slot)
        self.slot[rows], self.target[rows] = after, NO_SLOT

    # ------------------------------------------------------------------ sequences

    def begin(self, row: int, length: int, key: PrefixKey | None, promise: bool) -> bool:
        """Starts a row, on the checkpoint that was found for it, if there is room.

        Without a checkpoint there is room: for a promise, the caller has called `require_slot`.

        Args:
            length: how many tokens were found; `key` is their key, None if none were found.
            promise: whether the row gets a slot in any case.
        """
        if key is not None:
            self.slot[row] = self._own(self.checkpoints.slots[key])
            self.checkpoints.mark(row, length, key)
        self.promised[row] = promise
        if self.room() >= 0:
            return True
        self.release(np.asarray([row]))
        return False

    def share(self, source: int, rows: Sequence[int]) -> bool:
        """Gives rows without a state the state of another row, if there is room."""
        self.slot[np.asarray(rows)] = self.slot[source]
        self.pool.add_owners(self.slot[[source]], len(rows))
        for row in rows:
            self.checkpoints.copy_marks(source, row)
        if self.room() >= 0:
            return True
        self.release(np.asarray(rows))
        return False

    def release(self, rows: Ints) -> None:
        """Takes the states from rows; their checkpoints stay."""
        self.leave(rows)
        for row in rows.tolist():
            self._unmark(row)

    # ------------------------------------------------------------------ elsewhere and back

    def leave(self, rows: Ints) -> None:
        """Takes slots and promises from rows, which keep their checkpoints."""
        self.pool.drop(self.slot[rows])
        self.slot[rows] = NO_SLOT
        self.promised[rows] = False

    def require_return(self, what: str, rows: Ints, versions: Ints, promised: Bools) -> None:
        """Raises `OutOfPagesError` unless rows can have the states of these versions again.

        Args:
            what: the call, for the error.
            versions: the version of each row's state; -1 for a row that has none.
            promised: which rows get a slot in any case.
        """
        owners, slot, promises = self.pool.refcount.copy(), self.slot.copy(), self.promised.copy()
        slot[rows] = found = np.asarray([self._holding(version) for version in versions.tolist()])
        np.add.at(owners, found[found >= 0], 1)
        promises[rows] = promised
        missing, count = np.unique(versions[(versions >= 0) & (found < 0)], return_counts=True)
        alone = np.isin(versions, missing[count == 1]) & promised  # its promise covers it
        needed, room = missing.size - int(alone.sum()), self._room(owners, slot, promises)
        if needed > room:
            raise self.out_of_slots(what, needed, room)

    def come_back(self, rows: Ints, versions: Ints, promised: Bools) -> list[tuple[int, int]]:
        """Gives rows the states of these versions, after `require_return`.

        Returns:
            Slots whose bytes the caller has to bring, and their versions. Rows that shared a state
            share it again, and a state that is still here is not brought.
        """
        fresh = []
        # States that are still here are owned first, so that their slots are not reused.
        for row, version in zip(rows.tolist(), versions.tolist()):
            self.slot[row] = self._own(self._holding(version))
        for row, version in zip(rows.tolist(), versions.tolist()):
            if self.slot[row] < 0 <= version:
                slot = self._holding(version)
                if slot < 0:
                    slot = self._take()
                    self.pool.version[slot] = version
                    fresh.append((slot, version))
                else:
                    self._own(slot)
                self.slot[row] = slot
        self.promised[rows] = promised
        return fresh

    def require_slot(self, what: str) -> None:
        """Raises `OutOfPagesError` unless a call can have one slot."""
        if (room := self.room()) < 1:
            raise self.out_of_slots(what, 1, room)

    def receive(self, row: int) -> int:
        """Gives a row a slot for a state that was never here; call `require_slot` first."""
        self.slot[row] = self._take()
        return int(self.slot[row])

    def _holding(self, version: int) -> int:
        """Returns the live or cached slot that holds a version, or -1."""
        found = np.flatnonzero(self.pool.version == version)
        found = found[self.pool.is_kept(found)]
        return int(found[0]) if found.size and version >= 0 else NO_SLOT

    # ------------------------------------------------------------------ checkpoints

    def keep(self, row: int, length: int, key: PrefixKey | None) -> None:
        """Keeps the state that a row has now.

        Args:
            length: tokens of the row.
            key: the key of these tokens; None if their ids are not known.
        """
        slot = self.checkpoints.keep(row, length, int(self.slot[row]), key)
        self.pool.drop(np.asarray([self._own(slot)]))  # most recently used, so reused last

    def require_way_back(self, row: int, length: int) -> None:
        """Raises `OutOfPagesError` if another row is promised the slot of a row's checkpoint."""
        owners, slot, promised = self.pool.refcount.copy(), self.slot.copy(), self.promised.copy()
        left = slot[row]
        slot[row] = self.checkpoints.slots[self.checkpoints.key_at(row, length)]
        owners[left] -= 1
        owners[slot[row]] += 1
        promised[row] = False
        if (room := self._room(owners, slot, promised)) < 0:
            raise self.out_of_slots("truncate", 1, room + 1)

    def go_back(self, row: int, length: int) -> None:
        """Gives a row the state that it had at a length: 0, or the length of a checkpoint.

        For a checkpoint, call `require_way_back` first. If others have this state too, and no slot
        is left for the row's next write, the row's promise ends.
        """
        key = self.checkpoints.key_at(row, length) if length else None
        slot = NO_SLOT if key is None else self._own(self.checkpoints.slots[key])
        self.pool.drop(self.slot[[row]])
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
        self.pool.forgotten(np.asarray([self.checkpoints.forget(key)]))

    def _own(self, slot: int) -> int:
        if slot >= 0:
            self.pool.share(np.asarray([slot]))
        return slot

    def _unmark(self, row: int, length: int = -1) -> None:
        for key in self.checkpoints.unmark(row, length):
            self.forget(key)

    # ------------------------------------------------------------------ explain

    def owners(self) -> Ints:
        """`[slots]`, how many rows own each slot, counted from `slot` and `target`."""
        written = self.target[self.target != self.slot]
        held = np.concatenate([self.slot, written])
        return np.bincount(held[held >= 0], minlength=self.num_slots)

    def check(self, rows: Ints, lengths: Ints) -> None:
        """Raises `CorruptCacheError` if rows' slots contradict their texts or the room.

        Args:
            rows: live rows.
            lengths: `[rows]`, committed tokens of all rows.
        """
        stateless = np.setdiff1d(np.flatnonzero(self.slot >= 0), rows)
        if stateless.size:
            raise CorruptCacheError(f"row {stateless[0]} has a state but no sequence")
        self.checkpoints.check()
        if ((self.slot[rows] >= 0) != (lengths[rows] > 0)).any():
            raise CorruptCacheError("a sequence has tokens and no state, or the reverse")
        if self.room() < 0:
            raise CorruptCacheError("more state slots are promised than there are")
