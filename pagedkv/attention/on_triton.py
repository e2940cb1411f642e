"""The backend whose kernels read pages where they lie: `kernels/triton/`.

The functions are those of the protocol `call.Backend`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedkv.kernels.torch.page_mass import page_mass as mass_of_pages
from pagedkv.kernels.triton import backend as kernels
from pagedkv.kernels.triton import shared_prefix
from pagedkv.kernels.triton.bound import Bound, bind
from pagedkv.kernels.triton.launch import noted
from pagedkv.step.metadata import StepMetadata
from pagedkv.storage import Storage

from .call import Call, Chosen


class Plan(NamedTuple):
    """One step's work for the layers of a kind.

    Attributes:
        work: the step's rows, cut into work of kernels.
        reads: how many pages a row's queries choose and read; 0 for all.
        watched: a buffer in which kernels store sums for `page_mass`; None if none are needed.
    """

    work: kernels.Plan
    reads: int
    watched: Any


def plan(call: Call) -> Plan:
    """Cuts the step's rows into work of kernels."""
    step, group, scoring = call.step, call.group, call.scoring
    num_heads, by_distance, read = call.q.shape[1], scoring.by_distance, call.reads

    def build() -> Plan:
        watched = _watched(step, group, num_heads)
        lens, starts = step.kv_lens(group), step.query_start_loc
        columns, size = step.page_table(group).shape[1], step.config.page_size
        reads = read if read < columns else 0
        # Work on a shared prefix puts all queries at one place behind it, so no bias by distance.
        shared = None if by_distance else step.shared.get(group)
        alone = step.bounded or watched is not None or by_distance
        if not alone and (work := shared_work(step, group, num_heads)):
            shared = shared_prefix.plan(work, call.q.device)
        cut = kernels.plan(
            *(kernels.lens_read(lens, starts, size, read) if reads else lens, starts),
            *(call.q, *call.pages),
            num_new=step.num_new.tolist(),
            max_kv=int(step.kv_lens_of(group).max()),
            window=scoring.window,
            shared=shared,
        )
        return Plan(cut, reads, watched)

    return step.memo(("plan", group, num_heads, by_distance), build)


def check(call: Call, plan: Plan) -> None:
    """Raises if there is no kernel for the call."""
    kernels.check_call(*_tensors(call), plan.work.geometry, call.scoring)


def write(k: Tensor, v: Tensor, step: StepMetadata, layer: int) -> None:
    """Writes the step's K and V of one layer into its pages."""
    group = step.group_of(layer)
    storage: Storage = step.storage
    pages = storage.layer(layer)
    storage.calibrate(layer, k, v)
    if direct := step.direct(group):
        kernels.write_pages(k, v, *pages, *direct)
    kernels.write_kv(k, v, *pages, step.slots(group))


def write_and_attend(call: Call, plan: Plan) -> tuple[Tensor, Tensor]:
    """Writes, then attends; binds the launches if it can, for `again` in later layers."""
    q, k, v, step, layer, *_ = call
    assert k is not None
    assert v is not None
    group = call.group
    with noted() as launches:
        write(k, v, step, layer)
        out, lse = attend(call, plan)
    is_bound = not (plan.reads or step.queries is not None or step.direct(group))
    if is_bound and not launches.only:
        lasting = plan.work, step.slots(group), *_tensors(call)[3:]
        bound = bind(launches, (q, k, v), call.pages, call.scoring, (out, lse), lasting)
        step.keep(("bound", group), bound)
    return out, lse


def again(call: Call) -> tuple[Tensor, Tensor] | None:
    """Repeats the launches of the first layer of a kind for a similar call; see `bound.py`."""
    bound: Bound | None = call.bound
    if bound is None or call.step.storage.calibrates(call.layer):
        return None
    assert call.k is not None
    assert call.v is not None
    return bound((call.q, call.k, call.v), call.pages, call.scoring, call.return_lse)


