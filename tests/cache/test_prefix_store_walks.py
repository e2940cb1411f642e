"""Random walks over caches with a store: what a file brings holds what was computed, always."""

import random
from dataclasses import replace
from functools import partial

import pytest

from pagedkv import PagedKVCache
from tests import world
from tests.cache.stored import files
from tests.cases import CASES, random_op
from tests.effort import examples, slow


class StoredWorld(world.World):
    """A `World` whose cache has a prefix store, which other worlds wrote to."""

    def __init__(self, case, findable: set) -> None:
        config = replace(case.config, fingerprint=case.name.encode())
        super().__init__(replace(case, config=config), everything=False)
        self.findable = findable

    def clear(self, *_) -> None:
        """Prefixes stay: after they were cleared a cache leaves its store alone."""

    def unchanged(self, before) -> None:
        """After a call that failed prefixes may have come from the store, and nothing else."""
        after = self.snapshot()
        assert after[1:] == before[1:]
        for name in ("live", "shared", "sequences", "tokens", "tokens_reused", "promised"):
            assert getattr(after[0], name) == getattr(before[0], name), name
        self.verify(all_of_them=True)


FAST = "full-P3", "two-P4-rollback", "int4-P16"


@pytest.mark.sampled
@pytest.mark.parametrize("case", [c if c.name in FAST else slow(c)[0] for c in CASES])
def test_what_comes_from_a_store_is_what_was_computed(case, folder, monkeypatch):
    monkeypatch.setattr("pagedkv.saving.pieces.TOKENS", case.config.page_size)
    monkeypatch.setattr("pagedkv.saving.store.TRUSTED_S", 0.0)
    monkeypatch.setattr(world, "PagedKVCache", partial(PagedKVCache, prefix_store=folder))
    findable, found = set(), 0
    for seed in range(examples(12, taste=3)):
        walk, source = StoredWorld(case, findable), random.Random(seed)
        for _ in range(100):
            walk.apply(random_op(source, walk.config))
        found += walk.cache.stats().tokens_from_store
    assert files(folder)
    assert found
