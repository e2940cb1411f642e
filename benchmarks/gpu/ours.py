"""Our kernels behind the interface of the peers, in the settings that are compared."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from benchmarks.cells import Call, Case, Cell, Ready
from pagedkv.kernels.triton import backend as paged
from pagedkv.kernels.triton import proved, shared_prefix
from pagedkv.kernels.triton.decode_tuning import MOST_QUERIES
from pagedkv.kernels.triton.launch import target_of

from . import capacity, delta_rule

# As with peers, `+plan` plans in every call: on the device, so that a graph captures it, too.
APART = "ours-apart"  # a shared prefix is read by every row, as if nobody knew of it
VARIANTS = ("ours", APART, "ours+plan")
# Names of `proved.py`.
TRIED = {
    "ours-gluon": "gluon_prefill",
    "ours-gluon-rest": "gluon_rest",
    "ours-gluon-decode": "gluon_decode",
    "ours-gluon-decode-rest": "gluon_decode_rest",
    "ours-gluon-latents": "gluon_latents",
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
    cell = case.cell
    host: dict[str, Any] = {"num_new": cell.new, "max_kv": max(cell.kv_lens)}
    prefixes = []
    if cell.shared and variant != APART:
        prefixes = [paged.Prefix(slice(0, len(cell.new)), cell.shared // cell.page_size)]

    def cut() -> Any:
        shared = None
        if prefixes:
            work = paged.cut_prefixes(prefixes, cell.new, case.q.shape[1], case.k_pages)
            shared = shared_prefix.plan(work, case.q.device)
        return paged.plan(*rows, case.q, *pages[:2], shared=shared, **host)

    ahead = None if variant.endswith("+plan") else cut()

    def call() -> Tensor:
        work = ahead or cut()
        out, _ = paged.paged_attention(case.q, *pages, *rows, work, scale=case.scale)
        return out

    def tried() -> Tensor:
        with proved.trying(TRIED[variant]):
            return call()

    return tried if variant in TRIED else call


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
    "delta_rule": delta_rule.prepare,
}


def variants(case: Case) -> list[str]:
    """Returns which of our variants run in this cell."""
    if case.cell.kind == "capacity":
        return list(capacity.variants(case.cell))
    if case.cell.kind != "attend":
        return ["ours"]
    found = [name for name in VARIANTS if case.cell.shared or name != APART]
    arch = target_of(case.q.device).arch
    off = [name for name in _tried(case.cell) if not proved.is_on(TRIED[name], arch)]
    return found + off if arch == 90 else found


def _tried(cell: Cell) -> list[str]:
    """Returns which of `TRIED` have to do with a cell."""
    rest = "-rest" if cell.heads.d == 256 else ""
    if max(cell.new) > MOST_QUERIES:
        return [f"ours-gluon{rest}"]
    return ["ours-gluon-latents" if cell.latent else f"ours-gluon-decode{rest}"]


def prepare(case: Case, variant: str) -> Call | Ready:
    return KINDS[case.cell.kind](case, variant)
