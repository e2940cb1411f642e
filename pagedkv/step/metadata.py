"""A step as its caller and its layers see it, also on several devices or with fewer rows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.config import CacheConfig
from pagedkv.kernels.sending import sent
from pagedkv.pages.plan import PagePlan
from pagedkv.pages.tables import PageTables

from .device_tables import Devices
from .states import StepStates
from .tensors import StepTensors

# The step last opened on each cache, by the cache's handle: a compiled graph cannot hold an object,
# only a number.
open_steps: weakref.WeakValueDictionary[int, StepMetadata] = weakref.WeakValueDictionary()


class StepMetadata(StepTensors):
    """The facts about one step that a model and an attention kernel need.

    Tensors are on the cache's device, as views of buffers that the next steps reuse. If layers are
    on several devices, `at` gives the step as a layer sees it.

    Attributes:
        seqs: `[B]`, sequence ids (host).
        num_new: `[B]`, new tokens of each sequence (host).
        positions: `[T]` int64, position of every new token in its text.
        last_rows: `[B]` int64, index in `[T]` of each sequence's last token.
        query_start_loc: `[B + 1]` int32, where each sequence's tokens begin.
        handle: the cache's number in `open_steps`, the same in all its steps.
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
        super().__init__(plan, tables, devices.each[0], config)
        self.seqs = seqs
        self.backend = backend  # of attention, by name
        self.wrote: list[int] = []  # layers that wrote, one entry for each time
        # Whether a processor may attend to a shared prefix once for all rows. This changes the last
        # bits of results.
        self.reads_prefixes = True
        self.bounded = False  # counts on the host are upper bounds, not the step's own numbers
        self.shared: dict[int, Any] = {}  # in a bounded step, by group, work of common prefixes
        # How many last queries of each row `observer` watches; None if it watches none.
        self.queries: Ints | None = None
        self.observer: Any = None
        self.states: StepStates | None = None  # None for a model without states
        self.handle = self._device.handle
        open_steps[self.handle] = self
        self._number, self._number_of = 0, devices.of_layer
        parts, known = self._parts(tokens)
        ids = self._upload(parts)
        most = config.max_step_tokens
        self._sent_tokens = known
        self._tokens = self._device.keep("tokens", ids, most, torch.int64) if known else tokens
        self._elsewhere: tuple[StepMetadata, ...] = ()
        if devices.of_layer is not None:
            others = range(1, len(devices.each))
            self._elsewhere = tuple(self._on(devices, i, parts) for i in others)
        tables.changed.clear()

    @property
    def tokens(self) -> Tensor:
        """`[T]` int64, the ids of the new tokens, packed in `seqs` order."""
        if self._tokens is None:
            raise ValueError("tokens: this step was prepared by count, without ids")
        return self._tokens

    def _on(self, devices: Devices, number: int, parts: list[npt.NDArray[Any]]) -> StepMetadata:
        """Returns this step on another device."""
        there = copy(self)
        there._number, there._memo = number, {}
        there._device, there.storage = devices.each[number]
        there._upload(parts)
        return there

    # ------------------------------------------------------------------ on several devices

    def at(self, layer: int) -> StepMetadata:
        """Returns this step with its tensors on the device of a layer; `tokens` are not copied.

        A layer's call takes the step that `prepare` returned, and calls this by itself.

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
        """Lets an observer measure the attention of each row's last `queries` queries."""
        for step in (self, *self._elsewhere):
            step.queries, step.observer = queries, observer

    def is_of(self, tables: PageTables) -> bool:
        """Whether this is a step of the sequences in these tables."""
        return self._tables is tables

    def close(self, state: Literal["committed", "aborted"]) -> None:
        """Marks the step as over, on every device."""
        for step in (self, *self._elsewhere):
            step.state = state

    # ------------------------------------------------------------------ as part of a larger step

    def padded(self, rows: int, shared: dict[int, Any]) -> StepMetadata:
        """Pads this step of one token a row with empty rows, up to `rows`.

        All padded steps have their tensors at the same addresses, so a captured graph reads the
        latest step. Counts on the host are upper bounds for all padded steps.

        Args:
            shared: by group, the work of prefixes that rows share, in lasting buffers.
        """
        batch, groups = len(self.seqs), range(len(self.config.groups))
        assert self.num_tokens == batch <= rows
        keep = self._device.kept
        self.page_table(), self.slots(), self.kv_lens()  # makes them, if they are not made yet
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
        """Returns a copy of this step as it was before any layer used it."""
        step = copy(self)
        step.wrote = []
        named = ("page_table", "slots", "kv_lens")
        step._memo = {key: value for key, value in self._memo.items() if key[0] in named}
        return step

    def narrowed(self, num_queries: Ints) -> StepMetadata:
        """Returns this step with queries only for each row's last new tokens; only for reading.

        Args:
            num_queries: `[B]`; rows with 0 are left out. Layers with equal counts share the result.
        """
        try:
            counts, new = np.asarray(num_queries), self.num_new
        except (TypeError, ValueError):
            raise TypeError(
                f"num_queries: expected an integer for each row, got {num_queries!r}"
            ) from None
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

        step: StepMetadata = self.memo(("narrowed", counts.tobytes()), build)
        return step

    def in_chunks(self, group: int) -> StepMetadata:
        """Returns this step with a row for each chunk with queries, for a group of chunked layers.

        A chunk is a slice of the page table. Within it attention is plainly causal, so such a row
        begins at the chunk's first page, and its length counts from there.
        """
        chunk = self.config.groups[group].window
        assert chunk is not None

        def build() -> StepMetadata:
            step, size = copy(self), self.config.page_size
            step.queries, step.shared = None, {}
            ends = self.kv_lens_of(group)
            if int(self.num_new.max()) == 1:  # one chunk a row; a graph may replay it
                step.kv_lens_host = (ends - 1) % chunk + 1
                lens, whole = self.kv_lens(group), self.page_table(group)
                before = (lens - 1).clamp(min=0) // chunk * chunk  # padding rows have length 0
                step._kv_lens, first = lens - before, (before // size).long()
                if self.bounded:
                    step.kv_lens_host = np.full(len(ends), min(chunk, int(ends.max())))
            else:
                rows, starts, step.num_new, step.kv_lens_host = _chunks(self.num_new, ends, chunk)
                told = np.stack([rows, starts // size, step.kv_lens_host])
                at, first, lens = sent(told, self.query_start_loc.device)
                step._kv_lens, whole = lens.int(), self.page_table(group)[at]
                bounds = np.concatenate([[0], step.num_new.cumsum()]).astype(np.int32)
                step.query_start_loc = sent(bounds, self.query_start_loc.device)
                step.seqs = self.seqs[rows]
            columns = torch.arange(min(chunk // size, whole.shape[1]), device=first.device)
            places = (first[:, None] + columns).clamp_(max=whole.shape[1] - 1)
            step._memo = {("page_table", group): whole.gather(1, places)}
            step._memo |= {("kv_lens", group): step._kv_lens}
            step._evicted_host = np.zeros_like(self._evicted_host[:, :1])
            return step

        step: StepMetadata = self.memo(("chunks", group), build)
        return step

    def _without(self, rows: Ints) -> StepMetadata:
        """Returns a copy that has only these rows; only for reading."""
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

    def read_state(self, layer: int) -> list[Tensor]:
        """Returns copies of the rows' states before this step, in one state layer: `[B, *shape]`.

        Args:
            layer: index into `CacheConfig.states`. Rows without tokens get zeros.
        """
        return self._states.read(layer)

    def write_state(self, layer: int, tensors: Sequence[Tensor], *, donate: bool = False) -> None:
        """Hands in the rows' states after this step; `commit` stores them.

        Args:
            layer: index into `CacheConfig.states`; each layer writes exactly once.
            tensors: `[B, *shape]` each, in the order of `StateLayer.tensors`; kept until `commit`.
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

    def mark_written(self) -> None:
        """Notes that every layer wrote once: in a replayed CUDA graph no Python code notes it."""
        self.wrote += range(self.config.num_layers)

    def __repr__(self) -> str:
        return f"StepMetadata({len(self.seqs)} sequences, {self.num_tokens} tokens, {self.state})"


def _chunks(new: Ints, ends: Ints, chunk: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Returns the chunks that have queries, in the order of rows and tokens.

    Args:
        new, ends: `[B]`, new tokens of each row, and its length with them.

    Returns:
        For each chunk: its row, its first token, its queries, its tokens up to the last query.
    """
    begins = ends - new
    count = (ends - 1) // chunk - begins // chunk + 1
    rows = np.repeat(np.arange(len(new)), count)
    within = np.arange(len(rows)) - np.repeat(count.cumsum() - count, count)
    starts = (begins[rows] // chunk + within) * chunk
    stops = np.minimum(ends[rows], starts + chunk)
    return rows, starts, stops - np.maximum(starts, begins[rows]), stops - starts
