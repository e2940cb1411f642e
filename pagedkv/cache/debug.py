"""Debug mode: NaN in every slot that must not be read, so that reading one shows.

A page is poisoned when it is handed out; after an abort, a rejected token or a write below
findable tokens, the slots from `filled` on are poisoned again. Findable slots are never touched.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.errors import CorruptCacheError
from pagedkv.pages.plan import PagePlan
from pagedkv.pages.tables import PageTables
from pagedkv.storage import Storage


def poison_new(tables: PageTables, storage: Storage, plan: PagePlan) -> None:
    """Poisons the pages that a step took, and slots that it may overwrite in pages it had."""
    grown = tables.tables[tables.at(plan.grown_rows, plan.grown_columns)]
    for group, pages in enumerate(grown):
        storage.poison(group, _local(tables, storage, group, pages), 0)
    touched = [plan.rows[copy.order] for copy in plan.copies]
    if plan.claimed is not None:
        touched.append(plan.claimed)
    for rows in touched:
        poison_tails(tables, storage, rows)


def poison_tails(tables: PageTables, storage: Storage, rows: Ints) -> None:
    """Poisons the slots from `filled` on in the pages where these sequences end."""
    size = tables.page_size
    for row in rows[tables.lengths[rows] % size > 0].tolist():
        for group, table in enumerate(tables.tables[:, row]):
            page = table[int(tables.lengths[row]) // size - int(tables.evicted[group, row])]
            filled = int(tables.pool.filled[page])
            storage.poison(group, _local(tables, storage, group, page[None]), filled)


def check_bounds(tables: PageTables, storage: Storage) -> None:
    """Raises `CorruptCacheError` if the bounds of a complete page do not bound its keys."""
    pool = tables.pool
    complete = (pool.filled == tables.page_size) & ((pool.refcount > 0) | pool.findable)
    for group, (first, stop) in enumerate(zip(tables.base[:-1], tables.first_staging)):
        pages = np.flatnonzero(complete[first : min(stop, tables.base[group + 1])])
        storage.bounds.check(group, torch.from_numpy(pages).to(storage.device))


def check_poison(tables: PageTables, storage: Storage, plan: PagePlan | None) -> None:
    """Raises `CorruptCacheError` if a live or cached page has numbers past its filled slots."""
    pool = tables.pool
    used = (pool.refcount > 0) | pool.findable
    used[-1] = False
    if plan is not None:
        pages = tables.tables[:, plan.rows]
        used[pages[pages >= 0]] = False
        for copy in plan.copies:
            used[copy.source] = False
        if plan.codings is not None:
            used[plan.codings.target] = False
    for page in np.flatnonzero(used & (pool.filled < tables.page_size)).tolist():
        group, filled = int(pool.group_of[page]) // tables.kinds, int(pool.filled[page])
        if not storage.is_poisoned(group, page - int(tables.base[group]), filled):
            raise CorruptCacheError(f"page {page} holds bytes past its {filled} filled slots")


def _local(tables: PageTables, storage: Storage, group: int, pages: Ints) -> Tensor:
    return torch.from_numpy(pages - tables.base[group]).to(storage.device)
