"""Sends numbers that the host has made to a device, and waits for nothing.

A copy out of memory that is not pinned waits for all earlier work of the device.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def sent(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copies an array to a device, in order with later work there; on a CPU returns it."""
    host = torch.from_numpy(array)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
