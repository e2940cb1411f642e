"""The host tier: sequences that leave the device come back as they were, or stay where they are."""

import pytest
import torch

from pagedkv import PagedKVCache
from pagedkv.errors import (
    BudgetExceeded,
    HostMemoryError,
    OffloadedError,
    OpenStepError,
    OutOfPagesError,
    SequenceTooLongError,
    UnknownSequenceError,
)
from pagedkv.offload import host_storage
from pagedkv.storage.memory import runs_of
from tests.cases import two_groups
from tests.contents import advance, assert_contents, start, write_step
from tests.offload.hosted import TEXT, Copies, make, write_anything


def contents(cache: PagedKVCache, seq: int) -> list[torch.Tensor]:
    return [x for layer in range(cache.config.num_layers) for x in cache.gather(seq, layer)]


@pytest.mark.parametrize("kv_format", ["dense", "int8", "fp8", "int4", ("dense", "int4")], ids=str)
def test_what_comes_back_has_the_very_bits_that_left(kv_format):
    """Not those of a twin that others computed meanwhile, though it holds the same tokens."""
    config = two_groups(
        20, head_dim=32, page_size=16, max_tokens=256, host_tokens=256, kv_format=kv_format
    )
    cache, text = make(config), [i % 7 for i in range(75)]
    seq = cache.add(text)
    with cache.step([seq]) as step:
        write_anything(cache, step, seed=1)
    expected = contents(cache, seq)
    cache.offload(seq)
    cache.clear_prefixes()
    other = cache.add(text)
    with cache.step([other]) as step:
        write_anything(cache, step, seed=2)
    cache.free(other)
    cache.restore(seq)
    cache.check()
    assert all(map(torch.equal, contents(cache, seq), expected))


def test_neighbours_on_the_host_are_copied_together(monkeypatch):
    """Also when the pool hands out those that were freed last first."""
    counts = []

    def counted(pages):
        found = list(runs_of(pages))
        counts.append(len(found))
        return found

    monkeypatch.setattr(host_storage, "runs_of", counted)
    cache = make()
    seq = cache.add()
    with cache.step([seq], num_new=30) as step:
        write_anything(cache, step, seed=1)
    for _ in range(3):
        cache.offload(seq)
        cache.restore(seq)
    assert set(counts) == {1}


