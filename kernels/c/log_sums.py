"""Logarithms of sums of exponentials, in C: `log_sums.h` sums."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from .library import library


def log_sums(x: Tensor) -> Tensor:
    """Computes `torch.logsumexp` of the rows of `[n, width]` float32.

    A row's bits depend on no other row. In torch they do: its vectors cross the ends of rows, and
    it cuts one row into as many pieces as there are threads.
    """
    x = x.contiguous()
    out = x.new_empty(len(x))
    sizes = c_int64(len(x)), c_int64(x.shape[1])
    library().log_sums(
        c_void_p(x.data_ptr()), *sizes, c_void_p(out.data_ptr()), torch.get_num_threads()
    )
    return out
