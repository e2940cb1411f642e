"""Times one layer's attention through the public call on a CPU, in turn with SDPA.

SDPA attends over contiguous K and V, which no paged cache has at hand. If rows decode, two more
ways append the new token first: `torch.cat` does what `DynamicCache` does, and `repeat_kv` what
transformers does under a mask: cat, then repeat_kv, then SDPA. Ours finds out which rows share
pages; "nothing shared" has a copy for each row.

Slots that nobody may read are NaN, and so are the slots of the new tokens until ours writes them.
Each result is compared with float64 before it is timed. fp32; one thread, unless the job's name
says otherwise. The cells for a card are in `benchmarks/gpu/grid.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.nn.utils.rnn import pad_sequence

from benchmarks.cells import SPARE_PAGES, Call, Case, Cell, Heads, make_case
from benchmarks.conftest import Alternate, ratio
from benchmarks.peers import dense
from pagedkv import CacheConfig, PagedKVCache, StepMetadata, paged_attention

CPU = torch.device("cpu")
# Norm of the error over the norm of the truth: sums of fp32 stay near 1e-6, bf16 rounds to 2**-9.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
Check = Callable[[Call], None]
TINY, SMALL = Heads(8, 2, 64), Heads(9, 3, 64)
SDPA = "SDPA, K and V contiguous"
SHUFFLED, IN_A_ROW = "pagedkv, shuffled pages", "pagedkv, pages in a row"
READING = "a loop that reads as many bytes"
SHARED, APART = "pagedkv, prefix shared", "pagedkv, nothing shared"


def rows(heads: Heads, lens: Sequence[int], new: Sequence[int], shared: int = 0) -> Cell:
    return Cell("", heads, tuple(lens), tuple(new), 16, (), "", shared=shared)


ONE = (1,) * 16
SPREAD = tuple(range(512, 4097, 238))  # sixteen lengths
# By job: its cell of the small size, and its cell of the full size.
JOBS = {
    "decode, short rows": (rows(TINY, (64,) * 4, ONE[:4]), rows(SMALL, (512,) * 16, ONE)),
    "decode, long rows": (rows(TINY, (1024,) * 4, ONE[:4]), rows(SMALL, (4096,) * 16, ONE)),
    "decode, rows of all lengths": (
        rows(TINY, (140, 1024, 64, 512), ONE[:4]),
        rows(SMALL, SPREAD, ONE),
    ),
    "decode, a shared prefix": (
        rows(TINY, (544,) * 8, ONE[:8], shared=512),
        rows(SMALL, (4160,) * 16, ONE, shared=4096),
    ),
    "prefill": (rows(TINY, *((128,) * 2,) * 2), rows(SMALL, *((512,) * 4,) * 2)),
    "a chunk of a long prompt": (rows(TINY, (576,), (64,)), rows(SMALL, (4608,), (512,))),
}
ROUNDS = {"small": 40, "full": 60}
MOST_OF_READING = 1 / 0.6  # decoding is bound by memory: its seconds over those of reading
TARGETS = {("decode, long rows", SHUFFLED): 2.5, ("decode, long rows", IN_A_ROW): 1.5}


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


def placed(cell: Cell, shuffled: bool = True, dtype: torch.dtype = torch.float32) -> Placed:
    """Fills a cache with random K and V and opens the step that brings the new tokens."""
    lens, new = np.asarray(cell.kv_lens), np.asarray(cell.new)
    h, g, d = cell.heads
    pages, size = SPARE_PAGES + cell.num_pages, cell.page_size
    limits = {"max_sequences": len(new), "max_sequence_length": int(lens.max())}
    name = str(dtype).removeprefix("torch.")
    config = CacheConfig(1, g, d, name, pages * size, page_size=size, **limits)
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
    q = torch.randn(int(new.sum()), h, d).to(dtype)
    table = step.page_table()
    case = Case(cell, q, *pools, table, step.kv_lens(), step.query_start_loc)
    for pool in pools:
        for row in range(len(new)):
            ids = case.row_ids(row)
            pool[ids] = torch.randn(len(ids), g, size, d).to(dtype)
        for row, length in enumerate(cell.kv_lens):  # when all are filled: rows share pages
            pool[case.row_ids(row)[-1], :, (length - 1) % size + 1 :] = math.nan
    k, v = (pool[case.slots // size, :, case.slots % size] for pool in pools)
    return Placed(case, cache, step, k, v)


# ------------------------------------------------------------------ ways to attend


def attending(
    cell: Cell, shuffled: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[Call, Check]:
    """One layer's attention by the cache, which writes the new tokens; and its check."""
    ready = placed(cell, shuffled, dtype)
    check = right(ready.case)
    ready.forget()
    return lambda: paged_attention(ready.case.q, ready.k, ready.v, ready.step, 0), check


