"""Mixers over packed rows: one call for all rows of a step that have the same number of tokens.

A mixer takes `[B, n, hidden]`, rows of one length. On packed rows, `[1, T, hidden]`, it would let
the state of one row run into the next, so it is called for each *row group*: rows with equally many
tokens, all with a state before the step or all without. The decoding rows of a step are one group.
Each call gets the states of its rows from before the step, and leaves those after it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.forward_cache import ForwardCache
from pagedkv.hf.layer import PagedLayer
from pagedkv.hf.mixers import (
    CallByParts,
    GramView,
    StateView,
    embeds_grams,
    index_of,
    number_of,
)
from pagedkv.kernels.sending import sent
from pagedkv.models.kinds import field_of
from pagedkv.models.states import end_of
from pagedkv.step.metadata import StepMetadata

INPUT = "0", "hidden_states"  # a mixer's first argument, by its place or its name


class RowGroup(NamedTuple):
    """Rows of a step that a mixer computes in one call.

    Attributes:
        rows: `[B]`, their places among the rows of the step; None if the group has all rows.
        places: `[B * n]`, the places of their packed tokens; None if the group has all, in order.
        width: tokens of each row, n.
        has_state: whether the rows had tokens before the step.
    """

    rows: Tensor | None
    places: Tensor | None
    width: int
    has_state: bool


def row_groups(step: StepMetadata, device: torch.device) -> list[RowGroup]:
    """Returns the row groups of a step, with indices that are tensors on a device."""
    assert step.states is not None, "the caller asks only where there are states"
    new, had = np.asarray(step.num_new), step.states.source >= 0
    begins = np.cumsum(new) - new
    kinds: dict[tuple[int, bool], list[int]] = {}
    for row, kind in enumerate(zip(new.tolist(), had.tolist())):
        kinds.setdefault(kind, []).append(row)
    if len(kinds) == 1:
        ((width, has_state),) = kinds
        return [RowGroup(None, None, width, has_state)]
    groups = []
    for (width, has_state), rows in kinds.items():
        places = begins[rows][:, None] + np.arange(width)
        index = sent(np.array(rows), device), sent(places.ravel(), device)
        groups.append(RowGroup(*index, width, has_state))
    return groups


class MixerCall(CallByParts):
    """A mixer's work in one step, by row groups.

    Args:
        before: the states of all rows.
        done: takes the states of all rows after the step.
        view: makes the cache of one call from its states, or from None.
    """

    def __init__(
        self,
        mixer: nn.Module,
        step: StepMetadata,
        before: list[Tensor],
        done: Callable[[list[Tensor]], None],
        view: Callable[[list[Tensor] | None], StateView],
        args: Any,
        kwargs: dict[str, Any],
    ) -> None:
        self.before, self.done, self.view = before, done, view
        device = before[0].device
        groups = step.memo(("row groups", device), lambda: row_groups(step, device))
        super().__init__(mixer, args, kwargs, groups)

    def _view_of(self, group: RowGroup) -> StateView:
        if not group.has_state:
            return self.view(None)
        rows = group.rows
        return self.view(self.before if rows is None else [state[rows] for state in self.before])

    def _of_part(self, group: RowGroup, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if name not in INPUT and not self._is_by_token(value):
            raise UnsupportedModelError(
                f"{name}: the mixer {type(self.module).__name__} of layer "
                f"{index_of(self.module)} gets a tensor that may not have a part for each row"
            )
        packed = value[0] if group.places is None else value[0, group.places]
        return packed.reshape(-1, group.width, *packed.shape[1:])

    def _is_by_token(self, value: Tensor) -> bool:
        """Whether a tensor has one entry for each token: an id, a position, a mask, an input.

        Other tensors have other sizes, unless a step has exactly so many tokens.
        """
        packed: Tensor = self.args[0] if self.args else self.kwargs["hidden_states"]
        axes = 3 if value.is_floating_point() else 2
        return value.ndim == axes and value.shape[:2] == packed.shape[:2]

    def _finish(self, output: Any) -> Any:
        self.outputs.append(output)
        after = [view.states() for view in self.views]
        rows = [group.rows for group in self.parts]
        states = [_joined(parts, rows) for parts in zip(*after)]
        self.done(states)
        if isinstance(output, Tensor):
            return self._packed(self.outputs)
        return tuple(self._packed(parts) for parts in zip(*self.outputs))

    def _packed(self, parts: Any) -> Tensor:
        """Packs the groups' outputs, `[B, n, ...]` each, into `[1, T, ...]`."""
        places = [group.places for group in self.parts]
        return _joined([part.flatten(0, 1) for part in parts], places)[None]


