"""The device tensors of one step.

A step sends row numbers, lengths, ids and what changed of the page tables in one packed copy
(`device_tables.py`); positions, slots and the batch-ordered tables are computed on the device from
that. Every tensor handed out is valid until its step is closed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
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

from .device_tables import Devices
from .states import StepStates

# The step last opened on each cache, by the cache's handle: a compiled graph cannot hold on to an
# object, only to a number.
open_steps: weakref.WeakValueDictionary[int, StepMetadata] = weakref.WeakValueDictionary()


class StepMetadata:
    """What a model and an attention kernel need to know about one step.

    Tensors are on the cache's device and views of buffers that the next steps reuse. Where layers
    lie on several devices, `at` gives the step as a layer sees it.

    Attributes:
        seqs: `[B]`, sequence ids (host).
        num_new: `[B]`, new tokens of each (host).
        positions: `[T]` int64, position of every new token in its text.
        last_rows: `[B]` int64, index in `[T]` of each sequence's last token.
        query_start_loc: `[B + 1]` int32, where each sequence's tokens begin.
        handle: number of the cache, the same in all its steps.
    """

    def __init__(
        self,
        seqs: Ints,
        plan: PagePlan,
        tables: PageTables,
        devices: Devices,
        config: CacheConfig,
        backend: str,
        tokens: Tensor | None = None,
    ) -> None:
        device_tables, storage = devices.each[0]
        self.seqs = seqs
        self.num_new = plan.new
        self.kv_lens_host: Ints = plan.start + plan.new  # of the text
        self.config = config
        self.storage = storage  # not used here: a layer's call needs it
        self.backend = backend  # of attention, by name
        self.state: Literal["open", "committed", "aborted"] = "open"
        self.wrote: list[int] = []  # layers that wrote, one entry for each time
        self.bounded = False  # counts on the host are upper bounds, not the step's own numbers
        self.shared: dict[int, Any] = {}  # in a bounded step, by group, work of common prefixes
        # How many last queries of each row are watched for `observer`; None: none.
        self.queries: Ints | None = None
        self.observer: Any = None
        self.states: StepStates | None = None  # of a model that has them
        self._plan = plan
        self._tables = tables
        self._device = device_tables
        self.handle = device_tables.handle
        open_steps[self.handle] = self
        self._memo: dict[Any, Any] = {}
        # Where a policy evicts, groups hold different numbers of slots.
        self._evicts = config.policy is not None
        evicted = (
            tables.evicted[:, plan.rows] if self._evicts else np.zeros_like(tables.evicted[:, :1])
        )
        self._evicted_host: Ints = evicted * config.page_size  # [groups, B], slots no longer held
        self._width = int((tables.num_pages[plan.rows] - evicted).max())
        self._number, self._number_of = 0, devices.of_layer
        parts, known = self._parts(plan, tables, tokens)
        ids = self._upload(plan, parts)
        most = config.max_step_tokens
        self._sent_tokens = known
        self._tokens = self._device.keep("tokens", ids, most, torch.int64) if known else tokens
        self._elsewhere: tuple[StepMetadata, ...] = ()
        if devices.of_layer is not None:
            others = range(1, len(devices.each))
            self._elsewhere = tuple(self._on(devices, i, plan, parts) for i in others)
        tables.changed.clear()

    def _on(
        self, devices: Devices, number: int, plan: PagePlan, parts: list[npt.NDArray[Any]]
    ) -> StepMetadata:
        """This step on another device."""
        there = copy(self)
        there._number, there._memo = number, {}
        there._device, there.storage = devices.each[number]
        there._upload(plan, parts)
        return there

    def _parts(
        self, plan: PagePlan, tables: PageTables, tokens: Tensor | None
    ) -> tuple[list[npt.NDArray[Any]], bool]:
        """What is sent to a device, and whether all ids are among it."""
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

    def _upload(self, plan: PagePlan, parts: list[npt.NDArray[Any]]) -> Tensor:
        """Sends it, and computes where tokens go. Returns the ids."""
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

    # ------------------------------------------------------------------ on several devices

    def at(self, layer: int) -> StepMetadata:
        """This step on the device of a layer: the same numbers in tensors that are there.

        A layer's call is given the step itself, and finds what it needs. `tokens` stay where they
        are.

        Raises:
            ValueError: this is not the step that `prepare` returned.
        """
        if self._number_of is None:
            return self
        if self._number:
            raise ValueError(
                f"step: expected what `prepare` returned, got its part on {self.storage.device}"
            )
        number = self._number_of.get(layer, 0)
        return self._elsewhere[number - 1] if number else self

    def watch(self, queries: Ints | None, observer: Any) -> None:
        """Lets an observer measure the attention of so many last queries of each row."""
        for step in (self, *self._elsewhere):
            step.queries, step.observer = queries, observer

    def is_of(self, tables: PageTables) -> bool:
        """Whether this is a step of the sequences in these tables."""
        return self._tables is tables

    def close(self, state: Literal["committed", "aborted"]) -> None:
        """Says that the step is over, on every device."""
        for step in (self, *self._elsewhere):
            step.state = state

    # ------------------------------------------------------------------ as part of a larger step

    def padded(self, rows: int, shared: dict[int, Any]) -> StepMetadata:
        """This step of one token a row, as the first rows of a larger step whose others are empty.

        All padded steps have their tensors at the same addresses, so a captured graph reads the
        latest. Counts on the host are upper bounds that hold for all of them.

        Args:
            shared: by group, the work of prefixes that rows have in common, in lasting buffers.
        """
        batch, groups = len(self.seqs), range(len(self.config.groups))
        assert self.num_tokens == batch <= rows
        keep = self._device.kept
        self.page_table(), self.slots(), self.kv_lens()  # makes them, where nobody has yet
        if not self._sent_tokens:
            self._device.keep("tokens", self.tokens, self.config.max_step_tokens, torch.int64)
        step = copy(self)
        step._memo, step.wrote = {}, []
        step.bounded, step.shared = True, shared
        step.num_tokens = rows
        step.num_new = np.ones(rows, np.int64)
        step.kv_lens_host = np.full(rows, self.config.max_sequence_length)
        step._evicted_host = np.zeros((len(groups), rows), np.int64)
        step.query_start_loc = self._device.counting32(rows + 1)
        step.last_rows = self._device.counting(rows)
        for name in ("kv_lens", "positions", "tokens") if rows > batch else ():
            keep(name)(rows, batch).zero_()
        step._kv_lens, step.positions = keep("kv_lens")(rows), keep("positions")(rows)
        step._tokens = keep("tokens")(rows)
        whole = {name: self._device.kept_all(name) for name in ("page_table", "slots")}
        whole["slots"][:, batch:rows].fill_(-1)
        if self._evicts:
            whole["kv_lens"] = self._device.kept_all("kv_lens")
            whole["kv_lens"][:, batch:rows].zero_()
        for name, values in whole.items():
            step._memo |= {(name, group): values[group, :rows] for group in groups}
        return step

    def again(self) -> StepMetadata:
        """A copy of this step as it was before a layer computed anything for it."""
        step = copy(self)
        step.wrote = []
        named = ("page_table", "slots", "kv_lens")
        step._memo = {key: value for key, value in self._memo.items() if key[0] in named}
        return step

    def narrowed(self, num_queries: Ints) -> StepMetadata:
        """This step with queries for the last new tokens of each row alone, to be read from.

        Args:
            num_queries: `[B]`; rows with 0 are left out. What all layers ask alike is made once.
        """
        counts, new = np.asarray(num_queries), self.num_new
        few = counts.dtype.kind in "iu" and counts.shape == new.shape and counts.any()
        if not few or (counts < 0).any() or (counts > new).any():
            raise ValueError(
                f"num_queries: expected 0 to {new.tolist()} for the rows, and at least one in all, "
                f"got {counts.tolist()}"
            )

        def build() -> StepMetadata:
            step = self.again() if counts.all() else self._without(np.flatnonzero(counts))
            step.wrote, step.queries = self.wrote, None
            step.num_new, step.num_tokens = counts[counts > 0], int(counts.sum())
            starts = np.concatenate([[0], step.num_new.cumsum()]).astype(np.int32)
            step.query_start_loc = sent(starts, self.query_start_loc.device)
            return step

        step: StepMetadata = self._once(("narrowed", counts.tobytes()), build)
        return step

    def _without(self, rows: Ints) -> StepMetadata:
        """A copy that has these rows alone, as far as reading goes."""
        step, groups = copy(self), range(len(self.config.groups))
        chosen = sent(rows, self.query_start_loc.device)
        step.seqs, step.kv_lens_host = self.seqs[rows], self.kv_lens_host[rows]
        step._evicted_host = self._evicted_host[:, rows if self._evicts else slice(None)]
        step._plan = replace(self._plan, rows=self._plan.rows[rows])
        step._kv_lens = self._kv_lens[chosen]
        step._memo = {("page_table", g): self.page_table(g)[chosen] for g in groups}
        if self._evicts:
            step._memo |= {("kv_lens", g): self.kv_lens(g)[chosen] for g in groups}
        return step

    # ------------------------------------------------------------------ what a model needs

    @property
    def tokens(self) -> Tensor:
        """`[T]` int64, the ids of the new tokens, packed in `seqs` order."""
        if self._tokens is None:
            raise ValueError("tokens: this step was prepared by count, without ids")
        return self._tokens

    # ------------------------------------------------------------------ what a kernel needs

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
        """`[B]` int32, slots of each sequence: the new and dropped ones count, evicted ones not."""
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
        """One group's part of a value that is computed for all groups at once."""
        value = self._memo.get((name, group))
        if value is None:
            values = self._once((name, None), build)
            value = self._memo[name, group] = values[group]
        return value

    def written(self, group: int) -> tuple[Tensor, Tensor | None]:
        """Slots to write, and the tokens that go there (None for all, in order)."""
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
        """Pages that this step fills from end to end, where pages are coded as a whole.

        Returns:
            The first of each page's tokens in `[T]`, and the page, both `[n]` int64; None without
            any.
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

        return self._once(("csr", group), build)

    def group_of(self, layer: int) -> int:
        """The layer group of a layer."""
        try:
            return self.config.group_of[layer]
        except KeyError:
            last = self.config.num_layers - 1
            raise ValueError(f"layer: expected 0..{last}, got {layer!r}") from None

    def read_state(self, layer: int) -> list[Tensor]:
        """Copies of the rows' states before this step, in one state layer: `[B, *shape]` each.

        Args:
            layer: which of `CacheConfig.states`. Rows without tokens have zeros.
        """
        return self._states.read(layer)

    def write_state(self, layer: int, tensors: Sequence[Tensor], *, donate: bool = False) -> None:
        """Hands in the rows' states after this step; `commit` stores them.

        Args:
            layer: which of `CacheConfig.states`, each exactly once.
            tensors: `[B, *shape]` each, in the order of `StateLayer.tensors`; kept until then.
            donate: the caller will not touch the tensors again. If the next step has the same rows
                in the same order, its `read_state` gives these instead of copies.
        """
        self._states.write(layer, tensors, donate)

    @property
    def _states(self) -> StepStates:
        self.require_open()
        if self.states is None:
            raise ValueError("layer: this cache has no states, configure `states`")
        return self.states

    def memo(self, key: Any, build: Callable[[], Any]) -> Any:
        """A value that a backend computes once per step, and that the step keeps."""
        return self._once(key, build)

    def keep(self, key: Any, value: Any) -> None:
        """Keeps a value of a backend's until the step is over."""
        self._memo[key] = value

    def kept(self, key: Any) -> Any:
        """What was kept, or None."""
        return self._memo.get(key)

    def mark_written(self) -> None:
        """Says that every layer wrote once: in a replayed CUDA graph no Python code sees it."""
        self.wrote += range(self.config.num_layers)

    def require_open(self) -> None:
        """Raises `ClosedStepError` once the step was committed or aborted."""
        if self.state != "open":
            raise ClosedStepError(f"step: expected an open step, this one was {self.state}")

    def _once(self, key: Any, build: Callable[[], Any]) -> Any:
        value = self._memo.get(key)
        if value is None:
            self.require_open()
            value = self._memo[key] = build()
        return value

    def __repr__(self) -> str:
        return f"StepMetadata({len(self.seqs)} sequences, {self.num_tokens} tokens, {self.state})"
