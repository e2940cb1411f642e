"""Products with a matrix that was packed for a processor: a linear layer of any number of tokens.

The twin of `torch/packed_product.py`; `products.c` packs and multiplies. If 16 bits hold all
weights exactly, they are kept in 16 bits: a bfloat16 or float16 checkpoint that was loaded in
float32 has such weights, and with few rows reading weights takes all the time. Sums are float32
anyway, and a row's sums do not depend on other rows.
"""

from __future__ import annotations

from ctypes import c_void_p
from functools import cache
from struct import Struct

import torch
from torch import Tensor

from .library import library, missing

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NARROWEST_FIRST = torch.bfloat16, torch.float16, torch.float32
# `Matrix` and `Rows` of products.c. Packing bytes takes half the time of ctypes structures.
MATRIX, ROWS = Struct("Pqqi"), Struct("PPPqi")


class Packed:
    """A matrix `[outputs, inputs]` in panels.

    Attributes:
        panels: `[panels, inputs, width]`, in bfloat16 `[panels, inputs / 2, width, 2]`; a panel has
            as many outputs as two vectors have lanes.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        (outputs, inputs), width = shape, library().panel_width()
        of_panel = (-(-inputs // 2), width, 2) if dtype == torch.bfloat16 else (inputs, width)
        self.panels = torch.empty(-(-outputs // width), *of_panel, dtype=dtype, device="cpu")
        self.shape, self.nbytes = shape, self.panels.nbytes
        self.as_c = MATRIX.pack(self.panels.data_ptr(), *shape, TYPES[dtype])


@cache
def why_not(dtype: torch.dtype) -> str | None:
    """Says why matrices of a dtype are only packed here on request; None if they always are."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"expected float32 or bfloat16, got {str(dtype).removeprefix('torch.')}"
    if missing() or dtype == torch.float32 or library().multiplies_pairs():
        return missing() or None
    return "the processor, or its library, has no AVX512-BF16"


def pack(weight: Tensor) -> Packed:
    """Packs `[outputs, inputs]` in panels, with 16 bits a weight if these hold all exactly."""
    weight = weight.detach().contiguous()
    weight = weight if weight.dtype == torch.bfloat16 else weight.float()
    source, threads = TYPES[weight.dtype], torch.get_num_threads()
    for dtype in NARROWEST_FIRST:
        packed = Packed(weight.shape, dtype)
        if library().pack(packed.as_c, c_void_p(weight.data_ptr()), source, threads):
            break
    return packed


def product(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Computes `functional.linear` of `[..., inputs]` with a packed matrix; it has no gradient.

    Also for bfloat16: sums are float32 and rounded once.
    """
    dtype, (outputs, inputs) = x.dtype, packed.shape
    pairs = dtype == packed.panels.dtype == torch.bfloat16 and library().multiplies_pairs()
    x = x.contiguous() if pairs else x.float().contiguous()
    bias = None if bias is None else bias.float().contiguous()
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device="cpu")
    rows = ROWS.pack(
        *(x.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()),
        *(x.numel() // inputs, TYPES[x.dtype]),
    )
    library().packed_product(packed.as_c, rows, torch.get_num_threads())
    return out if out.dtype == dtype else out.to(dtype)
