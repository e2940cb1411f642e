"""A layer's call as data, and the parts of it that differ by backend.

`api.py` makes the call first; then it is checked, planned, written and attended. A call that no
kernel can serve is refused before anything is written.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from pagedkv.kernels.scoring import Scoring
from pagedkv.step.metadata import StepMetadata


class Call(NamedTuple):
    """One layer's attention in an open step.

    Attributes:
        q: `[T, H, D]`, queries of the step's new tokens.
        k, v: `[T, G, D]`, keys and values of the step's new tokens; None where the layer has
            written them before, so that all there is to see is in its pages.
        step: the open step, on the layer's device.
        layer: the layer that calls.
        scoring: the terms of its scores. The caller's have no window; a checked call has that of
            the layer's group, unless it is attended in chunks.
        return_lse: whether the log-sum-exp is asked for.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    step: StepMetadata
    layer: int
    scoring: Scoring
    return_lse: bool = False

    @property
    def group(self) -> int:
        """The layer's group.

        Raises:
            ValueError: the cache has no such layer.
        """
        return self.step.group_of(self.layer)

    @property
    def reads(self) -> int:
        """Pages that a row's queries choose and read; 0 for all."""
        config = self.step.config
        return 0 if config.groups[self.group].window is not None else config.pages_read

    @property
    def pages(self) -> tuple[Any, Any]:
        """The layer's K pages and V pages, as storage has them."""
        pages: tuple[Any, Any] = self.step.storage.layer(self.layer)
        return pages


class Chosen(NamedTuple):
    """The tokens that the queries of a call read; `chosen.py` makes it of their places.

    Where KV heads choose each for itself, a query is T * G queries of one KV head.

    Attributes:
        q: `[T, H, D]`, or `[T * G, H / G, D]`.
        pages: the layer's K and V, `[slots, G, 1, D]`, or `[slots, 1, 1, D]`, views.
        table: `[T, n]` int32, a page for each token, those of a query in the order of its text.
        counts: `[T]` int32, how many there are of each query, at least 1.
    """

    q: Tensor
    pages: tuple[Tensor, Tensor]
    table: Tensor
    counts: Tensor


class Backend(Protocol):
    """The parts of a layer's call that differ by backend, in the order they are called."""

    def again(self, call: Call) -> tuple[Tensor, Tensor] | None:
        """`write_and_attend` of a call like an earlier one of the step; None if nothing was done.

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

    def attend_chosen(self, call: Call, chosen: Chosen) -> tuple[Tensor, Tensor]:
        """`write`, if there is K, then attends to the tokens given alone; as `attend`."""

    def page_mass(self, call: Call, lse: Tensor) -> Tensor:
        """`[B, columns]` float32, the weight each page got from the queries that are watched.

        K of the step is written before.
        """
