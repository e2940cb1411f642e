"""A GPU that is not there: `kernel[grid](...)` on CPU tensors compiles for it and launches nothing.

Triton goes its whole way, specialisation and caches included, and reads all it wants to know of a
device from its driver. So what is compiled, how often, and what a launch costs the host can be
checked on any machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from pagedkv.kernels.triton import launch


class Chip(NamedTuple):
    """What an architecture offers, after the CUDA programming guide's table of capabilities.

    Attributes:
        shared: bytes of shared memory that one block can have.
        processors: streaming multiprocessors, of its best-known card.
        threads: resident threads per multiprocessor.
        blocks: resident blocks per multiprocessor.
    """

    shared: int
    processors: int
    threads: int
    blocks: int


CHIPS = {
    80: Chip(163 << 10, 108, 2048, 32),  # A100
    86: Chip(99 << 10, 84, 1536, 16),  # A40
    89: Chip(99 << 10, 128, 1536, 24),  # RTX 4090
    90: Chip(227 << 10, 132, 2048, 32),  # H100
    120: Chip(99 << 10, 170, 1536, 24),  # RTX 5090
}
REGISTERS = 64 << 10  # per multiprocessor, on all of them
WARP = 32


class Launcher:
    """Stands where triton puts its compiled C launcher."""

    def __init__(self, src: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        # Not the GPU of its making: a kernel compiled under one is found again under the next.
        driver.active.launches += 1


class FakeGPU:
    """A triton driver for one device of the given architecture.

    Attributes:
        launches: kernel launches so far.
    """

    launcher_cls = Launcher

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.chip = CHIPS[arch]
        self.launches = 0
        self.utils = SimpleNamespace(
            load_binary=self._load_binary, get_device_properties=self._properties
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, WARP)

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device number: this gives each architecture its own, and
        # leaves those of a real device 0 alone.
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def _load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024  # module, function, registers, spills, threads a block may have

    def _properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self.chip.shared,
            "max_num_regs": REGISTERS,
            "multiprocessor_count": self.chip.processors,
            "warpSize": WARP,
        }


@contextlib.contextmanager
def fake_gpu(arch: int = 90) -> Iterator[FakeGPU]:
    """Lets triton find a GPU of this architecture, and what it found before on leaving."""
    if knobs.runtime.interpret:
        raise RuntimeError("expected kernels to be compiled, but TRITON_INTERPRET is set")
    before = driver._active  # the property would look for a real GPU
    gpu = FakeGPU(arch)
    driver.set_active(gpu)
    try:
        yield gpu
    finally:
        driver.set_active(before)


def compiled_by(kernel: str, call: Callable[[], object]) -> Any:
    """The kernel of this name that a call launches first, as its launcher compiled it."""
    launched: list[launch.Launcher] = []
    launch_it = launch.Launcher._launch

    def note(self: launch.Launcher, *args: Any) -> None:
        launch_it(self, *args)
        launched.append(self)

    with mock.patch.object(launch.Launcher, "_launch", note):
        call()
    return next(one.compiled for one in launched if one.kernel.fn.__name__ == kernel)
