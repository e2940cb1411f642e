"""Small caches, a text that is saved, and what a refused file must leave alone."""

from pathlib import Path

import pytest
import torch

from pagedkv import PagedKVCache
from tests.cases import one_group
from tests.contents import assert_contents, start

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def make(config=None, **fields) -> PagedKVCache:
    return PagedKVCache(config or one_group(**fields), device="cpu", debug=True)


def save_text(path: Path, config=None, n: int = 10, **fields) -> Path:
    cache = make(config, **fields)
    cache.save(start(cache, TEXT[:n]), path)
    return path


def contents(cache: PagedKVCache, seq: int) -> list[torch.Tensor]:
    return [x for layer in range(cache.config.num_layers) for x in cache.gather(seq, layer)]


def refused(
    path: Path, error: type[Exception], match: str | None, cache: PagedKVCache | None = None
) -> None:
    """Loading raises, and the cache is as it was."""
    cache = cache or make(fingerprint=b"some model")
    seq = start(cache, [7, 7, 7, 7, 7])
    before = cache.stats()
    with pytest.raises(error, match=match):
        cache.load(path)
    assert cache.stats() == before
    cache.check()
    assert_contents(cache, seq, [7, 7, 7, 7, 7])
