"""A card that is not there: Triton compiles for it, and launches nothing.

Triton goes its whole way, specialisation and caches included, and reads all it wants to know of a
device from its driver. So kernels can be listed and compiled on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Chip(NamedTuple):
    """The limits of an architecture, after the CUDA programming guide's table of capabilities.

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
    100: Chip(227 << 10, 148, 2048, 32),  # B200
    120: Chip(99 << 10, 170, 1536, 24),  # RTX 5090
}
REGISTERS = 64 << 10  # per multiprocessor, on all of them
WARP = 32
AMD = {"gfx942": Chip(64 << 10, 304, 2048, 32)}  # MI300X


class SilentLauncher:
    """Stands where Triton puts its compiled C launcher."""

    def __init__(self, src: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        # Not the card it was made under: a kernel compiled under one is found under the next.
        driver.active.launches += 1


class AbsentCard:
    """A driver of Triton's for one device of the given architecture.

    Args:
        chip: what it offers; needed to list kernels, not to compile them.

    Attributes:
        launches: kernel launches so far.
    """

    launcher_cls = SilentLauncher

    def __init__(self, arch: int | str, chip: Chip | None = None) -> None:
        self.arch = arch
        self.chip = chip or (CHIPS[arch] if isinstance(arch, int) else AMD[arch])
        self.launches = 0
        self.utils = SimpleNamespace(
            load_binary=self._load_binary, get_device_properties=self._properties
        )

    def get_current_target(self) -> GPUTarget:
        if isinstance(self.arch, str):
            return GPUTarget("hip", self.arch, 64)
        return GPUTarget("cuda", self.arch, WARP)

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device number: this gives each architecture its own, and
        # leaves those of a real device 0 alone.
        return self.arch if isinstance(self.arch, int) else int(self.arch.removeprefix("gfx"), 16)

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


@contextmanager
def absent_card(arch: int | str = 90, chip: Chip | None = None) -> Iterator[AbsentCard]:
    """Lets Triton find a card of this architecture, and what it found before on leaving."""
    if knobs.runtime.interpret:
        raise RuntimeError("expected kernels to be compiled, but TRITON_INTERPRET is set")
    before = driver._active  # the property would look for a real card
    card = AbsentCard(arch, chip)
    driver.set_active(card)
    try:
        yield card
    finally:
        driver.set_active(before)


def is_absent() -> bool:
    """Whether the card that Triton finds is not there."""
    return isinstance(driver._active, AbsentCard)
