"""Our kernels behind the interface of the peers, in the settings that are compared."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from .grid import Call, Case
from .peers import Missing

MODULE = "pagedkv.kernels.paged"
# What runs in every attention cell: name to further arguments of `paged_attention`. Constants of
# other projects' kernels go here, as "vllm-style" and "sglang-style". As with peers, `+plan` plans
# in every call; ours plans on the device, so it is captured in a graph with the rest.
VARIANTS: dict[str, dict[str, Any]] = {"ours": {}, "ours+plan": {}}


def kernel(name: str) -> Any:
    try:
        return getattr(importlib.import_module(MODULE), name)
    except (ImportError, AttributeError) as error:
        raise Missing(f"{MODULE}.{name} is not there: {error}") from error


def attend(case: Case, variant: str = "ours") -> Call:
    """Our attention for a case."""
    paged_attention, plan = kernel("paged_attention"), kernel("plan")
    pages = (case.k_pages, case.v_pages, case.page_table)
    rows = (case.kv_lens, case.query_start_loc)
    options, longest = VARIANTS[variant], max(case.cell.kv_lens)

    def cut() -> Any:
        return plan(*rows, case.q, case.k_pages, num_new=case.cell.new, max_kv=longest)

    ahead = None if variant.endswith("+plan") else cut()

    def call() -> Tensor:
        work = ahead or cut()
        out, _ = paged_attention(case.q, *pages, *rows, work, scale=case.scale, **options)
        return out

    return call


def append(case: Case, variant: str = "ours") -> Call:
    """Writes the new tokens to their slots."""
    write_kv, slots, (k, v) = kernel("write_kv"), case.slots, case.fresh

    def call() -> Tensor:
        write_kv(k, v, case.k_pages, case.v_pages, slots)
        return case.k_pages

    return call


def copy(case: Case, variant: str = "ours") -> Call:
    """Copies the pages of row 0 onto those of row 1, K and V, as one layer each."""
    copy_pages, source, target = kernel("copy_pages"), case.row_ids(0), case.row_ids(1)

    def call() -> Tensor:
        copy_pages(case.k_pages[None], source, target)
        copy_pages(case.v_pages[None], source, target)
        return case.k_pages

    return call


KINDS = {"attend": attend, "append": append, "copy": copy}


def variants(case: Case) -> list[str]:
    """Which of ours run in this cell."""
    return list(VARIANTS) if case.cell.kind == "attend" else ["ours"]


def prepare(case: Case, variant: str) -> Call:
    return KINDS[case.cell.kind](case, variant)
