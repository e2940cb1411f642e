"""Tells whether a model is still the one that K and V were computed with.

Torch's counts of writes are not enough: fused optimizers and numpy views write without counting.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from pagedkv.errors import ModelChangedError

from .adapters import parametrized_in, state_of, tensors_of
from .longrope import angles_of
from .samples import bits


class SeenTensor(NamedTuple):
    """A tensor at the time of a snapshot.

    Attributes:
        tensor: the tensor itself.
        version: writes to it that torch counted; None if PEFT's forwards are among them.
        address: where its bytes lie.
        bits: the bytes of some of its elements.
        of_adapter: whether it belongs to an adapter.
    """

    tensor: weakref.ref[Tensor]
    version: int | None
    address: int
    bits: bytes
    of_adapter: bool

    def is_same(self, other: SeenTensor) -> bool:
        """Whether nothing shows that the tensor was changed in between."""
        versions = {self.version, other.version}
        counted = len(versions) == 1 or None in versions
        return self.tensor() is other.tensor() and counted and self[2:4] == other[2:4]


Snapshot = dict[str, SeenTensor]


def snapshot(model: nn.Module, left_out: Container[int] = ()) -> Snapshot:
    """Notes the weights of a model as they are now, by name, but for those of these `id()`."""
    held = [each for each in tensors_of(model) if id(each.tensor) not in left_out]
    found, parametrized = {}, parametrized_in(model)
    for each, some in zip(held, bits([each.tensor for each in held])):
        tensor = each.tensor
        version, address = _counted(tensor)
        version = None if id(tensor) in parametrized else version
        found[each.name] = SeenTensor(weakref.ref(tensor), version, address, some, each.of_adapter)
    return found


def is_stale(before: Snapshot, now: Snapshot) -> bool:
    """Whether K and V computed at one snapshot may differ from those computed at a later one.

    Added adapters do not count: if they act, the salt of prefixes differs (`adapters.state_of`),
    and if not, they change nothing.
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
        """Notes weights and adapters of a model as they are; `by_row` has each row's adapter."""
        return cls(snapshot(model, left_out=angles_of(model)), state_of(model, by_row))

    def require_same(self, model: Any, by_row: Sequence[str] | None = None) -> None:
        """Raises ModelChangedError if the model would now compute other K and V."""
        now = Weights.of(model, by_row)
        if now.adapters != self.adapters or is_stale(self.seen, now.seen):
            others = now.adapters != self.adapters
            what = "adapters (`set_adapter`, `adapter_names`)" if others else "weights"
            raise ModelChangedError(
                f"model: its {what} have changed since this PagedCache was filled; `reset()` it "
                "or start a new one"
            )


def _counted(tensor: Tensor) -> tuple[int | None, int]:
    try:
        address = tensor.data_ptr()
    except Exception:  # a special class may have no memory
        address = 0
    return -1 if tensor.is_inference() else tensor._version, address
