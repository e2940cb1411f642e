"""A piece of a text as a file: pages, found by a hash of all ids up to their end.

A piece holds no ids and no salt: its key covers both, and who looks for it has them. Pieces have
one number of complete pages. A piece that ends in a recurrent state is shorter, perhaps without a
page: it begins behind the last of those, and ends at the length of its state.
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

TOKENS = 128  # of a piece, rounded up to whole pages
FORMAT = 1  # of pieces: a cache finds those of this format alone
STATE = b"state"  # no key of a piece is hashed from as many bytes as that of one with a state


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


def state_keys(chain: Chain, key: bytes, number: int, behind: Tokens) -> list[bytes]:
    """The keys of states behind the first pieces of a text: after none of the ids there, one, ...

    Args:
        chain: of the keys of pieces.
        key: of the piece before; `number` are before.
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
    """Header and tensors of a piece whose pages are findable; None if some are not there.

    Of a layer group with a window it has the pages that are there, perhaps none.

    Args:
        pages: `[groups, n]`, the piece's pages, -1 where there is none.
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
