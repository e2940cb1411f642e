"""Mixers: the modules of a model that read and replace recurrent states.

Mixers have neither a class nor a name in common: `linear_attn`, `mamba`, `conv`, `mixer`,
`qkv_proj`. They are found by the methods of a cache that they call. Hooks on them pass a call to
the cache among its arguments, if that is one of ours; other calls pass untouched.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache, LinearAttentionLayer

from .forward_cache import ForwardCache, uncompiled

_CALLED = {"update_conv_state", "update_recurrent_state"}
_CALLED_BY_INDEXERS = {"update_indexer", "update_index"}


def mixers_of(model: nn.Module, called: Set[str] = _CALLED) -> dict[int, list[nn.Module]]:
    """Returns the mixers of each layer, by the layer's index.

    Args:
        called: methods of a cache; a mixer calls at least one of them.
    """
    found: dict[int, list[nn.Module]] = {}
    within: set[nn.Module] = set()  # modules inside a mixer, which the mixer itself calls by row
    for module in model.modules():
        kind: Any = type(module)
        if module in within or not hasattr(module, "layer_idx"):
            continue
        if called & _called_by(kind):
            found.setdefault(index_of(module), []).append(module)
            within.update(module.modules())
    return found


@cache
def _called_by(kind: Any) -> Set[str]:
    """Returns the names used in the methods of a class, without methods that all modules have."""
    own = {getattr(kind, name) for name in dir(kind) if name not in dir(nn.Module)}
    codes = (
        getattr(inspect.unwrap(x), "__code__", None) for x in {*own, kind.forward} if callable(x)
    )
    return {name for code in codes if code is not None for name in code.co_names}


def index_of(mixer: nn.Module) -> int:
    """The layer that a mixer belongs to."""
    index: Any = mixer.layer_idx
    return int(index)


def watch_mixers(model: nn.Module) -> list[RemovableHandle]:
    """Puts the hooks on a model's mixers and indexers."""
    handles = []
    kinds = (_CALLED, before_mixer), (_CALLED_BY_INDEXERS, before_indexer)
    for called, before in kinds:
        for mixers in mixers_of(model, called).values():
            for mixer in mixers:
                handles.append(mixer.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(mixer.register_forward_hook(after_mixer, with_kwargs=True))
    return handles


# The hooks get their module as an argument, so the hooks of a deep copy work on the copy.
@uncompiled
def before_mixer(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Hook before a mixer's forward; returns the arguments that it is called with instead."""
    cache = _first(ForwardCache, args, kwargs)
    return None if cache is None else cache.enter_mixer(module, args, kwargs)


@uncompiled
def before_indexer(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Hook before an indexer's forward; returns the arguments that it is called with instead.

    `indexers.py` calls it for each row alone.
    """
    cache = _first(ForwardCache, args, kwargs)
    return None if cache is None else cache.layers[index_of(module)].choose(module, args, kwargs)


@uncompiled
def after_mixer(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Hook after a mixer's forward; returns the output that the mixer's caller gets instead."""
    view = _first(View, args, kwargs)
    if view is None or view.finish is None:
        return None
    # A copy of an attached model has the hooks twice, once it is attached itself.
    finish, view.finish = view.finish, None
    return finish(output)


def _first(kind: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, kind)), None)


class _OneCall(LinearAttentionLayer):
    """A layer for one call of a mixer, which keeps a state that is handed in without a copy."""

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Keeps the tensor itself."""
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class View(Cache):
    """A cache for one call of one module: it has what the module reads, and nothing else.

    Attributes:
        finish: makes the output for the module's caller; None leaves the module's own.
    """

    finish: Callable[[Any], Any] | None = None


class CallByParts(ABC):
    """A call of a module in one step that is made for some rows at a time.

    The model's own call computes the last part; this object calls the module for those before it.

    Args:
        args, kwargs: the module's arguments, with the tokens of all rows and the forward's cache.
        parts: the parts of the step, at least one.
    """

    def __init__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], parts: Any) -> None:
        self.module, self.args, self.kwargs, self.parts = module, args, kwargs, parts
        self.views: list[Any] = []
        self.outputs: list[Any] = []

    def begin(self) -> tuple[Any, dict[str, Any]]:
        """Computes all parts but the last; returns the arguments for the last."""
        for part in self.parts[:-1]:
            args, kwargs = self._arguments(part)
            self.outputs.append(self.module.forward(*args, **kwargs))
        last = self._arguments(self.parts[-1])
        self.views[-1].finish = self._finish
        return last

    def _arguments(self, part: Any) -> tuple[Any, dict[str, Any]]:
        self.views.append(view := self._view_of(part))

        def of_part(name: str, value: Any) -> Any:
            return view if isinstance(value, ForwardCache) else self._of_part(part, name, value)

        args = tuple(of_part(str(i), value) for i, value in enumerate(self.args))
        return args, {name: of_part(name, value) for name, value in self.kwargs.items()}

    @abstractmethod
    def _view_of(self, part: Any) -> View:
        """Makes the cache of the call for a part."""

    @abstractmethod
    def _of_part(self, part: Any, name: str, value: Any) -> Any:
        """Returns a part's share of an argument; its name is its place if it has none."""

    @abstractmethod
    def _finish(self, output: Any) -> Any:
        """Takes the output of the last part; returns the output for all rows."""


class StateView(View):
    """A cache for one call of one mixer: it has the states of that mixer and nothing else.

    Args:
        index: the layer's index in the model.
        states: `[B, *shape]` each, first the convolution's, then the recurrent one; the mixer
            writes into them. None for rows without tokens.
        number: the place of the mixer's state among the states of its layer.
    """

    def __init__(self, index: int, states: list[Tensor] | None, number: int = 0) -> None:
        self._layer = layer = _OneCall(number_of_states=number + 1)
        self._number = number
        super().__init__(layers=[None] * index + [layer])
        for of_states in (layer.has_previous_state, layer.conv_states):
            for other in range(number):  # a mixer that asks for the state of another finds none
                del of_states[other]
        if states is None:
            return
        layer.device, layer.dtype = states[0].device, states[0].dtype
        layer.has_previous_state[number] = layer.is_conv_states_initialized[number] = True
        layer.conv_states[number], layer.conv_kernel_size[number] = states[0], states[0].shape[-1]
        if len(states) > 1:
            layer.recurrent_states[number] = states[1]
            layer.is_recurrent_states_initialized[number] = True

    def states(self) -> list[Tensor]:
        """The states that the mixer left, in the same order."""
        both = self._layer.conv_states[self._number], self._layer.recurrent_states[self._number]
        return [state for state in both if state is not None]


class GramView(StateView):
    """A cache for one call of a module that embeds n-grams: its convolution's inputs and last ids.

    Args:
        states: these two, as `models/states.py` lays them out. None for rows without tokens.
        end: the id that ends a text.
    """

    def __init__(self, index: int, states: list[Tensor] | None, end: int) -> None:
        self._layer = layer = _OneCall(number_of_states=3)
        self._end = end
        Cache.__init__(self, layers=[None] * index + [layer])
        if states is None:
            return
        held = states[0], states[1].long() + end
        layer.device, layer.dtype = held[0].device, held[0].dtype
        for i, state in enumerate(held, 1):  # 0 belongs to the layer's own mixer
            layer.has_previous_state[i] = layer.is_conv_states_initialized[i] = True
            layer.conv_states[i], layer.conv_kernel_size[i] = state, state.shape[-1]

    def states(self) -> list[Tensor]:
        """The two states, as the module left them."""
        convolved, ids = self._layer.conv_states[1], self._layer.conv_states[2]
        return [convolved, (ids - self._end).float()]


def embeds_grams(mixer: nn.Module) -> bool:
    """Whether a mixer embeds n-grams of ids, beside the layer's own mixer."""
    return hasattr(mixer, "ple_embedding")


def number_of(mixer: Any) -> int:
    """The number of a mixer's state among those of its layer; of n-grams that of the first."""
    return 1 if embeds_grams(mixer) else int(getattr(mixer, "conv_idx", 0))
