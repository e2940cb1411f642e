"""Compiles what a run will need, on all cores and without the device.

    python -m benchmarks.gpu.precompile GRID SUBSTR FILE          what the cells launch
    python -m benchmarks.gpu.precompile GRID SUBSTR FILE checks   what the correctness cases launch

Each call is made once on the "meta" device, which lists its kernels and launches none. Worker
processes compile the list, and SGLang's kernels by calling them. FILE gets the errors; it is
written last, so its presence says that this is over. A kernel that fails here fails again later.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.cells import Cell, Ready, make_case
from benchmarks.peers.kernels import Missing, sglang_attend
from pagedkv.kernels.triton import backend as paged
from pagedkv.kernels.triton import launch, proved, write
from pagedkv.kernels.triton.ahead import Done, Job, build, jobs_of, start, timed
from pagedkv.kernels.triton.card import absent_card

from . import correctness, ours

ARCH = 90  # where there is no device to ask
PEERS = "peers"  # in place of a module: peers that fail here are left out of the run later


@contextmanager
def recording(arch: int) -> Iterator[launch.Launches]:
    """Notes down what would be launched inside; nothing is compiled or launched."""
    with (
        absent_card(arch),
        # Tensors without memory all begin at 0, which looks as if they were views of each other.
        mock.patch.object(paged, "_base", id),
        launch.noted(only=True) as launches,
    ):
        yield launches


def call(cell: Cell) -> None:
    """Calls all of our variants for a cell, without its data."""
    case = make_case(cell, "meta")
    if cell.kind == "capacity":
        return  # through a cache, which does not work without data
    if cell.kind == "append":
        # The cell's own slots would be computed from data.
        slots = torch.empty(len(case.q), dtype=torch.int64, device="meta")
        write.write_kv(*case.fresh, case.k_pages, case.v_pages, slots)
        return
    for variant in ours.variants(case):
        made = ours.prepare(case, variant)
        (made.call if isinstance(made, Ready) else made)()


def case_calls(arch: int) -> Iterator[Callable[[], None]]:
    """Yields all correctness cases, and those of kernels that are off, with each of them on."""
    yield from (case.run for case in correctness.cases_of(correctness.OURS, "meta"))
    for name in proved.NAMES if arch == 90 else ():
        with proved.trying(name):
            yield from (case.run for case in correctness.cases_of(name, "meta"))


def collect(calls: Iterable[Callable[[], None]], arch: int = ARCH) -> tuple[list[Job], list[str]]:
    """Returns the jobs that calls need, the slow ones first, and errors of those that failed."""
    wrong = []
    with recording(arch) as launches:
        for each in calls:
            try:
                each()
            except Exception as error:
                wrong.append(f"not listed: {type(error).__name__}: {error}"[:500])
    return jobs_of(launches), wrong


def peer_groups(cells: list[Cell]) -> list[list[Cell]]:
    """Cells for which SGLang's kernels are alike, or nearly."""
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        if "sglang" in cell.peers:
            groups.setdefault((cell.heads, cell.decode), []).append(cell)
    return list(groups.values())


def build_peer(cells: list[Cell]) -> Done:
    """Calls SGLang's kernels, which compiles them, and launches nothing."""

    def work() -> None:
        with suppress(Missing):
            for cell in cells:
                case = make_case(cell, "meta")
                case.slots = torch.empty(len(case.q), dtype=torch.int64, device="meta")
                sglang_attend(case)()

    return timed(Job(PEERS, "sglang", (), (), ()), f"sglang, {cells[0].id}", work)


def compile_all(
    jobs: list[Job], groups: list[list[Cell]], arch: int, workers: int, launchers: bool
) -> Iterator[Done]:
    """Yields the outcome of each job; if a compiler aborts, the caller has to do the rest."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, initializer=start, initargs=(arch,)) as pool:
        sent = [pool.submit(build_peer, group) for group in groups]  # the longest
        sent += [pool.submit(build, job, launchers) for job in jobs]
        try:
            yield from (each.result() for each in as_completed(sent))
        except BrokenProcessPool as error:
            yield Done(Job("", "", (), (), ()), 0.0, False, f"a compiling process died: {error}")


def main(cells: list[Cell], checks: bool = False, workers: int = 0) -> list[str]:
    """Compiles for the device, or for Hopper without one; returns the errors of our kernels.

    Args:
        checks: compile for the correctness cases, not for the cells.
    """
    on_gpu = torch.cuda.is_available()
    major, minor = torch.cuda.get_device_capability() if on_gpu else divmod(ARCH, 10)
    arch = 10 * major + minor
    begun = time.perf_counter()
    calls = case_calls(arch) if checks else (partial(call, cell) for cell in cells)
    jobs, wrong = collect(calls, arch)
    noted = time.perf_counter()
    workers = min(workers or os.cpu_count() or 1, len(jobs) or 1)
    done = list(compile_all(jobs, [] if checks else peer_groups(cells), arch, workers, on_gpu))
    spent = sum(each.seconds for each in done)
    print(
        f"sm_{arch}: {len(jobs)} kernels listed in {noted - begun:.1f} s, compiled in "
        f"{time.perf_counter() - noted:.1f} s ({spent:.0f} s of work, "
        f"{sum(each.cached for each in done)} in the cache before)",
        flush=True,
    )
    failed = [each for each in done if each.error]
    wrong += [str(each.error) for each in failed if each.job.module != PEERS]
    for error in (*wrong, *(each.error for each in failed if each.job.module == PEERS)):
        print(error, flush=True)
    return wrong


if __name__ == "__main__":
    from .grid import GRIDS

    name, substring, file, *checks = sys.argv[1:]
    # Imported by its module's name, under which workers find it.
    from benchmarks.gpu.precompile import main as run

    if checks:  # beside the process that measures, which keeps two cores
        os.nice(10)
    told = ["what was compiled ahead did not end"]
    try:
        cells = [cell for cell in GRIDS[name]() if substring in cell.id]
        told = run(cells, bool(checks), max(1, (os.cpu_count() or 1) - 2 * bool(checks)))
    finally:
        part = Path(file).with_suffix(".part")
        part.write_text(json.dumps(told))
        part.replace(file)
