"""One layer's attention through the public call on a CPU, shape by shape, its ways in turn.

Rows that decode, that bring prompts or chunks, that begin with the same pages. `sdpa` attends over
K and V that are contiguous already, which no paged cache has at hand. Of decoding rows `cat`
appends the new token first, as `DynamicCache` does, and `repeat` is what transformers does under a
mask: cat, then repeat_kv, then SDPA; `ours-consecutive` has pages in a row. Ours finds out which
rows share pages; `ours-apart` runs with nothing shared, and its rate counts what it then must read,
as does that of `sdpa`.

What nobody may read is NaN, and so are the slots of the new tokens, which ours writes. Calls run in
fp32 and one thread, decoding also in all. A card's cells are those of `benchmarks/gpu/grid.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.nn.utils.rnn import pad_sequence

from benchmarks.cells import SPARE_PAGES, Call, Case, Cell, Heads, make_case
from benchmarks.conftest import Figure
from benchmarks.measuring import Times, Way, ceilings, measure
from benchmarks.peers import dense
from pagedkv import CacheConfig, PagedKVCache, StepMetadata, paged_attention

CPU = torch.device("cpu")
TOLERANCE = 1e-5  # norm of the error over that of the truth; sums of fp32 stay near 1e-6
Check = Callable[[Call], None]
TINY, SMALL, LARGE = Heads(8, 2, 64), Heads(9, 3, 64), Heads(32, 8, 128)


def rows(
    heads: Heads, lens: Sequence[int], new: Sequence[int], page: int = 16, shared: int = 0
) -> Cell:
    return Cell("", heads, tuple(lens), tuple(new), page, (), "", shared=shared)


ONE = (1,) * 16
SPREAD = tuple(range(512, 4097, 238))  # sixteen lengths
RAGGED, MIXED = ((200, 70, 33), (90, 1, 1)), ((2048,) * 16, (512, *ONE[1:]))
# Operation: cells of the small size, and of the full one.
CELLS: dict[str, tuple[list[Cell], list[Cell]]] = {
    "decode": (
        [rows(TINY, lens, ONE[:4]) for lens in ((256,) * 4, (40, 300, 17, 129))]
        + [rows(TINY, (200,) * 4, (4,) * 4)],
        [rows(SMALL, lens, ONE) for lens in ((512,) * 16, (4096,) * 16, SPREAD)]
        + [rows(SMALL, (4096,) * 16, ONE, page=64), rows(LARGE, (4096,) * 4, ONE[:4])]
        + [rows(SMALL, (4096,) * 16, (4,) * 16)],
    ),
    "prefill": (
        [rows(TINY, *pair) for pair in (((128,) * 2,) * 2, ((320,), (64,)), RAGGED)],
        [
            rows(SMALL, *pair)
            for pair in (((512,) * 4,) * 2, ((2048,),) * 2, ((4608,), (512,)), MIXED)
        ],
    ),
    "shared prefix": (
        [rows(TINY, (544,) * 8, ONE[:8], shared=512)],
        [
            rows(SMALL, (front + own,) * 16, ONE, shared=front)
            for front, own in ((1024, 64), (4096, 64), (256, 1024))
        ],
    ),
}


def label(cell: Cell) -> str:
    """Rows, tokens of each, new tokens if more than one, shared ones, heads, page, dtype."""

    def span(name: str, values: Sequence[int]) -> str:
        low, high = min(values), max(values)
        return f"{name}{low}" if low == high else f"{name}{low}..{high}"

    parts = [f"B{len(cell.new)}", span("S", cell.kv_lens)]
    parts += [] if cell.decode else [span("T", cell.new)]
    parts += [f"X{cell.shared}"] if cell.shared else []
    parts += [f"{name}{value}" for name, value in zip("HGD", cell.heads)]
    return "-".join([*parts, f"p{cell.page_size}", "fp32"])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    size, most = metafunc.config.getoption("--size") == "full", torch.get_num_threads()
    found = {
        f"{op}/{label(cell)}-t{threads}": (cell, threads)
        for op, sizes in CELLS.items()
        for cell in sizes[size]
        for threads in (1, most if op == "decode" else 1)
    }
    cases = [(replace(cell, id=name), threads) for name, (cell, threads) in found.items()]
    metafunc.parametrize(("cell", "threads"), cases, ids=list(found))


# ------------------------------------------------------------------ cells in a cache


class Placed(NamedTuple):
    """A case on the pages of a cache, the open step, and K and V of its new tokens, `[T, G, D]`."""

    case: Case
    cache: PagedKVCache
    step: StepMetadata
    k: Tensor
    v: Tensor

    @property
    def pools(self) -> tuple[Tensor, Tensor]:
        return self.case.k_pages, self.case.v_pages

    def forget(self) -> None:
        """Leaves NaN where the new tokens are to be written."""
        size, slots = self.case.cell.page_size, self.case.slots
        for pool in self.pools:
            pool[slots // size, :, slots % size] = math.nan


def placed(cell: Cell, shuffled: bool = True) -> Placed:
    """Fills a cache with random K and V and opens the step that brings the new tokens."""
    lens, new = np.asarray(cell.kv_lens), np.asarray(cell.new)
    h, g, d = cell.heads
    pages, size = SPARE_PAGES + cell.num_pages, cell.page_size
    limits = {"max_sequences": len(new), "max_sequence_length": int(lens.max())}
    config = CacheConfig(1, g, d, "float32", pages * size, page_size=size, **limits)
    cache = PagedKVCache(config, device="cpu")
    if shuffled:  # an empty pool hands out runs of pages, one that was in use for a while does not
        np.random.default_rng(0).shuffle(cache._tables.pool._stack)
    cache._storage.poison(0, torch.arange(pages))
    seqs = [cache.add()]
    if cell.shared:
        with cache.step(seqs, num_new=cell.shared, layers=()):
            pass
        seqs += cache.fork(seqs[0], len(new) - 1)
    else:
        seqs += [cache.add() for _ in new[1:]]
    before = lens - new - cell.shared
    if before.any():
        with cache.step(np.asarray(seqs)[before > 0], num_new=before[before > 0], layers=()):
            pass
    step, pools = cache.prepare(seqs, num_new=new), cache._storage.layer(0)
    torch.manual_seed(0)
    q = torch.randn(int(new.sum()), h, d)
    table = step.page_table()
    case = Case(cell, q, *pools, table, step.kv_lens(), step.query_start_loc)
    for pool in pools:
        for row in range(len(new)):
            ids = case.row_ids(row)
            pool[ids] = torch.randn(len(ids), g, size, d)
        for row, length in enumerate(cell.kv_lens):  # a shared page is every row's
            pool[case.row_ids(row)[-1], :, (length - 1) % size + 1 :] = math.nan
    k, v = (pool[case.slots // size, :, case.slots % size] for pool in pools)
    return Placed(case, cache, step, k, v)


# ------------------------------------------------------------------ ways to attend


def attending(cell: Cell, shuffled: bool = True) -> tuple[Call, Check]:
    """One layer's attention by the cache, which writes the new tokens; and its check."""
    ready = placed(cell, shuffled)
    check = right(ready.case)
    ready.forget()
    return lambda: paged_attention(ready.case.q, ready.k, ready.v, ready.step, 0), check


