"""Handles that stand for K, V and masks between a cache of ours and the attention function.

A handle has the shape, dtype and device of what it stands for, and no elements. So a model can pass
it on, but any computation with it raises: no change that a model makes to K, V or a mask is
silently lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from pagedkv.errors import UnsupportedModelError
from pagedkv.models.kinds import Sight

from .forward_cache import NAME, ForwardCache, changed_after_cache

_aten = torch.ops.aten
SIZES = {_aten.sym_size, _aten.size, _aten.sym_numel, _aten.numel, _aten.sym_stride, _aten.stride}
ASKED = {_aten.dim: 4, _aten.is_contiguous: True}  # answered even if the shape is not told
ANDS = {_aten.bitwise_and, _aten.__and__}
FLOATS = {_aten.where, _aten.lt}
MOVES = {_aten.alias, _aten.detach, _aten.to, _aten._to_copy}


class Handle(Tensor):
    """A tensor without elements: torch answers for its shape, dtype and device, and no more."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, told: bool = True
    ) -> Self:
        """Makes a handle of this shape.

        Args:
            told: whether models may ask for the shape.
        """
        policy = None if told else "sizes"
        made: Self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, dispatch_sizes_strides_policy=policy
        )
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called for functions that need elements, or a shape that is not told."""
        return next(_handles((args, kwargs))).computed(function, args, kwargs or {})

    def computed(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of a torch function that was called with this handle, or raises."""
        raise NotImplementedError

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}()"


