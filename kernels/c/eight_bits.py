"""Products with a matrix of 8 bits a weight: with few rows, reading half the bytes saves time.

Weights and rows are rounded to integers up to 127, times a scale for each group of 32 inputs;
scales of weights are halves. `eight_bits.c` multiplies; a row's bits depend on that row alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from struct import Struct

import torch
from torch import Tensor

from .library import library, missing

GROUP = 32
TOP = 127
AT_ONCE = 1 << 20  # weights that are packed together
HALVES = torch.finfo(torch.float16)
PRODUCT = Struct("PPPPPqqq")  # as `Product` in eight_bits.c


class Eight:
    """A matrix `[outputs, inputs]` of 8 bits a weight.

    Attributes:
        panels: `[panels, groups, bytes]`; a panel has as many outputs as a vector has lanes.
    """

    def __init__(self, panels: Tensor, shape: torch.Size) -> None:
        self.panels, self.shape, self.nbytes = panels, shape, panels.nbytes


@cache
def why_not(dtype: torch.dtype) -> str | None:
    """Says why no matrix of a dtype can have 8 bits a weight here; None if some can."""
    if dtype != torch.float32:
        return f"expected float32, got {str(dtype).removeprefix('torch.')}"
    if missing():
        return missing()
    there = hasattr(library(), "eight_bit_product")
    return None if there else "the processor, or its library, has no AVX512-VNNI"


def holds(weight: Tensor) -> bool:
    """Whether a matrix can have 8 bits a weight: whole groups, and scales that are halves."""
    if why_not(weight.dtype) or weight.shape[1] % GROUP:
        return False
    top = weight.detach().abs().amax().item() / TOP
    return HALVES.tiny <= top <= HALVES.max


@torch.no_grad()
def pack(weight: Tensor) -> Eight:
    """Packs `[outputs, inputs]`, for which `holds` is true, in panels: scales, then codes."""
    weight = weight.detach()
    (outputs, inputs), width = weight.shape, library().eight_bit_width()
    count, groups = -(-outputs // width), inputs // GROUP
    panels = torch.empty(count, groups, (2 + GROUP) * width, dtype=torch.uint8, device="cpu")
    for part, into in _parts(weight, panels, width):
        of_groups = part.view(-1, width, groups, GROUP)
        scales = (of_groups.abs().amax(-1) / TOP).half()
        by = scales.float().clamp_min(2.0**-80)[..., None]
        codes = (of_groups / by).round().clamp(-TOP, TOP).add(128).to(torch.uint8)
        codes = codes.view(-1, width, groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
        into[..., : 2 * width] = scales.transpose(1, 2).contiguous().view(torch.uint8)
        into[..., 2 * width :] = codes.flatten(2)
    return Eight(panels, weight.shape)


def product(x: Tensor, packed: Eight, bias: Tensor | None) -> Tensor:
    """Approximates `functional.linear` of `[..., inputs]` with a packed matrix; no gradient."""
    x, (outputs, inputs) = x.contiguous(), packed.shape
    bias = None if bias is None else bias.contiguous()
    out = x.new_empty(*x.shape[:-1], outputs)
    groups = x.new_empty(x.numel() // GROUP, library().eight_bit_group(), dtype=torch.uint8)
    call = PRODUCT.pack(
        *(packed.panels.data_ptr(), x.data_ptr(), 0 if bias is None else bias.data_ptr()),
        *(out.data_ptr(), groups.data_ptr(), outputs, inputs, x.numel() // inputs),
    )
    library().eight_bit_product(call, torch.get_num_threads())
    return out


def _parts(weight: Tensor, panels: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields rows of a matrix, padded to whole panels of `width` rows, and their panels."""
    count = max(1, AT_ONCE // (width * weight.shape[1]))
    for first in range(0, len(panels), count):
        into = panels[first : first + count]
        part = weight[first * width : (first + count) * width]
        if len(part) < len(into) * width:
            padded = part.new_zeros(len(into) * width, part.shape[1])
            padded[: len(part)] = part
            part = padded
        yield part, into
