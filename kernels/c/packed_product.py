"""Products with a matrix that was packed for a processor: a linear layer of any number of tokens.

The twin of `torch/packed_product.py`; `products.c` multiplies. Weights which 16 bits hold exactly
are kept in these: a checkpoint in bfloat16 or float16 that was loaded in float32 has such ones, and
few rows take as long as their weights take to be read. Sums are float32 all the same, and a row's
do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import Structure, byref, c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from .library import library, missing

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
AT_ONCE = 1 << 20  # weights that are looked at together


class _Matrix(Structure):
    """A packed matrix, as `Matrix` in products.c."""

    _fields_ = [
        ("panels", c_void_p),
        *((name, c_int64) for name in ("outputs", "inputs")),
        ("type", c_int32),
    ]


class _Rows(Structure):
    """The rows of a product, as `Rows` in products.c."""

    _fields_ = [*((name, c_void_p) for name in ("x", "bias", "out")), ("rows", c_int64)]


class Packed:
    """A matrix `[outputs, inputs]` in panels.

    Attributes:
        panels: `[panels, inputs, width]`; a panel is as many outputs as two vectors have lanes.
    """

    def __init__(self, panels: Tensor, shape: torch.Size) -> None:
        self.panels, self.shape = panels, shape
        self.nbytes = panels.nbytes
        self.as_c = _Matrix(panels.data_ptr(), *shape, TYPES[panels.dtype])


@cache
def why_not(dtype: torch.dtype) -> str | None:
    """Why matrices of a dtype are not packed here unless that is asked for; None where they are."""
    if dtype != torch.float32:
        return f"expected float32, got {str(dtype).removeprefix('torch.')}"
    return missing() or None


@torch.no_grad()
def pack(weight: Tensor) -> Packed:
    """`[outputs, inputs]` in panels, of 16 bits a weight where that is exact for all of them."""
    weight = weight.detach().float()
    kept = (x for x in (torch.bfloat16, torch.float16) if _holds(x, weight))
    dtype = next(kept, torch.float32)
    (outputs, inputs), width = weight.shape, library().panel_width()
    panels = torch.zeros(-(-outputs // width), inputs, width, dtype=dtype, device="cpu")
    for part, into in parts(weight, panels, width):
        # A word of bfloat16 has an output of the first half and one of the second.
        halves = part.view(-1, 2, width // 2, inputs).to(dtype)
        order = (0, 3, 2, 1) if dtype == torch.bfloat16 else (0, 3, 1, 2)
        made = halves.permute(order)
        into.view(made.shape).copy_(made)
    return Packed(panels, weight.shape)


def product(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """`functional.linear` of `[..., inputs]` with a packed matrix; it has no gradient.

    Of bfloat16 as well: sums are float32 and rounded once.
    """
    dtype, x, (outputs, inputs) = x.dtype, x.float().contiguous(), packed.shape
    bias = None if bias is None else bias.float().contiguous()
    out = x.new_empty(*x.shape[:-1], outputs)
    rows = _Rows(
        *(x.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()),
        x.numel() // inputs,
    )
    library().packed_product(byref(packed.as_c), byref(rows), torch.get_num_threads())
    return out.to(dtype)


def _holds(dtype: torch.dtype, weight: Tensor) -> bool:
    """Whether every weight is a number of a narrower dtype, bit for bit."""
    parts = weight.flatten().split(AT_ONCE)
    same = (torch.equal(x.to(dtype).float().view(torch.int32), x.view(torch.int32)) for x in parts)
    return all(same)


def parts(weight: Tensor, panels: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows of a matrix, padded to whole panels of `width` rows, and their panels."""
    count = max(1, AT_ONCE // (width * weight.shape[1]))
    for first in range(0, len(panels), count):
        into = panels[first : first + count]
        part = weight[first * width : (first + count) * width]
        if len(part) < len(into) * width:
            padded = part.new_zeros(len(into) * width, part.shape[1])
            padded[: len(part)] = part
            part = padded
        yield part, into