def contiguous(cell: Cell) -> dict[str, tuple[Call, Check]]:
    """Returns SDPA over K and V that are there already, and behind a dense cache's appends."""
    case = make_case(cell, CPU, torch.float32)
    calls = {SDPA: dense.sdpa(gather=False)(case)}
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

    ways = {"torch.cat, repeat_kv, SDPA": repeat}
    return ways | ({"torch.cat, then SDPA": cat} if len(set(lengths)) == 1 else {})


def right(case: Case) -> Check:
    """Compares the output with attention in float64 over the pages."""
    error_of, allowed = dense.check_attention(case), TOLERANCES[case.q.dtype]

    def check(call: Call) -> None:
        error = error_of(call)
        assert error < allowed, f"relative error {error:.2g}, allowed are {allowed:g}"

    return check


def require_right(ways: dict[str, tuple[Call, Check]]) -> dict[str, Call]:
    """Returns the calls, if all of them are right.

    Raises:
        AssertionError: one is wrong.
    """
    for call, check in ways.values():
        check(call)
    return {name: call for name, (call, _) in ways.items()}


# ------------------------------------------------------------------ what is timed


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full, most = metafunc.config.getoption("--size") == "full", torch.get_num_threads()
    jobs = [(name, cells[full], 1) for name, cells in JOBS.items()]
    if most > 1:
        jobs.append(("decode, long rows, all threads", JOBS["decode, long rows"][full], most))
    if "name" in metafunc.fixturenames:
        metafunc.parametrize(("name", "cell", "threads"), jobs, ids=[name for name, *_ in jobs])
    else:
        metafunc.parametrize("threads", sorted({1, most}))


@pytest.mark.usefixtures("one_thread")
def bench_one_layer(
    name: str, cell: Cell, threads: int, alternate: Alternate, claim: Any, size: str
) -> None:
    torch.set_num_threads(threads)
    apart = replace(cell, shared=0)
    ways = contiguous(apart)
    if cell.shared:
        ways |= {APART: attending(apart), SHARED: attending(cell)}
    else:
        ways[SHUFFLED] = attending(cell)
        if cell.decode:
            ways[IN_A_ROW] = attending(cell, shuffled=False)
    seconds = alternate(name, require_right(ways), ROUNDS[size], warmup=3)
    for way in list(ways)[1:]:
        times = ratio(seconds, way, SDPA)
        claim(name, f"{way} / SDPA", times, target=TARGETS.get((name, way)))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def bench_reading(
    dtype: torch.dtype, threads: int, alternate: Alternate, claim: Any, size: str
) -> None:
    """Times decoding beside a loop that reads as many bytes as K and V have, all in a row."""
    torch.set_num_threads(threads)
    cell = JOBS["decode, long rows"][size == "full"]
    numbers = torch.randn(sum(cell.kv_lens) * cell.token_bytes(dtype.itemsize) // 4)
    ways = require_right({SHUFFLED: attending(cell, dtype=dtype)}) | {READING: numbers.sum}
    kind = str(dtype).removeprefix("torch.")
    job = f"decode beside reading, {kind}, {'one thread' if threads == 1 else 'all threads'}"
    times = ratio(alternate(job, ways, ROUNDS[size], warmup=3), SHUFFLED, READING)
    claim(job, f"{SHUFFLED} / {READING}", times, target=MOST_OF_READING)
