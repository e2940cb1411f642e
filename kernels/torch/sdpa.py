"""Calls torch's attention kernels so that their errors do no harm.

On a CPU the flash kernel returns zeros for a query of which every score is NaN, or every one minus
infinity, or one infinity. A layer whose K or Q overflows would go unseen: what a prompt computed
would be a number, and a later step's NaN.

On compute capability 10.0 cuDNN's returns wrong numbers, without an error, when models with fewer
than 8 KV heads decode (torch 2.13): a few tokens look right, long texts do not. So any kernel but
cuDNN's may serve a call there.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

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
    """Attention of `[n, H, new, D]` to K and V `[n, G, s, D]`; a mask is added to the scores."""
    plain = v.shape[3] == q.shape[3] and all(x.stride(3) == 1 for x in (q, k, v))
    if q.device.type == "cpu" and plain:
        return attend_on_cpu(q, k, v, scale, causal=causal, mask=mask)[0]
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


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
        `[n, H, new, D]`, NaN where a query sees no number, and the log-sum-exp `[n, H, new]`.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale
    )
    told = lse.isfinite() & (lse != 0)
    if not told.all():  # 0 is what it says of queries without numbers, and rarely of another one
        wrong = ~k.isfinite().all(-1)
        if mask is not None:
            seen = (wrong.unsqueeze(2) & (mask > -torch.inf)).any(-1)
        else:
            seen = wrong.cummax(2).values if causal else wrong.any(2, keepdim=True)
        broken = ~q.isfinite().all(-1) | seen.repeat_interleave(q.shape[1] // k.shape[1], 1)
        out = out.masked_fill((broken & ~told).unsqueeze(-1), torch.nan)
    return out, lse


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
    """Returns the context in which `scaled_dot_product_attention` is called on a device."""
    if device.type != "cuda":
        return nullcontext()
    # A compiler knows how to trace torch's own switch, and no lock.
    return sdpa_kernel(OTHERS) if torch.compiler.is_compiling() else _without_cudnn
