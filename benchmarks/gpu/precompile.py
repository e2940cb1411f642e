"""Compiles what a run will need, on all cores and without the device.

    python -m benchmarks.gpu.precompile GRID SUBSTR FILE          what the cells launch
    python -m benchmarks.gpu.precompile GRID SUBSTR FILE checks   what the correctness cases launch

Each call is made once on the "meta" device, which lists its kernels and launches none. Worker
processes compile the list. FILE gets the errors; it is written last, so its presence says that this
is over. A kernel that fails here fails again later.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from benchmarks.cells import Cell, Ready, make_case
from pagedkv.kernels.triton import backend as paged
from pagedkv.kernels.triton import launch, proved, write
from pagedkv.kernels.triton.ahead import Job, compile_all, jobs_of
from pagedkv.kernels.triton.card import absent_card

from . import correctness, ours

ARCH = 90  # where there is no device to ask


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
    done = compile_all(jobs, arch, workers or None, launchers=on_gpu)
    spent = sum(each.seconds for each in done)
    print(
        f"sm_{arch}: {len(jobs)} kernels listed in {noted - begun:.1f} s, compiled in "
        f"{time.perf_counter() - noted:.1f} s ({spent:.0f} s of work, "
        f"{sum(each.cached for each in done)} in the cache before)",
        flush=True,
    )
    wrong += [each.error for each in done if each.error]
    print(*wrong, sep="\n", end="\n" if wrong else "", flush=True)
    return wrong


if __name__ == "__main__":
    from .grid import GRIDS

    name, substring, file, *checks = sys.argv[1:]
    if checks:  # beside the process that measures, which keeps two cores
        os.nice(10)
    told = ["what was compiled ahead did not end"]
    try:
        cells = [cell for cell in GRIDS[name]() if substring in cell.id]
        told = main(cells, bool(checks), max(1, (os.cpu_count() or 1) - 2 * bool(checks)))
    finally:
        part = Path(file).with_suffix(".part")
        part.write_text(json.dumps(told))
        part.replace(file)
