"""Which of torch's attention kernels may serve a call: any but cuDNN's.

On compute capability 10.0 cuDNN's returns wrong numbers, without an error, when models with fewer
than 8 KV heads decode (torch 2.13): a few tokens look right, long texts do not.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp
from torch.nn.attention import SDPBackend, sdpa_kernel

OTHERS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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
    """What calls of `scaled_dot_product_attention` on a device are made in."""
    if device.type != "cuda":
        return nullcontext()
    # A compiler knows how to trace torch's own switch, and no lock.
    return sdpa_kernel(OTHERS) if torch.compiler.is_compiling() else _without_cudnn
