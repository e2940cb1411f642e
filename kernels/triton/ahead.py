"""Compiles kernels before they are launched, on all cores, into Triton's cache on disk.

The launches that `launch.noted` notes down say which kernels. Processes of their own compile the
list, without the device, and a launch finds the results in the cache. The cache's key is made of
the kernel's source, the types and constants it is compiled for, the options, the architecture,
Triton's own files, the version that ptxas prints, and a few environment variables; nothing of it
comes from a device. PTX and cubin have one key: another ptxas or build of Triton makes both anew,
so a cache is not worth carrying from one to the other.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from pagedkv.kernels.scoring import Terms

from .card import AbsentCard, Chip
from .launch import Launch, Launcher

# Compiled first, so that no core is left with one at the end.
SLOW = "_latents_hopper", "_prefill_hopper", "_decode_hopper", "_prefill", "_decode"
NO_CHIP = Chip(0, 0, 0, 0)  # for compiling, which reads none of its limits


class Job(NamedTuple):
    """One kernel to compile; all of it can be sent to another process.

    Attributes:
        args: a dtype stands for a tensor, and one number for all numbers of its type.
    """

    module: str
    kernel: str
    static: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, int], ...]
    args: tuple[Any, ...]

    @classmethod
    def of(cls, launcher: Launcher, args: Sequence[Any]) -> Job:
        """Makes the job that compiles a launch with these arguments."""
        kinds = tuple(_kind(arg, param) for arg, param in zip(args, launcher.kernel.params))
        names = launcher.kernel.fn.__module__, launcher.kernel.fn.__name__
        options = tuple(launcher.options.items())
        return cls(*names, tuple(launcher.static.items()), options, kinds)


class Done(NamedTuple):
    """The outcome of a job: seconds, whether the cache had it, and what went wrong."""

    job: Job
    seconds: float
    cached: bool
    error: str | None


def jobs_of(launches: Iterable[Launch]) -> list[Job]:
    """Returns the jobs of launches, each once, the slow ones first."""
    jobs = dict.fromkeys(Job.of(launcher, args) for launcher, _, args in launches)
    return sorted(jobs, key=lambda job: SLOW.index(job.kernel) if job.kernel in SLOW else len(SLOW))


class Grid(NamedTuple):
    """The fields of a tensor descriptor that a kernel is compiled for, and its class."""

    descriptor: type
    dtype: torch.dtype
    block_shape: tuple[int, int]
    layout: Any

    def standing(self) -> Any:
        """A descriptor to compile for, of one block without memory."""
        data, shape = torch.empty(0, dtype=self.dtype, device="cpu"), list(self.block_shape)
        return self.descriptor(data, shape, [shape[1], 1], shape, self.layout)


def _kind(arg: Any, param: Any) -> Any:
    """Returns the part of an argument that a kernel is compiled for."""
    if hasattr(arg, "block_shape"):
        return Grid(type(arg), arg.base.dtype, tuple(arg.block_shape), arg.layout)
    if isinstance(arg, Terms):
        return Terms(*(_kind(each, param) for each in arg))
    if isinstance(arg, Tensor):
        return arg.dtype
    if isinstance(arg, float):
        return 0.5
    if not param.do_not_specialize or arg is None:
        return arg
    return 2 if -(2**31) <= arg < 2**31 else 2**40


def _standing(arg: Any) -> Any:
    """Makes an argument to compile for; an empty tensor is aligned like any other."""
    if isinstance(arg, Terms):
        return Terms(*map(_standing, arg))
    if isinstance(arg, Grid):
        return arg.standing()
    return torch.empty(0, dtype=arg, device="cpu") if isinstance(arg, torch.dtype) else arg


def start(arch: int | str) -> None:
    """Makes a process compile for an architecture without asking for a device."""
    driver.set_active(AbsentCard(arch, NO_CHIP))


def timed(job: Job, name: str, work: Callable[[], None]) -> Done:
    """Does the work of a job; returns how it ended, and whether the cache had all of it."""
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
        args = map(_standing, job.args)
        compiled = kernel.warmup(*args, grid=(1, 1, 1), **dict(job.static), **dict(job.options))
        if launcher:
            _build_launcher(compiled)

    return timed(job, f"{job.kernel} {dict(job.static)}", work)


def _build_launcher(compiled: Any) -> None:
    """Builds the C extension that launches a kernel, a second each with some versions of Triton."""
    from triton.backends.nvidia.driver import CudaLauncher

    try:
        CudaLauncher(compiled.src, compiled.metadata)
    except Exception as error:  # other versions need the device, and build at the first launch
        print(f"no launcher ahead: {error!r}", file=sys.stderr)


def compile_all(
    jobs: Sequence[Job], arch: int | str, workers: int | None = None, launchers: bool = False
) -> list[Done]:
    """Compiles jobs in `workers` processes, by default one for each core; returns how each ended.

    They are no children of `multiprocessing`, which would run a script again that has no main
    guard.
    """
    if not jobs:
        return []
    workers = min(workers or os.cpu_count() or 1, len(jobs))
    shares = [jobs[first::workers] for first in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        done = pool.map(partial(_compile_apart, arch=arch, launchers=launchers), shares)
        return [one for share in done for one in share]


def _compile_apart(jobs: Sequence[Job], arch: int | str, launchers: bool) -> list[Done]:
    """Compiles jobs in a process of its own."""
    program = f"from {__name__} import serve; serve({arch!r}, {launchers})"
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(list(jobs)),
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
    )
    if done.returncode:  # a compiler that aborts takes its process with it
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        error = f"a compiling process ended with {done.returncode}: {last}"
        return [Done(job, 0.0, False, error) for job in jobs]
    found: list[Done] = pickle.loads(done.stdout)
    return found


def serve(arch: int | str, launchers: bool) -> None:
    """Compiles the jobs that come on standard input, and tells what became of them."""
    answer = os.dup(1)
    os.dup2(2, 1)  # other code may print, which must not become a part of the answer
    start(arch)
    done = [build(job, launchers) for job in pickle.load(sys.stdin.buffer)]
    with os.fdopen(answer, "wb") as out:
        pickle.dump(done, out)
