"""Runs a grid on one GPU: `python -m benchmarks.gpu.run --grid core --out DIR`.

Correctness first, then the ceilings of the device, then cell after cell: each implementation is
compared with float32 on the cell's own inputs and timed only if it is right. `DIR/cells.json` is
rewritten after every cell, and cells in it are not run again, so a run that was cut off goes on
where it stopped. Needs no git and no virtual environment.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import build_peers, dense, ours, peers, timing
from .grid import GRIDS, Call, Case, Cell, make_case
from .table import render

Record = dict[str, Any]
TOLERANCE = 1e-2  # relative error norm; bf16 lies between 1e-3 and this
MARGIN = 1.5  # a cell is begun if this many times the slowest so far still fits
QUERY = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"


class DeviceLost(Exception):
    """After some failures nothing runs on the device any more until the process is replaced."""


def machine(device: torch.device, commit: str) -> Record:
    """What the numbers were measured on."""
    facts: Record = {"commit": commit, "date": time.strftime("%Y-%m-%d")}
    facts |= {"python": platform.python_version(), "torch": torch.__version__}
    try:
        facts["triton"] = importlib.import_module("triton").__version__
    except ImportError:
        facts["triton"] = None
    facts["flashinfer"] = peers.available()["flashinfer"]
    if device.type != "cuda":
        return facts | {"device": platform.processor() or platform.machine()}
    properties = torch.cuda.get_device_properties(device)
    facts |= {"device": properties.name, "sms": properties.multi_processor_count}
    facts |= {"l2_mb": properties.L2_cache_size >> 20, "cuda": torch.version.cuda}
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=True)
        facts |= zip(QUERY.split(","), asked.stdout.splitlines()[0].split(", "))
    except (OSError, subprocess.CalledProcessError, IndexError):
        facts["driver_version"] = "unknown"
    return facts


def hook(name: str, *arguments: Any) -> str:
    """Calls `main` of a module beside this one, if there is such; it returns what failed."""
    try:
        module = importlib.import_module(f"{__package__}.{name}")
    except ModuleNotFoundError as missing:
        if missing.name != f"{__package__}.{name}":
            raise
        return "not there"
    try:
        wrong = module.main(*arguments)
        return f"failed: {len(wrong)}, {'; '.join(wrong[:3])}" if wrong else "passed"
    except (Exception, SystemExit) as failure:
        return f"failed: {failure!r}"


def check_attention(case: Case) -> Callable[[Call], float]:
    tokens = dense.sample(case)
    true = dense.truth(case, tokens)
    tokens = tokens.to(case.q.device)
    return lambda call: dense.error(call()[tokens], true)


def check_append(case: Case) -> Callable[[Call], float]:
    size = case.cell.page_size
    at = (case.slots // size, slice(None), case.slots % size)

    def check(call: Call) -> float:
        case.k_pages[at] = case.v_pages[at] = math.nan
        call()
        pairs = zip((case.k_pages, case.v_pages), case.fresh)
        return max(dense.error(pages[at], fresh) for pages, fresh in pairs)

    return check


def check_copy(case: Case) -> Callable[[Call], float]:
    source, target = case.row_ids(0), case.row_ids(1)

    def check(call: Call) -> float:
        case.k_pages[target] = case.v_pages[target] = math.nan
        call()
        both = (case.k_pages, case.v_pages)
        return max(dense.error(pages[target], pages[source].float()) for pages in both)

    return check


CHECKS = {"attend": check_attention, "append": check_append, "copy": check_copy}


def ready(
    prepare: Callable[[Case], Call], case: Case, name: str, check: Callable[[Call], float]
) -> tuple[Record, timing.Way | None]:
    """One implementation, compared with the truth and set up for timing if it is right."""
    try:
        call, facts = prepare(case), {}
        if name not in peers.YARDSTICKS:
            facts["error"] = check(call)
            if not facts["error"] < TOLERANCE:  # NaN is wrong, too
                return {"wrong": str(facts["error"])}, None
        plans_on_host = name in peers.PEERS and name.endswith("+plan")
        return facts, timing.Way(call, not plans_on_host, case.q.device)
    except peers.Missing as missing:
        return {"missing": str(missing)}, None
    except Exception as failure:
        try:
            if case.q.device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as lost:
            raise DeviceLost(f"{name}: {failure!r}") from lost
        return {"failed": repr(failure)[:500]}, None


def measure_cell(cell: Cell, device: torch.device) -> Record:
    """Every implementation of one cell."""
    start = time.perf_counter()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    seed = time.time_ns() % 2**31  # fresh inputs in every run
    found: Record = {"ways": {}, "seed": seed, "device": str(device)}
    ways = {}
    try:
        case = make_case(cell, device, dtype, seed)
        check = CHECKS[cell.kind](case)
        wanted = {name: partial(ours.prepare, variant=name) for name in ours.variants(case)}
        for name, prepare in (wanted | {name: peers.PEERS[name] for name in cell.peers}).items():
            found["ways"][name], way = ready(prepare, case, name, check)
            if way:
                ways[name] = way
        for name, times in timing.measure(ways).items():
            found["ways"][name]["times"] = times
    except DeviceLost as lost:
        found["lost"] = str(lost)
    except Exception as failure:
        # Asynchronous errors surface late: here it cannot be told whose it was.
        found["lost"] = repr(failure)[:500]
    return found | {"seconds": time.perf_counter() - start}


class Results:
    """The results file."""

    def __init__(self, path: Path, resume: Path | None = None) -> None:
        self.path = path
        known = next((p for p in (path, resume) if p and p.is_file()), None)
        self.data: Record = json.loads(known.read_text()) if known else {"runs": [], "cells": {}}

    def save(self) -> None:
        """Replaces the file in one step: whoever reads it finds all of it."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.data, indent=1))
        part.replace(self.path)


