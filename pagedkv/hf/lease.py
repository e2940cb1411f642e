"""`Lease`: gives back what a `PagedCache` holds, however the cache ends."""

from __future__ import annotations

import weakref
from typing import Any

from transformers import PreTrainedModel

from pagedkv.cache.cache import PagedKVCache

from .attach import detach_later


class Lease:
    """Sequences that a `PagedCache` holds, returned when the cache is closed or collected."""

    def __init__(self, kv: PagedKVCache, model: PreTrainedModel) -> None:
        self.kv = kv
        self.seqs: list[int] = []
        self.spare: dict[Any, int] = {}  # rows as they were before the present forward
        self.model = weakref.ref(model)

    def end(self) -> None:
        """Gives everything back. May run inside a garbage collection, so it only queues ids."""
        self.kv.release_later([*self.seqs, *self.spare.values()])
        self.seqs, self.spare = [], {}
        model = self.model()
        if model is not None:
            detach_later(model)
