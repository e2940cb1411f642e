"""The backend that attends over pages where they are, on a processor: `kernels/c/`.

The functions are those of the protocol `call.Backend`. The torch backend computes the mass of
pages, and steps whose rows share long prefixes: it reads a prefix once, in one product of all its
queries.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.kernels.c import backend as kernels
from pagedkv.kernels.c import select_pages as sparse
from pagedkv.kernels.c.bound import Bound, binds
from pagedkv.kernels.torch import backend as torch_kernels
from pagedkv.step.metadata import StepMetadata

from . import on_torch
from .call import Call, Chosen
from .on_torch import page_mass

__all__ = [
    "again",
    "attend",
    "attend_chosen",
    "check",
    "page_mass",
    "plan",
    "write",
    "write_and_attend",
]

# If sharing spares a layer at least so many bytes of K and V, torch is faster: measured on 2 x AMD
# EPYC (Zen 4), 9/3 heads of 64 and 8/8, 16 and 64 rows (2026-11-26, docs/kernels.md).
TORCH_WORTH_BYTES = 8 << 20

NO_SUMS = torch.empty(0, device="cpu")


class Choosing(NamedTuple):
    """Rows that choose the pages they read.

    Attributes:
        rows, queries: `[n]` int64, indices of the rows and of their queries; None for all rows.
        ids: `[n, columns]`, page ids of each row.
        lens: `[n]` int64, the length of each row.
    """

    rows: Tensor | None
    queries: Tensor | None
    ids: Tensor
    lens: Tensor


class Plan(NamedTuple):
    """The arguments of the C library for the rows of a step.

    Attributes:
        num_new, kv_lens: `[B]` int64, new tokens of each row, and its length with them.
        gathered: torch's plan, if rows share long prefixes, or the library does not know the
            format of the pages; else None.
        choosing: None if no row chooses.
    """

    num_new: Ints
    kv_lens: Ints
    gathered: on_torch.Plan | None
    choosing: Choosing | None


def plan(call: Call) -> Plan:
    """Plans a call once per step for all layers; torch attends if rows share long prefixes."""
    step, group = call.step, call.group
    shares = on_torch.reads_prefixes(call)

    def build() -> Plan:
        num_new = np.ascontiguousarray(step.num_new, np.int64)
        kv_lens = np.ascontiguousarray(step.kv_lens_of(group), np.int64)
        shared = shares and on_torch.prefixes(call, TORCH_WORTH_BYTES)
        by_torch = shared or not kernels.serves(*call.pages)
        gathered = on_torch.plan(call) if by_torch else None
        return Plan(num_new, kv_lens, gathered, _choosing(call, num_new, kv_lens))

    return step.memo(("rows", group, shares), build)


def check(call: Call, plan: Plan) -> None:
    """Raises nothing: the library serves every call that `api.py` lets through."""


def write(k: Tensor, v: Tensor, step: StepMetadata, layer: int) -> None:
    """Writes the step's K and V of one layer into its pages."""
    is_served = kernels.serves(*step.storage.layer(layer))
    on_torch.write(k, v, step, layer, kernels if is_served else torch_kernels)


def again(call: Call) -> tuple[Tensor, Tensor] | None:
    """Serves a call without log-sum-exp like the step's first of its kind; see `c/bound.py`."""
    bound: Bound | None = call.bound
    if bound is None or call.return_lse:
        return None
    assert call.k is not None
    assert call.v is not None
    out = bound((call.q, call.k, call.v), call.pages, call.scoring)
    return None if out is None else (out, NO_SUMS)


def write_and_attend(call: Call, plan: Plan) -> tuple[Tensor, Tensor]:
    """Writes, then attends; binds the call if it can, for `again` in later layers."""
    assert call.k is not None
    assert call.v is not None
    if bound := _bound(call, plan):
        call.step.keep(("bound", call.group), bound)
        if found := again(call):
            return found
    write(call.k, call.v, call.step, call.layer)
    return attend(call, plan)


def _bound(call: Call, plan: Plan) -> Bound | None:
    """Binds the call; None if pages, rows or results need more than one call of C."""
    q, k, v, step, _, scoring, return_lse = call
    slots, tokens = step.written(call.group)
    plain = step.config.dense and tokens is None and not scoring.tensors
    if not plain or plan.gathered or plan.choosing or return_lse or step.queries is not None:
        return None
    assert k is not None
    assert v is not None
    where = step.page_table(call.group), plan.num_new, plan.kv_lens
    return Bound((q, k, v), call.pages, slots, where, scoring) if binds(q, k, v) else None


def attend(call: Call, plan: Plan) -> tuple[Tensor, Tensor]:
    """Attends over pages in place; the log-sum-exp is valid if the call asks for it."""
    if plan.gathered is not None:
        return on_torch.attend(call, plan.gathered)
    return kernels.paged_attention(
        *(call.q, *call.pages, call.step.page_table(call.group), plan.num_new, plan.kv_lens),
        call.scoring,
        return_lse=call.return_lse,
        chosen=_chosen(call, plan),
    )


def attend_chosen(call: Call, chosen: Chosen) -> tuple[Tensor, Tensor]:
    """Writes K and V if given, then attends to the chosen tokens; returns as `attend`."""
    if call.k is not None and call.v is not None:
        write(call.k, call.v, call.step, call.layer)
    lens = chosen.counts.cpu().numpy()
    return kernels.paged_attention(
        *(chosen.q, *chosen.pages, chosen.table, np.ones_like(lens), lens, call.scoring),
        return_lse=call.return_lse,
    )


def _choosing(call: Call, new: Ints, lens: Ints) -> Choosing | None:
    """Returns the rows with one query and with more pages than queries read; None for none."""
    count, size = call.reads, call.step.config.page_size
    rows = np.flatnonzero((new == 1) & (lens > count * size)) if count else np.empty(0, np.int64)
    if not rows.size:
        return None
    columns = -(-int(lens[rows].max()) // size)
    ids = call.step.page_table(call.group)[:, :columns]
    chosen = torch.from_numpy(lens[rows])
    if len(rows) == len(new):
        return Choosing(None, None, ids, chosen)
    places = torch.from_numpy(rows)
    return Choosing(places, torch.from_numpy(new.cumsum()[rows] - 1), ids[places], chosen)


def _chosen(call: Call, plan: Plan) -> Tensor | None:
    """Returns the columns that rows of one query choose: `[B, G, count]` int32; None for no row.

    A row that reads all pages has -1 in its first entry.
    """
    if plan.choosing is None:
        return None
    rows, queries, ids, lens = plan.choosing
    count, step = call.reads, call.step
    q = call.q if queries is None else call.q[queries]
    bounds = step.storage.bounds.of(call.layer)
    scores = sparse.score_columns(q, bounds, ids, lens, step.config.page_size)
    columns = sparse.choose_columns(scores, count)
    if rows is None:
        return columns
    chosen = columns.new_full((len(plan.num_new), *columns.shape[1:]), -1)
    chosen[rows] = columns
    return chosen
