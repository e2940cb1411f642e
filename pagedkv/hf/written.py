"""Follows attention that a model writes out itself, from `update` to the product with V.

Some models call no attention function: they multiply queries with K, scale, add a bias and a mask,
take the softmax and multiply it with V. Each of these operations is noted down here instead of
computed, and the last one attends over pages. Any other operation raises, so nothing is left out.
"""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor

from pagedkv.errors import UnsupportedModelError
from pagedkv.models.kinds import Sight

from .forward_cache import changed_after_cache, waiting
from .handles import MaskHandle, as_mask
from .staged import Staged
from .strange import refuse_strange

LEAST = -1e4  # a number added to hide a score is lower
ALL = Sight()
ROUNDED = 2.0**-7  # relative rounding that a bias in bfloat16 may have


class _Noted:
    """A tensor that is not computed: it has a shape, and notes how it would be computed.

    Attributes:
        staged: K and V of its layer.
        like: a tensor of its shape, without elements.
    """

    def __init__(self, staged: Staged, like: Tensor) -> None:
        self.staged, self.like = staged, like

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called when a function of torch is given such a tensor."""
        name = getattr(function, "__name__", "").strip("_")
        noted = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, _Noted))
        if name not in _FUNCTIONS:
            raise noted.strange(name)
        return _FUNCTIONS[name](*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        raise self.strange(name)

    def _no_step(self, *_: Any) -> Any:
        raise self.strange("an operator")

    __add__ = __sub__ = __mul__ = __truediv__ = __pow__ = __matmul__ = __neg__ = _no_step
    __getitem__ = __radd__ = __rsub__ = __rmul__ = _no_step

    def strange(self, what: str) -> UnsupportedModelError:
        """Makes the error for an operation that is no step of attention."""
        return changed_after_cache(self.staged.layer.index, what)

    def _as(self, like: Tensor, **changed: Any) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self), like=like, **changed)
        return other

    @property
    def shape(self) -> torch.Size:
        """The shape that the tensor would have."""
        return self.like.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of K and V."""
        return self.staged.k.dtype

    @property
    def device(self) -> torch.device:
        """The device of K and V."""
        return self.staged.k.device

    def size(self, *dim: int) -> Any:
        """Returns the size that the tensor would have."""
        return self.like.size(*dim)

    def view(self, *shape: Any) -> Self:
        """Returns it with other leading axes; the last two stay."""
        like = self.like.reshape(*shape)
        if like.shape[-2:] != self.like.shape[-2:]:
            raise self.strange("view")
        return self._as(like)

    reshape = view

    def to(self, *_: Any, **__: Any) -> Self:
        """Returns itself: attention computes in float32."""
        return self

    float = type = contiguous = to


class Half(_Noted):
    """K or V: `[..., tokens, D]`.

    Attributes:
        is_key: whether this is K.
        turned: whether its last two axes are swapped.
    """

    is_key: bool
    turned = False

    @classmethod
    def pair(cls, staged: Staged) -> tuple[Half, Half]:
        """Makes both; if rows are packed, one token longer than the new tokens."""
        new = staged.k.shape[2]
        length = staged.layer.cache.length_behind(new)
        made = []
        for x, is_key in ((staged.k, True), (staged.v, False)):
            shape = (*x.shape[:2], new + 1 if length is None else length, x.shape[3])
            half = cls(staged, torch.empty(shape, device="meta"))
            half.is_key = is_key
            made.append(half)
        return made[0], made[1]

    def transpose(self, one: int, other: int) -> Half:
        """Swaps the last two axes."""
        axes = self.like.ndim
        if {one % axes, other % axes} != {axes - 2, axes - 1}:
            raise self.strange("transpose")
        return self._as(self.like.transpose(one, other), turned=not self.turned)


