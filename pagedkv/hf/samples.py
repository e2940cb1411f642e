"""Samples of each tensor, taken from all over it, by which weights are told apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import chain

import torch
from torch import Tensor, nn

SAMPLES = 64  # elements read of each tensor: a training step changes nearly all elements
GOLDEN = (math.sqrt(5) - 1) / 2


@torch.inference_mode()
def bits(tensors: Sequence[Tensor]) -> list[bytes]:
    """Returns the exact bytes of each tensor's samples; empty if it has no readable elements."""
    views: dict[torch.device, dict[torch.dtype, list[tuple[int, Tensor]]]] = {}
    for i, tensor in enumerate(tensors):
        view = some_of(tensor)
        if view is not None:
            views.setdefault(view.device, {}).setdefault(view.dtype, []).append((i, view))
    found = [b""] * len(tensors)
    for kinds in views.values():
        packed = [torch.cat([view for _, view in kind]) for kind in kinds.values()]
        raw = torch.cat([one.view(torch.uint8) for one in packed]).cpu().numpy().tobytes()
        begin = 0
        for i, view in chain(*kinds.values()):
            end = begin + view.numel() * view.element_size()
            found[i] = raw[begin:end]
            begin = end
    return found


def some_of(tensor: Tensor) -> Tensor | None:
    """Returns `[n]`, at most `SAMPLES` elements from all over a tensor; nothing else is read.

    None for a tensor without readable elements: its bytes are elsewhere, or its class is a special
    one.
    """
    if type(tensor) not in (nn.Parameter, Tensor, nn.Buffer):
        try:
            tensor = tensor.data
            is_plain = type(tensor) is Tensor
        except Exception:  # a class of its own may raise anything
            return None
        if not is_plain:
            return None
    if tensor.is_meta or tensor.layout != torch.strided:
        return None
    if not tensor.is_contiguous():
        return tensor[_grid(tensor.shape)].reshape(-1)
    places = places_of(tensor)
    return tensor.as_strided((len(places),), (places.step,))


def places_of(tensor: Tensor) -> range:
    """Returns where the samples of a contiguous tensor of this shape lie."""
    if not tensor.numel():
        return range(0)
    step, count = _stride(tensor.numel(), tensor.shape[-1] if tensor.ndim else 1)
    return range(0, step * count, step)


@cache
def _stride(size: int, width: int) -> tuple[int, int]:
    """Returns how far apart samples of a contiguous tensor lie, and how many there are.

    Each lies some rows below the last one and the golden ratio of a row to its right, so that
    samples fall into as many rows and columns as they can.
    """
    count = min(size, SAMPLES)
    step = size // count
    if step > 2 * width:
        step = (step // width - 1) * width + round(GOLDEN * width)
    while math.gcd(step, width) > 1:
        step -= 1
    return step, count


def _grid(shape: Sequence[int]) -> tuple[slice, ...]:
    """Selects at most `SAMPLES` elements of a tensor with any layout in memory."""
    left, cuts = SAMPLES, []
    for i, size in enumerate(shape):
        count = min(size, round(left ** (1 / (len(shape) - i))))
        cuts.append(slice(0, None, -(-size // count)))
        left //= count
    return tuple(cuts)