def _joined(parts: Any, places: list[Tensor | None]) -> Tensor:
    """Joins parts into one tensor, with each row at its place."""
    first: Tensor = parts[0]
    if places[0] is None:
        return first
    out = first.new_empty(sum(map(len, parts)), *first.shape[1:])
    for part, at in zip(parts, places):
        out[at] = part
    return out


class Mixers:
    """The mixers of a model in the steps of packed rows.

    A layer may have several mixers, and each of them a state of its own: several convolutions, or
    a module that embeds n-grams before the layer's own mixer. The module's states stand last.

    Args:
        text: the configuration of the model's decoder.

    Attributes:
        states: by layer of the model, its place in `CacheConfig.states`.
    """

    def __init__(self, text: Any) -> None:
        self.states: dict[int, int] = {}
        self._end = end_of(text)
        self._most = field_of(text, "number_of_conv_states") or 1
        # By layer, what mixers that have not run will find, and what the others have left.
        self._before: dict[int, dict[int, list[Tensor]]] = {}
        self._after: dict[int, dict[int, list[Tensor]]] = {}

    def begin_step(self) -> None:
        """Forgets which mixers were entered."""
        self._before.clear()
        self._after.clear()

    @property
    def entered(self) -> bool:
        """Whether a mixer was entered in this step."""
        return bool(self._before)

    @property
    def missing(self) -> list[int]:
        """The layers whose states nothing computed in this step."""
        return sorted(i for i in self.states if self._before.get(i, True) or i in self._after)

    def enter(
        self, mixer: nn.Module, step: StepMetadata | None, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Calls a mixer for all row groups but the last; returns the arguments for the last."""
        index, number = index_of(mixer), number_of(mixer)
        if step is not None and index in self.states and index not in self._before:
            self._before[index] = self._parted(step.read_state(self.states[index]))
        before = self._before.get(index, {})
        if step is None or number not in before:
            raise UnsupportedModelError(
                f"layer {index}: {type(mixer).__name__} computed a state that nothing asked for, "
                "or one twice in a forward"
            )
        found = before.pop(number)

        def done(states: list[Tensor]) -> None:
            self._after.setdefault(index, {})[number] = states
            if not before:
                after = self._after.pop(index)
                left = [state for each in sorted(after) for state in after[each]]
                step.write_state(self.states[index], left, donate=True)

        view: Callable[[list[Tensor] | None], StateView] = (
            partial(GramView, index, end=self._end)
            if embeds_grams(mixer)
            else partial(StateView, index, number=number)
        )
        return MixerCall(mixer, step, found, done, view, args, kwargs).begin()

    def _parted(self, states: list[Tensor]) -> dict[int, list[Tensor]]:
        """The states of a layer by the number of the mixer whose they are."""
        if len(states) < self._most or self._most == 1:
            return {0: states}
        if len(states) > self._most:
            return {0: states[:-2], 1: states[-2:]}
        return {number: [state] for number, state in enumerate(states)}


class AbsentStates(LinearAttentionCacheLayerMixin):
    """A state layer of a packed forward. It has no states: its mixer is given a view of them."""

    is_compileable = False
    is_croppable = False

    def __init__(self, index: int) -> None:
        super().__init__()
        self.model_index = index

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Raises: packed rows would run into each other."""
        raise UnsupportedModelError(
            f"layer {self.model_index}: a module other than its mixer asks for the states of "
            "packed rows"
        )

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kw: Any) -> Tensor:
        """Raises: packed rows would run into each other."""
        return self.update_conv_state(recurrent_states)


class PagedAbsentStates(PagedLayer, AbsentStates):
    """A layer of a packed forward that has K and V beside a state."""

    def __init__(self, cache: ForwardCache, index: int, window: int | None, model_index: int):
        AbsentStates.__init__(self, model_index)
        PagedLayer.__init__(self, cache, index, window)
