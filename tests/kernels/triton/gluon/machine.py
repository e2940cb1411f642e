"""A card on the CPU: a thread for each group of warps, and every hazard as late as it can be.

What is copied arrives when somebody waits for it, and is NaN until then; products are computed when
they are waited for, from what then lies in their memory. So a place of a ring that is read too
early, or given away too soon, shows in the result, and a barrier that nobody arrives at ends in
TimeoutError. A group is one thread here, but four warps on a card: what one warp touched others may
not until the group's barrier, which is asserted.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

BREATH = 2e-4  # seconds, for others to do at once what they may do now
SLOW = ""  # the group of warps, by its function, whose products take long
program = threading.local()  # its number, and the group of warps


class Value(torch.Tensor):
    """A tensor that a group of warps has in registers."""

    def to(self, kind: Any) -> Value:  # type: ignore[override]
        return super().to(getattr(kind, "torch", kind))


def value(tensor: Any) -> Value:
    return torch.as_tensor(tensor).as_subclass(Value)


@dataclass(frozen=True)
class Kind:
    """An element type, with what Gluon's have."""

    torch: torch.dtype

    @property
    def primitive_bitwidth(self) -> int:
        return 8 * self.torch.itemsize


class Pointer:
    """Into a tensor's memory; an offset that leaves it is an IndexError."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = tensor, offset

    @classmethod
    def to(cls, tensor: Tensor) -> Pointer:
        count = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        return cls(tensor.as_strided((count,), (1,)))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)


def load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Value:
    at, mask = torch.broadcast_tensors(torch.as_tensor(pointer.offset), torch.as_tensor(mask))
    found = torch.full(at.shape, other, dtype=pointer.memory.dtype)
    found[mask] = pointer.memory[at[mask].long()]
    return value(found)


def store(pointer: Pointer, values: Any, mask: Any = True) -> None:
    tensors = map(torch.as_tensor, (pointer.offset, mask, values))
    at, mask, values = torch.broadcast_tensors(*tensors)
    pointer.memory[at[mask].long()] = values[mask].to(pointer.memory.dtype)


def atomic_add(pointer: Pointer, amount: int, **_: Any) -> Value:
    """One program runs after another, and of each one thread counts."""
    before = load(pointer)
    store(pointer, before + amount)
    return before


# ------------------------------------------------------------------ shared memory and barriers


class Shared:
    """Shared memory; what was stored there has to be fenced before a product reads it."""

    unfenced: ClassVar[dict[int, set[tuple[int, int]]]] = {}  # bytes, by thread
    # Bytes that a group had stored and not fenced when it told others.
    told: ClassVar[set[tuple[int, int]]] = set()
    # By thread, since its group's barrier: how it was touched, and from which byte to which.
    touched: ClassVar[dict[int, list[tuple[str, int, int]]]] = {}

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def dtype(self) -> Kind:
        return Kind(self.data.dtype)

    @property
    def bytes(self) -> tuple[int, int]:
        """From which address to which."""
        begin = self.data.data_ptr()
        steps = zip(self.data.shape, self.data.stride())
        size = 1 + sum((count - 1) * stride for count, stride in steps)
        return begin, begin + size * self.data.element_size()

    def index(self, at: int) -> Shared:
        return Shared(self.data[int(at)])

    def slice(self, start: int, length: int, dim: int) -> Shared:
        assert 0 <= start <= self.data.shape[dim] - length
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def touch(self, how: str) -> None:
        """Notes a load, a store or the reading of a product, before which no warp was too slow."""
        mine = Shared.touched.setdefault(threading.get_ident(), [])
        begin, end = self.bytes
        for before, first, last in mine:
            if "store" in (before, how) and first < end and begin < last:
                # Threads store again what they loaded or stored themselves.
                own = how == "store" and before != "product" and (first, last) == (begin, end)
                assert own, f"no barrier between {before} and {how}"
        mine.append((how, begin, end))

    def load(self, layout: Any) -> Value:
        self.touch("load")
        return value(self.data.clone())

    def store(self, values: Tensor) -> None:
        assert values.shape == self.data.shape
        assert values.dtype is self.data.dtype
        self.touch("store")
        self.data.copy_(values)
        Shared.unfenced.setdefault(threading.get_ident(), set()).add(self.bytes)
        Shared.told.discard(self.bytes)

    def is_fenced(self) -> bool:
        begin, end = self.bytes
        stored = Shared.unfenced.get(threading.get_ident(), set()) | Shared.told
        return not any(first < end and begin < last for first, last in stored)


def barrier() -> None:
    """All warps of the group have come here."""
    Shared.touched.pop(threading.get_ident(), None)


def fence() -> None:
    Shared.unfenced.pop(threading.get_ident(), None)


class Barriers:
    """As many barriers as a ring has places."""

    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, at: int) -> Barrier:
        return self.all[int(at)]


@dataclass(eq=False)
class Barrier:
    """A round ends when all have arrived and all bytes that were announced are there."""

    arrivals: int = 0
    missing: int = 0  # arrivals of this round
    bytes: int = 0  # announced and not there
    rounds: int = 0
    copies: list[Callable[[], int]] = field(default_factory=list)

    changed: ClassVar[threading.Condition] = threading.Condition()
    groups: ClassVar[int] = 0  # that run
    waiting: ClassVar[dict[int, tuple[Barrier, int]]] = {}  # for which phase, by thread

    def init(self, count: int) -> None:
        self.arrivals = self.missing = int(count)

    def arrive(self, count: int = 1) -> None:
        me = threading.get_ident()
        assert not Shared.touched.get(me), "no barrier before it arrives"
        Shared.told |= Shared.unfenced.get(me, set())
        with Barrier.changed:
            self.missing -= count
            assert self.missing >= 0, "more arrived than are expected"
            self._end()
        time.sleep(BREATH)

    def expect(self, size: int) -> None:
        with Barrier.changed:
            self.bytes += size
            self.missing -= 1
            assert self.missing >= 0, "announced twice"

    def wait(self, phase: int) -> None:
        def is_over() -> bool:
            while self.copies:
                self.bytes -= self.copies.pop()()
            self._end()
            return self.rounds % 2 != phase

        me = threading.get_ident()
        with Barrier.changed:
            try:
                while not is_over():
                    Barrier.waiting[me] = self, phase
                    if Barrier.is_stuck():
                        raise TimeoutError("nobody arrives")
                    Barrier.changed.wait()
            finally:
                Barrier.waiting.pop(me, None)

    @staticmethod
    def is_stuck() -> bool:
        """Every group waits, none for what is there."""
        return len(Barrier.waiting) == Barrier.groups and not any(
            one.copies or one.rounds % 2 != phase for one, phase in Barrier.waiting.values()
        )

    def _end(self) -> None:
        if not self.missing and not self.bytes and not self.copies:
            self.rounds += 1
            self.missing = self.arrivals
            Barrier.changed.notify_all()


# ------------------------------------------------------------------ copies and products


@dataclass
class Descriptor:
    """A grid in global memory, of which boxes are copied."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any

    @property
    def dtype(self) -> Kind:
        return Kind(self.base.dtype)


