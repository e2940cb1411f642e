"""How a kernel is launched: compiled once per configuration, then called without triton's dispatch.

`kernel[grid](...)` binds, hashes and looks up its arguments at every call, 10 to 20 us for the
signatures here; a compiled kernel called directly takes about 4. So a `Launcher` is kept for each
configuration, and the code that asks for one spells out its configuration. Arguments that change
from step to step are never part of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from .geometry import Target

ALIGNMENT = 16  # bytes; every pointer is compiled as a multiple of it


def interpreting() -> bool:
    """Whether kernels run in triton's interpreter, on the CPU."""
    return bool(knobs.runtime.interpret)


def target_of(device: torch.device) -> Target:
    """The architecture that kernels on this device are compiled for."""
    if interpreting():
        return Target(-1, 0, 227 << 10, 2)
    return _target(driver.active.get_current_device() if device.index is None else device.index)


@functools.cache
def _target(device: int) -> Target:
    if driver.active.get_current_device() != device:
        with torch.cuda.device(device):
            return _target.__wrapped__(device)
    found = driver.active.utils.get_device_properties(device)
    arch = driver.active.get_current_target().arch
    return Target(device, arch, found["max_shared_mem"], found["multiprocessor_count"])


class Launcher:
    """One configuration of a kernel on one device.

    Args:
        kernel: takes its run-time arguments first, its constexpr ones after them.
        static: the constexpr arguments.
        registers: the most that a thread may have; by default the compiler decides.
    """

    def __init__(
        self,
        kernel: Any,
        target: Target,
        static: dict[str, Any],
        num_warps: int,
        num_stages: int,
        registers: int | None = None,
    ) -> None:
        self.kernel = kernel
        self.device = target.device
        self.static = static
        # Triton's default, said because 3.9 warns where it is not, and that 3.10 has another.
        self.options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
        if registers is not None and isinstance(target.arch, int):  # AMD's compiler has no bound
            self.options["maxnreg"] = min(255, registers)
        names = [name for name in kernel.arg_names if name in static]
        assert len(names) == len(static)
        assert kernel.arg_names[-len(names) :] == names
        self._tail = tuple(static[name] for name in names)
        self.compiled: Any = None

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
        """Launches on the current stream of its device."""
        if (launches := _noted.get()) is not None:
            launches.append((self, grid, args))
            if launches.only:
                return
        if self.device < 0:
            self.kernel[grid](*args, **self.static)
        elif driver.active.get_current_device() != self.device:
            with torch.cuda.device(self.device):
                self._launch(grid, args)
        else:
            self._launch(grid, args)

    def _launch(self, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        compiled = self.compiled or self.compile(*args)
        stream = driver.active.get_current_stream(self.device)
        if _is_profiled():
            compiled[grid](*args, *self._tail)
            return
        run, packed = compiled.run, compiled.packed_metadata
        run(*grid, stream, compiled.function, packed, None, None, None, *args, *self._tail)

    def prepared(self, args: tuple[Any, ...]) -> list[Any]:
        """Arguments as `again` takes them, after a launch with them: tensors are addresses.

        The caller keeps the tensors alive. The interpreter takes tensors as they are.
        """
        if self.device < 0:
            return list(args)
        addresses = (arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args)
        return [*addresses, *self._tail]

    def again(self, grid: tuple[int, int, int], prepared: list[Any]) -> None:
        """Launches again with the arguments from `prepared`, if `is_ready` says that it may.

        Addresses among them may have changed, to others at multiples of 16 bytes.
        """
        if self.device < 0:
            self.kernel[grid](*prepared, **self.static)
            return
        compiled = self.compiled
        stream = driver.active.get_current_stream(self.device)
        run, packed = compiled.run, compiled.packed_metadata
        run(*grid, stream, compiled.function, packed, None, None, None, *prepared)

    def compile(self, *args: Any) -> Any:
        """Compiles for arguments of these types, once, and returns the compiled kernel."""
        compiled = self.kernel.warmup(*args, grid=(1, 1, 1), **self.static, **self.options)
        compiled._init_handles()
        self.compiled = compiled
        return compiled


Launch = tuple[Launcher, tuple[int, int, int], tuple[Any, ...]]


class Launches(list[Launch]):
    """Launches in their order, which were made or only noted down.

    Attributes:
        only: whether launches are noted down and not made.
    """

    only = False


_noted: ContextVar[Launches | None] = ContextVar("launches noted", default=None)


@contextmanager
def noted(only: bool = False) -> Iterator[Launches]:
    """Notes down what is launched inside, with its arguments; an outer call notes it, too.

    Args:
        only: launch nothing, so that outputs are whatever their memory holds.
    """
    around, launches = _noted.get(), Launches()
    launches.only = only or (around is not None and around.only)
    token = _noted.set(launches)
    try:
        yield launches
    finally:
        _noted.reset(token)
        if around is not None:
            around += launches


def is_ready(device: int) -> bool:
    """Whether `Launcher.again` may be called for a device: it is the current one, unprofiled."""
    return device < 0 or (driver.active.get_current_device() == device and not _is_profiled())


def _is_profiled() -> bool:
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(hook is not None and hook.calls for hook in hooks)


def check_aligned(**tensors: Tensor | None) -> None:
    """Raises ValueError for a tensor that does not begin at a multiple of 16 bytes."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{name}: expected data that begins at a multiple of {ALIGNMENT} bytes, got "
                f"address {tensor.data_ptr():#x}; a copy (.clone()) is aligned"
            )


def in_units(name: str, tensor: Tensor) -> tuple[int, int]:
    """The strides of the first two axes in units of 16 elements.

    With this unit a kernel knows that a stride is a multiple of 16 without being compiled for its
    value, and its loads stay 128 bits wide. Each is an argument of its own: among integers in a
    tuple Triton (3.6.0 and 3.7.1) makes a 1 a constant, and another kernel for a multiple of 16,
    even if `do_not_specialize` names the tuple.

    Raises:
        ValueError: a stride is not such a multiple, the last axis is not contiguous, or memory
            does not hold the tensor's values, because they are negated.
    """
    (outer, inner, last), (rows, heads, _) = tensor.stride(), tensor.shape
    outer, inner = outer * (rows > 1), inner * (heads > 1)  # a single one has no stride
    far = heads * abs(inner) >= 2**31  # kernels count heads in int32
    negated = " of negated values" if tensor.is_neg() else ""
    if last != 1 or (outer | inner) % 16 or far or negated:
        raise ValueError(
            f"{name}: expected strides that are multiples of 16 elements, heads within 2**31 "
            f"elements and a contiguous last axis, got {tensor.stride()}{negated}; a copy "
            "(.clone(memory_format=torch.contiguous_format)) has them"
        )
    return outer // 16, inner // 16


def layer_stride(pages: Tensor) -> int:
    """From a layer of pages `[L, N, ...]` to the next, in units of 16 bytes, for `at_layer`.

    Pools have any number of pages, and kernels are not compiled for it.
    """
    stride = pages.stride(0) * pages.element_size() * (len(pages) > 1)  # a single one has none
    assert stride % ALIGNMENT == 0
    return stride // ALIGNMENT
