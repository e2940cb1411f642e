"""Compiles what a run will need, on all cores and without the device.

Every cell and every correctness case is called once on the "meta" device, and noted down in place
of being launched. Worker processes compile that list, and call SGLang's kernels likewise.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
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
PEERS = "peers"  # in place of a module: what fails of theirs is left out of the run by itself


@contextmanager
def recording(arch: int) -> Iterator[launch.Launches]:
    """What would be launched inside; nothing is compiled or launched."""
    with (
        absent_card(arch),
        # Tensors without memory all begin at 0, which looks as if they were views of each other.
        mock.patch.object(paged, "_base", id),
        launch.noted(only=True) as launches,
    ):
        yield launches


def call(cell: Cell) -> None:
    """Calls all of ours for a cell, without its data."""
    case = make_case(cell, "meta")
    if cell.kind == "capacity":
        return  # through a cache, which does not work without data
    if cell.kind == "append":
        # Where tokens go is computed from data.
        slots = torch.empty(len(case.q), dtype=torch.int64, device="meta")
        write.write_kv(*case.fresh, case.k_pages, case.v_pages, slots)
        return
    for variant in ours.variants(case):
        made = ours.prepare(case, variant)
        (made.call if isinstance(made, Ready) else made)()


def collect(cells: list[Cell], with_correctness: bool = True, arch: int = ARCH) -> list[Job]:
    """What the cells and the correctness cases need, the slow ones first."""
    runs: list[Callable[[], None]] = [partial(call, cell) for cell in cells]
    if with_correctness:
        runs += [case.run for case in correctness.cases("meta")]
    with recording(arch) as launches:
        for run in runs:
            run()
        for name in proved.NAMES if with_correctness and arch == 90 else ():
            with proved.trying(name):
                for case in correctness.tried.tried_cases(name, "meta"):
                    case.run()
    return jobs_of(launches)


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
) -> list[Done]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, initializer=start, initargs=(arch,)) as pool:
        first = pool.map(build_peer, groups)  # the longest
        return [*pool.map(partial(build, launcher=launchers), jobs), *first]


def main(cells: list[Cell], with_correctness: bool = True, workers: int = 0) -> list[str]:
    """Compiles for the device, or for Hopper where there is none; returns what failed of ours."""
    on_gpu = torch.cuda.is_available()
    major, minor = torch.cuda.get_device_capability() if on_gpu else divmod(ARCH, 10)
    arch = 10 * major + minor
    begun = time.perf_counter()
    jobs = collect(cells, with_correctness, arch)
    noted = time.perf_counter()
    workers = min(workers or os.cpu_count() or 1, len(jobs) or 1)
    done = compile_all(jobs, peer_groups(cells), arch, workers, on_gpu)
    spent = sum(each.seconds for each in done)
    print(
        f"sm_{arch}: {len(jobs)} kernels listed in {noted - begun:.1f} s, compiled in "
        f"{time.perf_counter() - noted:.1f} s ({spent:.0f} s of work, "
        f"{sum(each.cached for each in done)} in the cache before)",
        flush=True,
    )
    for name in sorted({each.job.kernel for each in done}):
        times = sorted(each.seconds for each in done if each.job.kernel == name)
        print(f"  {name}: {len(times)}, {sum(times):.0f} s, the slowest {times[-1]:.1f} s")
    wrong = [each for each in done if each.error]
    for each in wrong:
        print(each.error, flush=True)
    return [str(each.error) for each in wrong if each.job.module != PEERS]


if __name__ == "__main__":
    from .grid import GRIDS

    name, substring = (*sys.argv[1:], *("core", "")[len(sys.argv) - 1 :])
    # By its module's name, which is what workers know it by.
    from benchmarks.gpu.precompile import main as run

    wrong = run([cell for cell in GRIDS[name]() if substring in cell.id])
    sys.exit(f"{len(wrong)} of our kernels do not compile" if wrong else 0)
