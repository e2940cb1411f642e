"""Calls torch's attention kernels so that their errors do no harm.

On a CPU the flash kernel returns zeros for a query if all its scores are NaN, or all are minus
infinity, or one is infinity. So the overflow of a layer's K or Q would stay hidden: a prompt would
give numbers, and a later step NaN. And every kernel multiplies a V of NaN or infinity with weights
of 0: tokens would change rows that do not see them, and with them stored prefixes.

On compute capability 10.0 cuDNN's kernel returns wrong numbers, without an error, when models with
fewer than 8 KV heads decode (torch 2.13): a few tokens look right, long texts do not. So cuDNN's
kernel is switched off on all cards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp
from torch.nn.attention import SDPBackend, sdpa_kernel

OTHERS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Attends for `[n, H, new, D]` to K and V `[n, G, s, D]`; a mask is added to the scores."""
    plain = v.shape[3] == q.shape[3] and all(x.stride(3) == 1 for x in (q, k, v))
    if q.device.type == "cpu" and plain:
        return attend_on_cpu(q, k, v, scale, causal=causal, mask=mask)[0]

    def attended(k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=gqa
        ), None

    out, _ = found = attended(k, v)
    return (found if is_fine(out) else unmoved(attended, k, v, mask, causal))[0]


def attend_on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs scaled_dot_product_attention's CPU kernel, and returns its log-sum-exp as well.

    Returns:
        `[n, H, new, D]`, NaN if all scores of a query are NaN, and the log-sum-exp `[n, H, new]`.
    """

    def attended(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor]
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale
        )
        return found

    def nan_if_broken(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attended(k, v)
        broken = ~q.isfinite().all(-1) | _seen(~k.isfinite().all(-1), q.shape[1], mask, causal)
        return out.masked_fill((broken & ~_is_sure(lse)).unsqueeze(-1), torch.nan), lse

    out, lse = attended(k, v)
    fine = bool(_is_sure(lse).all()) and (not (causal or mask is not None) or is_fine(out))
    return (out, lse) if fine else unmoved(nan_if_broken, k, v, mask, causal)


def _is_sure(lse: Tensor) -> Tensor:
    """Where a log-sum-exp is sure: 0 stands for queries without numbers, and rarely for others."""
    return lse.isfinite() & (lse != 0)


def is_fine(out: Tensor) -> bool:
    """Whether all results are finite; True on other devices than a CPU, to avoid a wait."""
    return out.device.type != "cpu" or bool(out.sum(dtype=torch.float32).isfinite())


def unmoved(
    attended: Callable[[Tensor, Tensor], tuple[Tensor, Any]],
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool = False,
) -> tuple[Tensor, Any]:
    """Attends so that hidden tokens never change a query that sees only finite numbers.

    A weight of 0 does not hide a NaN or infinite value, nor does an added mask hide such a score.

    Args:
        attended: computes `[n, H, new, D]`, and perhaps the log-sum-exp, from K and V.
    """
    out, lse = found = attended(k, v)
    bad_k, bad_v = (~x.isfinite() for x in (k, v))
    bad = bad_k.any(-1) | bad_v.any(-1)
    if not bad.any():
        return found
    seen = _seen(bad, out.shape[1], mask, causal)
    other, sums = attended(k.masked_fill(bad_k, 0), v.masked_fill(bad_v, 0))
    out = torch.where(seen.unsqueeze(-1), out, other)
    return out, None if lse is None else torch.where(seen, lse, sums)


def _seen(which: Tensor, heads: int, mask: Tensor | None, causal: bool) -> Tensor:
    """Whether queries see one of the tokens `which`, `[n, G, s]`: `[n, H, new or 1]`."""
    if mask is not None:
        seen = (which.unsqueeze(2) & (mask > -torch.inf)).any(-1)
    else:
        seen = which.cummax(2).values if causal else which.any(2, keepdim=True)
    return seen.repeat_interleave(heads // seen.shape[1], 1)


class _WithoutCudnn:
    """Keeps cuDNN's attention off while any thread is inside: torch has one switch for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = cudnn_sdp_enabled()
            self._inside += 1
            enable_cudnn_sdp(False)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                enable_cudnn_sdp(self._before)


_without_cudnn = _WithoutCudnn()


def without_cudnn(device: torch.device) -> AbstractContextManager[object]:
    """Returns the context for calls of `scaled_dot_product_attention` on a device."""
    if device.type != "cuda":
        return nullcontext()
    # A compiler can trace torch's own switch, but no lock.
    return sdpa_kernel(OTHERS) if torch.compiler.is_compiling() else _without_cudnn
