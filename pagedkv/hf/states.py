"""Layers of a `PagedCache` with a recurrent state, alone or beside K and V.

Models read and change the tensors of such a layer as they like, some of them in place and without
telling anybody. So a forward works on copies of its rows' states: they are read when the model
first looks at them, and written to the rows' slots when the forward has returned.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from pagedkv.arrays import Bools
from pagedkv.errors import UnsupportedModelError
from pagedkv.models import facts_of, layer_kinds
from pagedkv.models.states import end_of
from pagedkv.step.metadata import StepMetadata

from .forward_cache import ForwardCache
from .layer import PagedLayer
from .model import text_config
from .paged_layers import paged_layer
from .release import CACHE
from .transaction import enter


def make_layers(cache: ForwardCache) -> list[Any]:
    """The layers of a cache, one for each layer of its model's decoder."""
    text, windows = text_config(cache.model), cache.kv.config.windows
    tensors = [len(layer.tensors) for layer in cache.kv.config.states]
    most = getattr(text, "number_of_conv_states", 1)
    made: list[Any] = []
    for kind in layer_kinds(text):
        attention, state = kind.attention, kind.state
        # In a model that embeds n-grams most layers do not embed any, and have one state.
        states = 1 if state is None or tensors[state] < most else most
        if attention is not None and state is not None:
            made.append(HybridLayer(cache, attention, windows[attention], state, states))
        elif attention is not None or kind.source is not None:
            made.append(paged_layer(cache, kind))
        elif state is not None:
            grams = tensors[state] > states > 1
            made.append(StateLayer(cache, state, states, end_of(text) if grams else None))
        else:
            made.append(EmptyLayer())
    return made


class EmptyLayer(LinearAttentionLayer):
    """A layer that keeps nothing. Transformers takes it for a state layer, as in its own caches."""

    is_compileable = False
    staged = None


class StateLayer(LinearAttentionLayer):
    """One layer with a recurrent state; it holds the cache by a weak reference only.

    Args:
        index: of the layer among those with a state.
        number_of_states: states that transformers keeps apart within the layer.
        end: the id that ends a text, if the last state holds ids; see `models/states.py`.
    """

    is_compileable = False  # else masks are made as for a static cache
    is_croppable = False
    staged: Any = None

    def __init__(
        self,
        cache: ForwardCache,
        index: int,
        number_of_states: int = 1,
        end: int | None = None,
    ) -> None:
        self._owner = weakref.ref(cache)
        self._end = end
        self.state_index = index
        self._loaded = self.visited = False
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def forget(self) -> None:
        """Drops the tensors of a forward; the next forward reads what is committed."""
        self._loaded = self.visited = False
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)

    def hand_in(self, step: StepMetadata, rows: Sequence[int] | None) -> None:
        """Gives a step the states that the layer holds after the forward.

        Args:
            rows: the rows of the batch that are in the step; None for all.
        """
        if not self.visited:
            return  # the step says which layers are missing
        held: list[Tensor] = []
        for i in range(self.number_of_states):
            both = self._conv[i], self._recurrent[i]
            held += [x if rows is None else x[list(rows)] for x in both if x is not None]
        if self._end is not None:
            held[-1] = (held[-1] - self._end).float()
        step.write_state(self.state_index, held)

    # Attributes that models read and write directly: dicts by the number of the state.

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        """The last inputs of each convolution, `[B, channels, kernel]`."""
        self._visit()
        return self._conv

    @conv_states.setter
    def conv_states(self, value: dict[int, Tensor | None]) -> None:
        self._conv = value

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        """The sums over all tokens, `[B, ...]`."""
        self._visit()
        return self._recurrent

    @recurrent_states.setter
    def recurrent_states(self, value: dict[int, Tensor | None]) -> None:
        self._recurrent = value

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """Whether the rows have tokens. Making the mask asks this, too, so it is no visit."""
        self._load()
        return self._has_previous

    @has_previous_state.setter
    def has_previous_state(self, value: dict[int, bool]) -> None:
        self._has_previous = value

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Does what transformers' own layer does, on copies of what is committed."""
        self._visit()
        return LinearAttentionLayer.update_conv_state(self, conv_states, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Does what transformers' own layer does, on copies of what is committed."""
        self._visit()
        return LinearAttentionLayer.update_recurrent_state(self, recurrent_states, *args, **kwargs)

    def activate_past_recording(self) -> None:
        """Raises: drafts may be taken back, but a state cannot."""
        raise UnsupportedModelError(
            f"{CACHE}: assisted decoding takes back drafts, which recurrent states cannot; "
            "generate without assistant_model and prompt_lookup_num_tokens, or with transformers' "
            "own cache"
        )

    def _visit(self) -> None:
        self._load()
        self.visited = self._loaded

    def _load(self) -> None:
        cache = self._owner()
        if self._loaded or cache is None or not hasattr(self, "_has_previous"):
            return  # while transformers' constructor sets the attributes, nothing is there yet
        cache.require_usable()
        if not cache.touched:
            enter(cache)
            cache.touched = True
        if cache.transaction is None:
            raise UnsupportedModelError(
                f"{CACHE}: layers of a model with recurrent states cannot be called one by "
                "one; call the model, whose end says when the states are whole"
            )
        self._loaded = True
        if not cache.seen:
            return
        tensors = iter(cache.kv.read_state(cache.rows, self.state_index))
        shapes = len(cache.kv.config.states[self.state_index].tensors)
        for i in range(self.number_of_states):
            conv = next(tensors)
            if self._end is not None and i == self.number_of_states - 1:
                conv = conv.long() + self._end
            self._conv[i] = conv
            self.is_conv_states_initialized[i] = self._has_previous[i] = True
            self.conv_kernel_size[i] = conv.shape[-1]
            if i < shapes - self.number_of_states:
                self._recurrent[i] = next(tensors)
                self.is_recurrent_states_initialized[i] = True
            self.device, self.dtype = conv.device, conv.dtype


class HybridLayer(StateLayer, PagedLayer):
    """One layer with K and V and a recurrent state."""

    def __init__(
        self,
        cache: ForwardCache,
        index: int,
        window: int | None,
        state_index: int,
        number_of_states: int,
    ) -> None:
        PagedLayer.__init__(self, cache, index, window)
        StateLayer.__init__(self, cache, state_index, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialises a state, given by name; K and V need no initialising."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    get_max_length = PagedLayer.get_max_length


def require_states_to_follow(
    model: PreTrainedModel, had: Bools, fresh: Bools | None, new: int
) -> None:
    """Raises if recurrent states would be wrong after a forward.

    Args:
        had: `[B]`, which rows have tokens already.
        fresh: `[B, new]`, which tokens are computed; None for all.
    """
    kind = text_config(model).model_type
    if facts_of(kind).stepwise and had.any() and new > 1:
        raise UnsupportedModelError(
            f"{kind}: several tokens behind a state lose it in this model's scan; pass prompts "
            "whole, and then one token at a time"
        )
    if fresh is None:
        return
    before = np.concatenate([had[:, None], fresh], axis=1)
    if (np.maximum.accumulate(before, axis=1)[:, :-1] & ~fresh).any():
        raise UnsupportedModelError(
            "attention_mask: padding behind a row's tokens would change its recurrent state; "
            "pad on the left, or use BatchGenerator, whose rows need no padding"
        )
