"""Caches with a prefix store: many small pieces, and what a second cache finds of the first's."""

from pathlib import Path
from typing import Any

from pagedkv import CacheConfig, PagedKVCache
from tests.cases import one_group
from tests.contents import advance, assert_contents

PIECE = 8  # tokens, in place of 128
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7]


def make(folder: Any, config: CacheConfig | None = None, **fields: Any) -> PagedKVCache:
    """A cache as of a process of its own."""
    config = config or one_group(**{"fingerprint": b"a model", **fields})
    return PagedKVCache(config, device="cpu", debug=True, prefix_store=folder)


def compute(cache: PagedKVCache, text: list[int], salt: bytes = b"") -> int:
    """Tokens of a text that were found; the others are computed, and all are as they should be."""
    seq = cache.add(text, salt=salt)
    found = cache.length(seq)
    advance(cache, {seq: text}, salt)
    assert_contents(cache, seq, text, salt)
    cache.free(seq)
    cache.check()
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))
