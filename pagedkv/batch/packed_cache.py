"""The cache that carries a prepared step through a forward over packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagedkv.arrays import Ints
from pagedkv.cache.cache import PagedKVCache
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.forward_cache import NAME, ForwardCache, changed_after_cache
from pagedkv.hf.layer import PagedLayer
from pagedkv.hf.model import text_config
from pagedkv.hf.paged_layers import paged_layer
from pagedkv.models import layer_kinds

from .packed_mixers import AbsentStates, Mixers, PagedAbsentStates


class PackedCache(ForwardCache):
    """The cache that the layers of a packed forward see."""

    def __init__(self, model: PreTrainedModel, kv: PagedKVCache) -> None:
        self.model, self.kv = model, kv
        # No mask needs a past here, but the bias of models that write attention out needs one.
        self.seen = int(self.is_written)
        self.complete = False
        self.mixers = Mixers(text_config(model))
        super().__init__(layers=self._layers())

    def _layers(self) -> list[Any]:
        """The model's layers: with K and V, with a state, with both, or with neither."""
        windows = self.kv.config.windows
        layers: list[Any] = []
        for i, kind in enumerate(layer_kinds(text_config(self.model))):
            if kind.state is not None:
                self.mixers.states[i] = kind.state
            at = kind.attention
            if at is None and kind.source is None:
                layers.append(AbsentStates(i))
            elif at is not None and kind.state is not None:
                layers.append(PagedAbsentStates(self, at, windows[at], i))
            else:
                layers.append(paged_layer(self, kind))
        return layers

    @property
    def rows(self) -> list[int]:
        return [] if self.opened is None else self.opened.seqs.tolist()

    def require_usable(self) -> None:
        """Does nothing: the cache lives as long as its model is used."""

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """Returns how far each token's position is ahead of its place; `seen` outside of a forward.

        Without a layer it returns `seen`, too: models make positions of it where none are given.
        """
        if layer_idx is None:
            if self.touched and not self.is_written:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__}: its layers ask how long the cache is, which is "
                    "no one length where rows are packed; `PagedCache` with `generate` works"
                )
            return self.seen
        if self.opened is None:
            return self.seen
        index = getattr(self.layers[layer_idx], "index", 0)  # any, for a layer without K and V
        positions = self.opened.at(index).positions
        return positions - torch.arange(len(positions), device=positions.device)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Returns `seen` to masks, which have no past here, and to layers a length."""
        within = self.touched or self.mixers.entered
        return self.get_seq_length(layer_idx) if within else self.seen

    def abort_step(self) -> None:
        """Forgets K and V that a failed forward left staged; the caller aborts its step."""
        for layer in self.paged:
            layer.staged = None
        self.forget_forward()

    def open_step(self, shape: Sequence[int], mask: Tensor | None) -> None:
        """Does nothing: the step is open already, and nothing is masked in it."""

    def commit_step(self) -> None:
        """Notes that all layers have attended; the caller commits."""
        self.complete = True
        self.forget_forward()

    def enter_mixer(self, mixer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls the mixer for each row group; see `packed_mixers.py`."""
        return self.mixers.enter(mixer, self.opened, args, kwargs)

    def require_complete(self) -> None:
        """Raises if a forward has left out layers of the cache that it was given."""
        if missing := self.mixers.missing:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: its forward computed no state in the layers "
                f"{', '.join(map(str, missing))}, so these were not called by row"
            )
        if not self.complete:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: its forward did not pass all layers through the "
                "cache it was given"
            )

    def packed(self, x: Tensor) -> Tensor:
        """`[1, heads, T, D]` to `[T, heads, D]`."""
        return x[0].transpose(0, 1)

    def unpacked(self, out: Tensor, query: Tensor) -> Tensor:
        """`[T, H, D]` to `[1, T, H, D]`."""
        return out[None]

    def num_queries(self, new: int) -> Ints | None:
        """Raises: rows are packed, so a number alone does not tell the last tokens of each."""
        raise changed_after_cache(self.forward_layer)

    def length_behind(self, new: int) -> None:
        """Returns None: each row has a length of its own."""

    def held(self, layer: PagedLayer) -> None:
        """Raises: packed rows exist only within a forward."""
        raise UnsupportedModelError(
            f"layers[{layer.index}]: K and V of packed rows are read by `generator.cache.gather`"
        )

    def update_dense(self, layer: PagedLayer, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Raises: without paged attention rows would see one another."""
        raise UnsupportedModelError(
            f"attn_implementation: expected {NAME!r} while packed rows are computed; the model was "
            "switched to another one"
        )