class Scores(_Noted):
    """Scores of queries and keys, or the weights made of them: `[..., q, tokens]`.

    Attributes:
        query: `[B, H, q, D]`.
        scale: the factor of the scores.
        bias: a bias that is added to them, and its factor; None without one.
        mask: the mask that was added; None before.
        narrowed: whether the layer itself has hidden the scores outside its window.
        are_weights: whether the softmax was taken.
    """

    query: Tensor
    scale = 1.0
    bias: tuple[Tensor, float] | None = None
    mask: MaskHandle | None = None
    narrowed = False
    are_weights = False

    @classmethod
    def of(cls, query: Tensor, key: Any) -> Scores:
        """Makes the scores of queries and K."""
        if not (isinstance(key, Half) and key.is_key and key.turned):
            raise key.strange("matmul")
        rows, heads = key.staged.k.shape[:2]
        made = cls(key.staged, torch.empty(query.shape, device="meta") @ key.like)
        made.query = query.reshape(rows, -1, *query.shape[-2:])
        if made.query.shape[1] % heads:
            raise key.strange("matmul")
        return made

    def __mul__(self, factor: Any) -> Scores:
        if self.are_weights or not isinstance(factor, (int, float)):
            raise self.strange("mul")
        bias = self.bias and (self.bias[0], self.bias[1] * factor)
        return self._as(self.like, scale=self.scale * factor, bias=bias)

    def __truediv__(self, divisor: Any) -> Scores:
        return self * (1 / divisor)

    def __add__(self, other: Any) -> Scores:
        if self.are_weights or not isinstance(other, Tensor):
            raise self.strange("add")
        if isinstance(other, MaskHandle):
            return self._as(self.like, mask=other)
        told = self.staged.layer.cache.length_behind(1) is not None
        if self.bias is not None or (told and other.shape[-1] != self.shape[-1]):
            raise self.strange(f"a bias of shape {[*other.shape]}")
        if other.shape[-2] > 1 and not other.any():  # what a sum of products began with
            return self
        return self._as(self.like, bias=(other, 1.0))

    def masked_fill(self, mask: Any, value: float) -> Scores:
        """Hides the scores that the mask hides."""
        if not isinstance(mask, MaskHandle) or value > LEAST:
            raise self.strange("masked_fill")
        return self + mask

    def where(self, seen: Any, hidden: Any) -> Scores:
        """Hides scores by a mask of the layer's own, which has the length of the forward's."""
        value = hidden.item() if isinstance(hidden, Tensor) and not hidden.ndim else hidden
        usual = isinstance(value, float) and value <= LEAST and isinstance(seen, Tensor)
        told = self.staged.layer.cache.length_behind(1) is not None
        if self.are_weights or not usual or (told and seen.shape[-2:] != self.shape[-2:]):
            raise self.strange("where")
        if not _is_sight(seen, self.staged.layer.sight):
            raise self.strange("a mask that is not of its window")
        return self._as(self.like, narrowed=True)

    def at_least(self, floor: Any) -> Scores:
        """Returns itself: a floor this low limits only hidden scores, which stay hidden."""
        if self.are_weights or not isinstance(floor, Tensor) or floor.ndim or floor.item() > LEAST:
            raise self.strange("max")
        return self

    def weights(self, dim: int = -1, *_: Any, **__: Any) -> Scores:
        """Notes their softmax."""
        if self.are_weights or dim % self.like.ndim != self.like.ndim - 1:
            raise self.strange("softmax")
        return self._as(self.like, are_weights=True)

    def __matmul__(self, value: Any) -> Tensor:
        """Attends over pages with all noted operations: `[..., q, D]`."""
        staged, layer = self.staged, self.staged.layer
        right = isinstance(value, Half) and not (value.is_key or value.turned)
        if not (self.are_weights and right and value.staged is staged):
            raise self.strange("matmul")
        waiting.last = None
        mask = as_mask(self.mask, layer.cache)
        if not (self.narrowed and ALL in mask.sights):
            mask.require_sight(layer.index, layer.sight)
        terms: dict[str, Any] = {"scale": self.scale}
        if self.bias is not None:
            terms["alibi_slopes"] = self._slopes(mask)
        elif mask.bias is not None:
            raise self.strange("a bias within the mask")
        query = self.query.to(staged.k.dtype)  # some cast it for the product
        out = staged.attend(query, mask.padding, **terms).transpose(1, 2)
        return out.reshape(*self.shape[:-1], out.shape[-1])

    def _slopes(self, mask: MaskHandle) -> Tensor:
        """Returns the slopes of the bias, `[H]`; all layers of a forward share one bias."""
        assert self.bias is not None
        bias, factor = self.bias
        within = mask.bias  # the bias in the mask, if any, is the same one
        cache, layer = self.staged.layer.cache, self.staged.layer
        at = bias.data_ptr(), bias.shape, bias.stride()
        if layer.is_first or cache.slopes is None or cache.slopes[0] != at:
            found = slopes_of(bias, self.query.shape[1], mask.padding)
            same = within is None or torch.allclose(within.flatten(), bias.flatten() * factor)
            if found is None or not same:
                raise self.strange("a bias that is no slope by distance")
            cache.slopes = at, found
        return cache.slopes[1] * factor


