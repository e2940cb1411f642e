"""How a score is made of a query and a key: the terms, as data, for every backend.

`reference.paged_attention` says what each term means. Everything else about a term is here: what a
caller may give, what plain torch does with it, and what kernels are compiled for and given at run
time. `triton/attend.py` has what kernels do with it. They get the window as an argument of its own,
because they choose tiles by it, and for some integers in a tuple Triton would compile anew.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

NO_WINDOW = 1 << 30  # wider than any text
LOG2E = math.log2(math.e)
FARTHEST = 63  # places in front of a query: tokens as far, or farther, are no part of its tree
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NUMBERS = (torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max)  # sizes; 0 as well
SOFTCAPS = (1e-3, 1e3)  # beyond, the kernels' tanh by exponentials has too few digits


class Scoring(NamedTuple):
    """How scores are made, as in `reference.paged_attention`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    distance_bias: Tensor | None = None
    tree: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether torch's own attention makes such scores by itself, given a mask."""
        # It scales its mask, too: minus infinity times 0 is NaN, times -1 it draws all weight.
        terms = self.softcap is not None or self.sinks is not None or self.is_biased
        return self.scale > 0 and not terms

    @property
    def by_distance(self) -> bool:
        """Whether it matters how far in front of its query a token is."""
        return self.window is not None or self.tree is not None or self.is_biased

    @property
    def is_biased(self) -> bool:
        """Whether scores have a bias by distance, which needs the places of tokens in the text."""
        return self.alibi_slopes is not None or self.distance_bias is not None

    @property
    def tensors(self) -> tuple[tuple[str, Tensor], ...]:
        """The terms that are tensors, each behind its name."""
        if self.sinks is None and self.tree is None and not self.is_biased:
            return ()  # the usual case
        terms = zip(self._fields[3:], self[3:])
        return tuple((name, term) for name, term in terms if term is not None)

    # ------------------------------------------------------------------ what a caller gives

    def checked(self, q: Tensor, window: int | None) -> Scoring:
        """Checks a caller's terms, and returns them as numbers, with the window of the layer.

        Args:
            q: `[T, H, D]`.

        Raises:
            ValueError, TypeError: a term that is no number, out of its range, or a tensor that does
                not fit the queries.
        """
        scale, _, softcap, sinks, slopes, bias, tree = self
        scale = _number("scale", scale)
        if softcap is not None:
            softcap = _number("softcap", softcap) or None
            if softcap is not None and softcap < 0:
                raise ValueError(f"softcap: expected a positive number, got {softcap}")
        if sinks is not None:
            _check_floats("sinks", sinks, q, "[H]", q.shape[1:2])
        if slopes is not None:
            _check_floats("alibi_slopes", slopes, q, "[H]", q.shape[1:2])
        if bias is not None:
            _check_floats("distance_bias", bias, q, "[T, H, n]", (*q.shape[:2], None))
        if tree is not None:
            _check_tree(tree, q)
            if self.is_biased:
                raise ValueError("tree: expected None with a bias by distance")
        # Kernels read memory, to which a lazy minus has not been applied.
        terms = (None if x is None else x.resolve_neg() for x in (sinks, slopes, bias, tree))
        return Scoring(scale, window, softcap, *terms)

    def check_served(self, q: Tensor) -> None:
        """Raises for terms that kernels cannot compute, or read; `launch.py` checks alignment."""
        if self.softcap is not None and not SOFTCAPS[0] <= self.softcap <= SOFTCAPS[1]:
            raise NotImplementedError(
                f"softcap: expected {SOFTCAPS[0]} to {SOFTCAPS[1]}, got {self.softcap}; "
                "backend='torch' takes any"
            )
        for name, term in self.tensors:
            if term is not self.tree:  # `checked` has checked it
                _check_contiguous(name, term, q)

    # ------------------------------------------------------------------ in plain torch

    def scores(self, products: Tensor, query: Tensor, token: Tensor) -> Tensor:
        """Makes scores of products of queries and keys, also for keys that a query does not see.

        Args:
            products: `[n, G, r, q, s]` float32, of the r query heads of a KV head; overwritten.
            query, token: positions, for terms by distance; they broadcast against products.
                `distance_bias` is that of these queries, `[n, H, q, distances]`.
        """
        scores = products.mul_(self.scale)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        by_head = scores.shape[1:3]
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes.float().view(*by_head, 1, 1)
            scores = scores.add_(slopes * (token - query))
        if self.distance_bias is not None:
            distance, bias = query - token, self.distance_bias.float().unflatten(1, by_head)
            inside = (distance >= 0) & (distance < bias.shape[-1])
            index = distance.clamp(0, bias.shape[-1] - 1).expand(scores.shape)
            # A product with 0 would turn minus infinity, which hides a token, into NaN.
            scores = scores.add_(bias.gather(-1, index).masked_fill_(~inside, 0))
        return scores

    def hidden(self, query: Tensor, token: Tensor, sees: Tensor | None = None) -> Tensor:
        """Returns which tokens a query does not see, by the places of both.

        Args:
            sees: each query's bits of the tree.
        """
        hidden = token > query
        if sees is not None:
            back = query - token
            lacks = (sees >> back.clamp(0, FARTHEST)) & 1 == 0
            hidden = hidden | (lacks & (back < FARTHEST))  # not in place: rows' trees enlarge it
        if self.window is not None:
            hidden |= token <= query - self.window
        return hidden

    # ------------------------------------------------------------------ in kernels

    @property
    def kind(self) -> ScoringKind:
        """Returns the part of it that a kernel is compiled for."""
        if self.window is None and self.softcap is None and not self.tensors:
            return ONLY_SCALED  # the usual case; making one takes longer
        terms = self.window is not None, self.softcap is not None
        sinks, slopes, bias = (None if term is None else term.dtype for term in self[3:6])
        reach = 0, False
        if self.distance_bias is not None:
            reach = self.distance_bias.shape[2], self.distance_bias.is_contiguous()
        return ScoringKind(*terms, sinks, slopes, bias, *reach, self.tree is not None)

    def arguments(self) -> tuple[int, Terms]:
        """The window and the other terms as kernels take them at run time.

        Their types are what a kernel was compiled for.
        """
        window = NO_WINDOW if self.window is None else min(self.window, NO_WINDOW)
        if self.softcap is None:
            return window, Terms(self.scale * LOG2E, 0.0, *self[3:])
        return window, Terms(float(self.scale), float(self.softcap), *self[3:])


