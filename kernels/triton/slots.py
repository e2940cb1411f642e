"""Checks the inputs of kernels of one token, and the pools of states that they read and write."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .checks import DTYPES
from .launch import check_aligned

FAR = 2**30  # elements, so that places within a slot or a row are int32


def readable(x: Tensor) -> Tensor:
    """The tensor itself, or a copy if its last axis has gaps or its heads lie far apart."""
    strides = x.stride()
    near = strides[0] <= FAR and strides[1] * x.shape[1] <= FAR
    if near and strides[-1] == 1 and not x.is_neg():
        return x
    return x.clone(memory_format=torch.contiguous_format)


def check_dtypes(**inputs: Tensor | None) -> None:
    """Raises NotImplementedError for inputs of a dtype without a kernel."""
    for name, x in inputs.items():
        if x is not None and x.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise NotImplementedError(f"{name}: expected one of {names}, got {x.dtype}")


def check_pools(states: Tensor, into: Tensor) -> None:
    """Raises ValueError for pools that kernels cannot read and write."""
    pools = {"states": states} if into is states else {"states": states, "into": into}
    check_aligned(**pools)
    for name, pool in pools.items():
        size = math.prod(pool.shape[1:])
        if not pool[:1].is_contiguous() or size > FAR:
            raise ValueError(
                f"{name}: expected slots that are one run of at most {FAR} numbers, got "
                f"{list(pool.shape)} with strides {pool.stride()}"
            )
