"""Products with a matrix that was packed for a CPU before: a linear layer of few tokens.

oneDNN multiplies by blocks. A matrix that is not packed is put into blocks in every call, which for
few rows takes as long as the product. torch has operators for both halves, which it keeps for its
own compiler: nowhere else are they named, and none is used before it was right in a small product.
MKL has such operators as well: for float32 alone, in twice the memory, and they use their blocks
only in calls of as many rows as these were made for.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

DTYPES = torch.float32, torch.bfloat16
OPERATORS = "_reorder_linear_weight", "_linear_pointwise"
ROWS = 16  # that blocks are chosen for; they serve any number of rows
TRIED = 33, 70, (1, 2, 17, 40)  # inputs, outputs and rows of the products that are tried


@cache
def why_not(dtype: torch.dtype) -> str | None:
    """Why matrices of a dtype cannot be packed here; None where they can.

    It packs a small one and compares products with exact ones, at the first call for a dtype.
    """
    if dtype not in DTYPES:
        names = " or ".join(str(one).removeprefix("torch.") for one in DTYPES)
        return f"expected {names}, got {str(dtype).removeprefix('torch.')}"
    missing = [name for name in OPERATORS if not hasattr(torch.ops.mkldnn, name)]
    if missing:
        return f"this torch has no operator mkldnn.{missing[0]}"
    try:
        is_right = _tried(dtype)
    except (RuntimeError, TypeError, NotImplementedError) as error:  # another signature, say
        return f"mkldnn.{OPERATORS[1]} failed: {next(iter(str(error).splitlines()), '')}"
    return None if is_right else f"mkldnn.{OPERATORS[1]} gave wrong products"


@torch.no_grad()
def pack(weight: Tensor) -> Tensor:
    """`[outputs, inputs]` in the blocks that `product` reads; about as many bytes again."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    return packed


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`functional.linear` of `[..., inputs]` with a packed matrix; it has no gradient."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


@torch.no_grad()
def _tried(dtype: torch.dtype) -> bool:
    inputs, outputs, rows = TRIED
    draw = torch.Generator().manual_seed(0)
    weight, bias, x = (
        torch.randn(shape, generator=draw, device="cpu").to(dtype)
        for shape in ((outputs, inputs), (outputs,), (max(rows), inputs))
    )
    packed = pack(weight)
    for n in rows:
        for added in (None, bias):
            exact = functional.linear(x[:n].double(), weight.double(), _double(added))
            # Of `inputs` products and a bias, each summed in float32, and the sum rounded once.
            size = functional.linear(x[:n].double().abs(), weight.double().abs(), _size(added))
            bound = torch.finfo(dtype).eps * exact.abs() + (inputs + 1) * 2.0**-23 * size
            got = product(x[:n], packed, added)
            if got.dtype != dtype or not ((got.double() - exact).abs() <= bound).all():
                return False
    return True


def _double(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.double()


def _size(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.double().abs()
