"""RMS norms on a processor in one call; torch needs six, which find cold caches within a model.

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
    """Says why rows of a dtype are left to torch; None if they are not."""
    if dtype not in TYPES:
        return f"expected float32 or bfloat16, got {str(dtype).removeprefix('torch.')}"
    return missing() or None


def rms_norm(x: Tensor, weight: Tensor, eps: float, added: float, rounds: bool) -> Tensor:
    """Computes as `torch/rms_norm.py`, for tensors of one dtype and a contiguous weight.

    Rows that are not contiguous are copied first, so that a row's bits do not depend on strides.
    """
    rows, width = x.contiguous(), weight.numel()
    out = torch.empty_like(rows)
    norms = NORMS.pack(
        *(rows.data_ptr(), weight.data_ptr(), out.data_ptr()),
        *(x.numel() // width, width, eps, added, rounds, TYPES[x.dtype]),
    )
    library().rms_norm(norms, torch.get_num_threads())
    return out if rows is x else torch.empty_like(x).copy_(out)  # with torch's strides
