"""The tensors of one step on one device.

A step sends row numbers, lengths, ids and changed entries of the page tables in one packed copy
(`device_tables.py`). From these the device computes positions, slots and the batch's page tables.
Every tensor that a step hands out is valid until the step is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.config import CacheConfig
from pagedkv.errors import ClosedStepError
from pagedkv.kernels.sending import sent
from pagedkv.pages.plan import PagePlan
from pagedkv.pages.tables import PageTables

from .device_tables import DeviceTables


class StepTensors:
    """The tensors of a step that attention kernels read, made at their first use.

    Attributes:
        num_new: `[B]`, new tokens of each sequence (host).
        kv_lens_host: `[B]`, tokens of each sequence's text with the new ones (host).
        num_tokens: T, new tokens of all sequences.
        positions: `[T]` int64, position of every new token in its text.
        last_rows: `[B]` int64, index in `[T]` of each sequence's last token.
        query_start_loc: `[B + 1]` int32, where each sequence's tokens begin.
        storage: the pages on this device.
        state: whether the step was committed or aborted.
    """

    def __init__(
        self,
        plan: PagePlan,
        tables: PageTables,
        device: tuple[DeviceTables, Any],
        config: CacheConfig,
    ) -> None:
        self.num_new = plan.new
        self.kv_lens_host: Ints = plan.start + plan.new
        self.config = config
        self._device, self.storage = device
        self.state: Literal["open", "committed", "aborted"] = "open"
        self._plan = plan
        self._tables = tables
        self._memo: dict[Any, Any] = {}
        # If a policy evicts, groups hold different numbers of slots.
        self._evicts = config.policy is not None
        evicted = (
            tables.evicted[:, plan.rows] if self._evicts else np.zeros_like(tables.evicted[:, :1])
        )
        self._evicted_host: Ints = evicted * config.page_size  # [groups, B], slots no longer held
        self._width = int((tables.num_pages[plan.rows] - evicted).max())

    def _parts(self, tokens: Tensor | None) -> tuple[list[npt.NDArray[Any]], bool]:
        """Returns the arrays to send to a device, and whether all ids are among them."""
        plan, tables = self._plan, self._tables
        where = tables.changed.places()
        pages = tables.tables.reshape(-1)[where]
        uniform = plan.most == 1 or bool((plan.new == plan.new[0]).all())
        ids = plan.tokens if tokens is None else None
        nothing = plan.rows[:0]
        parts: list[npt.NDArray[Any]] = [plan.rows, plan.start, where, pages]
        parts += [nothing if part is None else part for part in (plan.held, ids)]
        parts.append(nothing if uniform else plan.new)
        parts.append(self._evicted_host.reshape(-1) if self._evicts else nothing)
        return parts, ids is not None and int(ids.min()) >= 0

    def _upload(self, parts: list[npt.NDArray[Any]]) -> Tensor:
        """Sends the arrays, and computes where tokens go. Returns the ids."""
        plan = self._plan
        rows, start, where, pages, held, ids, new, evicted = self._device.send(parts)
        self._evicted = evicted.view(-1, rows.numel())
        if where.numel():
            self._device.write(where, pages)
        self._rows = rows
        self._held = held if plan.held is not None else None
        if plan.most == 1:
            self._place_single(start)
        else:
            self._place(plan, start, new)
        return ids

    def _place_single(self, start: Tensor) -> None:
        """Computes where tokens go, in a step of one token for each row."""
        batch, keep = start.numel(), self._device.keep
        self.num_tokens = batch
        self.query_start_loc = self._device.counting32(batch + 1)
        self.last_rows = self._row_of_token = self._device.counting(batch)
        self._kv_lens = keep("kv_lens", start, self.config.max_sequences + 1).add_(1)
        self.positions = keep("positions", start, self.config.max_step_tokens, torch.int64)

    def _place(self, plan: PagePlan, start: Tensor, new: Tensor) -> None:
        """Computes where tokens go, in any step."""
        batch, keep = start.numel(), self._device.keep
        sequences, most = self.config.max_sequences + 1, self.config.max_step_tokens
        order = self._device.counting32(batch + 1)
        if new.numel():
            starts, lens, total = order.clone(), start + new, int(plan.new.sum())
            torch.cumsum(new, 0, dtype=torch.int32, out=starts[1:])
        else:
            size = int(plan.new[0])
            starts, lens, total = order * size, start + size, size * batch
        self.num_tokens = total
        self.query_start_loc = keep("query_start_loc", starts, sequences)
        self.last_rows = keep("last_rows", starts[1:].long() - 1, sequences)
        self._kv_lens = keep("kv_lens", lens, sequences)
        spans = starts.diff().long()
        self._row_of_token = order[:-1].long().repeat_interleave(spans, output_size=total)
        token = torch.arange(total, device=start.device)
        positions = token + (start - starts[:-1])[self._row_of_token]
        self.positions = keep("positions", positions, most)

    def page_table(self, group: int = 0) -> Tensor:
        """`[B, max_pages]` int32. -1 where a window dropped a page; undefined beyond the end."""

        def build() -> Tensor:
            tables = self._device.rows(self._rows, self._width)
            return self._device.keep_all("page_table", tables, *self._device.tables.shape[1:])

        return self._of_group("page_table", group, build)

    def page_table_host(self, group: int = 0) -> Ints:
        """`[B, max_pages]`, the page table on the host; page ids count over all groups."""
        self.require_open()
        return self._tables.tables[group, self._plan.rows, : self._width]

    def kv_lens(self, group: int = 0) -> Tensor:
        """`[B]` int32, each sequence's slots with new and dropped ones, without evicted ones."""
        if not self._evicts:
            return self._kv_lens

        def build() -> Tensor:
            most = self.config.max_sequences + 1
            return self._device.keep_all("kv_lens", self._kv_lens - self._evicted, most)

        return self._of_group("kv_lens", group, build)

    def kv_lens_of(self, group: int) -> Ints:
        """`[B]`, `kv_lens` on the host; upper bounds in a bounded step."""
        return self.kv_lens_host - self._evicted_host[group]

    def slots(self, group: int = 0) -> Tensor:
        """`[T]` int64, `page * page_size + offset` of every new token; -1: do not write."""

        def build() -> Tensor:
            size, row = self.config.page_size, self._row_of_token
            self.page_table()
            tables = self._device.kept_all("page_table")
            places = self.positions.expand(len(tables), -1)
            if self._evicts:
                places = places - self._evicted[:, row]
            pages = tables[self._device.groups, row, places // size]
            slots = pages.long() * size + places % size
            if self.config.staged:  # coded pages are written as a whole: `direct`
                slots.masked_fill_(pages < self._device.first_staging, -1)
            if self._held is not None:
                slots.masked_fill_(self._held[row] != 0, -1)
            return self._device.keep_all("slots", slots, self.config.max_step_tokens)

        return self._of_group("slots", group, build)

    def _of_group(self, name: str, group: int, build: Callable[[], Any]) -> Any:
        """Returns one group's part of a value that is computed for all groups at once."""
        value = self._memo.get((name, group))
        if value is None:
            values = self.memo((name, None), build)
            value = self._memo[name, group] = values[group]
        return value

    def written(self, group: int) -> tuple[Tensor, Tensor | None]:
        """Returns slots to write, and the tokens that go there (None for all, in order)."""
        plan = self._plan
        if plan.held is None and not (plan.direct and plan.direct.order.size):
            return self.slots(group), None

        def build() -> list[tuple[Tensor, Tensor]]:
            written = np.ones(self.num_tokens, dtype=bool)
            if plan.held is not None:
                written = ~np.repeat(plan.held, self.num_new)
            if plan.direct is not None:
                size = self.config.page_size
                written[self._first_of_direct()[:, None] + np.arange(size)] = False
            tokens = sent(np.flatnonzero(written), self.positions.device)
            self.slots()
            return [(slots, tokens) for slots in self._device.kept_all("slots")[:, tokens]]

        return self._of_group("written", group, build)

    def direct(self, group: int) -> tuple[Tensor, Tensor] | None:
        """Returns the pages that this step fills completely, if pages are coded as a whole.

        Returns:
            The index in `[T]` of each page's first token, and the page, both `[n]` int64; None if
            there are none.
        """
        direct, tables = self._plan.direct, self._tables
        if direct is None or not direct.order.size:
            return None

        def build() -> list[tuple[Tensor, Tensor]]:
            pages = tables.tables[tables.at(self._plan.rows[direct.order], direct.column)]
            groups, count = pages.shape
            # Kernels want each row to begin at a multiple of 16 bytes.
            told = np.zeros((1 + groups, count + count % 2), dtype=np.int64)
            told[0, :count] = self._first_of_direct()
            told[1:, :count] = pages - tables.base[:-1, None]
            first, *targets = sent(told, self.positions.device)[:, :count]
            return [(first, target) for target in targets]

        return self._of_group("direct", group, build)

    def _first_of_direct(self) -> Ints:
        plan = self._plan
        assert plan.direct is not None
        order, column = plan.direct
        starts = np.cumsum(plan.new) - plan.new
        return starts[order] + column * self.config.page_size - plan.start[order]

    def csr(self, group: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """FlashInfer's form: `indptr [B + 1]`, `indices`, `last_page_len [B]`, all int32.

        Leading null pages are left out.
        """

        def build() -> tuple[Tensor, Tensor, Tensor]:
            size, table = self.config.page_size, self.page_table(group)
            lens, columns = self.kv_lens(group), torch.arange(self._width, device=table.device)
            used = columns < -(-lens // size)[:, None]
            held = used & (table >= 0)
            indptr = torch.zeros(len(table) + 1, dtype=torch.int32, device=table.device)
            torch.cumsum(held.sum(1), 0, dtype=torch.int32, out=indptr[1:])
            return indptr, table[held], (lens - 1) % size + 1

        return self.memo(("csr", group), build)

    def group_of(self, layer: int) -> int:
        """Returns the layer group of a layer."""
        try:
            return self.config.group_of[layer]
        except KeyError:
            last = self.config.num_layers - 1
            raise ValueError(f"layer: expected 0..{last}, got {layer!r}") from None

    def keep(self, key: Any, value: Any) -> None:
        """Keeps a backend's value until the step is over."""
        self._memo[key] = value

    def kept(self, key: Any) -> Any:
        """Returns the value that `keep` got for a key, or None."""
        return self._memo.get(key)

    def require_open(self) -> None:
        """Raises `ClosedStepError` once the step was committed or aborted."""
        if self.state != "open":
            raise ClosedStepError(f"step: expected an open step, this one was {self.state}")

    def memo(self, key: Any, build: Callable[[], Any]) -> Any:
        """Returns a value that is computed once per step; the step keeps it."""
        value = self._memo.get(key)
        if value is None:
            self.require_open()
            value = self._memo[key] = build()
        return value
