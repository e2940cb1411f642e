"""How decode kernels are compiled and cut rows: tables by architecture, dtype and heads."""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton

from . import shared_prefix
from .geometry import Geometry, Target
from .work_list import Cut

MOST_QUERIES = 16  # rows with more new tokens are prefill's
# A long row is cut into WORK pairs of a split and a KV head, about two for each multiprocessor of a
# large card, with bounds for its splits. A row of some thousand tokens is cut into SHARED_WORK such
# pairs, with bounds of its own (docs/decisions/0062-splits-are-a-rule-of-the-row.md).
WORK, LEAST_SPLITS, MOST_SPLITS = 256, 32, 128
SHARED_WORK, LEAST_SHARES, MOST_SHARES = 64, 8, 16
MANY_HEADS = 4  # with as many KV heads a short row is not cut, so that nothing is merged


class Tuning(NamedTuple):
    """How a decode kernel is compiled and cut.

    Attributes:
        block_n: tokens a tile.
        programs: how many fit beside each other on a multiprocessor, by the kernel report.
        split, longest, splits: where rows are cut, as in `Cut`; without `splits`, the number of KV
            heads decides.
        uncut: as in `Cut`, if a row has enough programs by its KV heads.
        packed: words are taken apart two at a time, see `codes.unpack`.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    split: int = 128
    splits: int | None = None
    packed: bool = True
    longest: int = 1024
    uncut: int = 1024

    def cut(self, geometry: Geometry, queries: int) -> Cut:
        """Cuts rows of few new tokens into tiles of `queries` queries, and splits."""
        splits = most_splits(geometry) if self.splits is None else self.splits
        shares = min(max(LEAST_SHARES, SHARED_WORK // geometry.num_kv_heads), MOST_SHARES)
        # Splits begin with a whole tile of any kernel that may attend to them.
        rule = self.split, splits, max(self.block_n, shared_prefix.WHOLE), self.longest, shares
        many = geometry.num_kv_heads >= MANY_HEADS and not geometry.wide
        return Cut(1, MOST_QUERIES, queries, *rule, self.uncut if many else 0)


# For each product of 16, 32 and 64 rows, as far as registers reach, keyed by (architecture or None
# for any, roomy shared memory, padded head dim, bytes an element). Static choices: no spills, at
# least two buffers of K and V beside the one in use, and of those the most bytes in flight for the
# fewest instructions (benchmarks/kernel_report.py). benchmarks/gpu/tune.py prints measured ones.
TUNING: dict[tuple[int | str | None, bool, int, int], tuple[Tuning, ...]] = {
    (None, True, 64, 2): (Tuning(64, 4, 3, 6), Tuning(64, 4, 3, 4), Tuning(64, 4, 3, 4)),
    (90, True, 128, 2): (Tuning(64, 4, 3, 3), Tuning(32, 4, 4, 3), Tuning(64, 4, 3, 2)),
    (None, True, 128, 2): (Tuning(64, 4, 3, 3), Tuning(32, 4, 4, 3), Tuning(32, 4, 3, 2)),
    (None, True, 256, 2): (Tuning(32, 4, 3, 3), Tuning(32, 8, 3, 2), Tuning(32, 8, 3, 1)),
    (None, False, 64, 2): (Tuning(32, 4, 3, 5), Tuning(64, 4, 3, 2), Tuning(64, 4, 3, 2)),
    (120, False, 128, 2): (Tuning(32, 4, 3, 2), Tuning(32, 4, 3, 2), Tuning(64, 8, 3, 1)),
    ("gfx942", False, 128, 2): (Tuning(32, 4, 3, 2), Tuning(32, 4, 3, 2), Tuning(32, 4, 2, 1)),
    (None, False, 128, 2): (Tuning(32, 4, 3, 2), Tuning(32, 4, 3, 2), Tuning(64, 4, 3, 1)),
    (None, False, 256, 2): (Tuning(32, 4, 3, 1), Tuning(16, 4, 3, 1), Tuning(16, 8, 3, 1)),
    (None, True, 64, 4): (Tuning(32, 4, 3, 3), Tuning(32, 4, 3, 5), Tuning(16, 4, 4, 4)),
    (None, True, 128, 4): (Tuning(16, 4, 3, 5), Tuning(16, 4, 3, 4), Tuning(16, 8, 3, 2)),
    (None, True, 256, 4): (Tuning(16, 8, 3, 2), Tuning(16, 8, 3, 2), Tuning(16, 8, 3, 1)),
    (None, False, 64, 4): (Tuning(32, 4, 3, 2), Tuning(32, 4, 3, 2), Tuning(16, 4, 4, 2)),
    (None, False, 128, 4): (Tuning(16, 4, 3, 2), Tuning(16, 4, 3, 1), Tuning(16, 8, 3, 1)),
    (None, False, 256, 4): (Tuning(16, 8, 3, 1), Tuning(16, 8, 3, 1), Tuning(16, 8, 2, 1)),
    # Wide heads: fewer rows, so that sums of 512 columns stay in registers.
    (None, True, 512, 2): (Tuning(16, 4, 3, 2), Tuning(32, 8, 3, 1)),
    (80, True, 1024, 2): (Tuning(16, 4, 4, 2), Tuning(64, 8, 2, 1)),
    (90, True, 1024, 2): (Tuning(16, 4, 4, 3), Tuning(32, 8, 3, 1), Tuning(64, 8, 2, 1)),
    (None, True, 1024, 2): (Tuning(16, 4, 4, 2), Tuning(32, 8, 3, 1)),
    (None, False, 512, 2): (Tuning(16, 4, 3, 1), Tuning(16, 4, 3, 1)),
    (None, False, 1024, 2): (Tuning(16, 4, 4, 1), Tuning(16, 4, 3, 1)),
    (None, True, 512, 4): (Tuning(16, 8, 2, 1),),
    (None, True, 1024, 4): (Tuning(16, 8, 3, 1),),
    (None, False, 512, 4): (Tuning(16, 8, 2, 1),),
    (None, False, 1024, 4): (Tuning(16, 8, 2, 1),),
}
# Fewest tokens of a split: for rows of one new token; for rows of several, whose parts are larger;
# and, if heads are wide, for each query head of a KV head: parts of latents, written and read, are
# then at most 3/10 of the bytes of the latents themselves.
ONE_QUERY, SEVERAL_QUERIES, SPLIT_TOKENS = 256, 1024, 12
# As TUNING, for 16-bit queries over pages of which K or V is coded, keyed by (roomy shared memory,
# padded head dim, least bits an element). Few instructions a byte matter more here: words are taken
# apart by arithmetic, those of 4 bits hardly faster than memory brings them.
CODED: dict[tuple[bool, int, int], tuple[Tuning, Tuning, Tuning]] = {
    (True, 64, 8): (Tuning(64, 2, 4, 6), Tuning(64, 2, 3, 4), Tuning(64, 4, 3, 2)),
    (True, 128, 8): (Tuning(128, 4, 3, 3), Tuning(64, 4, 3, 2), Tuning(32, 4, 3, 2)),
    (True, 256, 8): (Tuning(32, 4, 3, 3), Tuning(32, 4, 3, 2), Tuning(16, 8, 3, 1)),
    (True, 64, 4): (Tuning(32, 1, 4, 16), Tuning(32, 1, 3, 8), Tuning(32, 4, 3, 3)),
    (True, 128, 4): (Tuning(32, 1, 4, 8), Tuning(32, 2, 3, 4), Tuning(32, 4, 3, 2)),
    (True, 256, 4): (Tuning(32, 2, 3, 4), Tuning(32, 4, 3, 2), Tuning(16, 8, 3, 1)),
    (False, 64, 8): (Tuning(64, 2, 4, 3), Tuning(64, 2, 3, 4), Tuning(64, 4, 3, 2)),
    (False, 128, 8): (Tuning(64, 4, 3, 2), Tuning(64, 4, 3, 2), Tuning(32, 4, 3, 1)),
    (False, 256, 8): (Tuning(32, 4, 3, 2), Tuning(32, 4, 3, 1), Tuning(16, 8, 3, 1)),
    (False, 64, 4): (Tuning(32, 1, 4, 8), Tuning(32, 1, 3, 8), Tuning(32, 4, 3, 3)),
    (False, 128, 4): (Tuning(32, 1, 4, 4), Tuning(32, 2, 3, 4), Tuning(32, 4, 3, 2)),
    (False, 256, 4): (Tuning(32, 2, 3, 3), Tuning(32, 4, 3, 2), Tuning(16, 8, 3, 1)),
}
# Small, so that small tests split and merge.
INTERPRETED = Tuning(32, 4, 1, 1, 64, 4, False, uncut=0)


def most_splits(geometry: Geometry) -> int:
    """Most splits of a row: with all its KV heads enough work for a card, if it is alone."""
    return min(max(LEAST_SPLITS, WORK // geometry.num_kv_heads), MOST_SPLITS)


def tuning(target: Target, geometry: Geometry, block_m: int) -> Tuning:
    """The table's entry for an architecture, or for any of its kind."""
    if target.arch == 0:
        return INTERPRETED._replace(block_n=geometry.block_n(INTERPRETED.block_n))
    found = _entries(target, geometry)[min(block_m // 32, 2)]
    found = found._replace(block_n=geometry.block_n(found.block_n))
    fewest = ONE_QUERY if block_m == 16 else SEVERAL_QUERIES
    if geometry.wide:
        fewest = max(fewest, triton.next_power_of_2(SPLIT_TOKENS * geometry.ratio))
        if geometry.page % 2 and found.block_n == 64:
            # Otherwise a watched step's notes of single tokens would not fit beside the tiles.
            found = found._replace(block_n=32, num_stages=3)
    found = found._replace(split=max(found.split, fewest))
    return found._replace(num_warps=8) if block_m > 64 else found


def _entries(target: Target, geometry: Geometry) -> tuple[Tuning, ...]:
    key = target.roomy, geometry.padded, geometry.dtype.itemsize
    if geometry.bits < 16 and geometry.dtype.itemsize == 2:
        return CODED[target.roomy, geometry.padded, geometry.bits]
    return TUNING.get((target.arch, *key)) or TUNING[(None, *key)]


@functools.cache
def most_rows(target: Target, geometry: Geometry) -> int:
    """Returns the most rows of a product, which several queries fill."""
    sizes = 3 if target.arch == 0 else len(_entries(target, geometry))
    if geometry.chained and not target.chains:
        sizes = 2  # without products of 64 rows
    return min(8 << sizes, geometry.most_ratio)
