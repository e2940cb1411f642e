"""Gluon on the CPU, which Triton does not interpret.

Functions of `kernels/triton/gluon/` run as they are written, with what stands in `machine.py`
instead of `gl`. Layouts mean nothing here; the compiler checks those.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor

import pagedkv.kernels.triton
from tests.kernels.triton.gluon import machine
from tests.kernels.triton.gluon.machine import Kind, Pointer, value

FOLDER = Path(pagedkv.kernels.triton.__path__[0]) / "gluon"

_programs = 1


def _no_layout(*_: Any, **__: Any) -> None:
    return None


def _jit(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _jit


LANGUAGE = SimpleNamespace(
    constexpr=lambda x: x,
    int32=Kind(torch.int32),
    int64=Kind(torch.int64),
    float32=Kind(torch.float32),
    bfloat16=Kind(torch.bfloat16),
    float16=Kind(torch.float16),
    barrier=machine.barrier,
    program_id=lambda axis: machine.program.number,
    num_programs=lambda axis: _programs,
    static_range=range,
    load=machine.load,
    store=machine.store,
    atomic_add=machine.atomic_add,
    arange=lambda start, end, layout: value(torch.arange(start, end)),
    zeros=lambda shape, kind, layout: value(torch.zeros(shape, dtype=kind.torch)),
    full=lambda shape, x, kind, layout: value(torch.full(shape, x, dtype=kind.torch)),
    where=lambda mask, x, y: value(torch.where(mask, x, y)),
    maximum=lambda x, y: value(torch.maximum(torch.as_tensor(x), torch.as_tensor(y))),
    minimum=lambda x, y: value(torch.minimum(torch.as_tensor(x), torch.as_tensor(y))),
    max=lambda x, axis: value(x.amax(axis)),
    sum=lambda x, axis: value(x.as_subclass(Tensor).sum(axis)),
    exp2=lambda x: value(torch.exp2(x)),
    log2=lambda x: value(torch.log2(x)),
    cdiv=lambda x, y: -(-x // y),
    expand_dims=lambda x, axis: value(x.unsqueeze(axis)),
    convert_layout=lambda x, layout: x,
    allocate_shared_memory=machine.allocate,
    warp_specialize=machine.specialize,
    SliceLayout=_no_layout,
    BlockedLayout=_no_layout,
    DotOperandLayout=_no_layout,
    NVMMADistributedLayout=_no_layout,
    SwizzledSharedLayout=_no_layout,
    NVMMASharedLayout=SimpleNamespace(get_default_for=_no_layout),
)
BARRIERS = SimpleNamespace(
    MBarrierLayout=lambda: "barriers",
    init=lambda one, count: one.init(count),
    expect=lambda one, size: one.expect(size),
    arrive=lambda one, count: one.arrive(count),
    wait=lambda one, phase: one.wait(phase),
)
MODULES: dict[str, dict[str, Any]] = {
    "triton.experimental": {},
    "triton.experimental.gluon": {"jit": _jit, "language": LANGUAGE},
    "triton.experimental.gluon.language.nvidia.hopper": {
        "fence_async_shared": machine.fence,
        "mbarrier": BARRIERS,
        "tma": SimpleNamespace(async_copy_global_to_shared=machine.copy_box),
        "warpgroup_mma": machine.multiply,
        "warpgroup_mma_wait": machine.wait_for,
    },
    "triton.experimental.gluon.nvidia.hopper": {"TensorDescriptor": machine.Descriptor},
}


class Launcher:
    """`launch.Launcher`, for kernels of which all programs run one after another."""

    def __init__(self, kernel: Any, target: Any, static: dict[str, Any], *_: Any) -> None:
        self.kernel, self.static = kernel, static

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
        global _programs
        _programs = grid[0]
        given = [_given(arg) for arg in args]
        for machine.program.number in range(grid[0]):
            self.kernel(*given, **self.static)


def _given(arg: Any) -> Any:
    """An argument as kernels see it; terms of scores are a tuple."""
    if isinstance(arg, tuple):
        return arg.__class__(*map(_given, arg))
    return Pointer.to(arg) if isinstance(arg, Tensor) else arg


@contextmanager
def modules() -> Iterator[None]:
    """Gluon is what stands above, for who imports it inside."""
    fake = {}
    for name, names in MODULES.items():
        fake[name] = ModuleType(name)
        fake[name].__dict__.update(names)
    with mock.patch.dict(sys.modules, fake):
        yield


def emulated(name: str) -> ModuleType:
    """A module of the folder, with Gluon from here."""
    package = ModuleType("emulated_gluon")
    package.__path__ = [str(FOLDER)]
    with modules(), mock.patch.dict(sys.modules, {"emulated_gluon": package}):
        module = importlib.import_module(f"emulated_gluon.{name}")
        loaded = [each for name, each in sys.modules.items() if name.startswith("emulated_gluon.")]
    for each in loaded:  # numbers of modules that know the real Triton
        names = {key: x.value for key, x in vars(each).items() if isinstance(x, tl.constexpr)}
        vars(each).update(names)
    module.Launcher = Launcher  # type: ignore[attr-defined]
    return module


@contextmanager
def mutated(name: str, old: str, new: str, folder: Path, slow: str = "") -> Iterator[None]:
    """A module has other text for who imports it inside, and others go on for long.

    Args:
        slow: see `machine.SLOW`.
    """
    shutil.copytree(FOLDER, folder)
    file = folder / f"{name}.py"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    with (
        mock.patch.multiple(machine, BREATH=0.03, SLOW=slow),
        mock.patch(f"{__name__}.FOLDER", folder),
    ):
        yield
