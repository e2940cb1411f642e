"""Similar tokens are merged: a representative stays and takes over the values of those that go."""

from __future__ import annotations

from dataclasses import dataclass

from .keydiff import KeyDiff


@dataclass(frozen=True)
class Semantic(KeyDiff):
    """Ranks as `KeyDiff` does; each value that goes is averaged into the most similar token's.

    Keys stay as they are: those of different positions cannot be averaged.
    """

    merges = True
