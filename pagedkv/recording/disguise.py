"""Token ids in disguise: equal where replay compares them, and otherwise nobody's business.

Replay needs to know which texts begin alike, nothing else: pages are found by prefixes, so ids are
compared only with ids at the same position. An id is therefore written as a number made of itself,
its position and a secret that is drawn for each trace and never written.
"""

from __future__ import annotations

import os
from base64 import b64encode

import numpy as np

from pagedkv.arrays import Ints, Tokens

_MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_LOW, _HIGH, _SHIFT = 0xFFFF, np.uint64(16), np.uint64(32)


class Disguise:
    """One secret function of ids and positions.

    Two ids at one position become the same number once in two thousand million times; a replay
    that differs for it is found out.
    """

    def __init__(self) -> None:
        secret = np.frombuffer(os.urandom(4 * 8 << 16), dtype=np.uint64)
        self._id_low, self._id_high, self._at_low, self._at_high = secret.reshape(4, -1)

    def ids(self, tokens: Tokens, positions: Ints) -> str:
        """What stands in the trace for ids at these positions; -1, an unknown id, stays -1."""
        x = self._id_low[tokens & _LOW] + self._id_high[(tokens >> 16) & _LOW]
        x ^= self._at_low[positions & _LOW] + self._at_high[(positions >> 16) & _LOW]
        for factor in _MIX:
            x ^= x >> _SHIFT
            x *= factor
        hidden = (x >> np.uint64(33)).astype(np.int32)
        if tokens.size and tokens.min() < 0:
            hidden[tokens < 0] = -1
        return b64encode(hidden.tobytes()).decode()
