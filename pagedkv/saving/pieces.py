"""A piece of a text as a file: complete pages, found by a hash of all ids up to their end.

A piece holds no ids and no salt: its key covers both, and who looks for it has them.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import numpy as np
from torch import Tensor

from pagedkv.config import CacheConfig
from pagedkv.pages.tables import PageTables
from pagedkv.storage import Storage

from . import format as files
from . import sequence
from .match import shape_of

TOKENS = 128  # of a piece, rounded up to whole pages
FORMAT = 1  # of pieces: a cache finds those of this format alone


def columns_of_piece(config: CacheConfig) -> int:
    """Pages of a piece."""
    return -(-TOKENS // config.page_size)


def root(weights: bytes, config: CacheConfig, salt: bytes) -> bytes:
    """The key before the first piece: of all that K and V depend on, besides the ids.

    Args:
        weights: what tells the model's weights from others.
    """
    facts = [FORMAT, files.VERSION, config.page_size, config.read_tokens, shape_of(config)]
    digest = sha256(json.dumps(facts, default=int).encode())
    for part in (weights, salt):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def take_out(
    tables: PageTables,
    storage: Storage,
    config: CacheConfig,
    key: bytes,
    page_keys: list[bytes],
    first: int,
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Header and tensors of a piece whose pages are findable; None if some are not there.

    Of a layer group with a window it has the pages that are there, perhaps none.

    Args:
        page_keys: of the text's pages, up to the end of the piece.
        first: the piece's first column.
    """
    tensors: dict[str, Tensor] = {}
    for group, window in enumerate(tables.windows):
        pages = np.array([tables.index.find(group, k) for k in page_keys[first:]], np.int64)
        columns = first + np.flatnonzero(pages >= 0)
        pages = pages[pages >= 0]
        if window is None and pages.size < len(page_keys) - first:
            return None
        tensors |= sequence.take_out(tables, storage, group, pages, columns)
    length = len(page_keys) * tables.page_size
    header = {"model": key.hex(), "length": length, "page_size": tables.page_size}
    return header | {"shape": shape_of(config)}, tensors
