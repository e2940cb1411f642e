"""Attention of new tokens if K and V of their past are made block by block.

With a long past K and V of all tokens would not fit at once: each block is attended separately, and
the parts are merged by their log-sum-exps. Every new token sees all of the past, so only the part
over the new tokens themselves is masked.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from .cascade import merge
from .sdpa import attend, attend_on_cpu, without_cudnn


def attend_row(
    q: Tensor, k: Tensor, v: Tensor, past: Iterable[tuple[Tensor, Tensor]], scale: float
) -> Tensor:
    """Attends causally for new tokens to themselves and all tokens before them.

    Args:
        q: `[n, H, q, D]`, the new tokens of n equally long rows.
        k, v: `[n, H, q, D]`, of the new tokens; D of V may be less than that of K.
        past: blocks `[n, H, s, D]` of K and V of the tokens before.

    Returns:
        `[n, H, q, D]`, D that of V.
    """
    found: tuple[Tensor, Tensor] | None = None
    with without_cudnn(q.device):
        for block in past:
            out, lse = found or _attend(q, k, v, True, scale)
            other, other_lse = _attend(q, *block, False, scale)
            found = merge(out, lse, other, other_lse), torch.logaddexp(lse, other_lse)
        return attend(q, k, v, scale, causal=True) if found is None else found[0]


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Returns attention `[n, H, q, D]`, and its natural log-sum-exp `[n, H, q, 1]` float32."""
    new, width = q.shape[2], v.shape[3]
    if q.device.type == "cpu":  # its kernel needs V as wide as K
        wide = F.pad(v, (0, k.shape[3] - width))
        out, lse = attend_on_cpu(q, k, wide, scale, causal=causal)
        return out[..., :width], lse.unsqueeze(-1)
    if q.device.type == "cuda":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, is_causal=causal, scale=scale
        )
        return out, lse[:, :, :new].unsqueeze(-1)
    scores = (q.float() @ k.float().transpose(2, 3)) * scale
    if causal:
        hidden = torch.ones(new, new, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    return ((scores - lse).exp() @ v.float()).to(q.dtype), lse
