"""Similar tokens are merged: a representative stays and takes over the values of those that go."""

from __future__ import annotations

from dataclasses import dataclass

from .keydiff import KeyDiff


@dataclass(frozen=True)
class Semantic(KeyDiff):
    """Ranks as `KeyDiff` does; each evicted value is averaged into that of the most similar token.

    Keys stay as they are, because keys of different positions cannot be averaged.
    """

    merges = True
