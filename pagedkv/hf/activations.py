"""Activations of a model, computed so that no number depends on its place in a tensor.

torch computes the end of a tensor, or of a thread's share of it, number by number, which rounds
differently from its vector code. So while a step computes, and only in its thread, activations get
pieces that are whole vectors for every thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, activations

from .swapped import StandIn, StandIns

VECTORS = 64  # any loop of torch takes a divisor of this at a time: two vectors of 16 bits each
ALONE = 1 << 15  # so many numbers torch computes in one thread: its grain size

# Classes that compute each number from itself, and hold nothing but settings.
_PLAIN = {nn.SiLU, nn.GELU, nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.Tanh, nn.Mish, nn.LeakyReLU}
_PLAIN |= {
    one
    for one in vars(activations).values()
    if isinstance(one, type) and issubclass(one, nn.Module) and one.__module__.startswith("transf")
}

_SHARED: weakref.WeakKeyDictionary[PreTrainedModel, weakref.ref[Activations]]
_SHARED = weakref.WeakKeyDictionary()


def activations_of(model: PreTrainedModel) -> Activations:
    """Returns the activations of a model, found at the first use and kept while they are used."""
    found = _SHARED[model]() if model in _SHARED else None
    if found is None:
        found = Activations(model)
        _SHARED[model] = weakref.ref(found)
    return found


def in_whole_vectors(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies a function of single numbers, computing each as if it stood in a full vector."""
    flat = x.reshape(-1)
    if len(flat) <= ALONE and not len(flat) % VECTORS:
        return compute(flat).view(x.shape)
    out, begin = torch.empty_like(flat), 0
    together = ALONE * torch.get_num_threads()  # then each thread has whole vectors
    while begin < len(flat):
        left = len(flat) - begin
        piece = flat[begin : begin + (together if left >= together else ALONE)]
        end = functional.pad(piece, (0, -len(piece) % VECTORS))
        out[begin : begin + len(piece)] = compute(end)[: len(piece)]
        begin += len(piece)
    return out.view(x.shape)


class Activations(StandIns):
    """The activations of a model, which compute in whole vectors during a step of ours."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        found = (part for part in model.modules() if is_plain(part))
        self._sites = [_InVectors(part, self._threads) for part in found]


def is_plain(module: nn.Module) -> bool:
    """Whether a module is an activation that computes each number from itself."""
    held = len(module._parameters) + len(module._modules) + len(module._buffers)
    forward = vars(module).get("forward")  # in the middle of a step it is ours
    return type(module) in _PLAIN and not held and isinstance(forward, (_InVectors, type(None)))


class _InVectors(StandIn):
    """The forward of an activation."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if len(args) == 1 and not kwargs else None
        compute = type(self.module).forward
        if not self.serves(x):
            return compute(self.module, *args, **kwargs)
        return in_whole_vectors(lambda x: compute(self.module, x), x)
