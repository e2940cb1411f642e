"""Computes RMS norms of a model on a CPU by one call in C, where a trial shows the same results.

A norm is recognised by what it computes, not by its name or class: a copy of the module computes
some rows, and float64 gives the bounds of every right result in float32, roundings included.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from pagedkv.kernels.c.rms_norm import rms_norm, why_not
from pagedkv.kernels.torch import rms_norm as twin
from pagedkv.kernels.torch.rms_norm import bounds

from .snapshot import SeenTensor
from .swapped import Swapped, is_its_own

How = tuple[float, float, bool]  # eps, the number added to weights, whether rows are rounded before


class NormForward(Swapped):
    """The forward of an RMS norm."""

    def __init__(self, module: nn.Module, seen: SeenTensor, threads: list[int], how: How) -> None:
        super().__init__(module, seen, threads)
        self.how, self.state = how, _state_of(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if other := self.other():
            return other(*args, **kwargs)
        x: Any = args[0] if len(args) == 1 and not kwargs else None
        if not self.serves(x):
            return type(self.module).forward(self.module, *args, **kwargs)
        return rms_norm(x, self.weight, *self.how)


def norms_of(
    weights: Mapping[nn.Module, SeenTensor | None],
    before: Mapping[nn.Module, NormForward],
    threads: list[int],
) -> dict[nn.Module, NormForward]:
    """Finds the norms among modules.

    Args:
        weights: modules with their weights, or None for a module without one.
        before: the norms found last time; unchanged ones are not examined again.
        threads: those that compute a step.
    """
    found: dict[nn.Module, NormForward] = {}
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        for module, seen in weights.items():
            last = before.get(module)
            if seen is None or not _may_be_one(module):
                continue
            if last and last.seen.is_same(seen) and _equal(last.state, _state_of(module)):
                found[module] = last
            elif how := how_it_norms(module):
                found[module] = NormForward(module, seen, threads, how)
    return found


def _may_be_one(module: nn.Module) -> bool:
    """Whether a module looks like a norm: a weight for each number of a row, a small number."""
    weight = module._parameters.get("weight")
    return (
        type(weight) is nn.Parameter
        and weight.dim() == 1
        and weight.is_cpu
        and weight.is_contiguous()
        and not weight.is_inference()
        and why_not(weight.dtype) is None
        and len(module._parameters) + len(module._modules) + len(module._buffers) == 1
        and len(_small_numbers(module)) == 1
        and is_its_own(module)
        and all(_is_fixed(own) for name, own in vars(module).copy().items() if name not in _OF_ALL)
    )


_OF_ALL = frozenset(vars(nn.Module())) | {"forward"}
_FIXED = {int, float, bool, str, type(None), FunctionType, torch.dtype, torch.device, torch.Size}


def _is_fixed(own: Any) -> bool:
    """Whether a value can change only by being replaced, because nothing can be written into it."""
    return all(map(_is_fixed, own)) if type(own) is tuple else type(own) in _FIXED


def _small_numbers(module: nn.Module) -> list[float]:
    return [own for own in vars(module).copy().values() if type(own) is float and 0 < own < 1]


def how_it_norms(module: nn.Module) -> How | None:
    """Returns the arguments with which `rms_norm` computes what a module does; None if none do."""
    weight, (eps,) = module._parameters["weight"], _small_numbers(module)
    assert weight is not None
    x = _rows(len(weight), eps).to(weight.dtype)
    width = len(weight)
    shapes = x.shape, (1, len(x), width), (1, 2, 8, width)
    tried = [_tried(copy(module), x.clone().view(shape)) for shape in shapes]
    ones = [_tried(copy(module), row.clone().view(1, 1, width)) for row in x[4::6]]
    bad = _no_numbers(x)
    shown = _tried(copy(module), bad.clone()[None])
    if shown is None or not all(out is not None for out in (*tried, *ones)):
        return None
    outs = [(slice(None), out.view(x.shape)) for out in tried if out is not None]
    outs.append((slice(4, None, 6), torch.cat([out[0] for out in ones if out is not None])))
    for how in ((eps, added, rounds) for added in (0.0, 1.0) for rounds in (True, False)):
        least, most = bounds(x, weight, *how)
        if all(((least[at] <= out) & (out <= most[at])).all() for at, out in outs):
            same = torch.equal(shown[0].isnan(), twin.rms_norm(bad, weight, *how).isnan())
            return how if same else None
    return None


def _no_numbers(x: Tensor) -> Tensor:
    """Makes rows in which one number is NaN or infinite."""
    x = x[9:12].clone()
    x[:, 0] = x.new_tensor([torch.nan, torch.inf, -torch.inf])
    return x


def _tried(module: nn.Module, x: Tensor) -> Tensor | None:
    """Returns what a forward gives; None if it is no norm, or changes its module."""
    before = _state_of(module)
    try:
        out = type(module).forward(module, x)
    except Exception:  # a forward that is made for other arguments may raise anything
        return None
    same = type(out) is Tensor and (out.dtype, out.shape) == (x.dtype, x.shape)
    return out if same and out.is_contiguous() and _equal(before, _state_of(module)) else None


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Returns all that a forward may depend on, except the weight's numbers and the rows."""
    kinds = type(module).__mro__
    own = ((i, kind) for i, kind in enumerate(kinds[: kinds.index(nn.Module)]))
    of_class = {f"{i}.{name}": value for i, kind in own for name, value in vars(kind).items()}
    state = {"": type(module), "()": type(module).forward, **of_class, **vars(module)}
    if is_its_own(module):  # in the middle of a step as well
        state.pop("forward", None)
    return state


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[key] is other[key] for key in one)


@lru_cache(maxsize=8)
def _rows(width: int, eps: float) -> Tensor:
    """Makes rows `[16, width]` of few and of many numbers, near `eps` and far, some around 1.

    Sums of few numbers have few roundings, so their bounds are narrow in a row of any width.
    """
    draw = torch.Generator().manual_seed(width)
    x = torch.randn(16, width, generator=draw, device="cpu", dtype=torch.float32)
    few = (0, 1.0), (1, 0.3), (1, 3.0), (2, 1.0), (3, 1.0), (5, 3.0)
    for row, (count, size) in enumerate(few):
        x[row, count:] = 0.0
        x[row] *= size * (eps * width) ** 0.5
    x[6:9] *= eps**0.5
    x[10:] += 1.0
    x[12:16] *= torch.tensor([1e-4, 30.0, 1e6, 1e15], device="cpu")[:, None]
    return x
