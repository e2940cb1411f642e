"""Runs a grid on one GPU: `python -m benchmarks.gpu.run --grid core --out DIR`.

Correctness first, then the ceilings of the device, then cell after cell (`measure.py`), all in
processes of their own: one that loses the device or hangs takes nothing with it. `DIR/cells.json`
is rewritten after every cell, and cells in it are not run again, so a run that was cut off goes on
where it stopped. Needs no git and no virtual environment.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.cells import Cell
from benchmarks.measuring import ceilings
from benchmarks.peers import build
from benchmarks.peers.kernels import available
from benchmarks.report import render

from . import measure
from .grid import GRIDS
from .ours import TRIED
from .proving import names_to_try, prove

Record = dict[str, Any]
MARGIN = 1.5  # a cell is begun if this many times the slowest so far still fits
QUERY = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"
CORRECTNESS_SECONDS = 240
LOSSES = 6  # processes that may die before the run gives up
GRACE = 60  # seconds beyond the limit after which a process hangs
OUT_OF_TIME = 3  # exit status of a process that stopped by itself


def machine(device: torch.device, commit: str) -> Record:
    """What the numbers were measured on."""
    facts: Record = {"commit": commit, "date": time.strftime("%Y-%m-%d")}
    facts |= {"python": platform.python_version(), "torch": torch.__version__}
    facts |= {"triton": triton.__version__, "flashinfer": available()["flashinfer"]}
    if device.type != "cuda":
        return facts | {"device": platform.processor() or platform.machine()}
    properties = torch.cuda.get_device_properties(device)
    facts |= {"device": properties.name, "sms": properties.multi_processor_count}
    facts["arch"] = 10 * properties.major + properties.minor
    facts |= {"l2_mb": properties.L2_cache_size >> 20, "cuda": torch.version.cuda}
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        facts |= zip(QUERY.split(","), asked.stdout.splitlines()[0].split(", "))
    except (OSError, subprocess.SubprocessError, IndexError):
        facts["driver_version"] = "unknown"
    return facts


class Results:
    """The results file: runs, cells that are done, and what the device was lost by."""

    def __init__(self, path: Path, resume: Path | None = None) -> None:
        self.path = path
        known = next((p for p in (path, resume) if p and p.is_file()), None)
        self.data: Record = {"runs": [], "cells": {}, "losses": [], "trying": None, "tried": {}}
        if known:
            self.data |= json.loads(known.read_text())

    def save(self) -> None:
        """Replaces the file in one step: whoever reads it finds all of it."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.data, indent=1))
        part.replace(self.path)

    def tries(self, cell: str, what: str) -> None:
        """Notes what is about to be tried, for whoever finds that it was never finished."""
        self.data["trying"] = [cell, what]
        self.save()

    def note_loss(self) -> None:
        """What a process that died was trying is left out from now on."""
        if self.data["trying"]:
            self.data["losses"].append(self.data["trying"])
        self.data["trying"] = None
        self.save()

    def without(self, cell: str) -> set[str]:
        """What lost the device in this cell, or in two others, or failed where it was tried."""
        losses = self.data["losses"]
        here = [what for where, what in losses if where == cell]
        if here.count(measure.TIMING) > 1:  # it was not the peers
            here.append(measure.INPUTS)
        names = [what for _, what in losses if what not in (measure.TIMING, measure.INPUTS)]
        tried = self.data["tried"]
        failed = (way for way, name in TRIED.items() if tried.get(name, "passed") != "passed")
        return {*here, *failed, *(name for name in names if names.count(name) > 1)}


def run_cells(
    cells: list[Cell],
    results: Results,
    measure_cell: Callable[..., Record],
    deadline: float = math.inf,
) -> bool:
    """Measures what is not in the results yet; says whether it got through."""
    slowest = 0.0
    for cell in cells:
        if cell.id in results.data["cells"]:
            continue
        if time.monotonic() + MARGIN * slowest > deadline:
            return False
        start = time.monotonic()
        facts = cell.facts | {"run": len(results.data["runs"]) - 1}
        tries, without = partial(results.tries, cell.id), results.without(cell.id)
        results.data["cells"][cell.id] = facts | measure_cell(cell, tries=tries, without=without)
        results.data["trying"] = None
        results.save()
        slowest = max(slowest, time.monotonic() - start)
        print(f"{cell.id}: {time.monotonic() - start:.1f} s", flush=True)
        gc.collect()  # gives a cell's memory back before the next one
        torch.cuda.empty_cache()
    return True


