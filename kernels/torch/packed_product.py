"""Products with a matrix that was packed for a CPU before: a linear layer of few tokens.

oneDNN multiplies by blocks. It puts an unpacked matrix into blocks in every call, which for few
rows takes as long as the product. torch has undocumented operators for both halves, meant for its
own compiler: only this file names them, and it tries them with small products before it uses them.
MKL has such operators as well: only for float32, with twice the memory, and they use their blocks
only in calls of as many rows as the blocks were made for.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

DTYPES = torch.float32, torch.bfloat16
OPERATORS = "_reorder_linear_weight", "_linear_pointwise"
ROWS = 16  # rows for which blocks are chosen; they serve any number of rows
TRIED = 33, 70, (1, 2, 17, 40)  # inputs, outputs and rows of the products that are tried


@cache
def why_not(dtype: torch.dtype) -> str | None:
    """Says why matrices of a dtype cannot be packed here; None if they can.

    The first call for a dtype packs a small matrix and compares products with exact ones.
    """
    if dtype not in DTYPES:
        names = " or ".join(str(one).removeprefix("torch.") for one in DTYPES)
        return f"expected {names}, got {str(dtype).removeprefix('torch.')}"
    missing = [name for name in OPERATORS if not hasattr(torch.ops.mkldnn, name)]
    if missing:
        return f"this torch has no operator mkldnn.{missing[0]}"
    try:
        is_right = _tried(dtype)
    except (RuntimeError, TypeError, NotImplementedError) as error:  # for example another signature
        return f"mkldnn.{OPERATORS[1]} failed: {next(iter(str(error).splitlines()), '')}"
    return None if is_right else f"mkldnn.{OPERATORS[1]} gave wrong products"


@torch.no_grad()
def pack(weight: Tensor) -> Tensor:
    """Packs `[outputs, inputs]` in the blocks that `product` reads, with about as many bytes."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    return packed


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Computes `functional.linear` of `[..., inputs]` with a packed matrix; it has no gradient."""
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
            more = torch.zeros_like(bias) if added is None else added
            terms = [each.double() for each in (x[:n], weight, more)]
            exact = functional.linear(*terms)
            # The bound for `inputs` products and a bias, summed in float32, and rounded once.
            size = functional.linear(*(each.abs() for each in terms))
            bound = torch.finfo(dtype).eps * exact.abs() + (inputs + 1) * 2.0**-23 * size
            got = product(x[:n], packed, added)
            if got.dtype != dtype or not ((got.double() - exact).abs() <= bound).all():
                return False
    return True
