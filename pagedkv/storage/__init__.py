"""The bytes of pages, on some device.

`dense.py` keeps them as they were computed, `quantized.py` in fewer bits.
"""

from __future__ import annotations

import torch

from pagedkv.config import CacheConfig

from .dense import DenseStorage
from .dense import DenseStorage as Storage
from .quantized import QuantizedStorage

__all__ = ["Storage", "make_storage"]


def make_storage(config: CacheConfig, device: torch.device, backend: str) -> Storage:
    """Storage of the formats that a config names."""
    kind = DenseStorage if config.dense else QuantizedStorage
    return kind(config, device, backend)
