"""A prefix that decoding rows share is read once for all of them.

Its parts are parts like any other: the decode kernel attends to the prefix with the queries of many
rows as rows of one product, then to what each row has of its own, and the merge weighs both. Which
rows share what, the host knows from its page tables (`cascade.find_prefixes`).

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

from .cascade import Prefix
from .work import FIELDS

# What must be spared of a layer for the second launch to be worth its time: some 3 us at 4.8 TB/s.
# Derived, not measured yet.
WORTH_BYTES = 16 << 20
BLOCK_M = 64
WHOLE = 64  # tokens of the largest tile: what follows a prefix begins with a whole one
EVERYTHING = 1 << 30  # a position behind all of a prefix: nothing of it is masked


class Plan(NamedTuple):
    """The work that prefixes make.

    Attributes:
        items, total: as in `work.Work`.
        skips: `[B, 2]` int32, each row's tokens and parts in its prefix.
        parts: most of those parts.
    """

    items: Tensor
    total: Tensor
    skips: Tensor
    parts: int


def plan(
    prefixes: Sequence[Prefix],
    num_new: Sequence[int],
    page_size: int,
    ratio: int,
    split: int,
    splits: int,
    device: torch.device,
) -> Plan:
    """Cuts the prefixes into tiles of queries and splits of tokens, on the host.

    Args:
        prefixes: of rows with one new token each.
        num_new: of every row.
        ratio: query heads a KV head.
        split, splits: fewest tokens of a split, most splits.
    """
    starts = np.cumsum([0, *num_new])
    skips = np.zeros((len(num_new), 2), np.int32)
    items = []
    queries = max(1, BLOCK_M // ratio)
    for rows, pages in prefixes:
        tokens = pages * page_size // WHOLE * WHOLE
        if not tokens:
            continue
        parts = min(splits, -(-tokens // split))
        size = -(-tokens // (parts * split)) * split
        parts = -(-tokens // size)
        skips[rows] = tokens, parts
        for row in range(rows.start, rows.stop, queries):
            count = min(queries, rows.stop - row)
            items += [
                (row, starts[row], count, EVERYTHING, i * size, min(tokens, (i + 1) * size), i, row)
                for i in range(parts)
            ]
    arrays = np.array(items, np.int32), np.array([len(items)], np.int32), skips
    sent = _send(arrays, device)
    return Plan(
        sent[0].view(-1, FIELDS.value), sent[1], sent[2].view(-1, 2), int(skips[:, 1].max())
    )


def _send(arrays: Sequence[npt.NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Arrays on the device after one copy, each at a multiple of 16 bytes."""
    sizes = [array.size for array in arrays]
    begins = np.cumsum([0, *(-(-size // 4) * 4 for size in sizes)]).tolist()
    packed = np.zeros(begins[-1], np.int32)
    for array, begin in zip(arrays, begins):
        packed[begin : begin + array.size] = array.ravel()
    host = torch.from_numpy(packed)
    if device.type == "cuda":
        host = host.pin_memory()  # so that the copy does not wait for the device
    on_device = host.to(device, non_blocking=True)
    return [on_device[begin : begin + size] for begin, size in zip(begins, sizes)]
