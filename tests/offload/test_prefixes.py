"""Prefixes that had to leave the device are found on the host."""

import gc
import weakref

import pytest

from pagedkv import PagedKVCache
from pagedkv.errors import OutOfPagesError
from pagedkv.offload.host_storage import HostStorage
from tests.cases import one_group, two_groups
from tests.contents import advance, assert_contents, start
from tests.offload.hosted import TEXT, make, write_anything


def push_out(cache: PagedKVCache, token: int = 99) -> None:
    """Something else takes all pages and leaves nothing that can be found."""
    seq = cache.add()
    with cache.step([seq], num_new=cache.config.max_tokens) as step:
        write_anything(cache, step, token)
    cache.free(seq)


@pytest.mark.parametrize("config", [one_group, two_groups])
def test_a_prefix_that_had_to_leave_is_found_on_the_host(config):
    cache = make(config(host_tokens=64, max_tokens=32))
    text = (TEXT * 3)[:30]
    cache.free(start(cache, text))
    push_out(cache)
    computed = cache.stats().tokens_computed
    seq = cache.add([*text, 1, 2])
    assert cache.length(seq) >= (30 if config is one_group else 24)
    assert_contents(cache, seq, text[: cache.length(seq)])
    assert cache.stats().tokens_computed == computed
    assert cache.stats().tokens_reused == cache.length(seq)
    advance(cache, {seq: [*text, 1, 2]})
    assert_contents(cache, seq, [*text, 1, 2])
    cache.check()


def test_part_of_a_prefix_may_be_here_and_the_rest_on_the_host():
    cache = make(max_tokens=32)
    text = list(range(24))
    cache.free(start(cache, text))
    start(cache, [50] * 16)  # takes the end of the text and leaves its beginning
    seq = cache.add([*text, 1])
    assert cache.stats().live == 4 + 4  # no room for all of it
    assert cache.length(seq) == 16
    assert_contents(cache, seq, text[:16])
    cache.check()


def test_prefixes_on_the_host_never_cross_salts():
    cache = make(max_tokens=16)
    cache.free(start(cache, TEXT, salt=b"a"))
    push_out(cache)
    assert cache.length(cache.add(TEXT, salt=b"b")) == 0
    assert cache.length(cache.add(TEXT, salt=b"a")) == 9


def test_the_prefix_used_least_recently_leaves_the_host_first():
    cache = make(max_tokens=16, host_tokens=24)
    for token in (1, 2, 1, 3):  # 1 is asked for again before 3 comes
        seq = cache.add([token] * 8 + [9])
        if cache.length(seq) < 8:
            advance(cache, {seq: [token] * 8 + [9]})
        cache.free(seq)
        push_out(cache)
    found = []
    for token in (1, 2, 3):
        seq = cache.add([token] * 9)
        found.append(cache.length(seq))
        cache.free(seq)
    assert found[0] == found[2] == 8
    assert found[1] < 8


def test_offloaded_sequences_push_prefixes_out_of_the_host_and_not_the_other_way():
    cache = make(max_tokens=16, host_tokens=16)
    a = start(cache, TEXT)
    cache.offload(a)
    for token in range(20, 24):
        cache.free(start(cache, [token] * 16))
    stats = cache.stats()
    assert (stats.offloaded, stats.host_cached) == (3, 1)
    cache.restore(a)
    assert_contents(cache, a, TEXT)


def test_a_hit_on_the_host_counts_towards_a_reservation():
    cache = make(max_tokens=32)
    text = list(range(16))
    cache.free(start(cache, text))
    push_out(cache)
    other = start(cache, [50] * 8)
    seq = cache.add([*text, 0], max_tokens=24)
    assert cache.length(seq) == 16
    assert cache.stats().promised == 2
    with pytest.raises(OutOfPagesError):
        advance(cache, {other: [50] * 9})
    advance(cache, {seq: [*text, *range(8)]})
    assert_contents(cache, seq, [*text, *range(8)])
    cache.check()


def test_what_the_host_cannot_hold_is_lost_and_nothing_else_happens(monkeypatch):
    cache = make(max_tokens=16)

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(HostStorage, "keep", fail)
    cache.free(start(cache, TEXT))
    push_out(cache)
    assert cache.stats().host_cached == 0
    assert cache.length(cache.add(TEXT)) == 0
    cache.check()


def test_stats_say_what_is_on_the_host():
    cache = make()
    assert "host" not in str(cache.stats())
    cache.offload(start(cache, TEXT))
    assert "on the host 3 pages offloaded (0.0 MiB), 0 cached" in str(cache.stats())


@pytest.mark.parametrize(
    "fields", [{}, {"host_tokens": 0}, {"read_tokens": 16}, {"growth_step": 8}]
)
def test_a_cache_that_is_dropped_gives_its_memory_back_without_a_garbage_collection(fields):
    cache = make(**fields)
    seq = start(cache, TEXT)
    if cache.config.host_tokens:
        cache.offload(seq)
        push_out(cache)
    held = [weakref.ref(x) for x in (cache._storage, cache._tables, cache._tier) if x is not None]
    gc.collect()
    gc.disable()
    try:
        del cache
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()
