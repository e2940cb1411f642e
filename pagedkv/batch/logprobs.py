"""Log-probabilities of tokens under a model's own distribution, as results and scores have them."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkv.kernels.c.library import missing
from pagedkv.kernels.c.log_sums import log_sums

AT_ONCE = 64  # rows of logits that are summed in one call, which may copy them to float32


def logprobs_of(logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """`[n]` float32: a token's logit less the log-sum-exp of its row, computed once for the row.

    Where a logit of the row is infinite, it is NaN for every token, as it is to torch.

    Args:
        logits: `[rows, vocab]`.
        rows: `[n]`, in which row each token stands.
        ids: `[n]`.
    """
    sums = torch.cat([_log_sums(chunk.float()) for chunk in logits.split(AT_ONCE)])
    sums = sums.masked_fill(sums == torch.inf, torch.nan)  # a logit is infinite
    return logits[rows, ids].float() - sums[rows]


def _log_sums(logits: Tensor) -> Tensor:
    return log_sums(logits) if logits.is_cpu and not missing() else logits.logsumexp(-1)
