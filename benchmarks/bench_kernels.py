"""One layer's attention, writes and copies through the public calls, in every way there is.

Rows that decode, that bring prompts or chunks, that begin with the same pages; new K and V to pages
that lie anywhere; whole pages as copy-on-write copies them. The baseline of attention is SDPA over
K and V that are contiguous already, which no paged cache has at hand; that of the others copies as
many bytes. `triton` and `torch` find out by themselves that rows share pages; `triton-apart` and
`torch-apart` run with nothing shared, and their rate counts what they then must read, as does the
baseline's. At full size a GPU runs the cells of `benchmarks/gpu/grid.py`.

What nobody may read is NaN, and so are the slots of the new tokens, which the timed call writes.
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

from benchmarks.cells import SPARE_PAGES, Case, Cell, Heads, make_case
from benchmarks.gpu import dense, grid
from benchmarks.measuring import Bench, What
from pagedkv import CacheConfig, PagedKVCache, StepMetadata, paged_attention, write_kv
from pagedkv.kernels import reference
from pagedkv.storage.memory import available_memory

ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
BACKENDS = ("triton", "torch") if ON_GPU else ("torch",)  # the interpreter is never timed
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# Norm of the error over that of the truth. Sums of fp32 stay near 1e-6; 16-bit K and V, weights and
# results are each rounded to 2^-9 (bf16), which leaves some 3e-3.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
Check = Callable[[Callable[[], Any]], None]
TINY, SMALL, LARGE = Heads(8, 2, 64), Heads(9, 3, 64), Heads(32, 8, 128)


class Pages(NamedTuple):
    """How many pages are copied, and of what; the pool holds four times as many."""

    layers: int
    count: int
    kv_heads: int
    head_dim: int
    page_size: int = 16


def rows(
    heads: Heads, lens: Sequence[int], new: Sequence[int], page: int = 16, shared: int = 0
) -> Cell:
    return Cell("", heads, tuple(lens), tuple(new), page, (), "", shared=shared)


ONE = (1,) * 16
SPREAD = tuple(range(512, 4097, 238))  # sixteen lengths
# Operation: cells of the small size, and of the full one on a CPU and on a GPU.
CELLS: dict[str, tuple[Sequence[Any], Sequence[Any], Sequence[Any]]] = {
    "decode": (
        [
            rows(TINY, (256,) * 4, ONE[:4]),
            rows(TINY, (40, 300, 17, 129), ONE[:4]),
            rows(TINY, (200,) * 4, (4,) * 4),
        ],
        [
            rows(SMALL, (512,) * 16, ONE),
            rows(SMALL, (4096,) * 16, ONE),
            rows(SMALL, (4096,) * 16, ONE, page=64),
            rows(SMALL, SPREAD, ONE),
            rows(LARGE, (4096,) * 4, ONE[:4]),
            rows(SMALL, (4096,) * 16, (4,) * 16),
        ],
        [*grid.decode_cells(), *grid.page_cells(), *grid.ragged_cells(), *grid.verify_cells()],
    ),
    "prefill": (
        [
            rows(TINY, (128,) * 2, (128,) * 2),
            rows(TINY, (320,), (64,)),
            rows(TINY, (200, 70, 33), (90, 1, 1)),
        ],
        [
            rows(SMALL, (512,) * 4, (512,) * 4),
            rows(SMALL, (2048,), (2048,)),
            rows(SMALL, (4096 + 512,), (512,)),
            rows(SMALL, (2048,) * 16, (512, *ONE[1:])),
        ],
        grid.prefill_cells(),
    ),
    "shared prefix": (
        [rows(TINY, (544,) * 8, ONE[:8], shared=512)],
        [
            rows(SMALL, (1024 + 64,) * 16, ONE, shared=1024),
            rows(SMALL, (4096 + 64,) * 16, ONE, shared=4096),
            rows(SMALL, (256 + 1024,) * 16, ONE, shared=256),
        ],
        grid.shared_cells(),
    ),
    "write": (
        [rows(TINY, (40,) * 8, ONE[:8]), rows(TINY, (100, 17), (90, 17))],
        [
            rows(SMALL, (512,) * 64, ONE * 4),
            rows(SMALL, (4096,), (4096,)),
            rows(LARGE, (1024,) * 4, (1024,) * 4),
        ],
        grid.append_cells(),
    ),
    "copy": (
        [Pages(2, 4, 2, 64), Pages(3, 1, 2, 64)],
        [Pages(30, 1, 3, 64), Pages(30, 64, 3, 64), Pages(4, 64, 8, 128)],
        [
            *(Pages(32, count, 8, 128) for count in (1, 16, 256)),
            Pages(32, 64, 8, 128, page_size=64),
            Pages(1, 1024, 8, 128),
        ],
    ),
}
FUNCTIONS = {"bench_write": ("write",), "bench_copy": ("copy",)}  # bench_attend has the others
ATTENTION = ("decode", "prefill", "shared prefix")


def ways(op: str) -> list[str]:
    """Those of one cell follow each other, the baseline last."""
    endings = ("", "-apart") if op == "shared prefix" else ("",)
    backends = [f"{backend}{ending}" for backend in BACKENDS for ending in endings]
    return [*backends, "sdpa" if op in ATTENTION else "copy"]


def label(cell: Cell | Pages, dtype: torch.dtype = DTYPE) -> str:
    """Rows, tokens of each, new tokens if more than one, shared ones, heads, page, dtype."""
    if isinstance(cell, Pages):
        layers, count, heads, dim, size = cell
        return f"L{layers}-N{count}-G{heads}-D{dim}-p{size}-{NAMES[dtype]}"

    def span(name: str, values: Sequence[int]) -> str:
        low, high = min(values), max(values)
        return f"{name}{low}" if low == high else f"{name}{low}..{high}"

    parts = [f"B{len(cell.new)}", span("S", cell.kv_lens)]
    parts += [] if cell.decode else [span("T", cell.new)]
    parts += [f"X{cell.shared}"] if cell.shared else []
    parts += [f"{name}{value}" for name, value in zip("HGD", cell.heads)]
    return "-".join([*parts, f"p{cell.page_size}", NAMES[dtype]])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    size = 0 if metafunc.config.getoption("--size") == "small" else 1 + ON_GPU
    ops = FUNCTIONS.get(metafunc.function.__name__, ATTENTION)
    known = {(op, label(cell)): cell for op in ops for cell in CELLS[op][size]}
    metafunc.parametrize(
        ("op", "cell", "way"),
        [
            pytest.param(op, cell, way, id=f"{op.replace(' ', '_')}-{case}-{way}")
            for (op, case), cell in known.items()
            for way in ways(op)
        ],
    )


def what_of(op: str, cell: Cell | Pages, way: str, nbytes: int, flops: int = 0) -> What:
    """What is recorded beside the time."""
    shape: dict[str, Any] = {"dtype": NAMES[DTYPE]}
    if isinstance(cell, Pages):
        shape |= cell._asdict()
    else:
        shape |= {"rows": len(cell.new), "tokens": sum(cell.kv_lens), "new tokens": sum(cell.new)}
        shape |= dict(zip(("heads", "kv heads", "head dim"), cell.heads))
        shape |= {"page size": cell.page_size, "shared": cell.shared}
    return What(op, label(cell), way, nbytes, flops, baseline=way in ("sdpa", "copy"), shape=shape)


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


def placed(cell: Cell, device: torch.device, backend: str, shuffled: bool = True) -> Placed:
    """Fills a cache with random K and V and opens the step that brings the new tokens."""
    lens, new = np.asarray(cell.kv_lens), np.asarray(cell.new)
    h, g, d = cell.heads
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pages, size = SPARE_PAGES + cell.num_pages, cell.page_size
    require_memory(cell, device)
    config = CacheConfig(
        num_layers=1,
        num_kv_heads=g,
        head_dim=d,
        dtype=str(dtype).removeprefix("torch."),
        max_tokens=pages * size,
        page_size=size,
        max_sequences=len(new),
        max_sequence_length=int(lens.max()),
    )
    cache = PagedKVCache(config, device=device, backend=backend)
    if shuffled:  # an empty pool hands out runs of pages, one that was in use for a while does not
        np.random.default_rng(0).shuffle(cache._tables.pool._stack)
    cache._storage.poison(0, torch.arange(pages, device=device))
    seqs = [cache.add()]
    if cell.shared:
        with cache.step(seqs, num_new=cell.shared):
            pass
        seqs += cache.fork(seqs[0], len(new) - 1)
    else:
        seqs += [cache.add() for _ in new[1:]]
    before = lens - new - cell.shared
    if before.any():
        with cache.step(np.asarray(seqs)[before > 0], num_new=before[before > 0]):
            pass
    step, pools = cache.prepare(seqs, num_new=new), cache._storage.layer(0)
    torch.manual_seed(0)
    q = torch.randn(int(new.sum()), h, d, device=device, dtype=dtype)
    table = step.page_table()
    case = Case(cell, q, *pools, table, step.kv_lens(), step.query_start_loc)
    for pool in pools:
        for row in range(len(new)):
            ids = case.row_ids(row)
            pool[ids] = torch.randn(len(ids), g, size, d, device=device, dtype=dtype)
        for row, length in enumerate(cell.kv_lens):  # a shared page is every row's
            pool[case.row_ids(row)[-1], :, (length - 1) % size + 1 :] = math.nan
    k, v = (pool[case.slots // size, :, case.slots % size] for pool in pools)
    return Placed(case, cache, step, k, v)


def require_memory(cell: Cell, device: torch.device) -> None:
    # The pages, and contiguous rows or the twin of the pages.
    pages = cell.num_pages + 2 * (sum(cell.row_pages) + SPARE_PAGES)
    needed = pages * cell.page_size * cell.token_bytes(DTYPE.itemsize)
    if needed > available_memory(device):
        pytest.skip(f"needs {needed / 2**30:.1f} GiB")


def attention(cell: Cell, device: torch.device, way: str) -> tuple[Callable[[], Tensor], Check]:
    """One layer's attention, by a backend, which writes the new tokens, or SDPA; and its check."""
    if way == "sdpa":
        require_memory(cell, device)
        case = make_case(cell, device, DTYPE)
        return dense.sdpa(gather=False)(case), right(case)
    ready = placed(cell, device, way)
    check = right(ready.case)
    ready.forget()
    return lambda: paged_attention(ready.case.q, ready.k, ready.v, ready.step, 0), check


