"""A piece of a text as a file: pages, found by a hash of all ids up to their end.

A piece holds no ids and no salt: its key covers both, and the reader knows them. All pieces have
the same number of complete pages. Only a piece that ends in a recurrent state is shorter, perhaps
without a page: it begins behind the last whole piece, and ends at the length of its state.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import numpy as np
from torch import Tensor

from pagedkv.arrays import Ints, Tokens
from pagedkv.config import CacheConfig
from pagedkv.pages.salts import Chain
from pagedkv.pages.tables import PageTables
from pagedkv.storage import Storage

from . import format as files
from . import sequence
from .match import shape_of

TOKENS = 128  # tokens of a piece, rounded up to whole pages
FORMAT = 1  # format of pieces: a cache finds only pieces of this format
STATE = b"state"  # five bytes: keys with a state hash odd counts of bytes, all others even ones


def columns_of_piece(config: CacheConfig) -> int:
    """Returns how many pages a piece has."""
    return -(-TOKENS // config.page_size)


def root(weights: bytes, config: CacheConfig, salt: bytes) -> bytes:
    """Returns the key before the first piece: a hash of all that K and V depend on but the ids.

    Args:
        weights: the fingerprint of the model's weights.
    """
    facts = [FORMAT, files.VERSION, config.page_size, config.read_tokens, shape_of(config)]
    digest = sha256(json.dumps(facts, default=int).encode())
    for part in (weights, salt):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def state_keys(chain: Chain, key: bytes, number: int, behind: Tokens) -> list[bytes]:
    """Returns keys of states behind a text's first pieces: after 0, 1, ... of the ids `behind`.

    Args:
        chain: the chain of the keys of pieces.
        key: the key of the last of these pieces; there are `number` of them.
    """
    found = [sha256(STATE + key).digest()]
    digest = sha256(STATE + sha256(chain.before(key, number)).digest())
    for token in behind:
        digest.update(token.tobytes())
        found.append(digest.copy().digest())
    return found


def take_out(
    tables: PageTables,
    storage: Storage,
    config: CacheConfig,
    key: bytes,
    pages: Ints,
    length: int,
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Returns the header and tensors of a piece; None if some of its pages are not findable.

    In layer groups with a window pages may be missing, even all of them.

    Args:
        pages: `[groups, n]`, the piece's pages; -1 if missing.
        length: tokens of the text up to the end of the piece.
    """
    tensors: dict[str, Tensor] = {}
    first, tail = -(-length // tables.page_size) - pages.shape[1], length % tables.page_size
    for group, window in enumerate(tables.windows):
        there = pages[group] >= 0
        if window is None and not there.all():
            return None
        columns = first + np.flatnonzero(there)
        tensors |= sequence.take_out(tables, storage, group, pages[group][there], columns, tail)
    header = {"model": key.hex(), "length": length, "page_size": tables.page_size}
    return header | {"shape": shape_of(config)}, tensors