def work(options: argparse.Namespace, cells: list[Cell], results: Results) -> int:
    """The process that measures."""
    deadline = time.monotonic() + options.limit_seconds
    device = torch.device(options.device)
    run = results.data["runs"][-1]
    if not run["machine"]:
        run["machine"] = machine(device, options.commit)
        results.tries("", "ceilings")
        run["ceilings"] = ceilings(device)
        results.data["trying"] = None
        results.save()
    measure_cell = partial(measure.measure_cell, device=device)
    return 0 if run_cells(cells, results, measure_cell, deadline) else OUT_OF_TIME


def child(module: str, arguments: list[str], seconds: float) -> int | None:
    """The exit status of another process of this interpreter; None if it took too long."""
    command = [sys.executable, "-m", f"{__package__}.{module}", *arguments]
    try:
        return subprocess.run(command, timeout=min(seconds, 1e6)).returncode
    except subprocess.TimeoutExpired:
        return None


def compiles(grid: str, substring: str) -> bool:
    """Compiles ahead of a run; False if something of ours does not compile."""
    status = child("precompile", [grid, substring], CORRECTNESS_SECONDS)
    if status is None:
        print(f"precompile: not done after {CORRECTNESS_SECONDS} s, the rest compiles when called")
    elif status:
        print(f"precompile: failed with exit status {status}, as said above; nothing was run")
    return not status


def check_correctness(device: str, *tried: str) -> str:
    status = child("correctness", [device, *tried], CORRECTNESS_SECONDS)
    if status is None:
        return f"failed: not done after {CORRECTNESS_SECONDS} s"
    return f"failed: exit status {status}" if status else "passed"


def measure_in_turns(path: Path, arguments: list[str], limit: float) -> bool:
    """Lets processes measure until one gets through; says whether one did."""
    deadline = time.monotonic() + limit
    for _ in range(LOSSES):
        left = max(0.0, deadline - time.monotonic())
        status = child("run", [*arguments, "--worker", f"--limit-seconds={left:.1f}"], left + GRACE)
        if status in (0, OUT_OF_TIME):
            return status == 0
        results = Results(path)
        print(f"a process died (exit status {status}) at {results.data['trying']}", flush=True)
        results.note_loss()
    return False


def dry_run(cells: list[Cell], folder: Path) -> None:
    """Says what would run, and what of it is at hand."""
    for cell in cells:
        size = max(cell.bytes, cell.num_pages * cell.page_size * cell.token_bytes()) / 2**20
        print(f"{cell.id:<28} {size:>7.0f} MiB  {' '.join(cell.peers)}  [{cell.target}]")
    print(f"{len(cells)} cells")
    for name, state in available().items():
        print(f"{name}: {state}")
    print("modules in", folder / "aot")
    for name in build.built(folder / "aot"):
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
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.dry_run and options.out is None:
        parser.error("--out is missing")
    return options


def main(arguments: list[str]) -> int:
    begun = time.monotonic()
    options = parse(arguments)
    cells = select(options)
    if options.dry_run:
        dry_run(cells, build.WORK)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "cells.json"
    results = Results(path, options.resume)
    if options.worker:
        return work(options, cells, results)
    if options.precompile and not compiles(options.grid, options.k):
        return 1
    correctness = check_correctness(options.device)
    print(f"correctness: {correctness}", flush=True)
    results.data["runs"].append({"correctness": correctness, "machine": {}, "ceilings": {}})
    results.save()
    for name in names_to_try():
        state = "not tried"
        if correctness == "passed":
            state = check_correctness(options.device, name)
        results.data["tried"][name] = state
        print(f"{name}, while it is on: {state}", flush=True)
        results.save()
    left = options.limit_seconds - (time.monotonic() - begun)
    through = measure_in_turns(path, arguments, left)
    results = Results(path)
    print(render(results.data))
    if results.data["tried"]:
        print(*prove(results.data, options.out), sep="\n")
    print("all cells done" if through else "not all cells are done: the same command goes on")
    return int(correctness != "passed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
