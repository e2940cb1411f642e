"""Merges similar tokens: values of evicted tokens are averaged into a similar one that stays."""

from __future__ import annotations

from dataclasses import dataclass

from .keydiff import KeyDiff


@dataclass(frozen=True)
class Semantic(KeyDiff):
    """Ranks as `KeyDiff` does; averages each evicted value into the most similar token's value.

    Keys stay as they are, because keys of different positions cannot be averaged.
    """

    merges = True
