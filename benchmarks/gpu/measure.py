"""Measures cells in a process of its own: `run.py` starts it, and starts another when it dies.

Each implementation is compared with float64 on the cell's own inputs and timed only if it is right.
After an illegal access nothing runs on the device any more in the same process. So each attempt is
written down before it begins, and the next process leaves out the one that was under way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import measuring
from benchmarks.cells import Call, Case, Cell, Check, Peer, Ready, make_case
from benchmarks.peers import dense
from benchmarks.peers.kernels import PEERS, YARDSTICKS, Missing

from . import ours

Record = dict[str, Any]
TOLERANCE = 1e-2  # relative error norm; bf16 lies between 1e-3 and this
INPUTS = "inputs"  # the attempt to make inputs, before any implementation
TIMING = "timing"  # the attempt to time all right implementations in turns
LEFT_OUT = "left out, because it failed before"


def check_append(case: Case) -> Check:
    size = case.cell.page_size
    at = (case.slots // size, slice(None), case.slots % size)

    def check(call: Call) -> float:
        case.k_pages[at] = case.v_pages[at] = math.nan
        call()
        pairs = zip((case.k_pages, case.v_pages), case.fresh)
        return max(dense.error(pages[at], fresh) for pages, fresh in pairs)

    return check


def check_copy(case: Case) -> Check:
    source, target = case.row_ids(0), case.row_ids(1)

    def check(call: Call) -> float:
        case.k_pages[target] = case.v_pages[target] = math.nan
        call()
        both = (case.k_pages, case.v_pages)
        return max(dense.error(pages[target], pages[source].double()) for pages in both)

    return check


CHECKS = {"append": check_append, "copy": check_copy}  # others attend, or check themselves


def ready(
    prepare: Peer, case: Case, name: str, check: Check, tolerance: float = TOLERANCE
) -> tuple[Record, measuring.Way | None]:
    """One implementation, compared with the truth and set up for timing if it is right.

    Raises:
        RuntimeError: the device is lost.
    """
    try:
        made = prepare(case)
        if not isinstance(made, Ready):
            made = Ready(made, None if name in YARDSTICKS else check)
        call, check_it, nbytes = made
        facts: Record = {"bytes": nbytes} if nbytes else {}
        if check_it:
            facts["error"] = check_it(call)
            if not facts["error"] < tolerance:  # NaN is wrong, too
                return {"wrong": str(facts["error"])}, None
        return facts, measuring.Way(call, not plans_on_host(name, case), case.q.device)
    except Missing as missing:
        return {"missing": str(missing)}, None
    except Exception as failure:
        if case.q.device.type == "cuda":
            torch.cuda.synchronize()
        return {"failed": repr(failure)[:500]}, None


def plans_on_host(name: str, case: Case) -> bool:
    """Whether a graph of the call would replay less than the call does."""
    return name.endswith("+plan") and (name in PEERS or bool(case.cell.shared))


def measure_cell(
    cell: Cell, device: torch.device, tries: Callable[[str], None], without: set[str]
) -> Record:
    """Every implementation of one cell.

    Args:
        tries: called with the name of each attempt before it begins.
        without: what must not be tried again: with `TIMING` in it no peer, with `INPUTS` nothing.
    """
    start = time.perf_counter()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    seed = time.time_ns() % 2**31  # fresh inputs in every run
    found: Record = {"ways": {}, "seed": seed, "device": str(device)}
    if INPUTS in without:
        return found | {"seconds": 0.0}
    tries(INPUTS)
    case = make_case(cell, device, dtype, seed)
    check = CHECKS.get(cell.kind, dense.check_attention)(case)
    wanted = {name: partial(ours.prepare, variant=name) for name in ours.variants(case)}
    wanted |= {name: PEERS[name] for name in cell.peers}
    ways = {}
    for name, prepare in wanted.items():
        if name in without or (TIMING in without and name != "ours"):
            found["ways"][name] = {"failed": LEFT_OUT}
            continue
        tries(name)
        found["ways"][name], way = ready(prepare, case, name, check)
        if way:
            ways[name] = way
    tries(TIMING)
    for name, times in measuring.measure(ways).items():
        found["ways"][name]["times"] = times
    return found | {"seconds": time.perf_counter() - start}
