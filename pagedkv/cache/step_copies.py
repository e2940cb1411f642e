"""Copies pages before a step's layers write, and moves and codes tokens after."""

from __future__ import annotations

import numpy as np

from pagedkv.arrays import Ints
from pagedkv.config import CacheConfig
from pagedkv.pages import staging
from pagedkv.pages.plan import PagePlan
from pagedkv.pages.pool import within
from pagedkv.pages.publish import completed
from pagedkv.pages.tables import PageTables
from pagedkv.step.metadata import StepMetadata
from pagedkv.storage import Storage
from pagedkv.storage.memory import memory_errors
from pagedkv.storage.page_statistics import PageStatistics


class StepCopies:
    """Copies and codes pages as a step's plan says, and keeps their statistics and bounds."""

    def __init__(
        self,
        tables: PageTables,
        storage: Storage,
        statistics: PageStatistics,
        config: CacheConfig,
    ) -> None:
        self._tables, self._storage = tables, storage
        self._statistics, self._config = statistics, config

    def copy(self, plan: PagePlan) -> None:
        """Copies pages that the step is about to write and that other sequences own as well."""
        base = self._tables.base
        for group, _, source, target in plan.copies:
            self._storage.copy_pages(group, source - base[group], target - base[group])

    def watch(self, step: StepMetadata, plan: PagePlan) -> None:
        """Prepares statistics; the step measures attention if the policy needs it."""
        tables, statistics = self._tables, self._statistics
        if statistics.compares:
            statistics.invalidate(tables.tables[tables.at(plan.rows, plan.column)])
        if not (statistics.watches or statistics.compares):
            return
        grown = tables.tables[tables.at(plan.grown_rows, plan.grown_columns)]
        statistics.reset(grown.reshape(-1))
        for copy in plan.copies:
            statistics.copy(copy.source, copy.target)
        step.watch(statistics.queries(plan.new), statistics)

    def move(self, plan: PagePlan, kept: Ints, places: Ints) -> None:
        """Moves K and V of the kept tokens to the slots that follow the text before the step.

        Args:
            kept: `[B]`, how many new tokens each sequence keeps.
            places: the place of every kept token among the new tokens of its sequence.
        """
        config = self._config
        if config.policy is not None or config.staged:
            why = f"{config.kv_format} pages" if config.staged else "a retention policy"
            raise NotImplementedError(
                f"accepted: expected the first tokens of each sequence with {why}, got others"
            )
        tables, order, ends = self._tables, np.repeat(np.arange(kept.size), kept), within(kept)
        apart = places != ends
        rows, start = plan.rows[order[apart]], plan.start[order[apart]]
        for group in range(len(config.groups)):
            source, target = (
                (tables.tables[group, rows, column] - tables.base[group]) * tables.page_size + slot
                for column, slot in (
                    divmod(start + x[apart], tables.page_size) for x in (places, ends)
                )
            )
            with memory_errors():
                self._storage.copy_slots(group, source, target)

    def code(self, plan: PagePlan, kept: Ints) -> None:
        """Codes and bounds the pages that are complete once the step keeps `kept` tokens."""
        self._code_staging(plan, kept)
        self._bound_completed(plan, kept)

    def _code_staging(self, plan: PagePlan, kept: Ints) -> None:
        """Codes staging pages into the pages set aside for them."""
        if plan.codings is None:
            return
        due = staging.due(self._tables, plan.rows, plan.codings, plan.start + kept)
        for group, (which, source) in enumerate(due):
            base, target = self._tables.base[group], plan.codings.target[group, which]
            with memory_errors():
                self._storage.code_pages(group, source - base, target - base)
            self._statistics.copy(source, target)
            self._update_bounds(group, target)

    def _bound_completed(self, plan: PagePlan, kept: Ints) -> None:
        """Writes the key bounds of completed pages, by which queries choose pages."""
        if self._config.read_tokens:
            for group, pages in enumerate(completed(self._tables, plan, kept)):
                self._update_bounds(group, pages)

    def _update_bounds(self, group: int, pages: Ints) -> None:
        if pages.size and self._config.keeps_bounds(group):
            self._storage.bounds.update(group, pages - self._tables.base[group])