def bounds(cache: PagedKVCache, seq: int) -> list[torch.Tensor]:
    """Returns the bounds of a sequence's complete pages, by which queries choose them."""
    pages = cache._tables.tables[0, cache._tables.row_of(seq), : cache.length(seq) // 4]
    return [cache._storage.bounds.of(layer)[pages] for layer in range(2)]


def test_queries_choose_among_pages_that_came_back_as_before(tmp_path):
    cache = make(read_tokens=16, max_tokens=128)
    a = start(cache, list(range(26)))
    cache.save(a, tmp_path / "x")
    expected = bounds(cache, a)
    cache.offload(a)
    cache.clear_prefixes()
    start(cache, [7] * 9)
    cache.restore(a)
    for seq in (a, cache.load(tmp_path / "x")):
        assert all(map(torch.equal, bounds(cache, seq), expected))


def test_pages_that_are_still_there_are_shared_and_not_copied(monkeypatch):
    copies, cache = Copies(monkeypatch), make()
    a = start(cache, TEXT)
    cache.offload(a)
    stats = cache.stats()
    assert (stats.live, stats.cached, stats.offloaded) == (0, 3, 3)
    assert stats.offloaded_bytes == 3 * cache.config.bytes_per_page()
    cache.restore(a)
    assert (copies.out, copies.into) == ([3], [1])  # all but the page that is written next
    assert_contents(cache, a, TEXT)
    advance(cache, {a: [*TEXT, 7]})
    cache.offload(a)
    assert copies.out == [3, 1]  # only what was written since


def test_forks_are_one_copy_on_the_host_and_share_again_when_they_come_back(monkeypatch):
    copies, cache = Copies(monkeypatch), make()
    a = start(cache, TEXT)
    family = [a, *cache.fork(a, 3)]
    advance(cache, {seq: [*TEXT, i] for i, seq in enumerate(family)})
    cache.offload(family)
    assert cache.stats().offloaded == 2 + 4
    cache.clear_prefixes()
    assert cache.stats().free == 16
    cache.restore(family[:3])
    assert sum(copies.into) == cache.stats().live == 2 + 3
    cache.restore(family)
    assert sum(copies.into) == cache.stats().live == 2 + 4
    for i, seq in enumerate(family):
        assert_contents(cache, seq, [*TEXT, i])
    advance(cache, {seq: [*TEXT, i, i] for i, seq in enumerate(family)})
    cache.check()


def test_a_restore_without_room_changes_nothing():
    cache = make(max_tokens=24)
    a, b = start(cache, TEXT), start(cache, TEXT[::-1])
    cache.offload([a, b])
    c = start(cache, [7] * 15)
    before = cache.stats()
    with pytest.raises(OutOfPagesError, match="restore needs 6 more pages, 2 can be had"):
        cache.restore([a, b])
    assert cache.stats() == before
    cache.check()
    assert cache.is_offloaded(a)
    cache.free(c)
    cache.restore([a, b])
    assert_contents(cache, a, TEXT)
    assert_contents(cache, b, TEXT[::-1])


def test_a_reservation_is_given_up_and_made_again():
    cache = make(max_tokens=32)
    a = start(cache, TEXT, max_tokens=24)
    assert cache.stats().promised == 3
    cache.offload(a)
    assert cache.stats().promised == 0
    b = cache.add(max_tokens=12)
    with pytest.raises(OutOfPagesError, match="restore needs 6 more pages, 5 can be had"):
        cache.restore(a)
    cache.free(b)
    cache.restore(a)
    assert cache.stats().promised == 3
    start(cache, [7] * 8)
    advance(cache, {a: [*TEXT, *range(14)]})
    cache.check()


def test_a_restore_sets_pages_aside_for_the_rest_of_a_prompt_as_well():
    fields = {"max_tokens": 64, "retention": "fifo", "budget": 8, "max_sequence_length": 64}
    cache = make(**fields)
    seq = cache.add(TEXT[:10] * 3, max_tokens=40)
    with cache.step([seq], num_new=4) as step:
        write_step(cache, step, [TEXT[:4]])
    promised = cache.stats().promised
    cache.offload(seq)
    with pytest.raises(ValueError, match="max_tokens: expected at least the text's 30, got 20"):
        cache.restore(seq, max_tokens=20)
    cache.restore(seq, max_tokens=40)
    assert cache.stats().promised == promised > 0
    cache.check()


def test_a_restore_may_set_other_pages_aside_than_before():
    cache = make(max_tokens=32)
    a = start(cache, TEXT, max_tokens=24)
    cache.offload(a)
    for wrong, error in ((9, ValueError), (33, SequenceTooLongError), ("12", TypeError)):
        with pytest.raises(error, match="max_tokens"):
            cache.restore(a, max_tokens=wrong)
    cache.restore(a, max_tokens=32)
    assert cache.stats().promised == 5
    cache.offload(a)
    cache.restore(a, max_tokens=12)
    assert cache.stats().promised == 0
    cache.check()


def test_host_memory_that_is_too_small_is_refused_by_name_and_nothing_is_changed():
    cache = make(host_tokens=16)
    a, b = start(cache, TEXT), start(cache, TEXT[::-1])
    before = cache.stats()
    match = "offload needs 6 pages of host memory, 4 of 4 can be had.*host_tokens larger by 8"
    with pytest.raises(HostMemoryError, match=match):
        cache.offload([a, b])
    assert cache.stats() == before
    cache.offload(b)
    with pytest.raises(HostMemoryError, match="1 of 4 can be had"):
        cache.offload(a)
    assert_contents(cache, a, TEXT)
    cache.check()
    cache.free(b)
    cache.offload(a)


def test_without_a_host_tier_or_the_memory_for_it_the_setting_is_named():
    cache = make(host_tokens=0)
    with pytest.raises(HostMemoryError, match="set CacheConfig"):
        cache.offload(start(cache, TEXT))
    with pytest.raises(BudgetExceeded, match="host_tokens: 1099511627776 tokens need"):
        make(host_tokens=1 << 40)
    with pytest.raises(ValueError, match="host_tokens: expected at least 0"):
        make(host_tokens=-1)


def test_an_offloaded_sequence_knows_its_length_and_can_be_freed_and_nothing_else(tmp_path):
    cache = make()
    seq, other = cache.add(TEXT), start(cache, [7, 7])
    with cache.step([seq], num_new=6, layers=()):
        pass
    cache.offload(seq)
    assert (cache.length(seq), cache.uncached(seq).tolist()) == (6, TEXT[6:])
    before = cache.stats()
    for call in (
        lambda: cache.prepare([other, seq], [[1], [1]]),
        lambda: cache.fork(seq),
        lambda: cache.truncate(seq, 3),
        lambda: cache.gather(seq, 0),
        lambda: cache.save(seq, tmp_path / "x"),
        lambda: cache.offload([other, seq]),
    ):
        with pytest.raises(OffloadedError, match=f"{seq} is offloaded, `restore` it first"):
            call()
        assert cache.stats() == before
    cache.restore(other)  # is here
    cache.release_later([seq])
    assert cache.stats().offloaded == 0
    for call in (cache.offload, cache.restore, cache.is_offloaded):
        with pytest.raises(UnknownSequenceError):
            call(seq)
    cache.check()


def test_a_sequence_in_an_open_step_stays():
    cache = make()
    a, b = start(cache, TEXT), start(cache, TEXT[::-1])
    with cache.step([a], [[1]]) as step:
        with pytest.raises(OpenStepError):
            cache.offload([b, a])
        cache.offload(b)
        cache.restore(b)
        write_anything(cache, step, 0)
    assert_contents(cache, b, TEXT[::-1])
    cache.check()


def test_clear_prefixes_forgets_what_is_on_the_host_and_keeps_offloaded_sequences():
    cache = make(max_tokens=16)
    cache.free(start(cache, TEXT))
    a = start(cache, [7] * 12)
    assert cache.stats().host_cached > 0
    cache.offload(a)
    cache.clear_prefixes()
    assert cache.stats().host_cached == 0
    cache.restore(a)
    assert_contents(cache, a, [7] * 12)
    assert cache.length(cache.add([7] * 12)) == 0
    cache.free(a)
    assert cache.stats().host_cached == cache.stats().cached == 0


def test_a_file_is_loaded_where_prefixes_have_to_leave_for_it(tmp_path):
    cache = make(max_tokens=16)
    cache.save(start(cache, TEXT), tmp_path / "x")
    cache.free(0)
    cache.free(start(cache, [7] * 16))
    seq = cache.load(tmp_path / "x")
    assert_contents(cache, seq, TEXT)
    cache.free(seq)
    assert cache.length(cache.add([7] * 16)) == 15
    cache.check()
