"""Mixers over packed rows: one call for all rows of a step that have the same number of tokens.

A mixer takes `[B, n, hidden]`, rows of one length. On packed rows, `[1, T, hidden]`, it would let
the state of one row run into the next, so it is called for each *row group*: rows with as many
tokens, all with a state before the step or all without. The decoding rows of a step are one group.
Each call gets the states of its rows, and what it leaves becomes the states after the step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.forward_cache import ForwardCache
from pagedkv.hf.layer import PagedLayer
from pagedkv.hf.mixers import StateView, index_of
from pagedkv.kernels.sending import sent
from pagedkv.step.metadata import StepMetadata


class RowGroup(NamedTuple):
    """Rows of a step that a mixer computes in one call.

    Attributes:
        rows: `[B]`, their places among the rows of the step; None if these are all.
        places: `[B * n]`, their packed tokens; None if these are all, in order.
        width: tokens of each row, n.
        has_state: whether the rows had tokens before the step.
    """

    rows: Tensor | None
    places: Tensor | None
    width: int
    has_state: bool


def row_groups(step: StepMetadata, device: torch.device) -> list[RowGroup]:
    """The row groups of a step, in tensors on a device."""
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


class MixerCall:
    """A mixer's work in one step.

    The call that the model makes computes the last row group; those before it are computed by calls
    of this object.

    Args:
        layer: which of `CacheConfig.states`.
        args, kwargs: the mixer's, with packed rows and the cache of the forward among them.
    """

    def __init__(
        self, mixer: nn.Module, step: StepMetadata, layer: int, args: Any, kwargs: dict[str, Any]
    ) -> None:
        self.mixer, self.step, self.layer, self.args, self.kwargs = mixer, step, layer, args, kwargs
        assert step.states is not None, "a model with mixers has states"
        device = step.states.device_of(layer)
        self.groups = step.memo(("row groups", device), lambda: row_groups(step, device))
        self.before = step.read_state(layer)
        self.views: list[StateView] = []
        self.outputs: list[Any] = []

    def begin(self) -> tuple[Any, dict[str, Any]]:
        """Computes all groups but the last; the arguments of the last."""
        for group in self.groups[:-1]:
            args, kwargs = self._arguments(group)
            self.outputs.append(self.mixer.forward(*args, **kwargs))
        last = self._arguments(self.groups[-1])
        self.views[-1].finish = self._finish
        return last

    def _arguments(self, group: RowGroup) -> tuple[Any, dict[str, Any]]:
        """The mixer's arguments with the rows and states of a group in place of the packed ones."""
        view = StateView(index_of(self.mixer), self._states_of(group))
        self.views.append(view)

        def of_group(name: str, value: Any) -> Any:
            if isinstance(value, ForwardCache):
                return view
            if not isinstance(value, Tensor):
                return value
            if name not in ("0", "hidden_states"):
                raise UnsupportedModelError(
                    f"{name}: the mixer {type(self.mixer).__name__} of layer "
                    f"{index_of(self.mixer)} gets a tensor that may not have a part for each row"
                )
            packed = value[0] if group.places is None else value[0, group.places]
            return packed.reshape(-1, group.width, packed.shape[-1])

        args = tuple(of_group(str(i), value) for i, value in enumerate(self.args))
        return args, {name: of_group(name, value) for name, value in self.kwargs.items()}

    def _states_of(self, group: RowGroup) -> list[Tensor] | None:
        if not group.has_state:
            return None
        rows = group.rows
        return self.before if rows is None else [state[rows] for state in self.before]

    def _finish(self, output: Any) -> Any:
        """Hands the states in; the output of all groups, packed."""
        self.outputs.append(output)
        after = [view.states() for view in self.views]
        rows = [group.rows for group in self.groups]
        states = [_joined(parts, rows) for parts in zip(*after)]
        self.step.write_state(self.layer, states, donate=True)
        if isinstance(output, Tensor):
            return self._packed(self.outputs)
        return tuple(self._packed(parts) for parts in zip(*self.outputs))

    def _packed(self, parts: Any) -> Tensor:
        """`[1, T, ...]` of `[B, n, ...]` of each group."""
        places = [group.places for group in self.groups]
        return _joined([part.flatten(0, 1) for part in parts], places)[None]


def _joined(parts: Any, places: list[Tensor | None]) -> Tensor:
    """Puts the rows of each part to their places."""
    first: Tensor = parts[0]
    if places[0] is None:
        return first
    out = first.new_empty(sum(map(len, parts)), *first.shape[1:])
    for part, at in zip(parts, places):
        out[at] = part
    return out


class AbsentStates(LinearAttentionCacheLayerMixin):
    """A state layer of a packed forward. Its mixer is given a view, so it has no states."""

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
