"""Pools that grow: pages come into being as they are needed, stay where they are, and go again."""

import pytest
import torch

from pagedkv import CacheConfig, OutOfPagesError, PagedKVCache, paged_attention
from pagedkv.errors import OpenStepError
from pagedkv.kernels.reference import paged_attention as reference
from pagedkv.storage import memory
from tests.cache.small import ids
from tests.cases import CASES, one_group, two_groups
from tests.contents import advance, assert_contents, kv_of, start, write_step
from tests.effort import slow
from tests.pages.growing import P, make, pages
from tests.world import World

# ------------------------------------------------------------------ growing


def test_a_reservation_that_is_refused_says_what_the_largest_pool_lacks():
    sizes = {"max_tokens": 4 * P, "max_sequence_length": 10 * P, "retention": "fifo"}
    with pytest.raises(OutOfPagesError, match=rf"max_tokens larger by {3 * P}\."):
        make(**sizes).add(ids(7 * P), max_tokens=7 * P)
    make(**{**sizes, "max_tokens": (4 + 3) * P}).add(ids(7 * P), max_tokens=7 * P)


@pytest.mark.parametrize(("step", "growths"), [(64, 15), *slow((256, 3), (1000, 0), (None, 0))])
def test_1000_tokens_grow_a_pool_15_times_by_64_and_3_times_by_256(step, growths):
    config = CacheConfig(1, 1, 2, "float32", max_tokens=1000, growth_step=step, max_sequences=2)
    cache = PagedKVCache(config, device="cpu")
    seq, counts = cache.add(), []
    for _ in range(1000):
        with cache.step([seq], num_new=1, layers=()):
            counts.append(cache.stats().growths)
    assert counts[-1] == growths
    assert counts == [n // (step or 1000) for n in range(1000)]
    assert cache.stats().pages == cache.stats().reserved == 63


@pytest.mark.parametrize("config", [one_group, two_groups], ids=["one", "two"])
def test_no_address_changes_and_no_byte_moves_as_a_pool_grows(config):
    cache = make(config(max_tokens=4096, growth_step=64, page_size=P, max_sequences=2))
    storage, text = cache._storage, ids(2000)
    tensors = [*storage.k, *storage.v, *(x for i in range(2) for x in storage.layer(i))]
    before = [(t.data_ptr(), t.stride(), t.shape) for t in tensors]
    a = start(cache, text[:50])
    first = cache.gather(a, 0)
    for end in range(100, 2001, 100):
        advance(cache, {a: text[:end]})
    assert cache.stats().growths >= 19
    assert [(t.data_ptr(), t.stride(), t.shape) for t in tensors] == before
    assert torch.equal(cache.gather(a, 0)[0][:50], first[0])
    assert_contents(cache, a, text)
    cache.check()


def test_one_long_step_grows_once_by_as_many_steps_as_it_needs():
    cache = make(max_tokens=256)
    assert pages(cache) == (2, 64, 0)
    start(cache, ids(35))
    assert pages(cache) == (10, 64, 1)


def test_a_step_is_rounded_up_to_pages_and_the_last_one_cut_to_the_limit():
    cache = make(max_tokens=30, growth_step=9)
    assert pages(cache) == (3, 8, 0)
    start(cache, ids(30))
    assert pages(cache) == (8, 8, 1)
    with pytest.raises(OutOfPagesError, match=r"of 8, .* max_tokens larger by 4"):
        start(cache, [7])


def test_cached_prefixes_are_reused_before_a_pool_grows():
    cache = make(max_tokens=256)
    cache.free(start(cache, ids(2 * P)))
    assert cache.stats().cached == 2
    a = start(cache, ids(2 * P, seed=1))
    assert pages(cache) == (2, 64, 0)
    assert_contents(cache, a, ids(2 * P, seed=1))
    b = start(cache, ids(P, seed=2))
    assert pages(cache) == (4, 64, 1)
    assert_contents(cache, b, ids(P, seed=2))


def test_a_reservation_grows_the_pool_when_it_is_made_and_is_kept_when_memory_is_gone(monkeypatch):
    cache = make(max_tokens=256, head_dim=128)
    a = start(cache, ids(3), max_tokens=40)
    assert cache.stats().pages == 10
    monkeypatch.setattr(memory, "available_memory", lambda device: 0)
    advance(cache, {a: ids(40)})
    with pytest.raises(OutOfPagesError):
        advance(cache, {a: ids(41)})
    assert_contents(cache, a, ids(40))


def test_a_prefix_is_found_whole_although_promises_leave_no_room_for_it():
    cache = make(max_tokens=256, growth_step=4 * P)
    cache.free(start(cache, ids(3 * P)))
    cache.add(max_tokens=3 * P)  # grows: what is cached cannot be promised twice
    cache.add(max_tokens=2 * P)
    held = cache.stats()
    assert (held.cached, held.promised) == (3, 5)
    a = cache.add(ids(3 * P + 1))
    assert cache.length(a) == 3 * P
    cache.check()


def test_a_fork_of_a_reserved_sequence_grows_the_pool_for_the_page_it_may_copy():
    cache = make(max_tokens=256)
    a = start(cache, ids(3), max_tokens=2 * P)
    assert pages(cache) == (2, 64, 0)
    b = cache.fork(a)[0]
    assert pages(cache) == (4, 64, 1)
    advance(cache, {a: [*ids(3), 7, 8], b: [*ids(3), 9, 8]})
    assert_contents(cache, a, [*ids(3), 7, 8])
    assert_contents(cache, b, [*ids(3), 9, 8])


def test_a_pool_may_grow_while_a_step_is_open():
    cache = make(max_tokens=256)
    a, text = start(cache, ids(5)), ids(8)
    step = cache.prepare([a], tokens=[text[5:]])
    write_step(cache, step, [text], layers=[0])
    b = cache.add(max_tokens=100)
    assert cache.stats().growths == 1
    write_step(cache, step, [text], layers=[1])
    cache.commit(step)
    assert_contents(cache, a, text)
    advance(cache, {b: ids(100, seed=1)})
    assert_contents(cache, b, ids(100, seed=1))


# ------------------------------------------------------------------ shrinking


def test_a_shrink_keeps_live_sequences_cached_prefixes_and_promises():
    cache = make(max_tokens=256)
    a = start(cache, ids(11))
    b = start(cache, ids(90, seed=1))
    c = start(cache, ids(6, seed=2), max_tokens=20)
    cache.free(start(cache, ids(13, seed=3)))
    cache.free(b)
    before = cache.stats()
    cache.shrink()
    after = cache.stats()
    assert (after.live, after.cached, after.promised) == (before.live, before.cached, 3)
    cache.check()
    assert_contents(cache, a, ids(11))
    hit = cache.add(ids(90, seed=1))
    assert cache.length(hit) == 89
    cache.free(hit)
    advance(cache, {c: ids(20, seed=2)})
    assert_contents(cache, c, ids(20, seed=2))


def test_a_pool_shrinks_to_what_is_used_in_whole_steps_and_grows_again():
    cache = make(max_tokens=256)
    a, b = start(cache, ids(11)), start(cache, ids(90, seed=1))
    bytes_grown = cache.stats().bytes
    cache.free(b)
    cache.clear_prefixes()
    gone = cache.shrink()
    assert pages(cache) == (4, 64, 2)
    assert gone == bytes_grown - cache.stats().bytes > 0
    advance(cache, {a: ids(60)})
    assert pages(cache) == (16, 64, 3)
    assert_contents(cache, a, ids(60))
    cache.free(a)
    cache.clear_prefixes()
    cache.shrink()
    assert pages(cache) == (2, 64, 3)


def test_pages_that_only_a_promise_needs_are_kept(monkeypatch):
    cache = make(max_tokens=256, head_dim=128)
    a = cache.add(max_tokens=40)
    assert cache.shrink() == 0
    cache.free(start(cache, ids(100, seed=1)))
    cache.clear_prefixes()
    assert cache.shrink() > 0
    assert pages(cache)[0] == 10
    cache.check()
    monkeypatch.setattr(memory, "available_memory", lambda device: 0)
    advance(cache, {a: ids(40)})
    assert_contents(cache, a, ids(40))


def test_rows_that_once_had_pages_that_are_gone_do_not_read_them():
    """The device's tables keep what rows once had beyond their end; a ragged batch gathers that."""
    cache = make(max_tokens=4096, growth_step=16, debug=False)
    low, high = start(cache, ids(400)), start(cache, ids(200, seed=3))
    cache.free([low, high])
    cache.clear_prefixes()
    cache.shrink()
    a, b = start(cache, ids(33, seed=1)), start(cache, ids(40, seed=2))
    assert a % 8 == high % 8, "the shorter text has the row whose pages lay at the end"
    texts = [ids(34, seed=1), ids(41, seed=2)]
    step = cache.prepare([a, b], tokens=[[1033], [2040]])
    assert int(step.page_table().max()) < cache.stats().pages
    k, v = (torch.cat([kv_of(t, 0, cache.config)[i][-1:] for t in texts]) for i in (0, 1))
    q = torch.randn(2, 4, 4)
    out = paged_attention(q, k, v, step, 0)
    tables = step.page_table().clamp(min=0), step.kv_lens(), step.query_start_loc
    torch.testing.assert_close(out, reference(q, *cache._storage.layer(0), *tables, scale=0.5)[0])


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (0, ValueError, "growth_step: expected at least 1, got 0"),
        (-4, ValueError, "growth_step: expected at least 1"),
        (65, ValueError, "growth_step: expected at most max_tokens = 64, got 65"),
        (2.0, TypeError, "growth_step: expected an int, got float"),
        (True, TypeError, "growth_step: expected an int, got bool"),
        ("16", TypeError, "growth_step: expected an int, got str"),
    ],
)
def test_a_growth_step_that_cannot_be_is_refused(step, error, message):
    with pytest.raises(error, match=message):
        one_group(growth_step=step)


