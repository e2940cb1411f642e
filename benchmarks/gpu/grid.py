"""The named grids as data, and fresh inputs for one cell.

A cell says which rows there are, how many tokens of each are new and in pages of what size; which
peers run beside ours; and what we must and want to reach. Cells that matter most come first, so
that a run cut short has measured them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

POOL_CAP = 20 << 30  # bytes of K and V pages; peers may need a second copy of them
SPARE_PAGES = 8  # free pages, all NaN: a kernel that reads them is found out


class Heads(NamedTuple):
    """Query heads, KV heads and head dimension of one layer."""

    h: int
    g: int
    d: int


HEADS = {
    "A": Heads(32, 8, 128),  # Llama 8B
    "B": Heads(64, 8, 128),  # Llama 70B
    "C": Heads(32, 4, 128),  # Qwen3 30B-A3B
    "D": Heads(32, 32, 128),  # no grouping
    "E": Heads(16, 2, 64),
    "F": Heads(8, 1, 256),
    "G": Heads(28, 4, 128),  # a group of 7
}


@dataclass(frozen=True)
class Cell:
    """One line of the table.

    Attributes:
        kind: attend, append (write new tokens) or copy (row 0's pages onto row 1's).
        kv_lens, new: tokens per row, and how many of them are new.
        shared: leading tokens that all rows have in the same pages.
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
    base: str | None = None

    @property
    def set_name(self) -> str:
        return self.id.partition("/")[0]

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
        return 2 * self.heads.g * self.heads.d * itemsize

    @property
    def bytes(self) -> int:
        """What must be read and written at the least, in 16-bit elements."""
        new = sum(self.new)
        if self.kind == "append":
            return 2 * new * self.token_bytes()
        if self.kind == "copy":
            return 2 * self.kv_lens[0] * self.token_bytes()
        tokens = sum(self.kv_lens) - (len(self.new) - 1) * self.shared
        return tokens * self.token_bytes() + 2 * new * self.heads.h * self.heads.d * 2

    @property
    def flops(self) -> int:
        """Multiplications and additions of causal attention."""
        pairs = sum(n * (kv - n) + n * (n + 1) // 2 for kv, n in zip(self.kv_lens, self.new))
        return 4 * pairs * self.heads.h * self.heads.d if self.kind == "attend" else 0

    def shrunk(self, rows: int = 4, tokens: int = 96) -> Cell:
        """The same cell in small: few rows, short, at most two KV heads; kinds of rows stay."""
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
        return torch.full_like(self.q, math.nan)

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
Peer = Callable[[Case], Call]


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


K = 1024
DECODE = ("flashinfer", "flashinfer+plan", "sglang", "read")
PREFILL = ("flashinfer-fa2", "flashinfer-fa3", "sglang", "sdpa", "sdpa-dense")
BIG = "must >= 0.95x flashinfer, >= 80% of 4.8 TB/s; goal >= 1.03x, >= 95% of read"
MID = "must >= 1.0x flashinfer; goal >= 1.15x"
ONE = "must <= 10 us; goal <= 7.5 us"
RAGGED = "must >= 85% of the uniform rate, >= 1.2x flashinfer+plan; goal >= 95%, >= 2x"
VERIFY = "must <= 1.15x the time of one token; goal <= 1.08x"
PAGES = "must within 5% (page 1: 25%) of page 64; goal 2% (12%)"
FULL = "must >= 450 TFLOPS, >= 0.70x fa3, > sdpa; goal >= 600 TFLOPS, >= 0.92x fa3"
CHUNK = "must >= 0.75x fa3; goal >= 0.95x"
CASCADE = "must >= 0.9x cascade, 5x without; goal >= 1.1x, 10x (n=64, 8K)"
APPEND = "must >= 70% of copy; goal >= 90% (from 4096 tokens)"
HOST = "must <= 20 us of host time; goal <= 8 us"


def short(n: int) -> str:
    return f"{n // K}k" if n >= K and n % K == 0 else str(n)


def decode_cells() -> list[Cell]:
    def cell(name: str, rows: int, length: int, page: int, target: str) -> Cell:
        name_of = f"decode/{name}/b{rows}/{short(length)}/p{page}"
        return Cell(name_of, HEADS[name], (length,) * rows, (1,) * rows, page, DECODE, target)

    big = [(32, 4 * K), (64, 4 * K), (128, 4 * K), (32, 16 * K), (8, 64 * K), (1, 128 * K)]
    mid = [(8, 512), (16, K), (4, 4 * K), (32, K), (8, 4 * K), (16, 4 * K)]
    cells = [cell("A", *shape, 16, BIG) for shape in big]
    cells += [cell("A", *shape, 16, MID) for shape in mid]
    cells += [cell("A", 1, length, 16, ONE) for length in (K, 4 * K)]
    cells += [cell("B", 1, 4 * K, 16, ONE), cell("B", 32, 4 * K, 16, BIG)]
    cells += [cell("B", 32, 16 * K, 64, BIG), cell("C", 32, 4 * K, 16, MID)]
    cells += [cell("C", 64, 16 * K, 64, BIG), cell("D", 8, 4 * K, 16, BIG)]
    cells += [cell("D", 32, 4 * K, 64, BIG), cell("E", 64, 4 * K, 16, MID)]
    cells += [cell("F", 64, 4 * K, 16, MID), cell("G", 32, 4 * K, 16, MID)]
    return cells


def page_cells() -> list[Cell]:
    lens, new = (8 * K,) * 32, (1,) * 32
    sizes = (64, 16, 1, 48, 128, 528)
    base = "pages/A/b32/8k/p64"
    return [
        Cell(f"pages/A/b32/8k/p{page}", HEADS["A"], lens, new, page, DECODE, PAGES, base=base)
        for page in sizes
    ]


def ragged_cells() -> list[Cell]:
    rows = 64
    spread = [round(128 * 256 ** (i / (rows - 1))) for i in range(rows)]
    zipf = [32 * K // (i + 1) for i in range(rows)]
    mixer = random.Random(0)
    mixer.shuffle(spread)
    mixer.shuffle(zipf)
    kinds = {"log": spread, "zipf": zipf, "one-long": [128 * K] + [512] * (rows - 1)}
    base = "decode/A/b64/4k/p16"
    return [
        Cell(
            f"ragged/A/{name}", HEADS["A"], tuple(lens), (1,) * rows, 16, DECODE, RAGGED, base=base
        )
        for name, lens in kinds.items()
    ]


def verify_cells() -> list[Cell]:
    peers = ("flashinfer-fa2", "flashinfer-fa2+plan", "sglang", "read")
    return [
        Cell(
            f"verify/{name}/q{q}/b32/4k",
            HEADS[name],
            (4 * K,) * 32,
            (q,) * 32,
            16,
            peers,
            VERIFY,
            base=f"decode/{name}/b32/4k/p16",
        )
        for name, q in (("A", 4), ("A", 8), ("A", 2), ("A", 16), ("C", 4))
    ]


def prefill_cells() -> list[Cell]:
    def full(name: str, length: int, page: int = 64) -> Cell:
        rows = 32 * K // length
        name_of = f"prefill/{name}/b{rows}/{short(length)}/p{page}"
        # Only D = 128 has a Hopper module at hand.
        peers = tuple(p for p in PREFILL if HEADS[name].d == 128 or p != "flashinfer-fa3")
        return Cell(name_of, HEADS[name], (length,) * rows, (length,) * rows, page, peers, FULL)

    def chunk(new: int, prefix: int) -> Cell:
        name_of = f"chunk/A/{short(new)}-on-{short(prefix)}"
        return Cell(name_of, HEADS["A"], (prefix + new,), (new,), 16, PREFILL, CHUNK)

    cells = [full("A", 8 * K), full("A", 32 * K), full("A", 2 * K), full("A", 8 * K, 16)]
    cells += [full("B", 8 * K), full("E", 8 * K), full("F", 8 * K)]
    cells += [chunk(2 * K, 64 * K), chunk(2 * K, 8 * K), chunk(512, 8 * K), chunk(8 * K, 64 * K)]
    lens, new = (8 * K,) * 64, (4 * K,) + (1,) * 63
    peers = ("flashinfer-fa2", "flashinfer-fa2+plan", "flashinfer-fa3", "sglang")
    return [*cells, Cell("mixed/A/4k+63x8k", HEADS["A"], lens, new, 16, peers, CHUNK)]


def other_cells() -> list[Cell]:
    def append(rows: int, new: int) -> Cell:
        lens, name_of = (max(new, K),) * rows, f"append/A/{rows}x{short(new)}"
        peers = ("flashinfer-append", "copy")
        return Cell(name_of, HEADS["A"], lens, (new,) * rows, 16, peers, APPEND, "append")

    def shared(rows: int, prefix: int, suffix: int) -> Cell:
        name_of = f"shared/A/n{rows}/{short(prefix)}+{short(suffix)}"
        lens = (prefix + suffix,) * rows
        peers = ("flashinfer-cascade", "flashinfer", "sglang")
        return Cell(
            name_of, HEADS["A"], lens, (1,) * rows, 16, peers, CASCADE, "attend", shared=prefix
        )

    def overhead(rows: int, length: int) -> Cell:
        name_of = f"overhead/A/b{rows}/{short(length)}"
        peers = ("flashinfer", "flashinfer+plan", "sglang")
        return Cell(name_of, HEADS["A"], (length,) * rows, (1,) * rows, 16, peers, HOST)

    pages = Cell("copy/A/16k", HEADS["A"], (16 * K,) * 2, (1, 1), 16, ("copy",), APPEND, "copy")
    cells = [append(256, 1), append(1, 4 * K), append(16, 4 * K), pages]
    cells += [shared(64, 8 * K, 64), shared(256, 4 * K, 64), shared(16, 32 * K, K)]
    return [*cells, overhead(32, K), overhead(1, 512)]


def core() -> list[Cell]:
    groups = (decode_cells, page_cells, prefill_cells, verify_cells, ragged_cells, other_cells)
    return [cell for group in groups for cell in group()]


GRIDS = {"core": core, "decode": decode_cells, "prefill": prefill_cells}
