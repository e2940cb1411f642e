"""The interface of a forward: what layers, masks and attention call on a cache of ours.

A forward is one step: its first layer opens it, and it is committed when the forward has returned
(`transaction.py`). `PagedCache` opens and commits a step for every forward, `PackedCache`
(`batch/packed_cache.py`) carries one that its caller has prepared and commits.
"""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from pagedkv.arrays import Ints
from pagedkv.cache import PagedKVCache
from pagedkv.cache.fair_turns import Turn
from pagedkv.errors import UnsupportedModelError
from pagedkv.models import attending_again, facts_of
from pagedkv.step.metadata import StepMetadata

from .model import text_config
from .release import CACHE
from .texts import Texts

NAME = "pagedkv"
Call = TypeVar("Call", bound=Callable[..., Any])


def uncompiled(function: Call) -> Call:
    """Keeps compilers away from a function that looks at objects they would specialise on."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call, unused-ignore]


class ForwardCache(Cache):
    """A cache as the layers, masks and attention functions of a forward see it.

    Attributes:
        model: the model that the cache was made for.
        kv: the pages.
        seen: tokens so far, padding included; the same for all rows.
        forward_layer: the layer that was updated last in this forward, -1 before the first.
        attended_again: how many layers have attended in this forward to another layer's K and V.
        opened: the step of this forward; None before its first layer, and if all is padding.
        transaction: the transaction of the forward that is under way; None if there is none.
        touched: whether a layer took part in the forward that is under way.
        forward_is_paged: `is_paged` at the first layer of this forward.
        slopes: the slopes of this forward's bias, with a key that tells which; see `written.py`.
        latest_mask: the mask that was made last for a forward with this cache.
        told_places: `[B, q, n]`, the latest choice of an indexer whose model makes a mask of it:
            places among the tokens of the forward; -1 for tokens before it, and for none.
        rows: sequence ids of the batch rows; empty before the first forward.
        texts: the texts of the rows.
        prepared: what `generate` has prepared for its first forward, if that has images.
    """

    model: PreTrainedModel
    texts: Texts
    prepared: Any
    kv: PagedKVCache
    seen: int
    forward_layer: int = -1
    attended_again: int = 0
    opened: StepMetadata | None = None
    transaction: object | None = None
    touched: bool = False
    forward_is_paged: bool = False
    slopes: tuple[Any, Tensor] | None = None
    latest_mask: weakref.ref[Any] | None = None
    told_places: weakref.ref[Tensor] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__:
            require_no_state(self, self, name)
        super().__setattr__(name, value)

    @property
    def is_under_way(self) -> bool:
        """Whether a forward with this cache has begun and is not over."""
        return self.__dict__.get("opened") is not None  # absent while the cache is made

    @property
    @abstractmethod
    def rows(self) -> list[int]:
        """Sequence ids of the batch rows; empty before the first forward."""

    @cached_property
    def paged(self) -> list[Any]:
        """The layers that have K and V of their own; a model may have others."""
        found = (layer for layer in self.layers if isinstance(layer, CacheLayerMixin))
        return [layer for layer in found if not layer.is_shared]

    @cached_property
    def turn(self) -> Turn:
        """The turn that this forward has on the pages, which threads may share."""
        return Turn()

    @cached_property
    def is_written(self) -> bool:
        """Whether the model's layers write attention out, instead of calling a function for it."""
        return facts_of(text_config(self.model).model_type).written

    @cached_property
    def shared_layers(self) -> int:
        """How many of the model's layers attend to the K and V of other layers."""
        return attending_again(text_config(self.model))

    @property
    def position_ids(self) -> Tensor:
        """Absent, so that models which append positions to it begin with those of the forward."""
        raise AttributeError("position_ids")

    @position_ids.setter
    def position_ids(self, value: Tensor) -> None:
        pass

    @property
    def is_paged(self) -> bool:
        """Whether the model attends over pages; any other attention gets all K and V gathered."""
        return bool(text_config(self.model)._attn_implementation == NAME)

    @property
    def all_attended_again(self) -> bool:
        """Whether all layers without own K and V have attended, if they do so over pages."""
        return self.attended_again == self.shared_layers or not self.is_paged

    @property
    def knows_texts(self) -> bool:
        """Whether the ids of rows can be compared with those that the cache holds."""
        return False

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, None]]:
        """Yields K, V and None for each layer that has them, as transformers' own caches do."""
        return ((layer.keys, layer.values, None) for layer in self.paged)

    @abstractmethod
    def require_usable(self) -> None:
        """Raises if the cache can take part in no forward."""

    def require_own(self, outermost: nn.Module) -> None:
        """Raises if a forward is of another model than the one that the cache was made for."""

    def begin_forward(self, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """Called before a forward that was given this cache, with its named arguments.

        Returns:
            The named arguments to run with instead; None leaves them as they are.
        """
        return None

    def begin_part(self, arguments: Mapping[str, Any]) -> None:
        """Called before an inner model of that forward is called with this cache."""

    def end_forward(self) -> None:
        """Called when a forward that was given this cache is over and was not committed."""

    @abstractmethod
    def abort_step(self) -> None:
        """Takes back all that a failed forward did; does nothing if none has failed."""

    def forget_forward(self) -> None:
        """Notes that no forward is under way."""
        self.transaction, self.touched = None, False
        self.forward_layer, self.attended_again = -1, 0

    @abstractmethod
    def open_step(self, shape: Sequence[int], mask: Tensor | None) -> None:
        """Called before the first layer writes.

        Args:
            shape: of K, `[B, G, q, D]`.
            mask: `[B, seen + q]`, False for padding; None without padding.
        """

    @abstractmethod
    def commit_step(self) -> None:
        """Called when all layers have attended and the forward has returned."""

    @abstractmethod
    def packed(self, x: Tensor) -> Tensor:
        """Packs the tokens of `[B, heads, q, D]` that are computed, row by row: `[T, heads, D]`.

        If `x` has fewer tokens than K had in this forward, they are the last of each row.
        """

    @abstractmethod
    def unpacked(self, out: Tensor, query: Tensor) -> Tensor:
        """Unpacks `[T, H, D]` into `[B, q, H, D]`."""

    @abstractmethod
    def num_queries(self, new: int) -> Ints | None:
        """`[B]`, how many of each row's last `new` tokens `packed` gives; None if all of a step."""

    def enter_mixer(self, mixer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Called before a mixer runs on this cache; returns the arguments to run with instead.

        None leaves them as they are.
        """
        return None

    @abstractmethod
    def length_behind(self, new: int) -> int | None:
        """Returns the length of rows behind `new` tokens, padding included; None if they differ."""

    @abstractmethod
    def held(self, layer: Any) -> tuple[Tensor, Tensor] | None:
        """Returns copies of all K and V that the rows have in a layer; None without rows."""

    @abstractmethod
    def update_dense(self, layer: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes K and V, and returns all K and V of a layer, for another attention than ours."""


class _Waiting(threading.local):
    """K and V of a layer that wait for an attention function in this thread.

    Attributes:
        last: the latest staged K and V, until an attention function has taken them.
    """

    last: weakref.ref[Any] | None = None


waiting = _Waiting()


def changed_after_cache(layer: int, how: str = "") -> UnsupportedModelError:
    """Makes the error for a model that changes K and V between cache and attention function."""
    if layer < 0:
        return UnsupportedModelError(
            "a layer attends that was not given the cache of its forward: in training, layers that "
            "are recomputed get none: turn gradient checkpointing off, or use torch.no_grad()"
        )
    how = f" ({how})" if how else ""
    return UnsupportedModelError(
        f"the K and V of layer {layer} did not reach paged attention: this model changes them "
        f"after the cache{how}, or the cache was made for another model. Use transformers' own "
        "cache for it, or one that was made for it."
    )


def require_no_state(cache: ForwardCache | None, holder: object, name: str) -> None:
    """Raises if a model keeps something of its texts as an attribute of its cache, or of a layer.

    Args:
        holder: the cache or the layer, which has no such attribute yet.
    """
    if not hasattr(type(holder), name) and cache is not None and cache.is_under_way:
        raise UnsupportedModelError(
            f"{name}: this model keeps it on its cache, beside K and V. Pages do not have it, so "
            "forks, later turns and packed rows would get that of another text. Use transformers' "
            "own cache for it"
        )


def other_model(expected: int, got: str) -> ValueError:
    """Makes the error for a cache that was made for a model of another depth."""
    return ValueError(
        f"{CACHE}: expected a cache of this model, got one for {expected} layers where the "
        f"model has {got}"
    )


class PagedLength(int):
    """The number of keys a `PagedCache` reports for its mask.

    Other code sees an int. The mask function sees that the mask is for one of our caches.
    """

    cache: ForwardCache

    @classmethod
    def of(cls, cache: ForwardCache, length: int) -> PagedLength:
        """`length`, with the cache that reports it."""
        self = cls(length)
        self.cache = cache
        return self