def test_a_pool_of_fixed_size_cannot_shrink():
    with pytest.raises(ValueError, match=r"shrink: .* growth_step"):
        make(growth_step=None).shrink()


def test_a_pool_does_not_shrink_while_a_step_is_open():
    cache = make(max_tokens=256)
    cache.free(start(cache, ids(90)))
    a = start(cache, ids(3, seed=1))
    step = cache.prepare([a], tokens=[[5]])
    before = cache.stats()
    with pytest.raises(OpenStepError, match="shrink: a step is open"):
        cache.shrink()
    assert cache.stats() == before
    write_step(cache, step, [[*ids(3, seed=1), 5]])
    cache.commit(step)
    assert_contents(cache, a, [*ids(3, seed=1), 5])


def test_pages_cannot_grow_on_a_device_without_a_way():
    with pytest.raises(NotImplementedError, match="growth_step: pages on meta cannot grow"):
        memory.PageMemory(one_group(growth_step=16), torch.device("meta"))


def test_check_finds_a_page_that_is_used_before_it_exists():
    cache = make(max_tokens=256)
    start(cache, ids(7))
    cache._tables.pool.existing[0] = 1
    with pytest.raises(Exception, match="before it exists: page 1"):
        cache.check()


def test_stats_tell_what_exists_and_what_may_come():
    cache = make(max_tokens=256)
    start(cache, ids(7))
    stats = cache.stats()
    assert (stats.pages, stats.reserved) == (2, 64)
    assert stats.bytes == 2 * cache.config.bytes_per_page() == cache._storage.nbytes
    assert "at most 64" in str(stats)
    assert "at most" not in str(make(growth_step=None).stats())


def test_growth_cases_of_the_state_machine_grow_and_shrink():
    world = World(next(case for case in CASES if case.name == "grow-P4"))
    for base in range(4):
        world.apply(("add", (base, 99, [base]), 0, None))
        world.apply(("step", [(base, [0], 0)], "uncached", 0, "with"))
    assert world.cache.stats().growths > 1
    world.free(range(64))
    world.clear()
    world.apply(("shrink",))
    assert world.cache.stats().pages == world.config.pages_at_once()
