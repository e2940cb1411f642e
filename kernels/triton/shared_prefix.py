"""Reads a prefix that decoding rows share, once for all of them.

Its parts are parts like any other: the decode kernel attends to the prefix with the queries of many
rows as rows of one product, then to each row's own tokens, and the merge weighs both. The host
finds the prefixes in its page tables (`prefixes.find_prefixes`).

Bytes moved: K and V of the prefix once for every 64 query heads of a KV head instead of once a row,
plus H x (D + 1) x 4 a row and split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedkv.kernels.prefixes import Prefix
from pagedkv.kernels.sending import sent

from .work_list import FIELDS, Cut

# Bytes that a layer must be spared for the second launch to be worth its time: some 3 us at 4.8
# TB/s. Derived, not measured yet.
LAUNCH_WORTH_BYTES = 16 << 20
WHOLE = 64  # tokens of the largest tile: behind a prefix, rows begin with a whole tile
EVERYTHING = 1 << 30  # a position behind all of a prefix: nothing of it is masked


class Plan(NamedTuple):
    """The work that prefixes make.

    Attributes:
        items, total: as in `work_list.Work`.
        skips: `[B, 2]` int32, each row's tokens and parts in its prefix.
        parts: the most parts of a row in its prefix.
    """

    items: Tensor
    total: Tensor
    skips: Tensor
    parts: int

    def fill(self, work: Work | None) -> None:
        """Puts other work in its place, or none, for a captured graph that reads it there."""
        if work is None:
            self.total.zero_()
            self.skips.zero_()
            return
        items, total, skips = _send(work, self.items.device)
        self.items[: len(items)] = items
        self.total.copy_(total)
        self.skips.zero_()
        self.skips[: len(skips)] = skips


class Work(NamedTuple):
    """The work of shared prefixes on the host, before it is sent to the device."""

    items: npt.NDArray[np.int32]
    total: npt.NDArray[np.int32]
    skips: npt.NDArray[np.int32]


def cut(
    prefixes: Sequence[Prefix],
    num_new: Sequence[int],
    page_size: int,
    cut: Cut,
) -> Work:
    """Cuts prefixes into tiles of queries and splits of tokens.

    Args:
        prefixes: of rows with one new token each.
        num_new: of every row.
        cut: the rule; a prefix is cut like a row of its length, and also if it is short, because
            its parts are merged with the rows' own in any case.
    """
    cut = cut._replace(uncut=0)
    starts = np.cumsum([0, *num_new])
    skips = np.zeros((len(num_new), 2), np.int32)
    items = []
    for rows, pages in prefixes:
        tokens = pages * page_size // WHOLE * WHOLE
        if not tokens:
            continue
        parts, size = cut.into(tokens)
        skips[rows] = tokens, parts
        for row in range(rows.start, rows.stop, cut.queries):
            count = min(cut.queries, rows.stop - row)
            items += [
                (row, starts[row], count, EVERYTHING, i * size, min(tokens, (i + 1) * size), i, row)
                for i in range(parts)
            ]
    total = np.array([len(items), 0, 0], np.int32)
    return Work(np.array(items, np.int32).reshape(-1, FIELDS.value), total, skips)


def plan(work: Work, device: torch.device) -> Plan:
    """Sends the work to the device."""
    items, total, skips = _send(work, device)
    return Plan(items, total, skips, int(work.skips[:, 1].max()))


def room(rows: int, parts: int, device: torch.device) -> Plan:
    """Makes an empty plan for any step of at most `rows` rows and `parts` parts of a prefix."""
    items = torch.zeros(rows * parts, FIELDS.value, dtype=torch.int32, device=device)
    total = torch.zeros(3, dtype=torch.int32, device=device)
    return Plan(items, total, torch.zeros(rows, 2, dtype=torch.int32, device=device), parts)


def _send(work: Work, device: torch.device) -> list[Tensor]:
    """The arrays on the device after one copy, each at a multiple of 16 bytes."""
    begins = np.cumsum([0, *(-(-array.size // 4) * 4 for array in work)]).tolist()
    packed = np.zeros(begins[-1], np.int32)
    for array, begin in zip(work, begins):
        packed[begin : begin + array.size] = array.ravel()
    there = sent(packed, device)
    return [there[b : b + array.size].view(array.shape) for array, b in zip(work, begins)]
