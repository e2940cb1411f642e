"""RMS norms on a processor: one call, where torch has six that find cold caches within a model.

The twin of `torch/rms_norm.py`; `rms_norm.c` computes. A row's bits depend on that row alone.
"""

from __future__ import annotations

from functools import cache
from struct import Struct

import torch
from torch import Tensor

from .library import library, missing

TYPES = {torch.float32: 0, torch.bfloat16: 1}
NORMS = Struct("PPPqqffii")  # as `Norms` in rms_norm.c: x, weight, out, rows, width, and the rest


@cache
def why_not(dtype: torch.dtype) -> str | None:
    """Why rows of a dtype are for torch; None where they are not."""
    if dtype not in TYPES:
        return f"expected float32 or bfloat16, got {str(dtype).removeprefix('torch.')}"
    return missing() or None


def rms_norm(x: Tensor, weight: Tensor, eps: float, added: float, rounds: bool) -> Tensor:
    """As `torch/rms_norm.py`, of tensors of one dtype; the weight is contiguous.

    Rows that are not contiguous are copied first: a row alone may be so where several are not.
    """
    rows, width = x.contiguous(), weight.numel()
    out = torch.empty_like(rows)
    norms = NORMS.pack(
        *(rows.data_ptr(), weight.data_ptr(), out.data_ptr()),
        *(x.numel() // width, width, eps, added, rounds, TYPES[x.dtype]),
    )
    library().rms_norm(norms, torch.get_num_threads())
    return out if rows is x else torch.empty_like(x).copy_(out)  # strides as torch's