def run_cells(
    cells: list[Cell],
    results: Results,
    measure: Callable[[Cell], Record],
    deadline: float = math.inf,
) -> bool:
    """Measures what is not in the results yet; says whether it got through.

    Raises:
        DeviceLost: after the cell was recorded.
    """
    slowest = 0.0
    for cell in cells:
        if cell.id in results.data["cells"]:
            continue
        if time.monotonic() + MARGIN * slowest > deadline:
            return False
        start = time.monotonic()
        facts = {"id": cell.id, "kind": cell.kind, "heads": cell.heads, "page_size": cell.page_size}
        facts |= {"bytes": cell.bytes, "flops": cell.flops}
        facts |= {"target": cell.target, "base": cell.base, "run": len(results.data["runs"]) - 1}
        record = facts | measure(cell)
        results.data["cells"][cell.id] = record
        results.save()
        slowest = max(slowest, time.monotonic() - start)
        print(f"{cell.id}: {time.monotonic() - start:.1f} s", flush=True)
        if "lost" in record:
            raise DeviceLost(record["lost"])
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return True


def dry_run(cells: list[Cell], work: Path) -> None:
    """Says what would run, and what of it is at hand."""
    for cell in cells:
        size = cell.num_pages * cell.page_size * cell.token_bytes() / 2**20
        print(f"{cell.id:<28} {size:>7.0f} MiB  {' '.join(cell.peers)}  [{cell.target}]")
    print(f"{len(cells)} cells")
    for name, state in peers.available().items():
        print(f"{name}: {state}")
    print("modules in", work / "aot")
    for name in build_peers.built(work / "aot"):
        print(" ", name)


def select(options: argparse.Namespace) -> list[Cell]:
    cells = [cell for cell in GRIDS[options.grid]() if options.k in cell.id]
    return [cell.shrunk() for cell in cells] if options.shrink else cells


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", choices=GRIDS, default="core")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--resume", type=Path, help="results of an earlier run, elsewhere")
    parser.add_argument("-k", default="", metavar="SUBSTR", help="only cells whose id has it")
    parser.add_argument("--limit-seconds", type=float, default=math.inf)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", action="store_true", help="tiny cells, to try things out")
    parser.add_argument("--precompile", action="store_true", help="compile our kernels beforehand")
    parser.add_argument("--dry-run", action="store_true", help="say what would run; needs no GPU")
    parser.add_argument("--continued", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.dry_run and options.out is None:
        parser.error("--out is missing")
    return options


def main(arguments: list[str]) -> int:
    begun = time.monotonic()
    options = parse(arguments)
    cells = select(options)
    if options.dry_run:
        dry_run(cells, build_peers.WORK)
        return 0
    device = torch.device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out / "cells.json", options.resume)
    if not options.continued:
        if options.precompile:
            print(f"precompile: {hook('precompile', cells)}", flush=True)
        correctness = hook("correctness", device.type)
        print(f"correctness: {correctness}", flush=True)
        run = {"machine": machine(device, options.commit), "correctness": correctness}
        results.data["runs"].append(run | {"ceilings": timing.ceilings(device)})
        results.save()
    deadline = begun + options.limit_seconds
    try:
        through = run_cells(cells, results, partial(measure_cell, device=device), deadline)
    except DeviceLost as lost:
        print(f"device lost: {lost}; a fresh process goes on", flush=True)
        left = [*arguments, "--continued", "--limit-seconds", str(deadline - time.monotonic())]
        os.execv(sys.executable, [sys.executable, "-m", f"{__package__}.run", *left])
    print(render(results.data))
    print("all cells done" if through else "out of time: the same command goes on")
    return int(results.data["runs"][-1]["correctness"].startswith("failed"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
