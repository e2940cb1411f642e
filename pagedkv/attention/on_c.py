"""The backend that attends over pages where they are, on a processor: `kernels/c/`.

The functions are those of the protocol `call.Backend`. Pages are written, and their mass is
computed, as on the torch backend.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.kernels.c import backend as kernels
from pagedkv.kernels.torch import select_pages as sparse

from .call import Call
from .on_torch import again, page_mass, pages_read, write

__all__ = ["again", "attend", "check", "page_mass", "plan", "write", "write_and_attend"]


class Plan(NamedTuple):
    """New tokens of each row, and its length with them: `[B]` int64."""

    num_new: Ints
    kv_lens: Ints


def plan(call: Call) -> Plan:
    """What a row computes depends on these numbers of its own, and on no other row."""
    step, group = call.step, call.group

    def build() -> Plan:
        both = step.num_new, step.kv_lens_of(group)
        return Plan(*(np.ascontiguousarray(x, np.int64) for x in both))

    return step.memo(("rows", group), build)


def check(call: Call, plan: Plan) -> None:
    """Raises nothing: the library serves every call that `api.py` lets through."""


def write_and_attend(call: Call, plan: Plan) -> tuple[Tensor, Tensor]:
    """Both, for a call with K and V."""
    assert call.k is not None
    assert call.v is not None
    write(call.k, call.v, call.step, call.layer)
    return attend(call, plan)


def attend(call: Call, plan: Plan) -> tuple[Tensor, Tensor]:
    """Attends over pages in place; the log-sum-exp is valid if the call asks for it."""
    return kernels.paged_attention(
        *(call.q, *call.pages, call.step.page_table(call.group), *plan, call.scoring),
        return_lse=call.return_lse,
        chosen=_chosen(call, plan),
    )


def _chosen(call: Call, plan: Plan) -> Tensor | None:
    """The columns that rows of one query choose to read: `[B, G, count]` int32; None for no row.

    A row that reads all has -1 in front.
    """
    count, step = pages_read(call), call.step
    size = step.config.page_size
    rows = np.flatnonzero((plan.num_new == 1) & (plan.kv_lens > count * size)) if count else ()
    if not len(rows):
        return None
    lens = torch.from_numpy(plan.kv_lens[rows])
    columns = -(-int(lens.max()) // size)
    ids = step.page_table(call.group)[torch.from_numpy(rows), :columns].long()
    queries = call.q[torch.from_numpy(plan.num_new.cumsum()[rows] - 1)]
    scores = sparse.score_columns(queries, step.storage.bounds.of(call.layer), ids, lens, size)
    chosen = torch.full((len(plan.num_new), scores.shape[1], count), -1, dtype=torch.int32)
    chosen[torch.from_numpy(rows)] = sparse.choose_columns(scores, count).int()
    return chosen
