"""Our kernels behind the interface of the peers, in the settings that are compared."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

from benchmarks.cells import Call, Case, Ready
from pagedkv.kernels.triton import backend as paged
from pagedkv.kernels.triton import shared_prefix

from . import capacity

Change = Callable[[Case], dict[str, Any]]
UNSPLIT = {"split": 1 << 30, "splits": 1}
EVERY_ITEM = 1 << 10  # programs for each multiprocessor: as good as one for every item
APART = "ours-apart"  # a shared prefix is read by every row, as if nobody knew of it


def vllm_style(case: Case) -> dict[str, Any]:
    """Constants of vLLM's Triton attention: 16 segments while there are few rows, or none."""
    heads = case.cell.heads.g
    few = len(case.cell.new) <= 128 // heads
    tile = 16 if few and case.q.element_size() == 2 else 32
    cut = {"split": tile, "splits": 16} if few else UNSPLIT
    return {"block_n": tile, "num_warps": 4, "num_stages": 3, "programs": EVERY_ITEM, **cut}


def sglang_style(case: Case) -> dict[str, Any]:
    """Constants of SGLang's Triton decode, with the splits it ships with."""
    cut = {"split": 32, "splits": 8}
    return {"block_n": 32, "num_warps": 4, "num_stages": 2, "programs": EVERY_ITEM, **cut}


# What runs in attention cells: name to changes of decode's tuning. As with peers, `+plan` plans in
# every call; ours plans on the device, so it is captured in a graph with the rest. The styles are
# our kernel with others' tiles, stages and splits: it still fetches page ids one tile ahead and
# merges as we do, so they tell what constants are worth, not how fast those projects are.
VARIANTS: dict[str, Change | None] = {
    "ours": None,
    APART: None,
    "ours+plan": None,
    "vllm-style": vllm_style,
    "sglang-style": sglang_style,
}


@contextmanager
def tuned(module: str, **changes: Any) -> Iterator[None]:
    """Lets `decode` or `prefill` plan with other constants; a plan keeps what it was made with."""
    kernels = importlib.import_module(f"pagedkv.kernels.triton.{module}")
    tuning = kernels.tuning

    def changed(*args: Any) -> Any:
        return tuning(*args)._replace(**changes)

    kernels.tuning = changed
    try:
        yield
    finally:
        kernels.tuning = tuning


def attend(case: Case, variant: str = "ours") -> Call:
    """Our attention for a case."""
    pages = (case.k_pages, case.v_pages, case.page_table)
    rows = (case.kv_lens, case.query_start_loc)
    change, cell = VARIANTS[variant], case.cell
    host: dict[str, Any] = {"num_new": cell.new, "max_kv": max(cell.kv_lens)}
    prefixes = []
    if cell.shared and variant != APART:
        prefixes = [paged.Prefix(slice(0, len(cell.new)), cell.shared // cell.page_size)]

    def cut() -> Any:
        with tuned("decode", **change(case)) if change else nullcontext():
            shared = None
            if prefixes:
                heads = case.q.shape[1]
                work = paged.cut_prefixes(prefixes, cell.new, heads, case.k_pages)
                shared = shared_prefix.plan(work, case.q.device)
            return paged.plan(*rows, case.q, case.k_pages, shared=shared, **host)

    ahead = None if variant.endswith("+plan") else cut()

    def call() -> Tensor:
        work = ahead or cut()
        out, _ = paged.paged_attention(case.q, *pages, *rows, work, scale=case.scale)
        return out

    return call


def append(case: Case, variant: str = "ours") -> Call:
    """Writes the new tokens to their slots."""
    slots, (k, v) = case.slots, case.fresh

    def call() -> Tensor:
        paged.write_kv(k, v, case.k_pages, case.v_pages, slots)
        return case.k_pages

    return call


def copy(case: Case, variant: str = "ours") -> Call:
    """Copies the pages of row 0 onto those of row 1, K and V, as one layer each."""
    source, target = case.row_ids(0), case.row_ids(1)

    def call() -> Tensor:
        paged.copy_pages(case.k_pages[None], source, target)
        paged.copy_pages(case.v_pages[None], source, target)
        return case.k_pages

    return call


KINDS: dict[str, Callable[[Case, str], Call | Ready]] = {
    "attend": attend,
    "append": append,
    "copy": copy,
    "capacity": capacity.prepare,
}


def variants(case: Case) -> list[str]:
    """Which of ours run in this cell."""
    if case.cell.kind == "capacity":
        return list(capacity.variants(case.cell))
    if case.cell.kind != "attend":
        return ["ours"]
    known = {name for name, change in VARIANTS.items() if case.cell.decode or change is None}
    known -= set() if case.cell.shared else {APART}
    return [name for name in VARIANTS if name in known]


def prepare(case: Case, variant: str) -> Call | Ready:
    return KINDS[case.cell.kind](case, variant)
