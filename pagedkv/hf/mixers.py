"""Mixers: the modules of a model that read and replace recurrent states.

Mixers have neither a class nor a name in common: `linear_attn`, `mamba`, `conv`, `mixer`,
`qkv_proj`. They are found by the methods of a cache that they call. Hooks on them hand a call to
the cache it was made with, if that is one of ours; the calls of others pass untouched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache, LinearAttentionLayer

from .forward_cache import ForwardCache

_CALLED = {"update_conv_state", "update_recurrent_state"}


def mixers_of(model: nn.Module) -> dict[int, list[nn.Module]]:
    """The mixers of each layer, by the layer's index."""
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        names = getattr(getattr(forward, "__code__", None), "co_names", ())
        if _CALLED.intersection(names) and hasattr(module, "layer_idx"):
            found.setdefault(index_of(module), []).append(module)
    return found


def index_of(mixer: nn.Module) -> int:
    """The layer that a mixer belongs to."""
    index: Any = mixer.layer_idx
    return int(index)


def watch_mixers(model: nn.Module) -> list[RemovableHandle]:
    """Puts the hooks on a model's mixers."""
    handles = []
    for mixers in mixers_of(model).values():
        for mixer in mixers:
            handles.append(mixer.register_forward_pre_hook(before_mixer, with_kwargs=True))
            handles.append(mixer.register_forward_hook(after_mixer, with_kwargs=True))
    return handles


# The hooks are functions of the module that they are given: a deep copy of a model has hooks that
# work on the copy.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def before_mixer(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Hook that a mixer runs before its forward; the arguments that it is called with instead."""
    cache = _first(ForwardCache, args, kwargs)
    return None if cache is None else cache.enter_mixer(module, args, kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def after_mixer(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Hook that a mixer runs after its forward; the output that its caller gets instead."""
    view = _first(StateView, args, kwargs)
    if view is None or view.finish is None:
        return None
    # A copy of an attached model has the hooks twice once it is attached as well.
    finish, view.finish = view.finish, None
    return finish(output)


def _first(kind: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, kind)), None)


class _OneCall(LinearAttentionLayer):
    """A layer for one call of a mixer: a state that is handed in need not be copied once more."""

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Keeps the tensor itself."""
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class StateView(Cache):
    """A cache for one call of one mixer: it has the states of that layer and nothing else.

    Args:
        index: the layer's.
        states: `[B, *shape]` each, of the convolution first, then recurrent; the mixer writes into
            them. None for rows without tokens.

    Attributes:
        finish: makes the output that the caller of the mixer gets; None: the mixer's own.
    """

    finish: Callable[[Any], Any] | None = None

    def __init__(self, index: int, states: list[Tensor] | None) -> None:
        self._layer = layer = _OneCall()
        super().__init__(layers=[None] * index + [layer])
        if states is None:
            return
        layer.device, layer.dtype = states[0].device, states[0].dtype
        layer.has_previous_state[0] = layer.is_conv_states_initialized[0] = True
        layer.conv_states[0], layer.conv_kernel_size[0] = states[0], states[0].shape[-1]
        if len(states) > 1:
            layer.recurrent_states[0] = states[1]
            layer.is_recurrent_states_initialized[0] = True

    def states(self) -> list[Tensor]:
        """The states that the mixer left, in the same order."""
        both = self._layer.conv_states[0], self._layer.recurrent_states[0]
        return [state for state in both if state is not None]
