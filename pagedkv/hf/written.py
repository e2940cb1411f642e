"""Attention that a model writes out itself, followed from `update` to the product with V.

Some models call no attention function: they multiply queries with K, scale, add a bias and a mask,
take the softmax and multiply it with V. Each of these is noted down here in place of a number, and
the last one attends over pages. Whatever is not such a step raises, so nothing is left out.
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
from .model import named_model
from .staged import Staged
from .strange import refuse_strange

LEAST = -1e4  # what is added to hide a score is lower
ALL = Sight()
ROUNDED = 2.0**-7  # of a bias in bfloat16


class _Noted:
    """A tensor that is not computed: only its shape is known, and how it would come about.

    Attributes:
        staged: K and V of its layer.
        like: of its shape, without elements.
    """

    def __init__(self, staged: Staged, like: Tensor) -> None:
        self.staged, self.like = staged, like

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called where torch is given one."""
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
        """The error for what is no step of attention."""
        return changed_after_cache(self.staged.layer.index, what)

    def _as(self, like: Tensor, **changed: Any) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self), like=like, **changed)
        return other

    @property
    def shape(self) -> torch.Size:
        """As that of the tensor."""
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
        """As that of the tensor."""
        return self.like.size(*dim)

    def view(self, *shape: Any) -> Self:
        """Returns it with other axes in front; its last two stay."""
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
        """Both; where rows are packed, one token longer than what is new."""
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
        scale: their factor.
        bias: what is added to them, and its factor; None for nothing.
        mask: under which they are seen; None until one is added.
        narrowed: whether the layer has hidden those outside of its own window itself.
        are_weights: whether these are weights.
    """

    query: Tensor
    scale = 1.0
    bias: tuple[Tensor, float] | None = None
    mask: MaskHandle | None = None
    narrowed = False
    are_weights = False

    @classmethod
    def of(cls, query: Tensor, key: Any) -> Scores:
        """The products of queries and K."""
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
        """Hides what the mask says."""
        if not isinstance(mask, MaskHandle) or value > LEAST:
            raise self.strange("masked_fill")
        return self + mask

    def where(self, seen: Any, hidden: Any) -> Scores:
        """Hides what is not seen by a mask of the layer's own, as long as the forward's."""
        value = hidden.item() if isinstance(hidden, Tensor) and not hidden.ndim else hidden
        usual = isinstance(value, float) and value <= LEAST and isinstance(seen, Tensor)
        told = self.staged.layer.cache.length_behind(1) is not None
        if self.are_weights or not usual or (told and seen.shape[-2:] != self.shape[-2:]):
            raise self.strange("where")
        if not _is_sight(seen, self.staged.layer.sight):
            raise self.strange("a mask that is not of its window")
        return self._as(self.like, narrowed=True)

    def at_least(self, floor: Any) -> Scores:
        """Returns itself: what hides a score may be no lower than this, and hides it as well."""
        if self.are_weights or not isinstance(floor, Tensor) or floor.ndim or floor.item() > LEAST:
            raise self.strange("max")
        return self

    def weights(self, dim: int) -> Scores:
        """Their softmax."""
        if self.are_weights or dim % self.like.ndim != self.like.ndim - 1:
            raise self.strange("softmax")
        return self._as(self.like, are_weights=True)

    def __matmul__(self, value: Any) -> Tensor:
        """Attends over pages, with all that was noted: `[..., q, D]`."""
        staged, layer = self.staged, self.staged.layer
        right = isinstance(value, Half) and not (value.is_key or value.turned)
        if not (self.are_weights and right and value.staged is staged):
            raise self.strange("matmul")
        waiting.last = None
        mask = as_mask(self.mask, layer.cache)
        if not (self.narrowed and ALL in mask.sights):
            mask.require_sight(layer.index, layer.sight)
        if self.bias is None and not layer.cache.is_placed:
            raise UnsupportedModelError(
                f"{named_model(layer.cache.model)} cannot run packed rows: its forward takes no "
                "position_ids, positions come from the length of the cache. `PagedCache` with "
                "`generate` works."
            )
        terms: dict[str, Any] = {"scale": self.scale}
        if self.bias is not None:
            terms["alibi_slopes"] = self._slopes(mask)
        elif mask.bias is not None:
            raise self.strange("a bias within the mask")
        query = self.query.to(staged.k.dtype)  # some cast it for the product
        out = staged.attend(query, mask.padding, **terms).transpose(1, 2)
        return out.reshape(*self.shape[:-1], out.shape[-1])

    def _slopes(self, mask: MaskHandle) -> Tensor:
        """`[H]`, the slopes of the bias; layers of a forward have it in common."""
        assert self.bias is not None
        bias, factor = self.bias
        within = mask.bias  # a layer that adds it itself counts it once
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
    """`[H]` float32, the slopes of a bias if it is one of ALiBi; else None.

    It rises by the slope from token to token: from 0 at the first of a text, or by columns up to 0
    at the last one. What stands beside the 0 is the slope as it is.

    Args:
        bias: `[..., 1, tokens]`, of the heads of all rows alike or of each.
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


def _softmax(scores: Any, dim: int = -1, *_: Any, **__: Any) -> Scores:
    found: Scores = scores.weights(dim)
    return found


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


def _max(scores: Any, floor: Any) -> Any:
    return scores.at_least(floor)


_FUNCTIONS: dict[str, Any] = {
    "matmul": _product,
    "rmatmul": lambda one, other: _product(other, one),
    "bmm": _product,
    "baddbmm": _added_product,
    "max": _max,
    "where": _where,
    "softmax": _softmax,
    "dropout": _dropout,
}
