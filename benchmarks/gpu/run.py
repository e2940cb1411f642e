"""Runs a grid on one GPU: `python -m benchmarks.gpu.run --out DIR`.

The most useful minutes on a card come first. The kernels of the cells are compiled; then the
ceilings of the device and one cell of each kind are measured (`measure.py`). Meanwhile the kernels
of the correctness cases are compiled in the background. Once they are there, the cases run, then
the cases of kernels that are off so far, and last the other cells. All of it happens in a process
that is replaced when it loses the device or hangs. It writes its results into `DIR/cells.json`:
what is in there does not run again, and a failure stops nothing else. In the end the binaries that
ran on Hopper are searched for faults of compilers (`cached.py`). Needs no git and no virtual
environment.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
import triton

from benchmarks.cells import Cell
from benchmarks.measuring import ceilings
from benchmarks.peers import build
from benchmarks.peers.kernels import available
from benchmarks.report import render

from . import correctness, measure
from .grid import GRIDS, one_of_each
from .proving import names_to_try, prove
from .results import NOT_CHECKED, Record, Results

MARGIN = 1.5  # a cell is begun if this many times the slowest so far still fits
QUERY = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"
COMPILE_SECONDS = 240  # kernels that are not compiled by then are compiled when they are called
LOSSES = 12  # processes that may die before the run gives up
QUIET = 60  # seconds without a note in the results after which a process counts as hung
POLL = 0.2  # seconds
OUT_OF_TIME = 3  # exit status of a process that stopped by itself
KERNELS = "cells", "checks", "cache"  # parts with a file of errors, see `compiled`


def machine(device: torch.device, commit: str) -> Record:
    """Describes the machine that the numbers were measured on."""
    facts: Record = {"commit": commit, "date": time.strftime("%Y-%m-%d")}
    facts |= {"python": platform.python_version(), "torch": torch.__version__}
    facts |= {"triton": triton.__version__, "flashinfer": available()}
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


def run_cells(
    cells: list[Cell],
    results: Results,
    measure_cell: Callable[..., Record],
    deadline: float = math.inf,
    enough: Callable[[], bool] = lambda: False,
) -> bool:
    """Measures the cells that the results lack; returns whether it got through."""
    slowest = 0.0
    for cell in cells:
        if cell.id in results.data["cells"]:
            continue
        if time.monotonic() + MARGIN * slowest > deadline or enough():
            return False
        start = time.monotonic()
        facts = cell.facts | {"run": len(results.data["runs"]) - 1}
        tries, without = partial(results.tries, cell.id), results.without(cell.id)
        results.data["cells"][cell.id] = facts | measure_cell(cell, tries=tries, without=without)
        results.done()
        slowest = max(slowest, time.monotonic() - start)
        print(f"{cell.id}: {time.monotonic() - start:.1f} s", flush=True)
        gc.collect()  # gives a cell's memory back before the next one
        torch.cuda.empty_cache()
    return True


def run_checks(results: Results, device: str, deadline: float) -> bool:
    """Checks what is on, then each name that is off, even after failures; as `run_cells`."""
    for name in (correctness.OURS, *names_to_try()):
        state = correctness.check(name, device, results, deadline)
        if not state:
            return False
        if name == correctness.OURS:
            results.data["runs"][-1]["correctness"] = state
        else:
            results.data["tried"][name] = state
        results.save()
        print(f"correctness, {name}: {state}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return True


def work(options: argparse.Namespace, cells: list[Cell], results: Results) -> int:
    """The process that measures."""
    begun = time.monotonic()
    deadline = begun + options.limit_seconds
    device = torch.device(options.device)
    run = results.data["runs"][-1]
    if not run["machine"]:  # else it has ceilings, or a process died of measuring them
        run["machine"] = machine(device, options.commit)
        results.tries("", "ceilings")
        run["ceilings"] = ceilings(device)
        results.done()
    measure_cell = partial(measure.measure_cell, device=device)
    more = partial(run_cells, results=results, measure_cell=measure_cell, deadline=deadline)
    more(one_of_each(cells))
    if not options.skip_checks:
        ahead = compiled(options.out, "checks")

        def enough() -> bool:
            return not options.precompile or ahead.exists()

        more(cells, enough=enough)  # rather than wait
        while not enough() and time.monotonic() < min(deadline, begun + COMPILE_SECONDS):
            results.tries("", "waiting for kernels")
            time.sleep(POLL)
        if not run_checks(results, options.device, deadline):
            return OUT_OF_TIME
    return 0 if more(cells) else OUT_OF_TIME


def start(module: str, arguments: list[str], **options: bool) -> subprocess.Popen[bytes]:
    """Another process of this interpreter."""
    command = [sys.executable, "-m", f"{__package__}.{module}", *arguments]
    return subprocess.Popen(command, **options)


def child(module: str, arguments: list[str], seconds: float, notes: Path | None) -> int | None:
    """Returns a process's exit status; None if it took too long, or wrote no note for long."""
    process = start(module, arguments)
    end, since, last = time.monotonic() + seconds, time.monotonic(), None
    while (status := process.poll()) is None:
        stamp = notes and notes.stat().st_mtime_ns
        if stamp != last:
            since, last = time.monotonic(), stamp
        if time.monotonic() > end or (notes and time.monotonic() - since > QUIET):
            process.kill()
            process.wait()
            return None
        time.sleep(POLL)
    return status


