"""One layer's attention through the public call on a CPU, shape by shape.

Rows that decode, that bring prompts or chunks, that begin with the same pages. The baseline is SDPA
over K and V that are contiguous already, which no paged cache has at hand. `torch` finds out by
itself that rows share pages; `torch-apart` runs with nothing shared, and its rate counts what it
then must read, as does the baseline's.

What nobody may read is NaN, and so are the slots of the new tokens, which the timed call writes.
Calls run in fp32 and one thread; `bench_attention.py` has two as well. A card's cells are
those of `benchmarks/gpu/grid.py`.
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

from benchmarks.cells import SPARE_PAGES, Case, Cell, Heads, make_case
from benchmarks.measuring import ceilings, shortest
from benchmarks.peers import dense
from benchmarks.report import rated
from pagedkv import CacheConfig, PagedKVCache, StepMetadata, paged_attention
from pagedkv.storage.memory import available_memory

CPU = torch.device("cpu")
TOLERANCE = 1e-5  # norm of the error over that of the truth; sums of fp32 stay near 1e-6
SECONDS = {"small": 0.05, "full": 2.0}  # about as long is one call timed
OFTEN = (5, 200)  # but so often at least, and at most
Call = Callable[[], Any]
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


def ways(op: str) -> list[str]:
    """Those of one cell follow each other, the baseline last."""
    apart = ["torch-apart"] if op == "shared prefix" else []
    return ["torch", *apart, "sdpa"]


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
    size = metafunc.config.getoption("--size") == "full"
    known = {(op, label(cell)): cell for op, cells in CELLS.items() for cell in cells[size]}
    metafunc.parametrize(
        ("op", "cell", "way"),
        [
            pytest.param(op, cell, way, id=f"{op.replace(' ', '_')}-{case}-{way}")
            for (op, case), cell in known.items()
            for way in ways(op)
        ],
    )


class Bench:
    """The fixture `bench`: checks a call, times it, records rates."""

    def __init__(self, benchmark: Any, size: str, tops: Callable[[], dict[str, float]]) -> None:
        self.benchmark, self.size, self.tops = benchmark, size, tops

    def __call__(
        self,
        call: Callable[[], Any],
        check: Check,
        what: dict[str, Any],
        nbytes: int,
        flops: int = 0,
    ) -> None:
        """Times `call` if `check` lets it pass.

        Args:
            nbytes, flops: at the least; 0 if no rate is wanted.

        Raises:
            AssertionError: the call is wrong; nothing was timed.
        """
        check(call)
        benchmark, info = self.benchmark, self.benchmark.extra_info
        benchmark.group = f"{what['op']}/{what['case']}"
        info |= what | {"timed": "wall, back to back, 1 thread"}
        if benchmark.disabled:
            return benchmark.pedantic(call)
        least, most = OFTEN
        rounds = max(least, min(most, int(SECONDS[self.size] / shortest(call, 3))))
        benchmark.pedantic(call, rounds=rounds, warmup_rounds=1 + rounds // 10)
        spent, tops = benchmark.stats.stats.median, self.tops()
        info |= rated("GB/s", nbytes / spent / 1e9, "read stream", tops["read_gbs"])
        info |= {"nbytes": nbytes}
        if flops:
            info |= rated("TFLOPS", flops / spent / 1e12, "matmul", tops["matmul_tflops"])
            info |= {"flops": flops}


@pytest.fixture(scope="session")
def tops(size: str) -> Callable[[], dict[str, float]]:
    """What the processor reads and multiplies at most, measured when first asked for."""
    return cache(lambda: ceilings(CPU, size))


@pytest.fixture
def bench(
    benchmark: Any, size: str, one_thread: None, tops: Callable[[], dict[str, float]]
) -> Bench:
    return Bench(benchmark, size, tops)


def what_of(op: str, cell: Cell, way: str) -> dict[str, Any]:
    """What is recorded beside the time; pytest-benchmark groups what is of one shape."""
    found = {"op": op, "case": label(cell), "way": way, "baseline": way == "sdpa"}
    found |= {"rows": len(cell.new), "tokens": sum(cell.kv_lens), "new tokens": sum(cell.new)}
    return found | {"page size": cell.page_size, "shared": cell.shared, **cell.heads._asdict()}


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
    require_memory(cell)
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


def require_memory(cell: Cell) -> None:
    # The pages, and contiguous rows or the twin of the pages.
    pages = cell.num_pages + 2 * (sum(cell.row_pages) + SPARE_PAGES)
    needed = pages * cell.page_size * cell.token_bytes(4)
    if needed > available_memory(CPU):
        pytest.skip(f"needs {needed / 2**30:.1f} GiB")


def attention(cell: Cell, way: str) -> tuple[Callable[[], Tensor], Check]:
    """One layer's attention, by the cache, which writes the new tokens, or SDPA; and its check."""
    if way == "sdpa":
        require_memory(cell)
        case = make_case(cell, CPU, torch.float32)
        return dense.sdpa(gather=False)(case), right(case)
    ready = placed(cell)
    check = right(ready.case)
    ready.forget()
    return lambda: paged_attention(ready.case.q, ready.k, ready.v, ready.step, 0), check


def right(case: Case) -> Check:
    """Compares the output with the truth about what the pages hold."""
    error_of = dense.check_attention(case)

    def check(call: Callable[[], Tensor]) -> None:
        error = error_of(call)
        assert error < TOLERANCE, f"relative error {error:.2g}, allowed are {TOLERANCE:g}"

    return check


# ------------------------------------------------------------------ what is timed


def bench_attend(bench: Bench, op: str, cell: Cell, way: str) -> None:
    way_of, _, ending = way.partition("-")
    apart = replace(cell, shared=0)
    call, check = attention(apart if ending else cell, way_of)
    read = apart if ending or way == "sdpa" else cell
    bench(call, check, what_of(op, cell, way), 2 * read.bytes, cell.flops)  # of 16-bit elements
