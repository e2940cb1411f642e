"""A layer's call as data, and the parts of it that differ by backend.

A call that no kernel can serve is refused before anything is written.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from pagedkv.kernels.scoring import Scoring
from pagedkv.step.metadata import StepMetadata


class Call(NamedTuple):
    """One layer's attention in an open step, its arguments checked.

    Attributes:
        q: `[T, H, D]`, queries of the step's new tokens.
        k, v: `[T, G, D]`, keys and values of the step's new tokens; None where the layer has
            written them before, so that all there is to see is in its pages.
        step: the open step.
        layer: the layer that calls.
        group: the layer's group.
        pages: the layer's K pages and V pages, as storage has them.
        scoring: the terms of its scores.
        return_lse: whether the log-sum-exp is asked for.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    step: StepMetadata
    layer: int
    group: int
    pages: tuple[Any, Any]
    scoring: Scoring
    return_lse: bool


class Backend(Protocol):
    """The parts of a layer's call that differ by backend, in the order they are called."""

    def again(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: StepMetadata,
        layer: int,
        scoring: Scoring,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor] | None:
        """`write_and_attend` of what is like an earlier call of the step; None if nothing was done.

        Nothing of the call is checked yet.
        """

    def plan(self, call: Call) -> Any:
        """The backend's plan of a step, made once for all layers of a kind."""

    def check(self, call: Call, plan: Any) -> None:
        """Raises where the backend has no kernel for the call; nothing is written yet."""

    def write(self, k: Tensor, v: Tensor, step: StepMetadata, layer: int) -> None:
        """Writes the step's K and V of one layer into its pages."""

    def write_and_attend(self, call: Call, plan: Any) -> tuple[Tensor, Tensor]:
        """`write`, then `attend`, for a call with K and V."""

    def attend(self, call: Call, plan: Any) -> tuple[Tensor, Tensor]:
        """`[T, H, D]` in the dtype of `q`; the log-sum-exp `[T, H]`, valid if asked for."""

    def page_mass(self, call: Call, lse: Tensor) -> Tensor:
        """`[B, columns]` float32, the weight each page got from the queries that are watched.

        K of the step is written before.
        """
