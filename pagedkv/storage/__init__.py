"""The bytes of pages, on some device.

`dense.py` keeps them as they were computed, `quantized.py` in fewer bits; `divided.py` has layers
on several devices, where `placement.py` says.
"""

from __future__ import annotations

import torch

from pagedkv.config import CacheConfig

from .dense import DenseStorage
from .dense import DenseStorage as Storage
from .divided import DividedStorage
from .placement import Placement
from .quantized import QuantizedStorage

__all__ = ["Placement", "Storage", "make_storage"]


def make_storage(config: CacheConfig, placement: Placement, backend: str) -> Storage:
    """Storage of the formats that a config names."""
    kind = DenseStorage if config.dense else QuantizedStorage
    if len(placement.layers_on) == 1:
        return kind(config, placement.home, backend)

    def part(device: torch.device, layers: tuple[int, ...]) -> Storage:
        return kind(config, device, backend, layers)

    return DividedStorage(config, placement, part)
