"""The backend that gathers pages into scratch and then attends: `kernels/torch/`.

The functions are those of the protocol `call.Backend`.
"""

from __future__ import annotations

from torch import Tensor

from pagedkv.kernels.prefixes import find_prefixes
from pagedkv.kernels.torch import backend as kernels
from pagedkv.kernels.torch.buckets import Bucket, cut_step, scratch_elements
from pagedkv.kernels.torch.page_mass import page_mass as mass_of_pages
from pagedkv.step.metadata import StepMetadata
from pagedkv.storage import Storage

from .call import Call

Plan = tuple[list[Bucket], int]  # buckets of rows attended together, and elements of scratch


def plan(call: Call) -> Plan:
    """Cuts the step's rows into buckets."""
    step, group, scoring = call.step, call.group, call.scoring
    config = step.config
    # Parts are merged by sums that only the plain call on a CPU gives.
    plain = scoring.plain and not scoring.by_distance and not call.return_lse
    read = pages_read(call)
    heads, *dims, _ = kept = config.shapes[group]
    alike = dims[0] == dims[1]  # which the call that gives sums asks for
    cut = call.q.device.type == "cpu" and plain and not read and alike
    # Rows without a past are attended over the K and V at hand, where there are any.
    at_hand = call.k is not None or bool((step.num_new < step.kv_lens_of(group)).all())
    exact = config.dense and at_hand

    def build() -> Plan:
        shape = step.num_new, step.kv_lens_of(group)
        token_bytes = kept.elements * step.storage.dtype.itemsize
        prefixes = []
        if cut:
            pages = step.page_table_host(group)
            prefixes = find_prefixes(*shape, pages, config.page_size, token_bytes)
        size, window = config.page_size, scoring.window
        buckets = cut_step(*shape, size, window, token_bytes, prefixes, exact, read)
        return buckets, scratch_elements(buckets, heads * max(dims), config.page_size)

    return step.memo(("buckets", group, cut, exact), build)


def check(call: Call, plan: Plan) -> None:
    """Raises nothing: this backend serves every call that `api.py` lets through."""


def write(k: Tensor, v: Tensor, step: StepMetadata, layer: int) -> None:
    """Writes the step's K and V of one layer into its pages."""
    group = step.group_of(layer)
    storage: Storage = step.storage
    pages = storage.layer(layer)
    storage.calibrate(layer, k, v)
    if direct := step.direct(group):
        kernels.write_pages(k, v, *pages, *direct)
    slots, tokens = step.written(group)
    if tokens is not None:
        k, v = k[tokens], v[tokens]
    kernels.write_kv(k, v, *pages, slots)


def again(*call: object) -> None:
    """Nothing is bound here: what the host does is small beside the gathering."""


def write_and_attend(call: Call, plan: Plan) -> tuple[Tensor, Tensor]:
    """Both, for a call with K and V."""
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
        bounds=storage.bounds.of(call.layer) if pages_read(call) else None,
    )


def page_mass(call: Call, lse: Tensor) -> Tensor:
    """`[B, columns]` float32, the weight each page got from the queries that are watched."""
    step = call.step
    assert step.queries is not None
    rows = step.num_new, step.kv_lens_of(call.group), step.queries
    return mass_of_pages(call.q, call.pages[0], step.page_table(call.group), *rows, call.scoring)


def pages_read(call: Call) -> int:
    """Pages that a row's queries choose and read; 0 for all."""
    return 0 if call.scoring.by_distance else call.step.config.pages_read
