"""Page mass out of the decode kernel: sums over pages of numbers that it stores for token chunks.

Twin of `torch/page_mass.page_mass`, which says what is computed. While the decode kernel has the
weights of a tile in registers, it also stores the sum of the weights of each chunk of the tile, and
the largest score so far, which these weights are relative to. With the log-sum-exp of the query,
known once its parts are merged, they become shares. K is not read again. (The logarithm of such a
sum would be one number instead of two, but takes a polynomial for each chunk.)

Bytes moved, for each watched query: H x 8 for every chunk, written and read; 4 a page.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedkv.kernels.prefixes import Ints
from pagedkv.kernels.sending import sent

from .attend import LOG2E
from .geometry import Target
from .launch import Launcher, target_of

FIELDS: tl.constexpr = tl.constexpr(5)
# Fields of a room, in this order:
#   at        first number of head 0 of packed query 0, as if the row's queries began there
#   width     chunks of the row; 0 if it is not watched
#   queries   how many of its last queries are watched
#   token     the last of its packed queries
#   position  of that query in its text

MOST_TOKENS = 8  # a chunk: so many columns of a product lie in one warp, whose sum is cheap
BLOCK_N = 64  # pages a tile
MOST_HEADS = 32  # of a tile
NUM_WARPS = 4


class Plan(NamedTuple):
    """Tensors for what the decode kernel notes down in a step, in all layers of equal heads.

    Attributes:
        rooms: `[B, 5]` int64, see `FIELDS`.
        chunks: float32, for each head of a row's queries the weights of its chunks, then the
            scores that these are relative to; each layer writes them anew.
        left: `[B]` on the host, how many last queries of each row are not watched here.
        chunk: tokens of a chunk.
        columns: of the page table.
    """

    rooms: Tensor
    chunks: Tensor
    left: Ints
    chunk: int
    columns: int
    num_heads: int
    page: int


def plan(
    num_new: Ints,
    kv_lens: Ints,
    queries: Ints,
    left: Ints,
    columns: int,
    num_heads: int,
    page_size: int,
    device: torch.device,
) -> Plan:
    """Plans room for the notes of watched rows.

    Args:
        num_new, kv_lens, queries: as in `torch/page_mass.page_mass`.
        left: as `queries`, of rows that another kernel attends for; 0 for all others.
    """
    chunk = min(MOST_TOKENS, page_size & -page_size)
    watched, ends = queries - left, np.cumsum(num_new)
    width = np.where(watched > 0, -(-kv_lens // chunk), 0)
    each = 2 * width * num_heads  # numbers a query
    taken = np.cumsum(each * num_new)
    at = taken - each * ends
    rooms = np.stack([at, width, watched, ends - 1, kv_lens - 1], 1).astype(np.int64)
    chunks = torch.empty(int(taken[-1]), dtype=torch.float32, device=device)
    fixed = left, chunk, columns, num_heads, page_size
    return Plan(sent(rooms, device), chunks, *fixed)


@triton.jit(do_not_specialize=["columns"])
def _fold(
    rooms_ptr,
    chunks_ptr,
    lse_ptr,
    mass_ptr,
    columns,
    NUM_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program adds up the chunks of a tile of a row's pages, over heads and queries."""
    EACH: tl.constexpr = PAGE // CHUNK
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    room = rooms_ptr + row * FIELDS
    at = tl.load(room)
    width = tl.load(room + 1)
    queries = tl.load(room + 2).to(tl.int32)
    token = tl.load(room + 3)
    position = tl.load(room + 4).to(tl.int32)
    if tl.program_id(1) * BLOCK_N * PAGE > position:  # behind the row's end
        queries = 0
    mass = tl.zeros([BLOCK_N], tl.float32)
    for back in range(0, queries):
        for first in range(0, NUM_HEADS, BLOCK_M):
            head = first + tl.arange(0, BLOCK_M)
            query = (token - back) * NUM_HEADS + head
            lse = tl.load(lse_ptr + query, mask=head < NUM_HEADS, other=0.0) * LOG2E
            for part in range(0, EACH):
                chunk = column * EACH + part
                there = (head < NUM_HEADS)[:, None] & (chunk * CHUNK <= position - back)[None, :]
                where = chunks_ptr + (at + query[:, None] * (2 * width) + chunk[None, :])
                weight = tl.load(where, mask=there, other=0.0)
                level = tl.load(where + width, mask=there, other=float("-inf"))
                # Only rounding can put a score above the log-sum-exp.
                share = tl.exp2(tl.minimum(level - lse[:, None], 0.0))
                mass += tl.sum(weight * share, 0)
    to = mass_ptr + row.to(tl.int64) * columns + column
    tl.store(to, mass / NUM_HEADS, mask=column < columns)


def page_mass(plan: Plan, lse: Tensor) -> Tensor:
    """Mass of every page of the rows that the plan is about, zeros for others: `[B, columns]`.

    Args:
        lse: `[T, H]`, which a call of the attention kernels with this plan returned.
    """
    rows = plan.rooms.shape[0]
    mass = torch.empty(rows, plan.columns, dtype=torch.float32, device=lse.device)
    launcher = _launcher(plan.num_heads, plan.page, plan.chunk, target_of(lse.device))
    launcher(
        (rows, triton.cdiv(plan.columns, BLOCK_N), 1),
        *(plan.rooms, plan.chunks, lse, mass, plan.columns),
    )
    return mass


@functools.cache
def _launcher(num_heads: int, page: int, chunk: int, target: Target) -> Launcher:
    static = {
        "NUM_HEADS": num_heads,
        "PAGE": page,
        "CHUNK": chunk,
        "BLOCK_M": min(MOST_HEADS, triton.next_power_of_2(num_heads)),
        "BLOCK_N": BLOCK_N,
    }
    return Launcher(_fold, target, static, NUM_WARPS, 1)
