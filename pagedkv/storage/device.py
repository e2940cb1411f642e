"""Devices by their names."""

from __future__ import annotations

import torch


def device_of(device: str | int | torch.device) -> torch.device:
    """The device of a name; "auto" is the current card, or the CPU where there is none.

    Raises:
        ValueError: torch knows no such device.
        TypeError: it is no name.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        kind = ValueError if isinstance(device, (str, int)) else TypeError
        raise kind(
            f"device: expected auto, cpu, cuda, cuda:0, mps or a torch.device, got {device!r}"
        ) from None