def compiled(folder: Path, what: str) -> Path:
    """The file of kernels of "cells" or "checks" that do not compile, or of faults in "cache"."""
    return folder / f"kernels-of-{what}.json"


@contextmanager
def compiling(options: argparse.Namespace) -> Iterator[None]:
    """Compiles the kernels of the cells first, and those of the checks during the block."""
    files = [compiled(options.out, what) for what in KERNELS]
    for file in files:
        file.unlink(missing_ok=True)
    if not options.precompile:
        yield
        return
    which = [options.grid, options.k]
    if child("precompile", [*which, str(files[0])], COMPILE_SECONDS, None) is None:
        print(f"precompile: not done after {COMPILE_SECONDS} s, the rest compiles when called")
    if options.skip_checks:
        yield
        return
    # A session of its own: its processes end with it.
    behind = start("precompile", [*which, str(files[1]), "checks"], start_new_session=True)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(behind.pid, signal.SIGKILL)
        behind.wait()


def measure_in_turns(path: Path, arguments: list[str], limit: float) -> bool:
    """Lets processes measure until one gets through; returns whether one did."""
    deadline = time.monotonic() + limit
    for _ in range(LOSSES):
        left = max(0.0, deadline - time.monotonic())
        more = [*arguments, "--worker", f"--limit-seconds={left:.1f}"]
        status = child("run", more, min(left + QUIET, 1e6), path)
        if status in (0, OUT_OF_TIME):
            return status == 0
        results = Results(path)
        trying = results.data["trying"]
        print(f"a process died (exit status {status}) at {trying}", flush=True)
        if not trying:  # the next one would fare no better
            return False
        results.note_loss()
    return False


def dry_run(cells: list[Cell], folder: Path) -> None:
    """Prints what would run, and which of it is installed here."""
    for cell in cells:
        size = max(cell.bytes, cell.num_pages * cell.page_size * cell.token_bytes()) / 2**20
        print(f"{cell.id:<28} {size:>7.0f} MiB  {' '.join(cell.peers)}  [{cell.target}]")
    print(f"{len(cells)} cells")
    print(f"flashinfer: {available()}")
    print("modules in", folder / "aot")
    for name in build.built(folder / "aot"):
        print(" ", name)


def select(options: argparse.Namespace) -> list[Cell]:
    cells = [cell for cell in GRIDS[options.grid]() if options.k in cell.id]
    return [cell.shrunk() for cell in cells] if options.shrink else cells


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", choices=GRIDS, default="all")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--resume", type=Path, help="cells.json of an earlier run")
    parser.add_argument("-k", default="", metavar="SUBSTR", help="only cells whose id has it")
    parser.add_argument("--limit-seconds", type=float, default=math.inf)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", action="store_true", help="tiny cells, to try things out")
    parser.add_argument("--precompile", action="store_true", help="compile our kernels beforehand")
    parser.add_argument("--skip-checks", action="store_true", help="no correctness cases")
    parser.add_argument("--dry-run", action="store_true", help="say what would run; needs no GPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.dry_run and options.out is None:
        parser.error("--out is missing")
    if options.resume and not options.resume.is_file():
        parser.error(f"--resume: expected a file, got {options.resume}")
    return options


def main(arguments: list[str]) -> int:
    begun = time.monotonic()
    options = parse(arguments)
    cells = select(options)
    if options.dry_run:
        dry_run(cells, build.WORK)
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no card that torch can use: --dry-run says what would run, --device cpu tries it")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "cells.json"
    results = Results(path, options.resume)
    if options.worker:
        return work(options, cells, results)
    results.begin(options.commit, check=not options.skip_checks)
    with compiling(options):
        left = options.limit_seconds - (time.monotonic() - begun)
        through = measure_in_turns(path, arguments, left)
    results = Results(path)
    latest, looked = results.data["runs"][-1], compiled(options.out, "cache")
    if latest["correctness"] != NOT_CHECKED and latest["machine"].get("arch") == 90:
        child("cached", [str(looked)], COMPILE_SECONDS, None)
    if looked.is_file():
        latest["binaries"] = "failed" if json.loads(looked.read_text()) else correctness.PASSED
    files = (compiled(options.out, what) for what in KERNELS)
    wrong = [error for file in files if file.is_file() for error in json.loads(file.read_text())]
    results.data["kernels"] = list(dict.fromkeys(wrong))
    results.save()
    print(render(results.data))
    if results.data["tried"]:
        print(*prove(results.data, options.out), sep="\n")
    failures = results.failures()
    print(*failures, f"{len(failures)} failures", sep="\n")
    print("all is done" if through else "not all is done: the same command goes on")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
