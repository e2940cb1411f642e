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
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from pagedkv.kernels.formats import DENSE, Format, Pages, is_view_of_k

from .tile import WIDEST

ALIGNMENT = 16  # bytes; every pointer is compiled as a multiple of it
QUERY_BYTES = 32 << 10  # of a tile: a third of a consumer card's shared memory
MOST_RATIO = 128  # query heads a KV head


class Target(NamedTuple):
    """The device that kernels are tuned for, and the sizes that fixed grids depend on.

    Attributes:
        device: its number; -1 for the interpreter.
        arch: compute capability, 90 for 9.0; 0 for the interpreter; a name, "gfx942", for AMD's.
        shared: bytes of shared memory that a block can have.
        processors: streaming multiprocessors.
    """

    device: int
    arch: int | str
    shared: int
    processors: int

    @property
    def roomy(self) -> bool:
        """More shared memory than consumer cards have (99 KiB a block)."""
        return self.shared > 128 << 10

    @property
    def chains(self) -> bool:
        """Whether products of 64 rows may be added up: Triton compiles that wrongly for 10.x.

        There the tensor memory holds such sums (triton#10821, up to 3.8); fewer rows use none.
        """
        return self.arch not in range(100, 110)


class Layout(NamedTuple):
    """Where the slots of K or of V pages lie; strides in elements, or in words."""

    format: Format
    stride_n: int
    stride_g: int
    stride_p: int

    @classmethod
    def of(cls, format: Format, data: Tensor) -> Layout:
        return cls(format, *data.stride()[:3])


class Half(NamedTuple):
    """Pages, or staging pages, of K or V, as kernels are compiled for them: a constexpr argument.

    Attributes:
        stride_n, stride_g, stride_p: as in `Layout`.
        dim: columns of a head, without `rest`.
        rest: columns of K behind those that V is a view of, which make a part of their own; or 0.
    """

    format: Format
    stride_n: int
    stride_g: int
    stride_p: int
    dim: int
    rest: int = 0

    @classmethod
    def of(cls, format: Format, data: Tensor, dim: int, rest: int = 0) -> Half:
        """Reads the strides off pages, of a layer or of all."""
        stride_n, stride_g, stride_p, _ = data.stride()[-4:]
        return cls(format, stride_n, stride_g, stride_p, dim, rest)

    @property
    def parts(self) -> int:
        """The number of parts of the head dim in an unpacked tile; `rest` is one more."""
        return self.format.per_word * -(-self.dim // WIDEST.value)  # only dense pages are wider

    @property
    def width(self) -> int:
        """Columns of a part."""
        return self.dim // self.parts

    @property
    def block(self) -> int:
        """Columns of a part, padded: a product takes 16 elements and more."""
        return max(16, triton.next_power_of_2(self.width))


NOT_THERE = Layout(DENSE, 0, 0, 0)


class Geometry(NamedTuple):
    """Heads and pages, as kernels are compiled for them.

    Attributes:
        head_dim, v_dim: columns of K, and of V.
        staging: of K and of V alike; `NOT_THERE` without any.
        dtype: of queries, and of pages that are not coded.
        rest: columns of K behind those that V is a view of; 0 if V is pages of its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page: int
    k: Layout
    v: Layout
    staging: Layout
    dtype: torch.dtype
    v_dim: int
    rest: int = 0

    @classmethod
    def of(
        cls, q: Tensor, k_pages: Tensor | Pages, v_pages: Tensor | Pages | None = None
    ) -> Geometry:
        """Reads the geometry off queries `[T, H, D]` and pages; V's are like K's unless given."""
        k = Pages.of(k_pages)
        v = k if v_pages is None else Pages.of(v_pages)
        staging = NOT_THERE if k.staging is None else Layout.of(DENSE, k.staging)
        _, kv_heads, page, width = k.data.shape
        dim, v_dim = width * k.format.per_word, v.data.shape[3] * v.format.per_word
        rest = dim - v_dim if v_dim < dim and is_view_of_k(k, v) else 0
        layouts = Layout.of(k.format, k.data), Layout.of(v.format, v.data), staging
        return cls(q.shape[1], kv_heads, dim, page, *layouts, q.dtype, v_dim, rest)

    @property
    def ratio(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def bits(self) -> int:
        """The fewest bits of an element of K or V."""
        return 16 // max(self.k.format.per_word, self.v.format.per_word)

    @property
    def chained(self) -> bool:
        """Whether a score of a narrow head is added up from several products of tensor cores."""
        return self.k.format.per_word > 1 and self.dtype.itemsize == 2

    @property
    def padded(self) -> int:
        """The head dim that tuning tables know it by."""
        return max(64, triton.next_power_of_2(self.head_dim))

    @property
    def wide(self) -> bool:
        """Whether the query heads of a KV head may fall into several tiles."""
        return self.head_dim > WIDEST.value

    @property
    def most_ratio(self) -> int:
        """The most query heads a KV head that are served; rows of one product if it is not wide."""
        if self.wide:
            return MOST_RATIO
        row = triton.next_power_of_2(self.head_dim) * self.dtype.itemsize
        return min(MOST_RATIO, QUERY_BYTES // row)

    def heads(self, rows: int) -> int:
        """Returns query heads of a KV head in a tile of `rows` rows: equal shares of them."""
        return -(-self.ratio // -(-self.ratio // rows)) if self.wide else self.ratio

    def block_n(self, most: int) -> int:
        """Returns tokens a tile, at most `most`; none spans pages whose K has scales of its own."""
        return min(most, self.page & -self.page) if self.k.format.scales == "channel" else most

    def staging_n(self, block_n: int) -> int:
        """Tokens a tile of staging pages: within one page, because there are one or two of them."""
        return min(block_n, 16, self.page & -self.page)

    def static(self) -> dict[str, Any]:
        """The constexpr arguments that attention kernels take of it."""
        return {
            "NUM_HEADS": self.num_heads,
            "NUM_KV_HEADS": self.num_kv_heads,
            "PAGE": self.page,
            "K": Half(*self.k, self.head_dim - self.rest, self.rest),
            "V": Half(*self.v, self.v_dim),
            "STAGING": Half(*self.staging, self.v_dim),
        }


def pointers(k: Pages, v: Pages) -> tuple[Tensor | None, ...]:
    """The tensors of both, in the order in which attention kernels take them."""
    return k.data, v.data, k.scales, v.scales, k.staging, v.staging


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
        self.options = {"num_warps": num_warps, "num_stages": num_stages}
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
