"""Evicts pages whose keys are most like all others; distinctive pages stay.

Source: Park et al. 2025, KeyDiff: Key Similarity-Based KV Cache Eviction, with one score for each
page instead of one for each token and head.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.arrays import Floats

from .policy import PageRecords, Policy


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Keeps pages by how little their keys resemble the mean key. Needs no attention weights."""

    recent: int = 64
    needs = ("likeness",)

    def keep_scores(self, pages: PageRecords) -> Floats:
        return -pages.likeness
