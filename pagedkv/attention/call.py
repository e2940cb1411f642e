"""A layer's call as data, and the protocol of backends that carry it out.

`api.py` makes a call, then checks and plans it, and lets the backend write and attend. It refuses a
call that no kernel can serve before anything is written.
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
        k, v: `[T, G, D]`, keys and values of the step's new tokens; None if the layer's pages
            already have them.
        step: the open step, on the layer's device.
        layer: the layer that calls.
        scoring: the terms of its scores. A caller sets no window; `checked` sets the window of the
            layer's group, unless the group is chunked.
        return_lse: whether the caller asks for the log-sum-exp.
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
        """How many pages a row's queries choose and read; 0 for all."""
        config = self.step.config
        return 0 if config.groups[self.group].window is not None else config.pages_read

    @property
    def pages(self) -> tuple[Any, Any]:
        """The layer's K pages and V pages, in the form of its storage."""
        pages: tuple[Any, Any] = self.step.storage.layer(self.layer)
        return pages

    @property
    def bound(self) -> Any:
        """The work that a backend kept of the step's first call of this kind; None for none."""
        key = "bound", self.step.config.group_of.get(self.layer)
        return self.step.kept(key)


class Chosen(NamedTuple):
    """The tokens that the queries of a call read; `chosen.py` makes it from their places.

    If each KV head chooses for itself, the T queries become T * G queries of one KV head.

    Attributes:
        q: `[T, H, D]`, or `[T * G, H / G, D]`.
        pages: the layer's K and V, `[slots, G, 1, D]`, or `[slots, 1, 1, D]`, views.
        table: `[T, n]` int32, a page of one slot for each token, in the order of the text.
        counts: `[T]` int32, how many tokens each query reads, at least 1.
    """

    q: Tensor
    pages: tuple[Tensor, Tensor]
    table: Tensor
    counts: Tensor


class Backend(Protocol):
    """The functions of a backend, in the order in which a layer's call uses them."""

    def again(self, call: Call) -> tuple[Tensor, Tensor] | None:
        """Writes and attends for a call that resembles an earlier call of the step.

        Returns None if it did nothing. The call is not checked yet.
        """

    def plan(self, call: Call) -> Any:
        """Returns the backend's plan of a step, made once for all layers of a kind."""

    def check(self, call: Call, plan: Any) -> None:
        """Raises if the backend has no kernel for the call; nothing is written yet."""

    def write(self, k: Tensor, v: Tensor, step: StepMetadata, layer: int) -> None:
        """Writes the step's K and V of one layer into its pages."""

    def write_and_attend(self, call: Call, plan: Any) -> tuple[Tensor, Tensor]:
        """Calls `write`, then `attend`, for a call with K and V."""

    def attend(self, call: Call, plan: Any) -> tuple[Tensor, Tensor]:
        """Returns `[T, H, D]` in the dtype of `q`; the log-sum-exp `[T, H]` if asked for."""

    def attend_chosen(self, call: Call, chosen: Chosen) -> tuple[Tensor, Tensor]:
        """Writes K and V if given, then attends only to the chosen tokens; returns as `attend`."""

    def page_mass(self, call: Call, lse: Tensor) -> Tensor:
        """Returns `[B, columns]` float32, the weight that watched queries gave each page.

        The step's K is written before.
        """
