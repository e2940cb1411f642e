"""How a score is made of a query and a key: the terms, as data, for every backend.

`reference.paged_attention` says what each term means. What else is known of one stands here: what a
caller may give, what plain torch does with it, and what kernels are compiled for and given at run
time. What kernels do with it stands in `triton/attend.py`. They take the window by itself, because
they choose tiles by it, and within a tuple Triton would compile anew for some values.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

NO_WINDOW = 1 << 30  # wider than any text
LOG2E = math.log2(math.e)
SOFTCAPS = (1e-3, 1e3)  # beyond, the kernels' tanh by exponentials has too few digits


class Scoring(NamedTuple):
    """How scores are made, as in `reference.paged_attention`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether torch's own attention makes such scores by itself, given a mask."""
        # It scales its mask along: minus infinity times 0 is NaN, times -1 what all would look at.
        return self.softcap is None and self.sinks is None and self.scale > 0

    @property
    def by_distance(self) -> bool:
        """Whether it matters how far in front of its query a token is."""
        return self.window is not None

    @property
    def tensors(self) -> tuple[tuple[str, Tensor], ...]:
        """The terms that are tensors, each behind its name."""
        return () if self.sinks is None else (("sinks", self.sinks),)

    # ------------------------------------------------------------------ what a caller gives

    def checked(self, q: Tensor, window: int | None) -> Scoring:
        """A caller's terms as the numbers they stand for, in a layer of this window.

        Args:
            q: `[T, H, D]`.

        Raises:
            ValueError, TypeError: a term that is no number, out of its range, or a tensor that does
                not fit the queries.
        """
        scale, _, softcap, sinks = self
        scale = _number("scale", scale)
        if not math.isfinite(scale):
            raise ValueError(f"scale: expected a finite number, got {scale}")
        if softcap is not None:
            softcap = _number("softcap", softcap)
            if not 0 < softcap < math.inf:
                raise ValueError(f"softcap: expected a positive number, got {softcap}")
        if sinks is not None:
            _check_by_head("sinks", sinks, q)
        return Scoring(scale, window, softcap, sinks)

    def check_served(self, q: Tensor) -> None:
        """Raises for terms that kernels cannot compute, or read; `launch.py` knows of alignment."""
        if self.softcap is not None and not SOFTCAPS[0] <= self.softcap <= SOFTCAPS[1]:
            raise NotImplementedError(
                f"softcap: expected {SOFTCAPS[0]} to {SOFTCAPS[1]}, got {self.softcap}; "
                "backend='torch' takes any"
            )
        if self.sinks is not None:
            _check_contiguous("sinks", self.sinks, q)

    # ------------------------------------------------------------------ in plain torch

    def scores(self, products: Tensor, query: Tensor, token: Tensor) -> Tensor:
        """Scores of products of queries and keys, also of those that a query does not see.

        Args:
            products: `[n, G, r, q, s]` float32, of the r query heads of a KV head; overwritten.
            query, token: positions, for terms by distance; they broadcast against products.
        """
        scores = products.mul_(self.scale)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores

    def hidden(self, query: Tensor, token: Tensor) -> Tensor:
        """Returns which tokens a query does not see, by the positions of both."""
        hidden = token > query
        if self.window is not None:
            hidden |= token <= query - self.window
        return hidden

    # ------------------------------------------------------------------ in kernels

    @property
    def kind(self) -> ScoringKind:
        """Returns the part of it that a kernel is compiled for."""
        if self.window is None and self.softcap is None and self.sinks is None:
            return ONLY_SCALED  # what most layers ask for; to make one takes longer
        dtype = None if self.sinks is None else self.sinks.dtype
        return ScoringKind(self.window is not None, self.softcap is not None, dtype)

    def arguments(self) -> tuple[int, Terms]:
        """The window and the other terms as kernels take them at run time.

        Their types are what a kernel was compiled for.
        """
        window = NO_WINDOW if self.window is None else min(self.window, NO_WINDOW)
        if self.softcap is None:
            return window, Terms(self.scale * LOG2E, 0.0, self.sinks)
        return window, Terms(float(self.scale), float(self.softcap), self.sinks)


class ScoringKind(NamedTuple):
    """The terms that scores have; for sinks their dtype."""

    window: bool
    softcap: bool
    sinks: torch.dtype | None


ONLY_SCALED = ScoringKind(False, False, None)


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


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}") from None


def _check_by_head(name: str, term: Tensor, q: Tensor) -> None:
    """Raises unless a term has a number for every query head, on the device of the queries."""
    if not isinstance(term, Tensor) or term.layout != torch.strided:
        got = term.layout if isinstance(term, Tensor) else type(term).__name__
        raise TypeError(f"{name}: expected a dense tensor, got {got}")
    if term.shape != q.shape[1:2] or not term.is_floating_point():
        raise ValueError(
            f"{name}: expected a float tensor of shape [H] = [{q.shape[1]}], got "
            f"{term.dtype} {list(term.shape)}"
        )
    if term.device != q.device:
        raise ValueError(f"{name}: expected device {q.device}, got {term.device}")


def _check_contiguous(name: str, term: Tensor, q: Tensor) -> None:
    """Raises unless a kernel finds a number for every query head beside each other."""
    if term.shape != q.shape[1:2] or term.stride(0) != 1:
        raise ValueError(
            f"{name}: expected a contiguous [H] = [{q.shape[1]}], got {list(term.shape)} with "
            f"strides {term.stride()}"
        )
