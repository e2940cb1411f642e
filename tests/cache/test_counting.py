"""`stats` counts right, and nothing leaks."""

import pytest

from pagedkv import CacheConfig, PagedKVCache
from pagedkv.config import KV_FORMATS
from tests.cache.small import P, ids, make
from tests.contents import start


def test_stats_tell_live_shared_cached_free_and_wasted_apart():
    cache = make(max_tokens=16 * P)
    a = start(cache, ids(10))  # 3 pages, 2 slots unused
    b = cache.fork(a)[0]
    c = start(cache, ids(5, 1), max_tokens=20)  # 2 pages, 3 slots unused, 3 pages promised
    gone = start(cache, ids(8, 2))
    cache.free(gone)
    stats = cache.stats()
    assert (stats.pages, stats.live, stats.shared, stats.cached, stats.free) == (16, 5, 3, 2, 9)
    assert (stats.promised, stats.wasted_slots) == (3, 5)
    assert (stats.sequences, stats.tokens) == (3, 25)
    assert stats.tokens_computed == 23
    assert stats.live_bytes == 5 * cache.config.bytes_per_page()
    assert (stats.unshared, stats.unshared_bytes) == (8, 8 * cache.config.bytes_per_page())
    assert stats.bytes == cache.config.nbytes == 16 * P * cache.config.bytes_per_token
    assert all(str(x) in str(stats) for x in (16, 5, 3, 2, 9))
    assert "5 slots unused, 8 without sharing" in str(stats)
    cache.free([a, b, c])
    stats = cache.stats()
    assert (stats.live, stats.shared, stats.promised, stats.wasted_slots) == (0, 0, 0, 0)
    assert (stats.unshared, stats.unshared_bytes) == (0, 0)
    assert "without sharing" not in str(stats)
    assert stats.free + stats.cached == stats.pages
    cache.clear_prefixes()
    assert cache.stats().free == stats.pages


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_bytes_are_those_of_the_configuration_in_every_format(kv_format):
    shape = {"num_layers": 3, "num_kv_heads": 6, "head_dim": 32, "page_size": 16}
    config = CacheConfig(**shape, max_tokens=64, dtype="float32", kv_format=kv_format)
    cache = PagedKVCache(config)
    assert cache.stats().bytes == config.nbytes == cache._storage.nbytes


def test_the_same_operations_take_the_same_pages():
    def run():
        cache, tables = make(max_tokens=10 * P), []
        a = start(cache, ids(9))
        b, c = cache.fork(a, 2)
        cache.free(b)
        d = start(cache, ids(6, 1))
        for n in range(3):
            step = cache.prepare([a, c, d], tokens=[n, n + 1, n + 2])
            tables.append(step.page_table().tolist())
            cache.commit(step, layers=())
        return tables

    assert run() == run()
