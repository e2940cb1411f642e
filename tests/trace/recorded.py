"""Random walks over recorded caches, and what a replay has to agree in with what it was made of."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv import PagedKVCache
from tests.cases import Case, random_op


def recorded_world(patch: pytest.MonkeyPatch, path: Path, case: Case) -> Any:
    """A `World` whose cache is recorded."""
    from tests import world

    patch.setattr(world, "PagedKVCache", partial(PagedKVCache, trace=path))
    return world.World(case, everything=False)


def walk(world: Any, operations: int) -> None:
    """Operations that are drawn anew for each cache, and the same in each run."""
    source = random.Random(repr(world.config))
    for _ in range(operations):
        world.apply(random_op(source, world.config))


def assert_same_pages(replayed: PagedKVCache, cache: PagedKVCache) -> None:
    """Two caches have the same sequences on the same pages, free and findable ones included."""
    ours, theirs = replayed._tables, cache._tables
    for name in ("tables", "seqs", "lengths", "num_pages", "first_kept", "evicted", "ids_known"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    for name in ("refcount", "filled", "existing", "num_free", "num_cached", "findable", "_stack"):
        assert np.array_equal(getattr(ours.pool, name), getattr(theirs.pool, name)), name
    assert (ours.tokens_computed, ours.tokens_reused) == (
        theirs.tokens_computed,
        theirs.tokens_reused,
    )
    assert set(ours.offloaded) == set(theirs.offloaded)
    if theirs.states is not None:
        assert np.array_equal(ours.states.slot, theirs.states.slot)
        assert np.array_equal(ours.states.refcount, theirs.states.refcount)
