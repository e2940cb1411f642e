"""A small cache that grows."""

from pagedkv import CacheConfig, PagedKVCache
from tests.cases import one_group

P = 4


def make(config: CacheConfig | None = None, debug: bool = True, **fields) -> PagedKVCache:
    fields = {"page_size": P, "growth_step": 2 * P, **fields}
    return PagedKVCache(config or one_group(**fields), device="cpu", debug=debug)


def pages(cache: PagedKVCache) -> tuple[int, int, int]:
    stats = cache.stats()
    return stats.pages, stats.reserved, stats.growths