def copy_box(source: Descriptor, at: list[Any], full: Barrier, into: Shared) -> None:
    """Begins a copy, which arrives when somebody waits for `full`; it is NaN until then.

    Rows behind the grid's last are zeros.
    """
    assert list(into.data.shape) == source.block_shape
    row, column = map(int, at)
    assert 0 <= row < source.shape[0]
    assert 0 <= column <= source.shape[1] - source.block_shape[1]
    into.data.fill_(math.nan)
    offset = source.base.storage_offset() + row * source.strides[0] + column
    shape = min(source.block_shape[0], source.shape[0] - row), source.block_shape[1]
    box = source.base.as_strided(shape, source.strides, offset)

    def arrive() -> int:
        into.data.zero_()[: len(box)] = box
        return into.data.numel() * into.data.element_size()

    with Barrier.changed:
        full.copies.append(arrive)
        Barrier.changed.notify_all()


@dataclass(eq=False)
class Product:
    """One that is still computed; it has no value before it was waited for."""

    left: Any
    right: Shared
    acc: Any  # or the product that is added to
    use_acc: bool
    result: Value | None = None

    @property
    def shared(self) -> list[Shared]:
        return [one for one in (self.left, self.right) if isinstance(one, Shared)]

    def finish(self) -> None:
        for operand in self.shared:
            operand.touch("product")  # it read until now
        left = self.left.data if isinstance(self.left, Shared) else self.left
        product = left.as_subclass(Tensor).float() @ self.right.data.float()
        acc = self.acc.result if isinstance(self.acc, Product) else self.acc
        self.result = value(product + acc.as_subclass(Tensor) if self.use_acc else product)


_issued = threading.local()


def multiply(
    left: Any, right: Shared, acc: Any, *, use_acc: bool = True, is_async: bool
) -> Product:
    product = Product(left, right, acc, use_acc)
    for operand in product.shared:
        assert operand.is_fenced(), "a store that nobody fenced"
        operand.touch("product")
    _issued.__dict__.setdefault("products", []).append(product)
    return product


def wait_for(left_running: int, deps: list[Any]) -> Any:
    """Waits for all products but the last ones; what else depends on it stays as it is."""
    products = _issued.__dict__.setdefault("products", [])
    if len(products) > left_running:
        # Longer than it takes somebody to go on who does not wait.
        time.sleep((20 if program.group == SLOW else 4) * BREATH)
    while len(products) > left_running:
        products.pop(0).finish()
    found = tuple(one.result if isinstance(one, Product) else one for one in deps)
    assert all(one is not None for one in found), "not all that is used was waited for"
    return found[0] if len(found) == 1 else found


# ------------------------------------------------------------------ programs


def allocate(kind: Any, shape: list[int], layout: Any) -> Any:
    if layout == "barriers":
        found = Barriers(shape[0])
        return found if len(shape) > 1 else found.index(0)
    fill = math.nan if kind.torch.is_floating_point else -1
    return Shared(torch.full(tuple(shape), fill, dtype=kind.torch))


def specialize(parts: list[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
    """Each partition in a thread of its own; the first error of any is raised."""
    errors: list[BaseException] = []
    number = program.number

    def run(function: Any, args: tuple[Any, ...]) -> None:
        program.number, program.group = number, function.__name__
        barrier()  # threads of earlier programs may have had its number
        fence()
        try:
            function(*args)
        except BaseException as error:
            errors.append(error)
        with Barrier.changed:  # others may wait for it in vain
            Barrier.groups -= 1
            Barrier.changed.notify_all()

    Barrier.groups = len(parts)
    Shared.told.clear()  # the memory of earlier programs may have had these addresses
    threads = [threading.Thread(target=run, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, TimeoutError)), errors[0])
