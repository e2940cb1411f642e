"""Inputs of the kernel benchmarks: cells of the GPU grid, in a cache with an open step.

The same inputs for every way of a shape: K and V of a case are put onto the cache's own pages,
which lie anywhere in its pool. What nobody may read is NaN, and so are the slots of the new tokens,
which the timed call has to write.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.gpu import dense
from benchmarks.gpu.grid import SPARE_PAGES, Call, Case, Cell, Heads, make_case
from pagedkv import CacheConfig, PagedKVCache, StepMetadata, paged_attention
from pagedkv.kernels import reference
from pagedkv.storage.memory import available_memory

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# Norm of the error over that of the truth. Sums of fp32 stay near 1e-6; 16-bit K and V, weights and
# results are each rounded to 2^-9 (bf16), which leaves some 3e-3.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
SAMPLED = 32  # tokens that are compared, when there are more: the twin takes one at a time

Check = Callable[[Callable[[], Any]], None]
_held: dict[Any, Case] = {}


class Placed(NamedTuple):
    """A case in a cache: the open step, and K and V of its new tokens, `[T, G, D]`."""

    cache: PagedKVCache
    step: StepMetadata
    k: Tensor
    v: Tensor


def on_gpu() -> bool:
    return torch.cuda.is_available()


def dtype_here() -> torch.dtype:
    """What is timed: bf16 on a GPU; a CPU computes in fp32."""
    return torch.bfloat16 if on_gpu() else torch.float32


def new_cell(
    heads: tuple[int, int, int],
    lens: Sequence[int],
    new: Sequence[int],
    page_size: int = 16,
    shared: int = 0,
) -> Cell:
    """A cell that is not in the GPU grid."""
    return Cell("", Heads(*heads), tuple(lens), tuple(new), page_size, (), "", shared=shared)


def label(cell: Cell, dtype: torch.dtype) -> str:
    """Rows, tokens of each, new tokens if more than one, shared ones, heads, page, dtype."""

    def span(name: str, values: Sequence[int]) -> str:
        low, high = min(values), max(values)
        return f"{name}{low}" if low == high else f"{name}{low}..{high}"

    parts = [f"B{len(cell.new)}", span("S", cell.kv_lens)]
    parts += [] if cell.decode else [span("T", cell.new)]
    parts += [f"X{cell.shared}"] if cell.shared else []
    parts += [f"{name}{value}" for name, value in zip("HGD", cell.heads)]
    return "-".join([*parts, f"p{cell.page_size}", NAMES[dtype]])


def spread(
    metafunc: pytest.Metafunc,
    cells: dict[str, Sequence[Any]],
    ways: Sequence[str],
    name: Callable[[Any, torch.dtype], str] = label,
) -> None:
    """Parametrizes `cell` and `way`: ways of one cell follow each other.

    Args:
        cells: under "small", and for the full size under "cpu" and "cuda".
    """
    if "cell" in metafunc.fixturenames:
        small = metafunc.config.getoption("--size") == "small"
        chosen = cells["small" if small else "cuda" if on_gpu() else "cpu"]
        known = {name(cell, dtype_here()): cell for cell in chosen}
        pairs = [
            pytest.param(cell, way, id=f"{case}-{way}")
            for case, cell in known.items()
            for way in ways
        ]
        metafunc.parametrize(("cell", "way"), pairs)


def backends() -> tuple[str, ...]:
    """Those that are timed here: the interpreter of Triton kernels never is."""
    return ("triton", "torch") if on_gpu() else ("torch",)


def case_of(cell: Cell, device: torch.device) -> Case:
    """Inputs of a cell, kept until another one is asked for; skips what does not fit."""
    key = cell, str(device)
    if key not in _held:
        _held.clear()
        release()
        # The case, its pages in a cache and contiguous rows; these two with nothing shared.
        pages = cell.num_pages + 2 * (sum(cell.row_pages) + SPARE_PAGES)
        needed = pages * cell.page_size * cell.token_bytes(dtype_here().itemsize)
        if needed > available_memory(device):
            pytest.skip(f"needs {needed / 2**30:.1f} GiB")
        _held[key] = make_case(cell, device, dtype_here())
    return _held[key]


def release() -> None:
    """Gives back GPU memory that torch keeps: a cache only takes what the card calls free."""
    if on_gpu():
        gc.collect()
        torch.cuda.empty_cache()


def nbytes(cell: Cell, apart: bool = False) -> int:
    """What must be read and written at the least.

    Args:
        apart: the shared tokens count for every row.
    """
    tokens = (len(cell.new) - 1) * cell.shared if apart else 0
    return (cell.bytes + tokens * cell.token_bytes()) * dtype_here().itemsize // 2


def shape_of(cell: Cell) -> dict[str, Any]:
    """For the results."""
    facts = {"rows": len(cell.new), "tokens": sum(cell.kv_lens), "new tokens": sum(cell.new)}
    heads = dict(zip(("heads", "kv heads", "head dim"), cell.heads))
    return facts | heads | {"page size": cell.page_size, "dtype": NAMES[dtype_here()]}


def place(case: Case, backend: str, apart: bool = False) -> Placed:
    """Puts a case into a cache of its own and opens the step that brings its new tokens.

    Args:
        apart: what rows share lies in pages of each row instead.
    """
    cell, lens, new = case.cell, np.asarray(case.cell.kv_lens), np.asarray(case.cell.new)
    rows, shared = len(new), 0 if apart else cell.shared
    pages = SPARE_PAGES + (sum(cell.row_pages) if apart else cell.num_pages)
    config = CacheConfig(
        num_layers=1,
        num_kv_heads=cell.heads.g,
        head_dim=cell.heads.d,
        dtype=str(case.q.dtype).removeprefix("torch."),
        max_tokens=pages * cell.page_size,
        page_size=cell.page_size,
        max_sequences=rows,
        max_sequence_length=int(lens.max()),
    )
    cache = PagedKVCache(config, device=case.q.device, backend=backend)
    # An empty pool hands out runs of pages, one that was in use for a while does not.
    np.random.default_rng(0).shuffle(cache._tables.pool._stack)
    cache._storage.poison(0, torch.arange(pages, device=case.q.device))
    first = cache.add()
    if shared:
        with cache.step([first], num_new=shared, layers=()):
            pass
    others = cache.fork(first, rows - 1) if shared else [cache.add() for _ in range(rows - 1)]
    seqs = np.asarray([first, *others])
    before = lens - new - shared
    if before.any():
        with cache.step(seqs[before > 0], num_new=before[before > 0], layers=()):
            pass
    step = cache.prepare(seqs, num_new=new)
    k, v = _fill(case, step, cache._storage.layer(0))
    return Placed(cache, step, k, v)


def _fill(case: Case, step: StepMetadata, pools: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Copies what the rows hold onto the cache's pages: K and V of the new tokens."""
    size, table, fresh = case.cell.page_size, step.page_table(), []
    for mine, theirs in zip(pools, (case.k_pages, case.v_pages)):
        for row, count in enumerate(case.cell.row_pages):
            ids = table[row, :count].long()
            mine[ids] = theirs[case.row_ids(row)]
            mine[ids[-1], :, (case.cell.kv_lens[row] - 1) % size + 1 :] = math.nan
        fresh.append(theirs[case.slots // size, :, case.slots % size])
        slots = step.slots()
        mine[slots // size, :, slots % size] = math.nan
    return fresh


def attend(case: Case, way: str, apart: bool = False) -> Call:
    """One layer's attention: a backend through the public call, or SDPA on contiguous K and V.

    The public call also writes the new tokens, which contiguous K and V hold already.
    """
    if way == "sdpa":
        return dense.sdpa(gather=False)(case)
    placed = place(case, way, apart)

    def call() -> Tensor:
        return paged_attention(case.q, placed.k, placed.v, placed.step, 0)

    return call


def check_attention(case: Case) -> Check:
    """Compares some tokens' output with the twin in float64, each of them a row of its own."""
    cell, count, device = case.cell, len(case.q), case.q.device
    tokens = torch.arange(count)
    if count > SAMPLED:
        ends = torch.tensor([0, cell.new[0] - 1, count - 1])
        tokens = torch.cat([ends, torch.randperm(count)[: SAMPLED - len(ends)]]).unique()
    new, lens = torch.tensor(cell.new), torch.tensor(cell.kv_lens)
    row = torch.arange(len(new)).repeat_interleave(new)[tokens]
    seen = lens[row] - (new.cumsum(0)[row] - 1 - tokens)
    true, _ = reference.paged_attention(
        case.q[tokens.to(device)].double(),
        case.k_pages,
        case.v_pages,
        case.page_table[row.to(device)],
        seen,
        torch.arange(len(tokens) + 1),
        scale=case.scale,
    )
    tolerance = TOLERANCE[case.q.dtype]

    def check(call: Call) -> None:
        error = dense.error(call()[tokens.to(device)].double(), true)
        assert error < tolerance, f"relative error {error:.2g}, allowed are {tolerance:g}"

    return check


def check_pools(pools: Sequence[Tensor], expected: Sequence[Tensor]) -> Check:
    """Compares whole pools with what the twin left of them, bit by bit: free pages are NaN."""

    def check(call: Callable[[], object]) -> None:
        call()
        kind = {2: torch.int16, 4: torch.int32}[pools[0].element_size()]
        for mine, twin in zip(pools, expected):
            wrong = (mine.view(kind) != twin.view(kind)).sum().item()
            assert not wrong, f"{wrong} elements differ from what the twin writes"

    return check
