"""Slots of states as integers: who has which, which are owed, and which checkpoint goes."""

import numpy as np
import pytest

from pagedkv.errors import CorruptCacheError, OutOfPagesError
from pagedkv.pages.check import check_pool
from pagedkv.pages.checkpoints import Checkpoints, PrefixKey
from pagedkv.pages.states import StateSlots

ROWS = 6


def rows(*numbers: int) -> np.ndarray:
    return np.asarray(numbers, dtype=np.int64)


class Slots(StateSlots):
    """Slots whose rows are live, and have tokens once they have stepped."""

    def step(self, *which: int) -> None:
        self.require_room(rows(*which))
        self.prepare(rows(*which))
        self.commit(rows(*which), np.ones(len(which), np.int64))
        self.verify()

    def verify(self) -> None:
        check_pool(self.pool, self.owners(), "state slot")
        self.check(np.arange(ROWS), (self.slot >= 0).astype(np.int64))


def key(name: str) -> PrefixKey:
    return PrefixKey(name.encode(), b"")


def test_going_back_to_a_state_that_others_have_may_end_a_promise():
    slots = Slots(2, ROWS)
    slots.begin(0, 0, None, promise=True)
    slots.step(0)
    slots.keep(0, 1, key("a"))
    slots.begin(1, 1, key("a"), promise=False)
    slots.step(0)
    slots.promised[1] = True
    slots.go_back(0, 1)
    slots.verify()
    assert slots.room() >= 0
    assert slots.promised.sum() == 1


def two_that_are_kept():
    """Slots for three, two of which rows 0 and 1 have and checkpoints keep."""
    slots = Slots(3, ROWS)
    for row, name in enumerate("ab"):
        slots.step(row)
        slots.keep(row, 1, key(name))
    return slots


def test_a_row_gives_up_only_as_many_checkpoints_as_it_must():
    slots = two_that_are_kept()
    slots.step(0, 1)
    assert [list(slots.checkpoints.slots), slots.in_use] == [[key("b")], 3]


def test_versions_tell_contents_apart():
    slots = Slots(3, ROWS)
    slots.step(0)
    first = int(slots.pool.version[0])
    slots.share(0, [1])
    slots.leave(rows(0))
    slots.require_return("restore", rows(0), rows(first), np.asarray([False]))
    assert slots.come_back(rows(0), rows(first), np.asarray([False])) == []
    assert slots.slot[0] == slots.slot[1]
    slots.leave(rows(0))
    slots.step(1)
    assert slots.pool.version[0] != first
    fresh = slots.come_back(rows(0, 2), rows(first, first), np.asarray([False, False]))
    assert fresh == [(int(slots.slot[0]), first)]
    assert slots.slot[0] == slots.slot[2] != slots.slot[1]
    slots.verify()


def test_a_state_that_is_only_kept_is_not_reused_for_a_row_that_comes_back_beside_its_own():
    slots = two_that_are_kept()
    mine = int(slots.pool.version[slots.slot[0]])
    slots.leave(rows(0, 1))
    slots.step(2)
    back = rows(3, 0), rows(70, mine), np.asarray([False, False])
    slots.require_return("restore", *back)
    assert slots.come_back(*back) == [(1, 70)]
    assert list(slots.checkpoints.slots) == [key("a")]
    slots.verify()


def test_a_checkpoint_that_is_asked_for_again_is_the_last_to_go():
    slots = two_that_are_kept()
    slots.release(rows(0, 1))
    slots.step(2)
    slots.keep(2, 1, key("a"))
    slots.step(3)
    assert list(slots.checkpoints.slots) == [key("a")]


@pytest.mark.parametrize(
    ("versions", "promised", "needed"),
    [
        ([70, 71], [False, False], 2),
        ([70, 70], [False, False], 1),
        ([70, 70], [True, False], 2),
        ([70, 71], [True, True], 2),
        ([70, 70], [True, True], 3),
        ([-1, -1], [True, False], 1),
        ([-1, 70], [False, False], 1),
    ],
)
def test_rows_come_back_if_there_are_slots_for_them_and_their_promises(versions, promised, needed):
    for num_slots in range(1, 5):
        slots = Slots(num_slots, ROWS)
        asked = rows(0, 1), rows(*versions), np.asarray(promised)
        if num_slots < needed:
            with pytest.raises(OutOfPagesError, match="restore"):
                slots.require_return("restore", *asked)
            assert (slots.room(), slots.promised.any()) == (num_slots, False)
        else:
            slots.require_return("restore", *asked)
            slots.come_back(*asked)
            slots.verify()


def test_check_names_what_contradicts_itself():
    def broken(change) -> str:
        slots = Slots(4, ROWS)
        slots.step(0)
        slots.keep(0, 1, key("a"))
        slots.step(1)
        change(slots)
        with pytest.raises(CorruptCacheError) as found:
            slots.verify()
        return str(found.value)

    assert "state slot 1" in broken(lambda slots: slots.pool.refcount.__setitem__(1, 5))
    assert "free: state slot 0" in broken(lambda slots: slots.pool.num_free.__iadd__(3))
    assert "can be found" in broken(lambda slots: slots.checkpoints.findable.fill(False))
    assert "promised" in broken(lambda slots: slots.promised.__setitem__(slice(None), True))
    assert "found by" in broken(lambda slots: slots.checkpoints._tails.clear())


def test_a_slot_of_two_checkpoints_is_named():
    kept = Checkpoints(4, ROWS)
    kept.keep(0, 1, 3, key("a"))
    kept.keep(0, 1, 3, key("b"))
    with pytest.raises(CorruptCacheError, match="two checkpoints"):
        kept.check()
