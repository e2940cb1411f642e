"""Attends to a shared prefix once for all its rows, and merges this with each row's own tokens.

Otherwise each of n decoding rows would gather and read the same prefix again. Here it is gathered
once, and the queries of all rows are multiplied with it as one matrix. Each row attends to its own
tokens separately, and the log-sum-exps of the two parts give their weights:

    out = out_own + sigmoid(lse_prefix - lse_own) * (out_prefix - out_own)

Bytes moved per decode step and layer: K and V of the prefix once instead of n times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sdpa import attend_on_cpu


def attend_prefix(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attends for the queries of n rows to one prefix that all of them see whole.

    Args:
        q: `[n, G, r, D]`, the r query heads of every KV head.
        k, v: `[1, G, s, D]`.

    Returns:
        `[n, G, r, D]`, and the natural log-sum-exp `[n, G, r, 1]` float32.
    """
    n, heads, queries, dim = q.shape
    out, lse = attend(q.transpose(0, 1).reshape(1, heads, n * queries, dim), k, v, None, scale)
    front, sums = (x.view(heads, n, queries, -1).transpose(0, 1) for x in (out, lse))
    return front, sums


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attends over plain tensors; returns also the natural log-sum-exp.

    Args:
        q: `[n, G, r, D]`; a query sees every key that the additive `mask` does not hide.
        k, v: `[n, G, s, D]`.

    Returns:
        `[n, G, r, D]`, and `[n, G, r, 1]` float32.
    """
    out, lse = attend_on_cpu(q, k, v, scale, mask=mask)
    return out.contiguous(), lse.unsqueeze(-1)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Computes the attention over two disjoint sets of keys from the attention over each."""
    return torch.lerp(out, other, torch.sigmoid(other_lse - lse).to(out.dtype))
