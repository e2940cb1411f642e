"""Steps for the Triton kernels, out of poisoned pools, and the float64 truth about them.

A slot that no query sees is NaN, whether it was written or not; page 0, which masked lanes fall
back to, is nobody's. Page tables go on beyond a row's end with ids that no pool has, and end with
the longest row; they begin with -1 where a window has passed. What a kernel reads too much shows in
its numbers, or as an IndexError.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from pagedkv.kernels import paged, reference, shared_prefix
from pagedkv.kernels.cascade import Prefix
from pagedkv.kernels.formats import Pages
from tests.test_attention import assert_accurate, attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NOWHERE = 10**6  # a page that no pool has
LAYOUTS = ("heads outermost", "slots outermost", "K and V side by side")
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
HALF = [torch.float16, torch.bfloat16]


def with_half(names: Iterable[str]) -> list[tuple[str, torch.dtype]]:
    """Each case in float32 and, in turn, in one of the narrower types."""
    pairs = zip(names, itertools.cycle(HALF))
    return [(name, dtype) for name, half in pairs for dtype in (torch.float32, half)]


def slow(*cases: Any) -> list[Any]:
    """Cases that the fast tests do without."""
    each = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=pytest.mark.slow) for case in each]


@dataclass(frozen=True)
class Step:
    """What `paged_attention` is given."""

    q: Tensor
    k_pages: Tensor | Pages
    v_pages: Tensor | Pages
    table: Tensor
    kv_lens: Tensor
    starts: Tensor
    options: dict[str, Any]
    keys: torch.dtype | None = None  # what K is rounded to, if not to the dtype of queries

    @property
    def num_new(self) -> list[int]:
        return self.starts.diff().tolist()

    @property
    def rounded(self) -> torch.dtype:
        """What weights are rounded to: with scales of tokens they need the range of bfloat16."""
        scaled = Pages.of(self.v_pages).format in ("int8", "int4_token")
        return torch.bfloat16 if scaled and self.q.dtype == torch.float16 else self.q.dtype

    @property
    def window(self) -> int | None:
        return self.options["window"]

    @property
    def options_here(self) -> dict[str, Any]:
        """The options for a computation on the CPU."""
        return {name: x.cpu() if isinstance(x, Tensor) else x for name, x in self.options.items()}

    def row(self, index: int) -> "Step":
        """One row by itself, on the same pool."""
        begin, end = self.starts[index : index + 2].tolist()
        return replace(
            self,
            q=self.q[begin:end].clone(),
            table=self.table[index : index + 1].clone(),
            kv_lens=self.kv_lens[index : index + 1].clone(),
            starts=torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE),
        )


def pages_of(layout: str, shape: tuple[int, int, int, int], dtype: torch.dtype):
    """Poisoned K and V pages `[N, G, P, D]`."""
    count, heads, size, dim = shape
    if layout == "K and V side by side":
        both = torch.full((count, 2, heads, size, dim), math.nan, dtype=dtype, device=DEVICE)
        return both[:, 0], both[:, 1]
    if layout == "slots outermost":
        shape = (count, size, heads, dim)
    pages = [torch.full(shape, math.nan, dtype=dtype, device=DEVICE) for _ in "kv"]
    return [x.transpose(1, 2) if layout == "slots outermost" else x for x in pages]


@contextmanager
def one_thread() -> Iterator[None]:
    """Small sums, which other threads would make many times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def step_of(
    rows: list[tuple[int, int]],
    *,
    heads: int = 4,
    groups: int = 2,
    dim: int = 16,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    layout: str = LAYOUTS[0],
    shared: int = 0,
    seed: int = 0,
    order: int = 0,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> Step:
    """A step on shuffled pages.

    Args:
        rows: new tokens of each row, and its length with them.
        shared: how many leading pages all rows have in common.
        order: which pages rows get; what is in them does not depend on it.
    """
    random, shuffle = (torch.Generator().manual_seed(number) for number in (seed, order))
    counts = [-(-length // page) for _, length in rows]
    total = shared + sum(max(0, count - shared) for count in counts) + 3
    ids = iter((1 + torch.randperm(total - 1, generator=shuffle)).tolist())
    common = [next(ids) for _ in range(shared)]
    table = torch.full((len(rows), max(counts, default=0)), NOWHERE, dtype=torch.int32)
    k_pages, v_pages = pages_of(layout, (total, groups, page, dim), dtype)
    for row, ((new, length), count) in enumerate(zip(rows, counts, strict=True)):
        mine = (common + [next(ids) for _ in range(count - shared)])[:count]
        table[row, :count] = torch.tensor(mine, dtype=torch.int32)
        first = 0 if window is None else max(0, length - new - window + 1)
        table[row, : first // page] = -1
        token = torch.arange(first, length)
        page_ids, slots = torch.tensor(mine, dtype=torch.long)[token // page], token % page
        for pages in (k_pages, v_pages):
            content = torch.randn(length - first, groups, dim, generator=random)
            pages[page_ids, :, slots] = content.to(dtype).to(DEVICE)
    starts = torch.tensor([0, *(new for new, _ in rows)]).cumsum(0)
    q = torch.randn(int(starts[-1]), heads, dim, generator=random).to(dtype)
    drawn = torch.randn(heads, generator=random).to(DEVICE)
    return Step(
        q.to(DEVICE),
        k_pages,
        v_pages,
        table.to(DEVICE),
        torch.tensor([length for _, length in rows], dtype=torch.int32, device=DEVICE),
        starts.int().to(DEVICE),
        {
            "scale": dim**-0.5 if scale is None else scale,
            "window": window,
            "softcap": softcap,
            "sinks": drawn if sinks else None,
        },
    )


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """What is allocated inside begins as NaN, or as numbers that lead nowhere."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(math.nan if tensor.is_floating_point() else 2**30)

    with mock.patch.object(torch, "empty", poisoned):
        yield


def attend(
    step: Step, *, num_new=None, max_kv: int | None = None, prefixes: Sequence[Prefix] = ()
) -> tuple[Tensor, Tensor]:
    """The kernels' output and log-sum-exp; the host may know less than is true."""
    if max_kv is None:
        max_kv = int(step.kv_lens.max())
    with poisoned_outputs():
        shared = None
        if prefixes:
            work = paged.cut_prefixes(
                prefixes, step.num_new, step.q.shape[1], step.k_pages, step.q.dtype
            )
            shared = shared_prefix.plan(work, step.q.device)
        plan = paged.plan(
            *(step.kv_lens, step.starts, step.q, step.k_pages, step.v_pages),
            num_new=step.num_new if num_new is None else num_new,
            max_kv=max_kv,
            window=step.window,
            shared=shared,
        )
        return paged.paged_attention(
            *(step.q, step.k_pages, step.v_pages, step.table, step.kv_lens, step.starts, plan),
            **step.options,
        )


@one_thread()
def truth(step: Step) -> tuple[Tensor, Tensor]:
    """The reference in float64, on the CPU."""
    pages = (on_host(x) for x in (step.k_pages, step.v_pages))
    tensors = (step.table, step.kv_lens, step.starts)
    return reference.paged_attention(
        step.q.cpu().double(), *pages, *(x.cpu() for x in tensors), **step.options_here
    )


def on_host(pages: Tensor | Pages) -> Tensor | Pages:
    if isinstance(pages, Tensor):
        return pages.cpu()
    return Pages(pages.format, *(None if x is None else x.cpu() for x in pages[1:]))


def contents(row: Step) -> tuple[Tensor, Tensor]:
    """K and V of a row, `[length, G, D]`, on the CPU; zero where no query sees them."""
    length, size = int(row.kv_lens), Pages.of(row.k_pages).data.shape[2]
    ids = row.table[0, : -(-length // size)].cpu()
    dtypes = row.keys or row.q.dtype, row.q.dtype
    k, v = (
        reference.gather_pages(on_host(x), ids, 0, length, dtype).nan_to_num(0)
        for x, dtype in zip((row.k_pages, row.v_pages), dtypes)
    )
    return k, v


def clumsy(row: Step, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a row with every intermediate rounded, in float64."""
    q = row.q.cpu()
    blind = max(0, len(q) - len(k))  # queries in front of the text
    options = row.options_here
    out, lse = attention(q[blind:], k, v, len(k) - len(q) + blind, rounded=dtype, **options)
    out = torch.cat([out.new_zeros(blind, *out.shape[1:]), out])
    front = lse.new_full((blind, lse.shape[1]), -math.inf)
    if options["sinks"] is not None:
        front[:] = options["sinks"]
    return out, torch.cat([front, lse])


@one_thread()
def check(step: Step, result: tuple[Tensor, Tensor] | None = None) -> None:
    """Every row of the kernels' result agrees with the reference."""
    out, lse = (x.cpu() for x in (attend(step) if result is None else result))
    exact, exact_lse = truth(step)
    assert out.dtype == step.q.dtype
    assert lse.dtype == torch.float32
    assert not out.isnan().any()
    # Queries without keys and without a sink, and only those, have no finite sum.
    assert torch.equal(lse.isneginf(), exact_lse.isneginf())
    for index, new in enumerate(step.num_new):
        if not new:
            continue
        row, tokens = step.row(index), slice(*step.starts[index : index + 2].tolist())
        k, v = contents(row)
        twin, _ = clumsy(row, k, v, step.rounded)
        # Scores and their sums are float32 in any dtype.
        _, twin_lse = clumsy(row, k, v, torch.float32)
        dim, reach = step.q.shape[2], min(len(k), step.window or len(k))
        largest = v.abs().max().item() if len(v) else 0.0
        products = abs(step.options["scale"]) * row.q.norm(dim=-1).max().item()
        products *= k.norm(dim=-1).max().item() if len(k) else 0.0
        what = f"row {index}, {new} new of {len(k)} tokens"
        # A score that is off by e moves the output by up to 2 e of the largest value.
        terms = reach + 2 * dim * products
        assert_accurate(
            out[tokens], twin, exact[tokens], reduction=terms, largest=largest, what=what
        )
        finite = exact_lse[tokens].isfinite()
        if finite.any():
            assert_accurate(
                *(x[finite] for x in (lse[tokens], twin_lse, exact_lse[tokens])),
                reduction=dim + reach,
                largest=max(products, 1.0),
                what=f"LSE of {what}",
            )


def random_bits(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bits at all, NaN and subnormal numbers among them."""
    random = torch.Generator().manual_seed(seed)
    number = BITS[dtype.itemsize]
    info = torch.iinfo(number)
    bits = torch.randint(info.min, info.max, shape, generator=random, dtype=number)
    return bits.view(dtype).to(DEVICE)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """As torch.equal, but NaN is like NaN of the same bits only."""
    number = BITS[found.element_size()]
    assert torch.equal(found.view(number), expected.view(number))
