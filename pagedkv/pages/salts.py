"""Salts: whose a text is, from which token on. Only texts with equal salts share prefixes.

A salt is bytes, for a whole text, or *regions*: each a pair of its first token and its bytes. The
bytes of the first region go into the key before the first page. The bytes of a later region go into
the key of the page that holds its first token, before the page's tokens (`Chain.mixed`). This page
may hold tokens of both regions, and only texts with both salts find it; texts with only the earlier
salts find the pages before it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from hashlib import sha256
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

Region = tuple[int, bytes]
Salt = bytes | tuple[Region, ...]
UNMIXED: Mapping[int, bytes] = MappingProxyType({})


class Chain(NamedTuple):
    """The parts of the keys of a text's pages that are not its tokens.

    Attributes:
        root: the key before the first page.
        mixed: by column in which a region begins, bytes that follow the key of the page before.
    """

    root: bytes
    mixed: Mapping[int, bytes] = UNMIXED

    def before(self, key: bytes, column: int) -> bytes:
        """Returns the bytes before a page's tokens in its key and its partial key.

        Args:
            key: the key of the page before it.
        """
        return key + self.mixed[column] if column in self.mixed else key

    def behind(self, key: bytes, column: int) -> Chain:
        """Returns the chain of the text from a column on; `key` is that of the page before."""
        return Chain(key, {c - column: own for c, own in self.mixed.items() if c >= column})


def as_salt(salt: Any, expected: str = "bytes or regions") -> Salt:
    """Checks a salt and returns it as it is kept: as bytes if it has one region.

    Raises:
        TypeError, ValueError: it is no salt.
    """
    if isinstance(salt, bytes):
        return salt
    if not is_regions(salt):
        raise TypeError(f"salt: expected {expected}, got {type(salt).__name__}")
    regions = tuple((int(start), own) for start, own in salt)
    starts = [start for start, _ in regions]
    if starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
        raise ValueError(f"salt: expected regions from token 0 on, ascending, got {starts}")
    return regions if len(regions) > 1 else regions[0][1]


def is_regions(salt: Any) -> bool:
    """Whether a value is a list of pairs of a token's place and bytes."""
    return (
        isinstance(salt, (list, tuple))
        and len(salt) > 0
        and all(
            isinstance(pair, tuple)
            and len(pair) == 2
            and hasattr(pair[0], "__index__")
            and isinstance(pair[1], bytes)
            for pair in salt
        )
    )


def first_of(salt: Salt) -> bytes:
    """The salt of a text's first token."""
    return salt if isinstance(salt, bytes) else salt[0][1]


def with_first(salt: Salt, first: bytes) -> Salt:
    """Returns the salt with other bytes for the first region."""
    return first if isinstance(salt, bytes) else ((0, first), *salt[1:])


def mixed_in(salt: Salt, size: int) -> Mapping[int, bytes]:
    """Returns `Chain.mixed`: by column, a hash of all later regions that begin there."""
    if isinstance(salt, bytes):
        return UNMIXED
    mixed: dict[int, bytes] = {}
    for start, own in salt[1:]:
        column = start // size
        mixed[column] = sha256(mixed.get(column, b"") + sha256(own).digest()).digest()
    return mixed


def up_to(salt: Salt, stop: int) -> Salt:
    """The salt of a text's first `stop` tokens."""
    if isinstance(salt, bytes):
        return salt
    regions = tuple(region for region in salt if region[0] < stop)
    return regions if len(regions) > 1 else regions[0][1]


def shared_tokens(one: Salt, other: Salt, size: int) -> int:
    """Counts tokens that equal texts under two salts share; whole pages if the salts differ."""
    if one == other:
        return sys.maxsize
    regions = [((0, salt),) if isinstance(salt, bytes) else salt for salt in (one, other)]
    starts = [start for a, b in zip(*regions) if a != b for start in (a[0], b[0])]
    longer = max(regions, key=len)[len(min(regions, key=len)) :]
    return min([*starts, *(start for start, _ in longer)]) // size * size
