"""Whether a model's weights are still those that stored K and V were computed with.

`snapshot` reads a few elements of each parameter and buffer, `is_stale` compares two snapshots; the
callers decide what follows from a change. A snapshot costs a few milliseconds, and one read back
for each device. torch's counts of writes would not do: fused optimizers and numpy views write
without counting.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pagedkv.errors import ModelChangedError

from .adapters import state_of, tensors_of

SAMPLES = 64  # elements read of each tensor: a training step changes nearly all elements
GOLDEN = (math.sqrt(5) - 1) / 2


class Seen(NamedTuple):
    """A tensor at the time of a snapshot.

    Attributes:
        tensor: the tensor itself.
        version: writes to it that torch counted.
        address: where its bytes lie.
        bits: the bytes of some of its elements.
        of_adapter: whether it belongs to an adapter.
    """

    tensor: weakref.ref[Tensor]
    version: int
    address: int
    bits: bytes
    of_adapter: bool

    def is_same(self, other: Seen) -> bool:
        """Whether no sign shows that the tensor was changed in between."""
        return self.tensor() is other.tensor() and self[1:4] == other[1:4]


Snapshot = dict[str, Seen]


def snapshot(model: nn.Module) -> Snapshot:
    """The weights of a model as they are now, by name."""
    named = [
        (part, tensor, of_adapter)
        for name, whole, of_adapter in tensors_of(model)
        for part, tensor in plain(name, whole)
    ]
    every = bits([tensor for _, tensor, _ in named])
    return {
        name: Seen(weakref.ref(tensor), *_counted(tensor), some, of_adapter)
        for (name, tensor, of_adapter), some in zip(named, every)
    }


def is_stale(before: Snapshot, now: Snapshot) -> bool:
    """Whether K and V computed at one snapshot may differ from those computed at a later one.

    Adapters that were added do not count: where they act, the salt of prefixes differs
    (`adapters.state_of`), and elsewhere they change nothing.
    """
    for name, seen in before.items():
        if name not in now or not seen.is_same(now[name]):
            return True
    return any(not seen.of_adapter for name, seen in now.items() if name not in before)


class Weights(NamedTuple):
    """The weights and adapters that the rows of a cache were begun with."""

    seen: Snapshot
    adapters: bytes

    @classmethod
    def of(cls, model: Any, by_row: Sequence[str] | None = None) -> Weights:
        """Weights and adapters of a model as it is now; `by_row` names the adapter of each row."""
        return cls(snapshot(model), state_of(model, by_row))

    def require_same(self, model: Any, by_row: Sequence[str] | None = None) -> None:
        """Raises ModelChangedError where K and V computed now would be others."""
        now = Weights.of(model, by_row)
        if now.adapters != self.adapters or is_stale(self.seen, now.seen):
            others = now.adapters != self.adapters
            what = "adapters (`set_adapter`, `adapter_names`)" if others else "weights"
            raise ModelChangedError(
                f"model: its {what} have changed since this PagedCache was filled; `reset()` it "
                "or start a new one"
            )


def plain(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor, and the tensors inside it if it is a wrapper (quantised, distributed)."""
    yield name, tensor
    if is_traceable_wrapper_subclass(tensor):
        for part in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, part)
            if isinstance(inner, Tensor):  # a mesh of devices is none
                yield from plain(f"{name}.{part}", inner)


def _counted(tensor: Tensor) -> tuple[int, int]:
    try:
        address = tensor.data_ptr()
    except Exception:  # of a class of its own, without memory
        address = 0
    return -1 if tensor.is_inference() else tensor._version, address


# ------------------------------------------------------------------ some elements of each


@torch.inference_mode()
def bits(tensors: Sequence[Tensor]) -> list[bytes]:
    """The exact bytes of some elements of each tensor; none where a tensor has none here."""
    views: dict[torch.device, dict[torch.dtype, list[tuple[int, Tensor]]]] = {}
    for i, tensor in enumerate(tensors):
        view = some_of(tensor)
        if view is not None:
            views.setdefault(view.device, {}).setdefault(view.dtype, []).append((i, view))
    found = [b""] * len(tensors)
    for kinds in views.values():
        packed = [torch.cat([view for _, view in kind]) for kind in kinds.values()]
        raw = torch.cat([one.view(torch.uint8) for one in packed]).cpu().numpy().tobytes()
        begin = 0
        for i, view in chain(*kinds.values()):
            end = begin + view.numel() * view.element_size()
            found[i] = raw[begin:end]
            begin = end
    return found


def some_of(tensor: Tensor) -> Tensor | None:
    """`[n]`, at most `SAMPLES` elements from all over a tensor, of which nothing else is read.

    None for a tensor without readable elements: it is empty, its bytes are elsewhere, or it is of a
    class of its own.
    """
    if type(tensor) not in (nn.Parameter, Tensor, nn.Buffer):
        try:
            tensor = tensor.data
            is_plain = type(tensor) is Tensor
        except Exception:  # a class of its own may raise anything
            return None
        if not is_plain:
            return None
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return None
    if not tensor.is_contiguous():
        return tensor[_grid(tensor.shape)].reshape(-1)
    places = places_of(tensor)
    return tensor.as_strided((len(places),), (places.step,))


def places_of(tensor: Tensor) -> range:
    """Where in a contiguous tensor of this shape its samples lie."""
    if not tensor.numel():
        return range(0)
    step, count = _stride(tensor.numel(), tensor.shape[-1] if tensor.ndim else 1)
    return range(0, step * count, step)


@cache
def _stride(size: int, width: int) -> tuple[int, int]:
    """How far apart samples of a contiguous tensor of rows lie, and how many there are.

    Each lies some rows further and the golden ratio of a row to the right of the last, so that they
    fall into as many rows and columns as there are samples.
    """
    count = min(size, SAMPLES)
    step = size // count
    if step > 2 * width:
        step = (step // width - 1) * width + round(GOLDEN * width)
    while math.gcd(step, width) > 1:
        step -= 1
    return step, count


def _grid(shape: Sequence[int]) -> tuple[slice, ...]:
    """At most `SAMPLES` elements of a tensor that lies in memory in any way."""
    left, cuts = SAMPLES, []
    for i, size in enumerate(shape):
        count = min(size, max(1, round(left ** (1 / (len(shape) - i)))))
        cuts.append(slice(0, None, -(-size // count)))
        left //= count
    return tuple(cuts)