def right(case: Case) -> Check:
    """Compares the output with the truth about what the pages hold."""
    error_of, tolerance = dense.check_attention(case), TOLERANCE[case.q.dtype]

    def check(call: Callable[[], Tensor]) -> None:
        error = error_of(call)
        assert error < tolerance, f"relative error {error:.2g}, allowed are {tolerance:g}"

    return check


def same(pools: Sequence[Tensor], expected: Sequence[Tensor]) -> Check:
    """Compares whole pools with what the twin left of them, bit by bit: free pages are NaN."""

    def check(call: Callable[[], object]) -> None:
        call()
        kind = {2: torch.int16, 4: torch.int32}[pools[0].element_size()]
        for mine, twin in zip(pools, expected):
            wrong = (mine.view(kind) != twin.view(kind)).sum().item()
            assert not wrong, f"{wrong} elements differ from what the twin writes"

    return check


# ------------------------------------------------------------------ what is timed


def bench_attend(bench: Bench, device: torch.device, op: str, cell: Cell, way: str) -> None:
    backend, _, ending = way.partition("-")
    apart = replace(cell, shared=0)
    call, check = attention(apart if ending else cell, device, backend)
    read = apart if ending or way == "sdpa" else cell
    bench(call, what_of(op, cell, way, read.bytes * DTYPE.itemsize // 2, cell.flops), check)


def bench_write(bench: Bench, device: torch.device, op: str, cell: Cell, way: str) -> None:
    moved = 2 * sum(cell.new) * cell.token_bytes(DTYPE.itemsize)  # read, and written
    what = what_of(op, cell, way, moved)
    if way == "copy":
        copy_contiguous(bench, what, device)
        return
    ready = placed(cell, device, way)
    ready.forget()
    expected = [pool.clone() for pool in ready.pools]
    reference.write_kv(ready.k, ready.v, *expected, ready.step.slots())
    bench(lambda: write_kv(ready.k, ready.v, ready.step, 0), what, same(ready.pools, expected))


def bench_copy(bench: Bench, device: torch.device, op: str, cell: Pages, way: str) -> None:
    """K and V of all layers at once."""
    config = CacheConfig(
        num_layers=cell.layers,
        num_kv_heads=cell.kv_heads,
        head_dim=cell.head_dim,
        dtype=str(DTYPE).removeprefix("torch."),
        max_tokens=4 * cell.count * cell.page_size,
        page_size=cell.page_size,
    )
    what = what_of(op, cell, way, 2 * cell.count * config.bytes_per_page())
    if way == "copy":
        copy_contiguous(bench, what, device)
        return
    storage = PagedKVCache(config, device=device, backend=way)._storage
    pools = [*storage.k, *storage.v]
    for pool in pools:
        pool.normal_()
    source, target = torch.randperm(config.num_pages())[: 2 * cell.count].view(2, -1)
    expected = [pool.clone() for pool in pools]
    for twin in expected:
        reference.copy_pages(twin, source.to(device), target.to(device))
    ids = source.numpy(), target.numpy()
    bench(lambda: storage.copy_pages(0, *ids), what, same(pools, expected))


def copy_contiguous(bench: Bench, what: What, device: torch.device) -> None:
    source, target = torch.randn(2, what.nbytes // 8, device=device)  # half of it each
    bench(lambda: target.copy_(source), what, same([target], [source]))