def _is_sight(seen: Tensor, sight: Sight) -> bool:
    """Whether a mask `[..., q, tokens]` of the last q of some tokens shows what a layer sees."""
    queries, tokens = seen.shape[-2:]
    if sight.chunked or seen.dtype != torch.bool or seen.numel() != queries * tokens:
        return False
    place = torch.arange(tokens, device=seen.device)
    last = place[tokens - queries :, None]
    plain = place <= last
    if sight.window is not None:
        plain &= place > last - sight.window
    return torch.equal(seen.reshape(plain.shape), plain)


def slopes_of(bias: Tensor, heads: int, padding: Tensor | None) -> Tensor | None:
    """Returns the slopes of a bias, `[H]` float32, if it is one of ALiBi; else None.

    Such a bias rises by the slope from token to token: from 0 at a text's first token, or by
    columns up to 0 at the last one. The number next to the 0 is the slope itself.

    Args:
        bias: `[..., 1, tokens]`, by head, for all rows together or for each row.
        padding: `[B, tokens]`, False for padding.
    """
    tokens = bias.shape[-1]
    if bias.shape[-2] != 1 or bias.numel() % (heads * tokens):
        return None
    rows = bias.detach().double().reshape(-1, heads, tokens)
    column = torch.arange(tokens, device=bias.device)[None]
    seen = torch.ones_like(column, dtype=torch.bool) if padding is None else padding
    if len(rows) not in (1, len(seen)):
        return None
    least = torch.where(rows == 0, math.inf, rows.abs()).amin((0, 2))
    slopes = torch.where(least.isinf(), 0.0, least)
    for place in (seen.cumsum(-1) - 1, column - (tokens - 1)):
        rise = slopes[:, None] * place[:, None]
        off = (rows - rise).abs() > ROUNDED * rise.abs()
        if not (off & seen[:, None]).any():
            return slopes.float()
    return None


def _dropout(weights: Any, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> Any:
    refuse_strange(p if training else 0.0, {})
    return weights


def _product(one: Any, other: Any) -> Any:
    return one @ other if isinstance(one, Scores) else Scores.of(one, other)


def _added_product(
    bias: Tensor, batch1: Tensor, batch2: Any, *, beta: float = 1, alpha: float = 1
) -> Scores:
    scores = Scores.of(batch1, batch2) * alpha
    return scores + (bias if beta == 1 else bias * beta)


def _where(seen: Any, scores: Any, hidden: Any) -> Any:
    if not isinstance(scores, Scores):
        raise hidden.strange("where")
    return scores.where(seen, hidden)


_FUNCTIONS: dict[str, Any] = {
    "matmul": _product,
    "rmatmul": lambda one, other: _product(other, one),
    "bmm": _product,
    "baddbmm": _added_product,
    "max": Scores.at_least,
    "where": _where,
    "softmax": Scores.weights,
    "dropout": _dropout,
}