class ScoringKind(NamedTuple):
    """The terms that scores have; for tensors their dtype.

    Attributes:
        distances: how many a `distance_bias` has; 0 without one.
        by_query: whether it differs by query, else by head alone.
    """

    window: bool
    softcap: bool
    sinks: torch.dtype | None = None
    alibi_slopes: torch.dtype | None = None
    distance_bias: torch.dtype | None = None
    distances: int = 0
    by_query: bool = False
    tree: bool = False


ONLY_SCALED = ScoringKind(False, False)


class Terms(NamedTuple):
    """Terms as one argument of a kernel; a tensor that is not there is None when it is compiled.

    Numbers are floats: Triton would compile a kernel anew for some values of an integer in a tuple.

    Attributes:
        scale: times log2(e) unless there is a softcap, since weights are powers of two.
        softcap: 0 if there is none.
    """

    scale: float
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    distance_bias: Tensor | None
    tree: Tensor | None = None


def _number(name: str, value: Any) -> float:
    """Returns a number as kernels take it, in float32; raises for others, and for what is none."""
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}") from None
    if number and not NUMBERS[0] <= abs(number) <= NUMBERS[1]:
        least, most = NUMBERS
        raise ValueError(
            f"{name}: expected a finite number of float32, 0 or from {least:.4g} to {most:.4g} in "
            f"size, got {number}"
        )
    return number


def _check_floats(
    name: str, term: Tensor, q: Tensor, axes: str, shape: tuple[int | None, ...]
) -> None:
    """Raises unless a term has this shape, None for any length, on the device of the queries."""
    if not isinstance(term, Tensor) or term.layout != torch.strided:
        got = term.layout if isinstance(term, Tensor) else type(term).__name__
        raise TypeError(f"{name}: expected a dense tensor, got {got}")
    expected = ["n" if length is None else length for length in shape]
    fits = len(term.shape) == len(shape) and all(
        has > 0 if length is None else has == length for has, length in zip(term.shape, shape)
    )
    if not fits or term.dtype not in FLOATS:
        wanted = f"{axes} = {expected}".replace("'", "")
        raise ValueError(
            f"{name}: expected float32, float16 or bfloat16 of shape {wanted}, got {term.dtype} "
            f"{list(term.shape)}"
        )
    if term.device != q.device:
        raise ValueError(f"{name}: expected device {q.device}, got {term.device}")


def _check_tree(tree: Tensor, q: Tensor) -> None:
    """Raises unless a tree has 64 bits for every query, where kernels find them."""
    if not isinstance(tree, Tensor) or tree.layout != torch.strided or tree.dtype != torch.int64:
        got = tree.dtype if isinstance(tree, Tensor) else type(tree).__name__
        raise TypeError(f"tree: expected a dense int64 tensor, got {got}")
    if tree.shape != q.shape[:1] or not tree.is_contiguous():
        raise ValueError(
            f"tree: expected a contiguous [T] = [{len(q)}], got {list(tree.shape)} with strides "
            f"{tree.stride()}"
        )
    if tree.device != q.device:
        raise ValueError(f"tree: expected device {q.device}, got {tree.device}")


def _check_contiguous(name: str, term: Tensor, q: Tensor) -> None:
    """Raises unless a term is contiguous, or is one for all queries and expanded over them."""
    own = term.shape == q.shape[1:2] if term.ndim == 1 else term.shape[:2] == q.shape[:2]
    by_head = term.ndim == 3 and term.stride(0) == 0 and term[0].is_contiguous()
    if not own or not (term.is_contiguous() or by_head):
        expected = f"[H] = [{q.shape[1]}]" if term.ndim == 1 else "[T, H, n], or an expanded [H, n]"
        raise ValueError(
            f"{name}: expected a contiguous {expected}, got {list(term.shape)} with "
            f"strides {term.stride()}"
        )
