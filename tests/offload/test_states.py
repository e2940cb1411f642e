"""Recurrent states travel with the pages of a sequence to the host and back, bit for bit."""

import pytest
import torch

from pagedkv import OutOfPagesError, PagedKVCache
from pagedkv.errors import CorruptCacheError, HostMemoryError, OffloadedError
from pagedkv.storage.states import StateStorage
from tests.cases import one_group
from tests.offload.hosted import TEXT, Copies
from tests.states import assert_state, begin, grow, with_states


def make(max_states: int = 8, **fields) -> PagedKVCache:
    config = one_group(**{"host_tokens": 64, **fields})
    return PagedKVCache(with_states(config, max_states), device="cpu", debug=True)


def noise(cache, seq) -> list[torch.Tensor]:
    """Puts numbers of every kind into a state, NaN and infinity too."""
    slot = int(cache._tables.states.slot[cache._tables.row_of(seq)])
    tensors = cache._states.take_out(slot)
    for tensor in tensors:
        tensor.reshape(-1)[:2] = torch.tensor([float("nan"), float("-inf")])
    cache._states.put_in(slot, tensors)
    return tensors


def bits(tensors) -> list[list[int]]:
    return [x.contiguous().view(torch.uint8).flatten().tolist() for x in tensors]


def test_a_state_comes_back_bit_for_bit_in_another_slot():
    cache = make()
    seq, other = begin(cache, TEXT), begin(cache, [7])
    before = noise(cache, seq)
    cache.offload(seq)
    assert cache.stats().states == 1
    assert cache.stats().offloaded_bytes >= cache.config.bytes_per_state
    taken = begin(cache, [8])
    for call in (cache.checkpoint, lambda seq: cache.read_state(seq, 0)):
        with pytest.raises(OffloadedError):
            call(seq)
    cache.restore(seq)
    slot = int(cache._tables.states.slot[cache._tables.row_of(seq)])
    assert bits(cache._states.take_out(slot)) == bits(before)
    cache.check()
    assert_state(cache, other, [7])
    assert_state(cache, taken, [8])
    assert cache.stats().offloaded_bytes == 0


def test_sequences_that_share_a_state_share_it_there_and_again_here(monkeypatch):
    cache = make(4)
    seq = begin(cache, TEXT)
    forks = cache.fork(seq, 3)
    copies = []
    inner = StateStorage.take_out
    monkeypatch.setattr(
        StateStorage, "take_out", lambda self, slot: copies.append(slot) or inner(self, slot)
    )
    cache.offload([seq, forks[0]])
    cache.offload(forks[1:])
    assert (len(copies), cache.stats().states) == (1, 0)
    cache.restore(forks[:1])
    cache.restore([seq, *forks])
    assert cache.stats().states == 1
    grow(cache, {fork: [*TEXT, i] for i, fork in enumerate(forks)})
    assert_state(cache, seq, TEXT)
    cache.check()


def test_a_state_that_is_still_here_is_not_copied_back(monkeypatch):
    cache = make()
    seq = begin(cache, TEXT)
    fork = cache.fork(seq)[0]
    cache.checkpoint(seq)
    cache.offload(seq)
    monkeypatch.setattr(StateStorage, "put_in", lambda *_: pytest.fail("copied"))
    cache.restore(seq)
    assert cache.stats().states == 1
    monkeypatch.undo()
    cache.offload(seq)
    grow(cache, {fork: [*TEXT, 1]})
    cache.restore(seq)  # from the checkpoint
    assert cache.stats().states == 2
    assert_state(cache, seq, TEXT)


def test_checkpoints_wait_for_a_sequence_that_is_away():
    cache = make()
    seq = begin(cache, TEXT[:4])
    cache.checkpoint(seq)
    grow(cache, {seq: TEXT})
    cache.offload(seq)
    assert cache.checkpoints(seq) == [4]
    cache.restore(seq)
    cache.truncate(seq, 4)
    assert_state(cache, seq, TEXT[:4])
    empty = cache.add()
    cache.offload([empty, seq])
    cache.free(seq)
    cache.restore(empty)
    grow(cache, {empty: [1]})
    cache.check()


def test_without_a_slot_nothing_comes_back_and_nothing_changes():
    cache = make(2)
    first, second = begin(cache, TEXT), begin(cache, TEXT[:3])
    cache.offload([first, second])
    third = begin(cache, [9])
    before = cache.stats()
    with pytest.raises(OutOfPagesError, match="restore needs 2 state slots, 1 of 2"):
        cache.restore([first, second])
    assert cache.stats() == before
    assert cache.is_offloaded(first)
    cache.restore(second)
    assert_state(cache, second, TEXT[:3])
    cache.free(third)
    cache.restore(first)
    assert_state(cache, first, TEXT)
    cache.check()


def test_a_promise_is_made_again_or_refused():
    cache = make(2, max_sequences=4)
    seq = begin(cache, TEXT, max_tokens=12)
    fork = cache.fork(seq)[0]
    cache.offload(seq)
    other = begin(cache, [1])
    with pytest.raises(OutOfPagesError, match="state slots"):
        cache.restore(seq)  # its state is here, but not the slot it would write
    cache.free(other)
    cache.restore(seq)
    with pytest.raises(OutOfPagesError, match="1 sequences have one promised"):
        begin(cache, [2])
    grow(cache, {seq: [*TEXT, 5]})
    assert_state(cache, fork, TEXT)
    cache.offload(fork)
    with pytest.raises(OutOfPagesError):
        cache.restore(fork, max_tokens=64)
    cache.check()


@pytest.mark.parametrize("where", ["take_out", "put_in", "reserve"])
def test_want_of_memory_for_a_state_changes_nothing(where, monkeypatch):
    cache = make(64, max_sequences=32)
    seq = begin(cache, TEXT)

    def fail(*_):
        raise MemoryError("none")

    def refused(call):
        before = cache.stats()
        monkeypatch.setattr(StateStorage, where, fail)
        with pytest.raises(HostMemoryError):
            call(seq)
        monkeypatch.undo()
        assert cache.stats() == before
        cache.check()

    if where == "take_out":
        refused(cache.offload)
    else:
        cache.offload(seq)
        refused(cache.restore)
        cache.restore(seq)
    assert_state(cache, seq, TEXT)


def test_prefixes_are_not_kept_on_the_host_without_their_states(monkeypatch):
    cache = make(max_tokens=16)
    copies = Copies(monkeypatch)
    cache.free(begin(cache, TEXT))
    begin(cache, [7] * 16)
    assert (copies.out, cache.stats().host_cached) == ([], 0)
    with pytest.raises(OutOfPagesError):
        begin(cache, TEXT)
    cache.check()


def test_check_holds_host_states_against_those_who_are_away():
    cache = make()
    seq = begin(cache, TEXT)
    cache.offload(seq)
    cache._tier.states._bytes.clear()
    with pytest.raises(CorruptCacheError, match="host states"):
        cache.check()
