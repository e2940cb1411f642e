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
from pagedkv.kernels.sending import sent
from pagedkv.kernels.torch import backend as torch_kernels
from pagedkv.kernels.torch import select_pages as sparse
from pagedkv.step.metadata import StepMetadata

from . import on_torch
from .call import Call
from .on_torch import again, page_mass

__all__ = ["again", "attend", "check", "page_mass", "plan", "write", "write_and_attend"]

# Bytes of K and V that a layer has to be spared for torch's way to be sooner, measured on 2 x AMD
# EPYC (Zen 4), 9/3 heads of 64 and 8/8, 16 and 64 rows (2026-11-26, docs/kernels.md).
WORTH_BYTES = 8 << 20


class Plan(NamedTuple):
    """The arguments of the C library for the rows of a step.

    Attributes:
        num_new, kv_lens: `[B]` int64, new tokens of each row, and its length with them.
        gathered: torch's plan, where rows share long prefixes, or pages have a format that the
            library does not know; else None.
    """

    num_new: Ints
    kv_lens: Ints
    gathered: on_torch.Plan | None


def plan(call: Call) -> Plan:
    """Plans a call once a step for all its layers; torch attends where rows share long prefixes."""
    step, group = call.step, call.group
    shares = on_torch.reads_prefixes(call)

    def build() -> Plan:
        num_new = np.ascontiguousarray(step.num_new, np.int64)
        kv_lens = np.ascontiguousarray(step.kv_lens_of(group), np.int64)
        shared = shares and on_torch.prefixes(call, WORTH_BYTES)
        by_torch = shared or not kernels.serves(*call.pages)
        return Plan(num_new, kv_lens, on_torch.plan(call) if by_torch else None)

    return step.memo(("rows", group, shares), build)


def check(call: Call, plan: Plan) -> None:
    """Raises nothing: the library serves every call that `api.py` lets through."""


def write(k: Tensor, v: Tensor, step: StepMetadata, layer: int) -> None:
    """Writes the step's K and V of one layer into its pages."""
    is_served = kernels.serves(*step.storage.layer(layer))
    on_torch.write(k, v, step, layer, kernels if is_served else torch_kernels)


def write_and_attend(call: Call, plan: Plan) -> tuple[Tensor, Tensor]:
    """Writes, then attends, for a call with K and V."""
    assert call.k is not None
    assert call.v is not None
    write(call.k, call.v, call.step, call.layer)
    return attend(call, plan)


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


def _chosen(call: Call, plan: Plan) -> Tensor | None:
    """The columns that rows of one query choose to read: `[B, G, count]` int32; None for no row.

    A row that reads all has -1 in front.
    """
    count, step = call.reads, call.step
    size = step.config.page_size
    if not count:
        return None
    rows = np.flatnonzero((plan.num_new == 1) & (plan.kv_lens > count * size))
    if not rows.size:
        return None
    told = rows, plan.num_new.cumsum()[rows] - 1, plan.kv_lens[rows]
    places, lasts, lens = (sent(x, call.q.device) for x in told)
    columns = -(-int(plan.kv_lens[rows].max()) // size)
    ids = step.page_table(call.group)[places, :columns].long()
    queries = call.q[lasts]
    scores = sparse.score_columns(queries, step.storage.bounds.of(call.layer), ids, lens, size)
    shape = len(plan.num_new), scores.shape[1], count
    chosen = torch.full(shape, -1, dtype=torch.int32, device=call.q.device)
    chosen[places] = sparse.choose_columns(scores, count).int()
    return chosen
