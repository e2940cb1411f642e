"""One layer of a `PagedCache`: the object that a model's attention module calls.

`update()` only stages K and V and returns handles of them (`staged.py`); the attention function,
which also has the mask, writes and attends. This keeps padding tokens out of the pages, so that
rows with different padding share pages.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from pagedkv.errors import UnsupportedModelError

from .forward_cache import (
    ForwardCache,
    PagedLength,
    changed_after_cache,
    require_no_state,
    uncompiled,
    waiting,
)
from .handles import KVHandle, MaskHandle, as_mask
from .staged import Staged
from .transaction import by_hand, enter
from .written import Half


class PagedLayer(CacheLayerMixin):
    """One layer of a `PagedCache`; it holds the cache by a weak reference only."""

    supports_early_init = False
    is_croppable = True
    is_shared = False  # whether it uses the pages of another layer

    def __init__(self, cache: ForwardCache, index: int, window: int | None) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)
        self.index, self.window = index, window
        self.sight = cache.kv.config.sights[index]
        self.is_sliding = window is not None
        self.is_first = index == 0
        self.record_past = False  # transformers resets it by this name
        self.is_initialized = True
        self.staged: Staged | None = None
        self.pair: Any = Half.pair if cache.is_written else KVHandle.pair
        self.dtype = getattr(torch, cache.kv.config.dtype)
        self.device = cache.kv.placement.layers[index]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__ and "_cache" in self.__dict__:
            require_no_state(self._cache(), self, name)
        super().__setattr__(name, value)

    @property
    def keys(self) -> Tensor | None:
        """A copy of the K of all rows, `[B, G, seen, D]`; zeros where no token is held."""
        held = self.held()
        return None if held is None else held[0]

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._require_none(value, "keys")

    @property
    def values(self) -> Tensor | None:
        """A copy of V of all tokens, as `keys` gives K."""
        held = self.held()
        return None if held is None else held[1]

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._require_none(value, "values")

    def held(self) -> tuple[Tensor, Tensor] | None:
        """Copies of the K and V that the rows have in this layer; None without rows."""
        return self.cache.held(self)

    def _require_none(self, value: Tensor | None, name: str) -> None:
        if value is not None:  # transformers' constructor sets None
            raise UnsupportedModelError(
                f"layers[{self.index}].{name}: expected to be read, not set: K and V are in pages, "
                "which other rows may share. `retention=` forgets tokens, `crop` takes back the "
                "last; what edits K and V works on transformers' own cache"
            )

    @property
    def cache(self) -> ForwardCache:
        """The cache this layer belongs to."""
        cache = self._cache()
        if cache is None:
            raise ReferenceError("the PagedCache of this layer is gone")
        cache.require_usable()
        return cache

    def activate_past_recording(self) -> None:
        """From now on, lets `crop` take back tokens of the latest forward."""
        self.record_past = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: pages exist from the start."""

    @uncompiled
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stages K and V `[B, G, q, D]` and returns their handles, or a dense gather."""
        cache = self.cache
        if self.is_first:
            self.begin()
        elif cache.forward_layer != self.index - 1:
            raise UnsupportedModelError(
                f"layer {self.index} was updated after layer {cache.forward_layer}: this model "
                "does not visit its layers in order"
            )
        elif cache.paged[self.index - 1].staged is not None:
            raise changed_after_cache(self.index - 1)
        cache.forward_layer = self.index
        if self.is_first:  # once a forward: a configuration takes 20 us to answer
            cache.forward_is_paged = cache.is_paged
        if not cache.forward_is_paged:
            return self.write_dense(key_states, value_states)
        return self.stage(key_states, value_states)

    def begin(self) -> None:
        """Begins a forward at the first layer, unless something before it has begun it."""
        cache = self.cache
        if self.is_first and not (cache.touched and cache.forward_layer == -1):
            enter(cache)
            cache.touched = True

    def open(self, shape: Sequence[int], padding: Tensor | None) -> None:
        """Opens the step of a forward at the first layer; see `ForwardCache.open_step`."""
        if self.is_first:
            cache = self.cache
            with by_hand(cache):
                cache.open_step(shape, padding)

    def mask(self, given: Any) -> MaskHandle:
        """Returns the mask for its attention, from the argument that its attention was given."""
        return as_mask(given, self.cache)

    def chosen(self, handle: Any) -> Tensor | None:
        """Returns the tokens that queries read, from their handle; None for all."""
        if handle is not None:
            raise UnsupportedModelError(f"layer {self.index}: it has no index keys to choose by")
        return None

    def stage(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Stages K and V and returns their handles."""
        staged = self.wait(Staged(self, key_states, value_states))
        return self.pair(staged)

    def wait(self, staged: Staged) -> Staged:
        """Keeps staged K and V where the attention function finds them."""
        self.staged = staged
        waiting.last = weakref.ref(staged)
        return staged

    def write_dense(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Writes K and V for another attention than ours; returns all K and V of the layer."""
        return self.cache.update_dense(self, key_states, value_states)

    def end_by_hand(self, cache: ForwardCache) -> None:
        """Commits after the last layer when a caller runs layers one by one and no hook fires."""
        passed = cache.forward_layer + 1 == len(cache.paged)
        if cache.transaction is None and passed and cache.all_attended_again:
            with by_hand(cache):
                cache.commit_step()

    @uncompiled
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of keys from the first token on, padding and dropped ones included."""
        cache = self.cache
        return PagedLength.of(cache, cache.seen + query_length), 0

    @uncompiled
    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self.cache.seen

    def get_max_length(self) -> int:
        """-1: a layer has no maximum of its own, the pool says when it is full."""
        return -1
