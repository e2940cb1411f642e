"""Compiles what a run will need, on all cores and without the device, into Triton's cache on disk.

Every cell and every correctness case is called once on the "meta" device, under a driver that
launches nothing: the launchers, asked for a kernel, note what it would be compiled for instead.
Worker processes compile that list, and call SGLang's kernels likewise.

The run finds the results in the cache, because its key is made of the kernel's source, the types
and constants it is compiled for, the options, the architecture, Triton's own files, what ptxas
prints as its version, and a few environment variables; nothing of it comes from a device. PTX and
cubin lie under one key: another ptxas or build of Triton makes both anew, so a cache is not worth
carrying.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from benchmarks.cells import Cell, Ready, make_case
from benchmarks.compiled.fake_driver import FakeGPU, fake_gpu
from benchmarks.peers.kernels import Missing, sglang_attend
from pagedkv.kernels.scoring import Terms
from pagedkv.kernels.triton import backend as paged
from pagedkv.kernels.triton import launch, write

from . import correctness, ours

ARCH = 90  # where there is no device to ask
PEERS = "peers"  # in place of a module: what fails of theirs is left out of the run by itself
SLOW = ("_prefill", "_decode")  # compiled first, so that no core is left with one at the end


class Job(NamedTuple):
    """One kernel to compile; all of it can be sent to another process.

    Attributes:
        args: dtypes stand for tensors, and one number for all of a type.
    """

    module: str
    kernel: str
    static: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, int], ...]
    args: tuple[Any, ...]


class Done(NamedTuple):
    """What became of a job: seconds, whether the cache had it, and what went wrong."""

    job: Job
    seconds: float
    cached: bool
    error: str | None


def kind(arg: Any, param: Any) -> Any:
    """All of an argument that a kernel is compiled for."""
    if isinstance(arg, Terms):
        return Terms(*(kind(each, param) for each in arg))
    if isinstance(arg, Tensor):
        return arg.dtype
    if isinstance(arg, float):
        return 0.5
    if not param.do_not_specialize or arg is None:
        return arg
    return 2 if -(2**31) <= arg < 2**31 else 2**40


class Nothing:
    """Stands for a compiled kernel: launching it does nothing."""

    function, packed_metadata = 0, ()

    def run(self, *args: Any) -> None:
        pass

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return self.run


@contextmanager
def recording(arch: int) -> Iterator[dict[Job, None]]:
    """What launchers would compile inside, in order; nothing is compiled or launched."""
    jobs: dict[Job, None] = {}

    def note(self: launch.Launcher, *args: Any) -> Any:
        kinds = tuple(kind(arg, param) for arg, param in zip(args, self.kernel.params))
        names = self.kernel.fn.__module__, self.kernel.fn.__name__
        options = tuple(self.options.items())
        jobs[Job(*names, tuple(self.static.items()), options, kinds)] = None
        return Nothing()  # not kept: the launcher is still without a kernel

    with (
        fake_gpu(arch),
        mock.patch.object(launch.Launcher, "compile", note),
        # Tensors without memory all begin at 0, which looks as if they were views of each other.
        mock.patch.object(paged, "_base", id),
    ):
        yield jobs


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
    with recording(arch) as jobs:
        for run in runs:
            run()
    return sorted(jobs, key=lambda job: SLOW.index(job.kernel) if job.kernel in SLOW else len(SLOW))


def standing(arg: Any) -> Any:
    """An argument to compile for; memory of no size is aligned like that of any tensor."""
    if isinstance(arg, Terms):
        return Terms(*map(standing, arg))
    return torch.empty(0, dtype=arg) if isinstance(arg, torch.dtype) else arg


def start(arch: int) -> None:
    """Makes a worker compile for an architecture without asking for a device."""
    driver.set_active(FakeGPU(arch))


def timed(job: Job, name: str, work: Callable[[], None]) -> Done:
    """What became of it, and whether the cache had all that was compiled."""
    found: list[bool] = []
    begun, error = time.perf_counter(), None
    knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
    try:
        work()
    except Exception as failure:
        error = f"{name}: {type(failure).__name__}: {failure}"[:1000]
    return Done(job, time.perf_counter() - begun, bool(found) and all(found), error)


def build(job: Job, launcher: bool = False) -> Done:
    """Compiles one job; with its C launcher, too, where a driver is installed."""

    def work() -> None:
        kernel = getattr(importlib.import_module(job.module), job.kernel)
        args = map(standing, job.args)
        compiled = kernel.warmup(*args, grid=(1, 1, 1), **dict(job.static), **dict(job.options))
        if launcher:
            build_launcher(compiled)

    return timed(job, f"{job.kernel} {dict(job.static)}", work)


def build_launcher(compiled: Any) -> None:
    """The C extension that launches it, on which some versions of Triton spend a second each."""
    from triton.backends.nvidia.driver import CudaLauncher

    try:
        CudaLauncher(compiled.src, compiled.metadata)
    except Exception as error:  # others need the device; then it is made at the first launch
        print(f"no launcher ahead: {error!r}", file=sys.stderr)


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
