"""Random walks over recorded caches, and what a trace has to agree in with the cache it is of."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv import PagedKVCache
from pagedkv.trace.books import Books
from tests import world
from tests.cases import Case, random_op


def recorded_world(patch: pytest.MonkeyPatch, path: Path, case: Case) -> Any:
    """A `World` whose cache is recorded."""
    patch.setattr(world, "PagedKVCache", partial(PagedKVCache, trace=path))
    return world.World(case, everything=False)


def walk(world: Any, operations: int) -> None:
    """Operations that are drawn anew for each cache, and the same in each run."""
    source = random.Random(repr(world.config))
    for _ in range(operations):
        world.apply(random_op(source, world.config))


def assert_same_pages(books: Books, cache: PagedKVCache) -> None:
    """The trace and the cache have the same sequences on the same pages, cached ones included."""
    tables, pool, stats = cache._tables, cache._tables.pool, cache.stats()
    rows = tables.live_rows()
    assert books.lengths == dict(zip(tables.seqs[rows].tolist(), tables.lengths[rows].tolist()))
    for row in rows.tolist():
        for group, table in enumerate(books.tables[int(tables.seqs[row])]):
            first = int(tables.first_kept[group, row])
            end = int(tables.num_pages[row] - tables.evicted[group, row])
            assert list(table.pages) == tables.tables[group, row, first:end].tolist()
    assert np.array_equal(books.refs, pool.refcount[:-1])
    assert np.array_equal(books.filled, pool.filled[:-1])
    assert {name: getattr(stats, name) for name in books.stats()._fields} == books.stats()._asdict()
    assert books.counts.get("host", np.zeros(2)).tolist() == [stats.offloaded, stats.host_cached]
    if tables.states is not None:
        assert books.counts["states"].tolist() == [stats.states, stats.checkpoints]
        assert [books.slots.get(seq, -1) for seq in books.tables] == [
            int(tables.states.slot[tables.row_of(seq)]) for seq in books.tables
        ]
