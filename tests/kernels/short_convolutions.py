"""Steps of short convolutions out of poisoned pools, held to float64. Nothing here needs pytest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.kernels.delta_rules import UNIT, nothing_else_written, slots

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = {  # rows, channels, inputs of a filter
    "one row": (1, 48, 4),
    "several pieces": (4, 700, 4),
    "a filter of three": (9, 24, 3),
    "odd channels": (3, 13, 2),
    "the last input alone": (2, 8, 1),
}
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]


def make(
    rows: int,
    channels: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    mixed: bool = True,
) -> Inputs:
    """Arguments of `convolution_step`; `mixed` as of `slots`."""
    states, source, target = slots(rows, (channels, width), dtype, device, mixed)
    x, weight, bias = (
        torch.randn(shape, device=device).to(dtype)
        for shape in ((rows, channels), (channels, width), (channels,))
    )
    return x, states, weight, bias, source, target


def check(
    step: Callable[..., Tensor],
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    source: Tensor,
    target: Tensor,
    **options: Any,
) -> None:
    """Raises AssertionError unless a step is right, and nothing else was written."""
    every = x, states, weight, bias, source, target
    if x.is_meta:
        step(*every, **options)
        return
    width, after = weight.shape[1], []
    true, bound = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for _ in range(2))
    for row, slot in enumerate(source.tolist()):
        inputs = torch.zeros_like(states[0]) if slot < 0 else states[slot].clone()
        inputs[:, :-1] = inputs[:, 1:].clone()
        inputs[:, -1] = x[row]
        after.append(inputs)
        terms = inputs.double() * weight.double()
        if bias is not None:
            terms = torch.cat([terms, bias.double()[:, None]], 1)
        true[row], bound[row] = terms.sum(1), (width + 2) * UNIT * terms.abs().sum(1)
    if options.get("silu", True):
        # Its slope is at most 1.1; an exponential of y is off by roundings of y and a few more.
        off = (12 + 2 * true.abs()) * UNIT
        true = true * true.sigmoid()
        bound = 1.1 * bound + off * true.abs()
    info = torch.finfo(x.dtype)
    bound += info.eps / 2 * (true.abs() + bound) + info.smallest_normal * info.eps
    into = options.get("into", states)
    with nothing_else_written(states, into, target):
        out = step(*every, **options)
    assert out.dtype == x.dtype, f"the output is {out.dtype}"
    worst = ((out.double() - true).abs() / bound).amax()
    assert worst <= 1, f"the output is off by {worst:.3g} times the bound"
    for inputs, slot in zip(after, target.tolist()):
        assert slot < 0 or torch.equal(into[slot], inputs), "a state is another one"