def attend(call: Call, plan: Plan) -> tuple[Tensor, Tensor]:
    """Attends over pages where they lie; the log-sum-exp is always valid."""
    chosen = None
    if plan.reads:
        step, (q, _, _, table, lens, starts) = call.step, _tensors(call)
        bounds = step.storage.bounds.of(call.layer)
        lasting = step.config.page_size, plan.reads, bool((step.num_new == 1).all())
        chosen = kernels.chosen_table(q, bounds, table, lens, starts, *lasting)
    return kernels.attend(*_tensors(call), plan.work, call.scoring, chosen, plan.watched)


def attend_chosen(call: Call, chosen: Chosen) -> tuple[Tensor, Tensor]:
    """Writes K and V if given, then attends to the chosen tokens; returns as `attend`."""
    q, (k, v), table, counts = chosen
    starts = torch.arange(len(table) + 1, dtype=torch.int32, device=table.device)
    tensors = q, k, v, table, counts, starts
    work = kernels.plan(*(counts, starts, q, k, v), num_new=[1] * len(table), max_kv=table.shape[1])
    kernels.check_call(*tensors, work.geometry, call.scoring)
    if call.k is not None and call.v is not None:
        write(call.k, call.v, call.step, call.layer)
    return kernels.attend(*tensors, work, call.scoring)


def page_mass(call: Call, lse: Tensor) -> Tensor:
    """Returns `[B, columns]` float32, the weight that watched queries gave each page."""
    step, group = call.step, call.group
    assert step.queries is not None
    queries, mass = step.queries, None
    if watched := plan(call).watched:
        queries, mass = watched.left, kernels.page_mass(watched, lse)
    if mass is None or queries.any():
        rows = step.num_new, step.kv_lens_of(group), queries
        pages, table = call.pages[0], step.page_table(group)
        rest = mass_of_pages(call.q, pages, table, *rows, call.scoring)
        mass = rest if mass is None else mass + rest
    return mass


def _tensors(call: Call) -> tuple[Tensor, Any, Any, Tensor, Tensor, Tensor]:
    step, group = call.step, call.group
    return call.q, *call.pages, step.page_table(group), step.kv_lens(group), step.query_start_loc


def shared_work(step: StepMetadata, group: int, num_heads: int) -> Any:
    """Returns the prefixes that rows of a layer group share, cut into work for kernels (host).

    None if rows share nothing, or too little to be worth it.
    """
    storage: Storage = step.storage
    members = step.config.groups[group]
    if members.window is not None or len(step.num_new) < 2 or step.config.pages_read:
        return None
    k_pages, _ = storage.layer(storage.groups[group].layers[0])
    page_size = step.config.page_size
    token_bytes = step.config.bytes_per_page(group) // (page_size * len(members.layers))
    pages = step.page_table_host(group)
    new, kv_lens = step.num_new, step.kv_lens_of(group)
    prefixes = kernels.find_prefixes(new, kv_lens, pages, page_size, token_bytes)
    if not prefixes:
        return None
    return kernels.cut_prefixes(prefixes, new.tolist(), num_heads, k_pages, storage.dtype)


def _watched(step: StepMetadata, group: int, num_heads: int) -> Any:
    """Returns a buffer in which kernels store sums for `page_mass`; None if none is watched.

    It is None, too, if queries choose pages: mass is measured over all pages of a text.
    """
    if step.queries is None:
        return None
    columns, read = step.page_table(group).shape[1], step.config.pages_read
    if step.config.groups[group].window is not None or 0 < read < columns:
        return None
    rows = step.num_new, step.kv_lens_of(group), step.queries
    storage: Storage = step.storage
    return kernels.watch(*rows, columns, num_heads, step.config.page_size, storage.device)


def room_for_prefixes(step: StepMetadata, group: int, rows: int, num_heads: int) -> Any:
    """Makes a lasting buffer for the work of shared prefixes, for graphs of `rows` rows."""
    k_pages, _ = step.storage.layer(step.storage.groups[group].layers[0])
    longest = step.config.max_sequence_length
    return kernels.room_for_prefixes(rows, longest, num_heads, k_pages, step.storage.dtype)
