"""Cells: inputs that kernels are timed on, as data, and fresh tensors for them.

A cell says which rows there are, how many of their tokens are new, and how large pages are; which
peers run beside ours; and what we must and want to reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

POOL_CAP = 20 << 30  # bytes of K and V pages; peers may need a second copy of them
SPARE_PAGES = 8  # free pages, all NaN: a kernel that reads them is found out


class Heads(NamedTuple):
    """Query heads, KV heads and head dimension of one layer."""

    h: int
    g: int
    d: int


@dataclass(frozen=True)
class Cell:
    """One line of the table.

    Attributes:
        kind: attend, append (write new tokens), copy (row 0's pages onto row 1's), capacity or
            delta_rule (a state for each row in place of pages).
        kv_lens, new: tokens per row, and how many of them are new.
        shared: leading tokens that all rows have in the same pages.
        latent: columns of K that V is a view of; 0 if V has pages of its own.
        base: id of a cell that this one is compared with, by time per byte.
    """

    id: str
    heads: Heads
    kv_lens: tuple[int, ...]
    new: tuple[int, ...]
    page_size: int
    peers: tuple[str, ...]
    target: str
    kind: str = "attend"
    shared: int = 0
    latent: int = 0
    base: str | None = None

    @property
    def decode(self) -> bool:
        return all(new == 1 for new in self.new)

    @property
    def row_pages(self) -> list[int]:
        return [-(-n // self.page_size) for n in self.kv_lens]

    @property
    def num_pages(self) -> int:
        """Pages in use; shared ones count once."""
        return sum(self.row_pages) - (len(self.new) - 1) * (self.shared // self.page_size)

    def token_bytes(self, itemsize: int = 2) -> int:
        return (1 if self.latent else 2) * self.heads.g * self.heads.d * itemsize

    @property
    def bytes(self) -> int:
        """Returns the bytes that must be read and written at the least, with 16-bit elements."""
        new = sum(self.new)
        if self.kind == "append":
            return 2 * new * self.token_bytes()
        if self.kind == "copy":
            return 2 * self.kv_lens[0] * self.token_bytes()
        if self.kind == "delta_rule":
            h, g, d = self.heads
            return 2 * new * (h * d * d * 4 + (h + 2 * g) * d * 4 * 2)
        tokens = sum(self.kv_lens) - (len(self.new) - 1) * self.shared
        return tokens * self.token_bytes() + new * self.heads.h * self._columns * 2

    @property
    def flops(self) -> int:
        """Multiplications and additions of causal attention."""
        pairs = sum(n * (kv - n) + n * (n + 1) // 2 for kv, n in zip(self.kv_lens, self.new))
        return 2 * pairs * self.heads.h * self._columns if self.kind == "attend" else 0

    @property
    def _columns(self) -> int:
        """Columns of K and of V, added."""
        return self.heads.d + (self.latent or self.heads.d)

    @property
    def facts(self) -> dict[str, Any]:
        """The cell as results describe it."""
        known = {"id": self.id, "kind": self.kind, "heads": self.heads, "target": self.target}
        known |= {"page_size": self.page_size, "base": self.base}
        return known | {"bytes": self.bytes, "flops": self.flops}

    def shrunk(self, rows: int = 4, tokens: int = 96) -> Cell:
        """Makes a small cell: few rows, short, at most two KV heads; kinds of rows stay."""
        h, g, d = self.heads
        step = max(1, len(self.new) // rows)
        kv_lens, counts = self.kv_lens[::step][:rows], self.new[::step][:rows]
        scale = max(1, math.ceil(max(kv_lens) / tokens))
        # Only lengths of many new tokens shrink: one new token stays one, eight stay eight.
        new = [n if n <= 16 else max(17, n // scale) for n in counts]
        shared = self.shared // scale // self.page_size * self.page_size
        lens = [max(n + shared, kv // scale) for kv, n in zip(kv_lens, new)]
        small = Heads(h // g * min(g, 2), min(g, 2), d)
        return replace(self, heads=small, kv_lens=tuple(lens), new=tuple(new), shared=shared)


@dataclass
class Case:
    """Inputs of one cell. K and V pages are `[N, G, P, D]`, one tensor each."""

    cell: Cell
    q: Tensor  # [T, H, D]
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor  # [B, max_pages], int32
    kv_lens: Tensor  # [B], int32
    query_start_loc: Tensor  # [B + 1], int32

    @property
    def scale(self) -> float:
        return self.cell.heads.d**-0.5

    def output(self) -> Tensor:
        """Where to write: NaN until then, so that nothing unwritten passes for a result."""
        return torch.full_like(self.q[..., : self.v_pages.shape[3]], math.nan)

    @cached_property
    def slots(self) -> Tensor:
        """Where each new token lives, `[T]`, int64."""
        device = self.q.device
        new = torch.tensor(self.cell.new, device=device)
        row = torch.repeat_interleave(torch.arange(len(new), device=device), new)
        token = torch.arange(len(row), device=device) - self.query_start_loc[row]
        position = (self.kv_lens[row] - new[row] + token).long()
        page_size = self.cell.page_size
        return self.page_table[row, position // page_size].long() * page_size + position % page_size

    def row_ids(self, row: int) -> Tensor:
        """The pages of one row, in order."""
        return self.page_table[row, : self.cell.row_pages[row]].long()

    @cached_property
    def fresh(self) -> tuple[Tensor, Tensor]:
        """K and V of new tokens to write, `[T, G, D]`."""
        shape = (len(self.q), self.cell.heads.g, self.cell.heads.d)
        k, v = (torch.randn(shape, device=self.q.device, dtype=self.q.dtype) for _ in range(2))
        return k, v


Call = Callable[[], Tensor]
Check = Callable[[Call], float]  # relative error norm


class Ready(NamedTuple):
    """A call with a check of its own, if it can be checked, and the bytes of its pages."""

    call: Call
    check: Check | None
    nbytes: int | None = None


Peer = Callable[[Case], Call | Ready]


def make_case(
    cell: Cell, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Case:
    """Fresh random inputs; pages of a row lie anywhere, free ones are NaN."""
    h, g, d = cell.heads
    pages = cell.num_pages + SPARE_PAGES
    size = pages * cell.page_size * cell.token_bytes(dtype.itemsize)
    if size > POOL_CAP:
        raise ValueError(f"{cell.id} needs {size / 2**30:.1f} GiB of pages")
    torch.manual_seed(seed)
    shape = (pages, g, cell.page_size, d)
    k_pages, v_pages = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    if cell.latent:
        v_pages = k_pages[..., : cell.latent]
    order = torch.randperm(pages)
    used, free = order[: cell.num_pages], order[cell.num_pages :].to(device)
    k_pages[free] = v_pages[free] = math.nan
    counts = cell.row_pages
    common = cell.shared // cell.page_size
    # What no row needs stays -1, so that a kernel that reads past a row's pages is found out.
    table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
    table[:, :common] = used[:common]
    start = common
    for row, count in enumerate(counts):
        table[row, common:count] = used[start : start + count - common]
        start += count - common
    starts = torch.tensor((0, *cell.new)).cumsum(0).int()
    return Case(
        cell=cell,
        q=torch.randn(sum(cell.new), h, d, device=device, dtype=dtype),
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=table.to(device),
        kv_lens=torch.tensor(cell.kv_lens, dtype=torch.int32, device=device),
        query_start_loc=starts.to(device),
    )
