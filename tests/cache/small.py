"""A small cache, ids for it, and all that can be seen of it."""

from pagedkv import CacheConfig, PagedKVCache
from tests.cases import one_group

P = 4


def make(config: CacheConfig | None = None, debug: bool = True, **fields) -> PagedKVCache:
    return PagedKVCache(config or one_group(page_size=P, **fields), device="cpu", debug=debug)


def ids(n: int, seed: int = 0) -> list[int]:
    """The first ids of a stretch; different seeds have none in common."""
    return [1000 * seed + i for i in range(n)]


def snapshot(cache: PagedKVCache, seqs) -> dict:
    """All that can be seen of a cache between steps."""
    cache.check()
    return {
        "stats": cache.stats(),
        "lengths": [cache.length(seq) for seq in seqs],
        "uncached": [cache.uncached(seq).tolist() for seq in seqs],
        "contents": [
            [x.tolist() for x in cache.gather(seq, layer)]
            for seq in seqs
            for layer in range(cache.config.num_layers)
        ],
    }


def table_of(step, row: int, columns: int, group: int = 0) -> list[int]:
    return step.page_table(group)[row, :columns].tolist()
