"""Counts of pages, slots and tokens, which a person can check by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .tables import PageTables


@dataclass(frozen=True)
class CacheStats:
    """A snapshot of a cache; all page counts but `promised` are sums over layer groups.

    Attributes:
        pages: all pages that exist; live + cached + free.
        live: pages that some sequence owns.
        shared: live pages that two or more sequences own.
        cached: pages without an owner that are still findable as a prefix.
        free: pages that are neither live nor cached.
        promised: pages set aside for reservations, in each group that can run out.
        wasted_slots: slots of live pages that hold no committed token.
        sequences: live sequences.
        tokens: committed tokens of all live sequences together.
        tokens_computed: tokens whose K and V were computed and committed.
        tokens_reused: tokens not computed, because they were found or shared by a fork.
        evicted: pages that sequences have lost to a policy so far.
        live_bytes: K and V bytes of the live pages.
        bytes: K and V bytes of all pages that exist, and of static scales.
        reserved: pages that may exist: more than `pages` in a pool that can still grow.
        growths: how often the pool grew.
        offloaded: host pages of offloaded sequences.
        offloaded_bytes: K and V bytes of the host pages of offloaded sequences.
        host_cached: host pages without an owner that are findable as a prefix.
        states: state slots in use, by sequences, which may share them, and by checkpoints.
        checkpoints: prefixes whose state is kept.
        unshared: pages that live sequences would own if they shared none.
        unshared_bytes: K and V bytes of `unshared` pages.
        tokens_from_store: tokens whose K and V a prefix store brought into pages.
    """

    pages: int
    live: int
    shared: int
    cached: int
    free: int
    promised: int
    wasted_slots: int
    sequences: int
    tokens: int
    tokens_computed: int
    tokens_reused: int
    evicted: int
    live_bytes: int
    bytes: int
    reserved: int
    growths: int
    offloaded: int = 0
    offloaded_bytes: int = 0
    host_cached: int = 0
    states: int = 0
    checkpoints: int = 0
    unshared: int = 0
    unshared_bytes: int = 0
    tokens_from_store: int = 0

    def __str__(self) -> str:
        more = f", at most {self.reserved}" if self.reserved > self.pages else ""
        host = ""
        if self.offloaded or self.host_cached:
            size = self.offloaded_bytes / 2**20
            host = f"on the host {self.offloaded} pages offloaded ({size:.1f} MiB), "
            host += f"{self.host_cached} cached; "
        alone = f", {self.unshared} without sharing" if self.unshared > self.live else ""
        return (
            f"{self.sequences} sequences, {self.tokens} tokens; of {self.pages} pages "
            f"{self.live} live ({self.shared} shared, {self.wasted_slots} slots unused{alone}), "
            f"{self.cached} cached, {self.free} free, {self.promised} promised{more}; "
            f"{self.live_bytes / 2**20:.1f} of {self.bytes / 2**20:.1f} MiB; {host}"
            f"tokens computed {self.tokens_computed}, reused {self.tokens_reused}"
            f"{f', from a store {self.tokens_from_store}' if self.tokens_from_store else ''}"
            f"{f', pages evicted {self.evicted}' if self.evicted else ''}"
            f"{f'; {self.states} states, {self.checkpoints} checkpoints' if self.states else ''}"
        )


def collect(
    tables: PageTables,
    bytes_per_page: list[int],
    nbytes_of_scales: int = 0,
    offloaded: int = 0,
    offloaded_bytes: int = 0,
    host_cached: int = 0,
) -> CacheStats:
    """Counts pages, slots and tokens.

    Args:
        bytes_per_page: bytes of a page in every segment of the pool.
        nbytes_of_scales: bytes of static scales beside the pages.
        offloaded, offloaded_bytes, host_cached: counts of the host tier, as in `CacheStats`.
    """
    pool, rows = tables.pool, tables.live_rows()
    refcount = pool.refcount[:-1]
    live = refcount > 0
    groups, owners = pool.group_of[:-1][live], refcount[live]
    per_group = np.bincount(groups, minlength=len(bytes_per_page))
    owned = np.bincount(groups, weights=owners, minlength=len(bytes_per_page))
    cached, free = int(pool.num_cached.sum()), int(pool.num_free.sum())
    pages = int(pool.existing.sum())
    return CacheStats(
        pages=pages,
        live=pages - cached - free,
        shared=int((refcount > 1).sum()),
        cached=cached,
        free=free,
        promised=tables.reservations.total,
        wasted_slots=int((tables.page_size - pool.filled[:-1][live]).sum()),
        sequences=rows.size,
        tokens=int(tables.lengths[rows].sum()),
        tokens_computed=tables.tokens_computed,
        tokens_reused=tables.tokens_reused,
        evicted=tables.pages_evicted,
        live_bytes=int(per_group @ bytes_per_page),
        bytes=int(pool.existing @ bytes_per_page) + nbytes_of_scales,
        reserved=refcount.size,
        growths=tables.growth.count if tables.growth else 0,
        offloaded=offloaded,
        offloaded_bytes=offloaded_bytes,
        host_cached=host_cached,
        states=0 if tables.states is None else tables.states.in_use,
        checkpoints=0 if tables.states is None else len(tables.states.checkpoints),
        unshared=int(owners.sum()),
        unshared_bytes=int(owned @ bytes_per_page),
    )