def contiguous(cell: Cell) -> dict[str, tuple[Call, Check]]:
    """SDPA over K and V that are there already; and what a dense cache does to get them."""
    case = make_case(cell, CPU, torch.float32)
    calls = {"sdpa": dense.sdpa(gather=False)(case)}
    if cell.decode:
        calls |= appending(case)
    return {name: (call, right(case)) for name, call in calls.items()}


def appending(case: Case) -> dict[str, Call]:
    """One new token a row behind contiguous `[B, G, N, D]`, right padded with zeros."""
    lengths = case.cell.kv_lens

    def padded(pages: Tensor) -> Tensor:
        rows = (dense.dense(pages, table[None], n)[0] for table, n in zip(case.page_table, lengths))
        held = pad_sequence([x.transpose(0, 1) for x in rows], batch_first=True)
        return held.transpose(1, 2)

    q = case.q[:, :, None]
    (past_k, new_k), (past_v, new_v) = (
        [part.contiguous() for part in padded(pages).tensor_split([-1], 2)]
        for pages in (case.k_pages, case.v_pages)
    )
    mask = (torch.arange(max(lengths)) < case.kv_lens[:, None])[:, None, None]

    def cat() -> Tensor:
        k, v = torch.cat([past_k, new_k], 2), torch.cat([past_v, new_v], 2)
        return sdpa(q, k, v, enable_gqa=True)[:, :, 0]

    def repeat() -> Tensor:
        both = torch.cat([past_k, new_k], 2), torch.cat([past_v, new_v], 2)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in both)
        return sdpa(q, k, v, attn_mask=mask)[:, :, 0]

    return {"repeat": repeat} | ({"cat": cat} if len(set(lengths)) == 1 else {})


def right(case: Case) -> Check:
    """Compares the output with the truth about what the pages hold."""
    error_of = dense.check_attention(case)

    def check(call: Call) -> None:
        error = error_of(call)
        assert error < TOLERANCE, f"relative error {error:.2g}, allowed are {TOLERANCE:g}"

    return check


def timed(ways: dict[str, tuple[Call, Check]]) -> dict[str, Times]:
    """Ways in turn, if all of them are right.

    Raises:
        AssertionError: one is wrong; nothing was timed.
    """
    for call, check in ways.values():
        check(call)
    return measure({name: Way(call, False, CPU) for name, (call, _) in ways.items()})


# ------------------------------------------------------------------ what is timed


@pytest.fixture(scope="session")
def tops(size: str) -> Callable[[int], dict[str, float]]:
    """What so many threads read and multiply at most, measured when first asked for."""
    return cache(lambda threads: ceilings(CPU, size))


@pytest.mark.usefixtures("one_thread")
def bench_attend(
    benchmark: Any,
    figure: Figure,
    tops: Callable[[int], Any],
    cell: Cell,
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    apart = replace(cell, shared=0)
    ways = {"ours": attending(cell)}
    if cell.shared:
        ways["ours-apart"] = attending(apart)
    elif cell.decode:
        ways["ours-consecutive"] = attending(cell, shuffled=False)
    times = benchmark.pedantic(timed, (ways | contiguous(apart),), rounds=1)
    nbytes = {"ours": cell.bytes}  # of 16-bit elements
    found = {
        name: {"times": spent, "bytes": 2 * nbytes.get(name, apart.bytes)}
        for name, spent in times.items()
    }
    run = {"machine": {"threads": threads}, "correctness": "passed", "ceilings": tops(threads)}
    benchmark.extra_info |= {"cell": cell.facts | {"ways": found}, "run": run}
    base = times["sdpa"]["eager"]
    figure(f"{cell.id}, contiguous SDPA", base / 1e3, "ms")
    targets = {"ours": 2.5, "ours-consecutive": 1.5} if cell.decode and not cell.shared else {}
    for name, spent in times.items():
        if name != "sdpa":
            figure(f"  {name} / SDPA", spent["eager"] / base, "x", targets.get(name))
