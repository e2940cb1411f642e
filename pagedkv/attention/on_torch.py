"""The backend that gathers pages into scratch and then attends: `kernels/torch/`.

The functions are those of the protocol `call.Backend`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from pagedkv.kernels.prefixes import Prefix, find_prefixes
from pagedkv.kernels.torch import backend as kernels
from pagedkv.kernels.torch.buckets import Bucket, cut_step, scratch_elements
from pagedkv.kernels.torch.page_mass import page_mass as mass_of_pages
from pagedkv.step.metadata import StepMetadata
from pagedkv.storage import Storage

from .call import Call, Chosen

Plan = tuple[list[Bucket], int]  # buckets of rows attended together, and elements of scratch


def reads_prefixes(call: Call) -> bool:
    """Whether a prefix that rows share may be read once, and its part merged by log-sum-exps.

    Only torch's plain call on a CPU returns these, and only for K and V of the same width.
    """
    _, k_dim, v_dim, _ = call.step.config.shapes[call.group]
    scoring = call.scoring
    plain = scoring.plain and not call.return_lse and call.step.reads_prefixes
    plain = plain and call.step.config.groups[call.group].window is None and scoring.tree is None
    return call.q.device.type == "cpu" and plain and not call.reads and k_dim == v_dim


def prefixes(call: Call, worth_bytes: int | None = None) -> list[Prefix]:
    """Returns the shared prefixes that are worth reading once; see `find_prefixes`."""
    step, group = call.step, call.group
    rows = step.num_new, step.kv_lens_of(group), step.page_table_host(group)
    return find_prefixes(*rows, step.config.page_size, _token_bytes(call), worth_bytes)


def _token_bytes(call: Call) -> int:
    return call.step.config.shapes[call.group].elements * call.step.storage.dtype.itemsize


def plan(call: Call) -> Plan:
    """Cuts the step's rows into buckets."""
    step, group, window = call.step, call.group, call.scoring.window
    config = step.config
    cut, read = reads_prefixes(call), call.reads
    # Rows without a past attend over the call's K and V instead of pages, if the call has them.
    at_hand = call.k is not None or bool((step.num_new < step.kv_lens_of(group)).all())
    exact = config.dense and at_hand

    def build() -> Plan:
        shape, size = (step.num_new, step.kv_lens_of(group)), config.page_size
        shared = prefixes(call) if cut else []
        buckets = cut_step(*shape, size, window, _token_bytes(call), shared, exact, read)
        heads, *dims, _ = config.shapes[group]
        return buckets, scratch_elements(buckets, heads * max(dims), size)

    return step.memo(("buckets", group, cut, exact), build)


def check(call: Call, plan: Plan) -> None:
    """Raises nothing: this backend serves every call that `api.py` lets through."""


def write(k: Tensor, v: Tensor, step: StepMetadata, layer: int, by: Any = kernels) -> None:
    """Writes the step's K and V of one layer into its pages.

    Args:
        by: the kernels that write, of this backend or of `on_c.py`.
    """
    group = step.group_of(layer)
    storage: Storage = step.storage
    pages = storage.layer(layer)
    storage.calibrate(layer, k, v)
    if direct := step.direct(group):
        by.write_pages(k, v, *pages, *direct)
    slots, tokens = step.written(group)
    if tokens is not None:
        k, v = k[tokens], v[tokens]
    by.write_kv(k, v, *pages, slots)


def again(call: Call) -> None:
    """Returns None: repeating a call saves only host time, and gathering takes far longer."""


def write_and_attend(call: Call, plan: Plan) -> tuple[Tensor, Tensor]:
    """Writes, then attends, for a call with K and V."""
    assert call.k is not None
    assert call.v is not None
    write(call.k, call.v, call.step, call.layer)
    return attend(call, plan)


def attend(call: Call, plan: Plan) -> tuple[Tensor, Tensor]:
    """Attends over gathered pages; the log-sum-exp is valid if the call asks for it."""
    storage: Storage = call.step.storage
    buckets, needed = plan
    return kernels.paged_attention(
        *(call.q, call.k, call.v, *call.pages, call.step.page_table(call.group), buckets),
        storage.scratch(needed),
        call.scoring,
        return_lse=call.return_lse,
        bounds=storage.bounds.of(call.layer) if call.reads else None,
    )


def attend_chosen(call: Call, chosen: Chosen) -> tuple[Tensor, Tensor]:
    """Writes K and V if given, then attends to the chosen tokens; returns as `attend`."""
    if call.k is not None and call.v is not None:
        write(call.k, call.v, call.step, call.layer)
    q, (k, v), table, counts = chosen
    lens = counts.cpu().numpy().astype("int64")
    buckets = cut_step(np.ones_like(lens), lens, 1, None, _token_bytes(call), exact=False)
    elements = k.shape[1] * max(k.shape[3], v.shape[3])
    scratch = call.step.storage.scratch(scratch_elements(buckets, elements, 1))
    return kernels.paged_attention(
        *(q, None, None, k, v, table, buckets, scratch, call.scoring),
        return_lse=call.return_lse,
    )


def page_mass(call: Call, lse: Tensor) -> Tensor:
    """Returns `[B, columns]` float32, the weight that watched queries gave each page."""
    step = call.step
    assert step.queries is not None
    rows = step.num_new, step.kv_lens_of(call.group), step.queries
    return mass_of_pages(call.q, call.pages[0], step.page_table(call.group), *rows, call.scoring)
