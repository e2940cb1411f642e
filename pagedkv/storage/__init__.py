"""The bytes of pages, on one device or several.

`dense.py` keeps numbers as they were computed, `quantized.py` in fewer bits; `divided.py` has
layers on several devices, which `placement.py` names.
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
    """Makes the storage for a config's formats and a placement."""
    kind = DenseStorage if config.dense else QuantizedStorage
    if len(placement.layers_on) == 1:
        return kind(config, placement.home, backend)

    def part(device: torch.device, layers: tuple[int, ...]) -> Storage:
        return kind(config, device, backend, layers)

    return DividedStorage(config, placement, part)
