"""The backend that attends over pages where they are, on a processor: `kernels/c/`.

The functions are those of the protocol `call.Backend`. The mass of pages is computed as on the
torch backend. So are steps whose rows share long prefixes: torch reads these once, in one product
of all their queries.
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

# Bytes of K and V that a layer has to be spared for torch's way to be sooner, measured on 2 x AMD
# EPYC (Zen 4), 9/3 heads of 64 and 8/8, 16 and 64 rows (2026-11-26, docs/kernels.md).
WORTH_BYTES = 8 << 20

NO_SUMS = torch.empty(0, device="cpu")


class Choosing(NamedTuple):
    """Rows that choose the pages they read.

    Attributes:
        rows, queries: `[n]` int64, their numbers, and those of their queries; None for all rows.
        ids: `[n, columns]`, of their pages.
        lens: `[n]` int64, their lengths.
    """

    rows: Tensor | None
    queries: Tensor | None
    ids: Tensor
    lens: Tensor


class Plan(NamedTuple):
    """The arguments of the C library for the rows of a step.

    Attributes:
        num_new, kv_lens: `[B]` int64, new tokens of each row, and its length with them.
        gathered: torch's plan, where rows share long prefixes, or pages have a format that the
            library does not know; else None.
        choosing: None if no row chooses.
    """

    num_new: Ints
    kv_lens: Ints
    gathered: on_torch.Plan | None
    choosing: Choosing | None


def plan(call: Call) -> Plan:
    """Plans a call once a step for all its layers; torch attends where rows share long prefixes."""
    step, group = call.step, call.group
    shares = on_torch.reads_prefixes(call)

    def build() -> Plan:
        num_new = np.ascontiguousarray(step.num_new, np.int64)
        kv_lens = np.ascontiguousarray(step.kv_lens_of(group), np.int64)
        shared = shares and on_torch.prefixes(call, WORTH_BYTES)
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
    """Serves calls without a log-sum-exp, like the first of their kind; see `c/bound.py`."""
    q, k, v, step, layer, scoring, return_lse = call
    bound: Bound | None = step.kept(("bound", step.config.group_of.get(layer)))
    if bound is None or return_lse or step.state != "open":
        return None
    assert k is not None
    assert v is not None
    out = bound((q, k, v), call.pages, scoring)
    return None if out is None else (out, NO_SUMS)


def write_and_attend(call: Call, plan: Plan) -> tuple[Tensor, Tensor]:
    """Writes, then attends, for a call with K and V; it serves to bind those of other layers."""
    assert call.k is not None
    assert call.v is not None
    if bound := _bound(call, plan):
        call.step.keep(("bound", call.group), bound)
        if found := again(call):
            return found
    write(call.k, call.v, call.step, call.layer)
    return attend(call, plan)


def _bound(call: Call, plan: Plan) -> Bound | None:
    """The call, bound; None where pages, rows or results ask for more than C does in one call."""
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
    """Writes, if there is K, then attends to the tokens given; results as those of `attend`."""
    if call.k is not None and call.v is not None:
        write(call.k, call.v, call.step, call.layer)
    lens = chosen.counts.cpu().numpy()
    return kernels.paged_attention(
        *(chosen.q, *chosen.pages, chosen.table, np.ones_like(lens), lens, call.scoring),
        return_lse=call.return_lse,
    )


def _choosing(call: Call, new: Ints, lens: Ints) -> Choosing | None:
    """Rows of one query and of more pages than are read."""
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
    """The columns that rows of one query choose to read: `[B, G, count]` int32; None for no row.

    A row that reads all has -1 in front.
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