def _handles(tree: Any) -> Iterator[Handle]:
    if isinstance(tree, Handle):
        yield tree
    elif isinstance(tree, dict):
        yield from _handles(tuple(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from _handles(part)


class KVHandle(Handle):
    """K or V of one layer between `update` and the attention function: `[B, G, seen + q, D]`.

    Attributes:
        staged: K and V as the model gave them to the cache: the `Staged` of its layer.
        is_key: whether this is K.
    """

    staged: Any
    is_key: bool

    @classmethod
    def pair(cls, staged: Any) -> tuple[KVHandle, KVHandle]:
        """Makes the handles of K and V.

        If rows are packed, they have no common length behind the cache, and a model that asks for
        it is refused.
        """
        new = staged.k.shape[2]
        length = staged.layer.cache.length_behind(new)
        made = []
        for x, is_key in ((staged.k, True), (staged.v, False)):
            shape = (*x.shape[:2], new if length is None else length, x.shape[3])
            handle = cls.of(shape, x.dtype, x.device, told=length is not None)
            handle.staged, handle.is_key = staged, is_key
            made.append(handle)
        return made[0], made[1]

    def computed(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Raises, because pages have K and V as they were when the cache got them.

        In inference mode torch also calls this for moves that change nothing: they are allowed.
        """
        layer, kind = self.staged.layer.index, function.overloadpacket
        if kind in (_aten.to, _aten.contiguous):
            here = torch.empty(0, dtype=self.dtype, device=self.device)
            if function(here, *args[1:], **kwargs) is here:
                return self.pair(self.staged)[0 if self.is_key else 1]
        if kind in ASKED:
            return ASKED[kind]
        if kind in SIZES:
            raise UnsupportedModelError(
                f"layer {layer}: this model asks how long K and V are behind the cache, which is "
                "no one length where rows are packed; `PagedCache` with `generate` may work"
            )
        raise changed_after_cache(layer, str(function))


class ChosenHandle(Handle):
    """The tokens that an indexer chose, between it and the attention function.

    The model takes it for its indexer's output for all rows: a mask of tokens, or their places.

    Attributes:
        layer: the layer of the cache that has the index keys by which they were chosen.
        places: `[T, n]` or `[T, G, n]`, their places in their texts; below 0 for none.
    """

    layer: int
    places: Tensor

    @classmethod
    def made(cls, layer: int, places: Tensor, of_row: Tensor, mask: MaskHandle) -> ChosenHandle:
        """Makes the handle for all rows; `of_row` is what the indexer returned for the last one."""
        as_rows = *mask.shape[:-2], mask.shape[-2], places.shape[-1]
        shape = mask.shape if of_row.dtype == torch.bool else as_rows
        handle = cls.of(shape, of_row.dtype, mask.device)
        handle.layer, handle.places = layer, places
        return handle

    def computed(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Raises: attention would read by the unchanged choice."""
        raise UnsupportedModelError(
            f"this model computes with the tokens that its indexer chose ({function}), which "
            "paged attention reads as they are"
        )


class MaskHandle(Handle):
    """A mask that was made for a forward with a cache of ours: `[B, 1, q, seen + q]`.

    Attributes:
        cache: the cache of the forward that it is for.
        sights: how far a query may see by it: for a short text several are the same mask.
        padding: `[B, seen + q]`, False for padding; None without padding.
        chosen: the chosen tokens that are seen; None for all.
        bias: a bias that the model has put into the mask; None without one.
    """

    cache: ForwardCache
    sights: Sequence[Sight]
    padding: Tensor | None
    chosen: ChosenHandle | None = None
    bias: Tensor | None = None

    @classmethod
    def made(
        cls,
        cache: ForwardCache,
        sights: Sequence[Sight],
        padding: Tensor | None,
        shape: Sequence[int],
        device: torch.device,
    ) -> MaskHandle:
        """Makes the handle of a mask; see its attributes."""
        mask = cls.of(shape, torch.bool, device)
        mask.cache, mask.sights, mask.padding = cache, sights, padding
        return mask

    def computed(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Returns the mask moved, cut to the last queries or narrowed; raises for anything else."""
        kind, shape = function.overloadpacket, [*self.shape]
        if kind in MOVES:
            return self._like(shape)
        if kind is _aten.slice and args[1] == 2 and args[3] >= shape[2]:
            shape[2] = len(range(shape[2])[args[2] :])
            return self._like(shape)
        if kind is _aten.select and args[1:] == (1, 0) and len(shape) == 4:  # the axis of heads
            return self._like([shape[0], *shape[2:]])
        if kind in ANDS and isinstance(args[1], ChosenHandle):
            return self.narrowed(args[1])
        if self.cache.is_written and (kind in FLOATS or kind is _aten.masked_fill):
            made = self._like(shape)  # the mask as numbers that are added to scores
            made.bias = args[0] if kind is _aten.masked_fill else None
            return made
        raise UnsupportedModelError(
            f"attention_mask: this model computes with the mask ({function}), so that it would not "
            "be the one that paged attention reads pages by"
        )

    def narrowed(self, chosen: ChosenHandle) -> MaskHandle:
        """Returns this mask for chosen tokens only."""
        both = self._like([*self.shape])
        both.chosen = chosen
        return both

    def _like(self, shape: Sequence[int]) -> MaskHandle:
        return self.made(self.cache, self.sights, self.padding, shape, self.device)

    def require_sight(self, layer: int, held: Sight) -> None:
        """Raises if this mask shows a layer another window than the cache holds of it."""
        if held not in self.sights:
            raise UnsupportedModelError(
                f"sliding_window: layer {layer} attends under a mask of {self.sights[0]}, and by "
                f"the model's configuration it has {held}; sliding_window and layer_types have to "
                "say what its layers do"
            )


def staged_of(key: Tensor, value: Tensor) -> Any:
    """Returns a layer's `Staged` if K and V are its handles; None if K is no handle."""
    if not isinstance(key, KVHandle):
        return None
    staged = key.staged
    is_value = isinstance(value, KVHandle) and value.staged is staged and not value.is_key
    if not (is_value and key.is_key):
        raise changed_after_cache(staged.layer.index)
    return staged


def as_mask(mask: Any, cache: ForwardCache) -> MaskHandle:
    """Returns a layer's mask if it was made for a forward with this cache; else raises."""
    if isinstance(mask, MaskHandle) and mask.cache is cache:
        return mask
    if mask is None:
        raise UnsupportedModelError(
            "attention_mask: this model asked for no mask, or the mask function of "
            f"{NAME!r} is not registered; padding would be attended"
        )
    raise UnsupportedModelError(
        "attention_mask: expected [batch, tokens], from which transformers makes the mask of this "
        f"forward, got {type(mask).__name__} of shape {list(getattr(mask, 'shape', []))}; a mask "
        "of its own per query is not supported by paged attention"
    )
