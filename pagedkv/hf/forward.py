"""What a forward through a cache of ours is made of, whichever kind of cache it is.

A forward is one step: its first layer opens it, its last one closes it. `PagedCache` opens and
commits a step for every forward, `PackedCache` (`batch/packed.py`) carries one that its caller has
prepared.
"""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pagedkv.cache import PagedKVCache
from pagedkv.errors import UnsupportedModelError
from pagedkv.step.metadata import StepMetadata

NAME = "pagedkv"


class ForwardCache(Cache):
    """A cache as the layers, masks and attention of a forward know it.

    Attributes:
        kv: the pages.
        seen: tokens so far, padding included; the same for all rows.
        mask_made: whether a mask was asked for since the last step was opened.
        forward_layer: the layer that was updated last in this forward, -1 before the first.
        opened: the step of this forward; None before its first layer, and where all is padding.
    """

    model: PreTrainedModel
    kv: PagedKVCache
    seen: int
    mask_made: bool
    forward_layer: int
    opened: StepMetadata | None

    @abstractmethod
    def require_usable(self) -> None:
        """Raises where the cache can take part in no forward."""

    @abstractmethod
    def abort_step(self) -> None:
        """Takes back what a forward that died left open or staged."""

    @abstractmethod
    def open_step(self, shape: Sequence[int], mask: Tensor | None) -> None:
        """Before the first layer writes: K is `[B, G, q, D]`, the mask `[B, seen + q]` or None."""

    @abstractmethod
    def close_step(self, new: int) -> None:
        """After the last layer has attended, of a forward of q tokens."""

    @abstractmethod
    def packed(self, x: Tensor) -> Tensor:
        """Real tokens of `[B, heads, q, D]`, row after row: `[T, heads, D]`."""

    @abstractmethod
    def unpacked(self, out: Tensor, query: Tensor) -> Tensor:
        """`[T, H, D]` back to `[B, q, H, D]`."""

    @abstractmethod
    def update_dense(self, layer: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All K and V of a layer, where the model was switched to another attention."""


class _Waiting(threading.local):
    """What a forward in this thread has not finished.

    Attributes:
        last: the K and V last staged by a layer, until an attention function has taken them.
        cache: whose layers are updated, from the first of them on.
    """

    last: weakref.ref[Any] | None = None
    cache: weakref.ref[ForwardCache] | None = None


waiting = _Waiting()


def changed_after_cache(layer: int) -> UnsupportedModelError:
    """The refusal of a model whose K and V do not reach the attention function as they were."""
    return UnsupportedModelError(
        f"the K and V of layer {layer} did not reach paged attention: this model changes them "
        "after the cache, or the cache was made for another model. Use transformers' own cache "
        "for it, or one that was made for it."
    )


def other_model(expected: int, got: int) -> ValueError:
    """The error of a cache that was made for a model of another depth."""
    return ValueError(
        f"past_key_values: expected a cache of this model, got one for {expected} layers where the "
        f"model has {got} or more"
    )


class PagedLength(int):
    """The number of keys a `PagedCache` reports for its mask.

    An int to everyone else. The mask function knows by it that the mask is for one of our caches,
    and the cache knows that the mask function was called at all: a name that is registered for
    attention but not for masks would silently get none.
    """

    cache: ForwardCache

    @classmethod
    def of(cls, cache: ForwardCache, length: int) -> PagedLength:
        """`length`, with the cache that reports it."""
        self = cls(length)
        self.cache = cache
        return self
