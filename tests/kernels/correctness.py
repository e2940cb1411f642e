"""Our kernels on a device, held to a float64 twin; and the laws that hold bit for bit.

All cases of a shape share a handful of compiled kernels, which `benchmarks/gpu/precompile.py` makes
beforehand; `benchmarks/gpu/correctness.py` is how a card is checked. Where there is none a few run
in the interpreter. Nothing here needs pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from pagedkv import CacheConfig, PagedKVCache, write_kv
from pagedkv.kernels import reference
from pagedkv.kernels.formats import Pages
from pagedkv.kernels.prefixes import Prefix
from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.torch import select_pages as sparse
from pagedkv.kernels.torch.page_mass import page_mass
from pagedkv.kernels.triton import backend as paged
from pagedkv.kernels.triton import decode, launch, prefill
from pagedkv.kernels.triton import select_pages as choose
from pagedkv.kernels.triton.delta_rule import delta_rule_step
from pagedkv.kernels.triton.short_convolution import convolution_step
from tests.kernels import delta_rules, short_convolutions
from tests.kernels.shapes import DTYPES, FULL, SMALL, Shape, chosen_by_twins, shapes, wide
from tests.kernels.steps import EACH, LAYOUTS, Rows, Step, coded
from tests.kernels.truth import attend, check

MIXED_PAIRS = (("dense", "int8"), ("int8", "int4_token"), ("int4_channel", "fp8"), ("fp8", "dense"))
PASSED = "passed"
HUGE = 2**31  # elements from which int32 offsets overflow


class Case(NamedTuple):
    group: str
    name: str
    run: Callable[[], None]

    @property
    def title(self) -> str:
        """The name that no other case has."""
        return f"{self.group}, {self.name}"


def same(what: str, *pairs: tuple[Tensor, Tensor]) -> None:
    """Raises AssertionError unless both of each pair have the same bits."""
    for mine, other in pairs:
        if mine.is_meta:
            continue
        equal = torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
        assert equal, f"{what}: other bits, {(mine != other).sum()} of {mine.numel()} elements"


# ------------------------------------------------------------------ cases of every shape


def agree(shape: Shape, device: str, rows: Rows, num_new: list[int] | None = None) -> None:
    """The result is right, and its bits do not change when the host knows less.

    Args:
        num_new: what the host says, if not the truth.
    """
    step = shape.step(rows, device)
    claimed = step.num_new if num_new is None else num_new
    result = attend(step, num_new=claimed)
    check(step, result)
    again = attend(step, num_new=claimed * 2, max_kv=2 * step.max_kv + 5000)
    same("larger bounds", *zip(result, again))


def agree_across(shape: Shape, device: str, rows: Rows) -> None:
    """Queries that see their whole row, of whatever place they are."""
    step = replace(shape.step(rows, device), causal=False)
    check(step, attend(step))


def alone(shape: Shape, device: str, rows: Rows) -> None:
    """A row in a batch is the row alone, bit for bit."""
    step = shape.step(rows, device)
    few = [new for new in step.num_new if 0 < new <= 16]
    out, lse = attend(step)
    for index, (new, tokens) in enumerate(zip(step.num_new, step.tokens)):
        if new:
            # Or tiles of queries differ in size.
            result = attend(step.row(index), num_new=[max(few)] if new <= 16 else [new])
            same(f"row {index} alone", (out[tokens], result[0]), (lse[tokens], result[1]))


def write(shape: Shape, device: str) -> None:
    """Each token to its slot, from slices of a wider tensor, and nothing else changes."""
    step = shape.step([(5, 70), (16, 16), (20, 130), (3, 1)], device)
    heads, dim, dtype, count = shape.groups, shape.dim, shape.dtype, len(step.slots)
    packed = torch.randn(count, (shape.ratio + 2) * heads, dim, device=device, dtype=dtype)
    k, v = packed[:, -2 * heads :].chunk(2, dim=1)
    slots = step.slots.clone()
    slots[1::5] = -1
    slots[0] = 3 * shape.page - 1  # the last slot of page 2
    pools = step.k_pages, step.v_pages
    wanted = [pages.clone() for pages in pools]
    if device != "meta":
        reference.write_kv(k, v, *wanted, slots)
    paged.write_kv(k, v, *pools, slots)
    for pages, into in zip(pools, wanted):
        same("pages after a write", (pages.contiguous(), into.contiguous()))


def replay(shape: Shape, device: str) -> None:
    """Plan, write and attention, captured once and replayed for other rows, bit for bit."""
    counts = [(1, 900), (16, 300), (1, 40), (100, 420), (4, 77), (31, 31)]
    others = [(100, 130), (1, 7), (4, 800), (1, 1), (31, 900), (16, 16)]
    if device == "cpu":
        counts, others = [(1, 40), (17, 20)], [(17, 50), (1, 3)]
    sizes = {"pages": 3 + len(counts) * (1000 // shape.page + 1), "columns": 1000 // shape.page + 3}
    step, other = (shape.step(rows, device, **sizes) for rows in (counts, others))
    new = (len(step.q), shape.groups, shape.dim)
    k, v = (torch.randn(new, device=device, dtype=shape.dtype) for _ in range(2))

    def layer(each: Step) -> tuple[Tensor, Tensor]:
        # What the host says is the same for both: it is what a graph is captured with.
        paged.write_kv(k, v, each.k_pages, each.v_pages, each.slots)
        return attend(each, num_new=step.num_new, max_kv=1000)

    def refill() -> None:
        for name in ("q", "k_pages", "v_pages", "table", "kv_lens", "starts", "slots"):
            getattr(step, name).copy_(getattr(other, name))
        for name in ("sinks", "alibi_slopes"):
            if step.options[name] is not None:
                step.options[name].copy_(other.options[name])

    result = layer(step)  # compiles, which cannot be captured
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = layer(step)
        refill()
        graph.replay()
    else:
        refill()
        result = layer(step)
    known = layer(other)
    check(other, known)
    pools = (step.k_pages, other.k_pages), (step.v_pages, other.v_pages)
    same("a replay", *zip(result, known), *((x.contiguous(), y.contiguous()) for x, y in pools))


# ------------------------------------------------------------------ coded pages


@contextmanager
def word_by_word() -> Iterator[None]:
    """Plans made inside take coded words apart one at a time, not two."""

    def alone(tuning: Callable[..., NamedTuple], *args: object) -> NamedTuple:
        return tuning(*args)._replace(packed=False)

    with (
        mock.patch.object(decode, "tuning", partial(alone, decode.tuning)),
        mock.patch.object(prefill, "tuning", partial(alone, prefill.tuning)),
    ):
        yield


def agree_coded(shape: Shape, device: str, rows: Rows, pair: tuple[str, str]) -> None:
    """Attention over coded pages is right, and so are words taken apart two at a time."""
    step = coded(shape.step(rows, device), *pair)
    with word_by_word():
        single = attend(step)
    check(step, single)
    if device == "cpu":
        return
    packed = attend(step)
    check(step, packed)
    if pair[0] != "int4_channel":  # whose minima are rounded one more time
        same("words taken apart one by one", *zip(packed, single))


def write_coded(shape: Shape, device: str, pair: tuple[str, str]) -> None:
    """K and V are coded as the torch functions code them, bit for bit."""
    step = coded(shape.step([(5, 70), (2 * shape.page + 30, 130)], device), *pair)
    mine = step.k_pages, step.v_pages
    assert isinstance(mine[0], Pages)
    assert isinstance(mine[1], Pages)
    twins = [pages.each(torch.clone) for pages in mine]
    shape_of = len(step.slots), shape.groups, shape.dim
    new = [torch.randn(shape_of, device=device, dtype=shape.dtype) for _ in "kv"]
    if "int4" in "".join(pair):
        first, target = ([3, 3 + shape.page], [1, 0])
        where = [torch.tensor(x, device=device) for x in (first, target)]
        calls = paged.write_pages, reference.write_pages
    else:
        where, calls = [step.slots], (paged.write_kv, reference.write_kv)
    calls[0](*new, *mine, *where)
    if device != "meta":
        calls[1](*new, *twins, *where)
    for pages, twin in zip(mine, twins):
        same("words", (pages.data, twin.data))
        same("scales", (pages.scales, twin.scales))


def coded_cases(device: str) -> Iterator[Case]:
    dtypes = DTYPES[1:] if device != "cpu" else DTYPES[:1]
    small = device == "cpu"
    for i, dtype in enumerate(dtypes):
        for j, pair in enumerate((*EACH, *MIXED_PAIRS)):
            if i and j >= len(EACH):
                continue
            page, dim = (16, 32) if small else ((16, 32)[(i + j) % 2], (128, 64, 256)[(i + j) % 3])
            terms = ({}, {"window": 100}, {"softcap": 20.0, "sinks": True})[(i + j) % 3]
            shape = Shape(4, 2, dim, page, dtype, terms)
            name = f"{shape}, {pair[0]} K, {pair[1]} V"
            every = SMALL if small else FULL
            for rows in ("mixed",) if small else ("decode", "verify", "mixed"):
                run = partial(agree_coded, shape, device, every[rows], pair)
                yield Case("coded", f"{name}, {rows}", run)
            if "dense" not in pair:
                yield Case("write", name, partial(write_coded, shape, device, pair))


# ------------------------------------------------------------------ cases of their own


def prefix(shape: Shape, device: str) -> None:
    """Rows that share their first pages attend to them once; others are beside them."""
    front = -(-(600 if device != "cpu" else 64) // shape.page)
    begin = front * shape.page
    rows = [(1, begin + n) for n in (1, 2, 33, 64, 300, 700)[: 3 if device == "cpu" else None]]
    rows += [(1, begin + 5), (40, begin + 90)]
    step = shape.step(rows, device, shared=front)
    check(step, attend(step, prefixes=[Prefix(slice(0, len(rows) - 2), front)]))


def watch(shape: Shape, device: str, rows: Rows) -> None:
    """A call that is watched gives the same bits, and mass as torch computes it."""
    step = shape.step(rows, device)
    num_new, lens = (np.array(x) for x in zip(*rows))
    queries = np.where(num_new <= 16, np.minimum(num_new, lens), 0)
    asked = num_new, lens, queries
    watched = paged.watch(*asked, step.table.shape[1], step.q.shape[1], shape.page, step.q.device)
    assert watched is not None
    result = attend(step, watched=watched)
    mass = paged.page_mass(watched, result[1])
    if device == "meta":
        return
    same("watched", *zip(result, attend(step)))
    scores = {name: step.options[name] for name in ("scale", "softcap", "sinks")}
    twin = page_mass(step.q, step.k_pages, step.table, *asked, Scoring(**scores))
    worst = (mass - twin).abs().max().item()
    assert worst <= 1e-4 * max(queries), f"mass is off by {worst:.3g}"


def score(shape: Shape, device: str, rows: Rows) -> None:
    """Scores of pages by their bounds, for rows of one new token, are those that torch computes.

    The pages of the highest are those that sorting finds.
    """
    step = shape.step(rows, device)
    bounds = torch.rand(len(step.k_pages), shape.groups, shape.dim, 2, device=device).half()
    bounds[..., 1] -= 0.5  # minima, of both signs
    rest = step.table, step.kv_lens, shape.page
    found = choose.score_columns(step.q, bounds, *rest)
    count = max(2, step.table.shape[1] // 3)
    for decoding in (True, False):
        same("chosen pages", chosen_by_twins((step.q, bounds, *rest), count, decoding))
    if device == "meta":
        return
    wanted = sparse.score_columns(step.q, bounds, *rest)
    always = wanted.isinf()  # read in any case, or behind a row's end
    assert torch.equal(found.where(always, 0), wanted.where(always, 0)), "other pages are infinite"
    # A sum of so many products; of 16-bit queries, both factors are rounded to bfloat16.
    slack = shape.dim * 2.0**-23 + (2.0**-7 if shape.dtype != torch.float32 else 0)
    size = sparse.score_columns(step.q.abs(), bounds.abs(), *rest)
    worst = ((found - wanted).abs() / size).masked_fill(always, 0).max().item()
    assert worst <= slack, f"scores are off by {worst:.3g} of their terms, more than {slack:.3g}"


def copy(dtype: torch.dtype, size: int, between: bool, device: str) -> None:
    """Whole pages of all layers, within a storage or into another."""
    stores = [torch.randn(3, n, 2, size, 80, device=device).to(dtype) for n in (40, 29)]
    one = stores[0]
    into = stores[1] if between else one
    source = torch.tensor([3, 39, 0, 17, 8], device=device)
    target = torch.tensor([5, 1, 28, 2, 21], device=device)
    wanted = into.clone()
    if device != "meta":
        wanted[:, target] = one[:, source].clone()
    paged.copy_pages(one, source, target, into if between else None)
    same("copied pages", (into, wanted))


def move_states(sizes: delta_rules.Sizes, dtype: torch.dtype, device: str) -> None:
    """A token of the gated delta rule, and of its convolution; no slot but the targets changes."""
    delta_rules.check(delta_rule_step, delta_rules.make(sizes, dtype, device))
    rows, _, heads, _, dim, _ = sizes
    for width in (3, 4):
        inputs = short_convolutions.make(rows, heads * dim, width, dtype, device)
        short_convolutions.check(convolution_step, *inputs)


def state_cases(device: str) -> Iterator[Case]:
    sizes = [(5, 16, 32, 128, 128), (33, 2, 4, 96, 192), (3, 8, 8, 256, 256), (9, 3, 3, 7, 33)]
    every = [delta_rules.Sizes(*each) for each in sizes]
    every.append(delta_rules.Sizes(4, 8, 8, 128, 128, channels=True))
    if device == "cpu":
        every = [delta_rules.Sizes(5, 1, 2, 16, 40)]
    for number, one in enumerate(every):
        dtype = DTYPES[number % 3]
        yield Case("states", f"{tuple(one)}, {dtype}", partial(move_states, one, dtype, device))


def huge(shape: Shape, device: str) -> None:
    """Attention, writes and copies behind element 2^31 of a pool."""
    heads, dim, size = shape.groups, shape.dim, shape.page
    pages = HUGE // (heads * dim * size) + 4000
    step = shape.step([*FULL["decode"], *FULL["prefill"]], device, pages=pages)
    check(step)
    new = len(step.q), heads, dim
    k, v = (torch.randn(new, device=device, dtype=shape.dtype) for _ in range(2))
    paged.write_kv(k, v, step.k_pages, step.v_pages, step.slots)
    at = step.slots // size, slice(None), step.slots % size
    same("written", *((x[at], y) for x, y in ((step.k_pages, k), (step.v_pages, v))))
    check(step)
    source = torch.tensor([pages - 1, pages - 3, 0], device=device)
    target = torch.tensor([2, pages - 5, pages - 9], device=device)
    wanted = step.v_pages[source].clone()
    paged.copy_pages(step.v_pages[None], source, target)
    same("copied", (step.v_pages[target], wanted))


def grow(dtype: torch.dtype, device: str) -> None:
    """Pages come and go behind fixed addresses, which a graph reads, and no other page changes."""
    layers, heads, dim, step = (4, 8, 128, 4096) if device == "cuda" else (2, 2, 16, 32)
    name = str(dtype).removeprefix("torch.")
    most = 25 * step - 1000 if device == "cuda" else 5 * step  # there, layers lie apart
    config = CacheConfig(layers, heads, dim, name, max_tokens=most, growth_step=step)
    cache = PagedKVCache(config, device=device, backend="triton")
    pools = [pages for layer in range(layers) for pages in cache._storage.layer(layer)]
    addresses = [pages.data_ptr() for pages in pools]

    def feed(seq: int, tokens: int) -> Tensor:
        new = torch.randn(layers, 2, tokens, heads, dim, device=device).to(dtype)
        with cache.step([seq], num_new=tokens) as opened:
            for layer in range(layers):
                write_kv(*new[layer], opened, layer)
        return new

    def check_contents(seq: int, wanted: Tensor) -> None:
        for layer in range(layers):
            same(f"layer {layer}", *zip(cache.gather(seq, layer), wanted[layer]))
        assert [pages.data_ptr() for pages in pools] == addresses, "pages moved"

    def free_memory() -> int:
        return torch.cuda.mem_get_info()[0] if device == "cuda" else 0

    first = cache.add()
    kept = feed(first, step // 2)
    seen = torch.empty_like(pools[0][:4])
    graph = capture_and_refuse(cache, seen, pools[0]) if device == "cuda" else None
    before = free_memory()
    second = cache.add(max_tokens=3 * step)
    taken = before - free_memory()
    fresh = feed(second, 3 * step)
    check_contents(first, kept)
    check_contents(second, fresh)
    if graph is not None:
        graph.replay()
        same("a replay", (seen, pools[0][:4]))
    cache.free(second)
    before = free_memory()
    gone = cache.shrink()
    assert gone > 0, "nothing went"
    if device == "cuda":
        returned = free_memory() - before
        assert min(taken, returned) > 0.9 * gone, f"{taken} taken, {returned} returned of {gone}"
    check_contents(first, kept)
    third = cache.add()
    fresh = feed(third, 4 * step)
    check_contents(first, kept)
    check_contents(third, fresh)


def capture_and_refuse(cache: PagedKVCache, seen: Tensor, pages: Tensor) -> torch.cuda.CUDAGraph:
    """A graph that copies the first pages; while it was captured, growing was refused."""
    graph, refused = torch.cuda.CUDAGraph(), ""
    with torch.cuda.graph(graph):
        seen.copy_(pages[: len(seen)])
        try:
            cache.add(max_tokens=3 * cache.config.growth_step)
        except RuntimeError as error:
            refused = str(error)
    assert "captured" in refused, f"growth while a graph was captured: {refused or 'allowed'}"
    return graph


# ------------------------------------------------------------------ all of them


def of_shape(shape: Shape, device: str) -> Iterator[Case]:
    rows = SMALL if device == "cpu" else FULL
    for name, some in rows.items():
        # As many new tokens as any row of a step may have in decode: one kernel for all of these.
        num_new = None if name in ("decode", "prefill") else [*(n for n, _ in some), 16]
        yield Case(name, str(shape), partial(agree, shape, device, some, num_new))
    if device == "cpu":
        mix = [(2, 30), (1, 0), (17, 40)]
    else:
        mix = [(2, 70), (1, 0), (7, 1500), (0, 12), (16, 16), (40, 700), (100, 100), (3, 3)]
    yield Case("alone", str(shape), partial(alone, shape, device, mix))
    yield Case("write", str(shape), partial(write, shape, device))
    yield Case("replay", str(shape), partial(replay, shape, device))


def cases(device: str) -> Iterator[Case]:
    """All cases for a GPU (or "meta", to see what they compile), a few for the interpreter."""
    every = shapes()
    if device == "cpu":
        mixed = {"window": 20, "softcap": 5.0, "sinks": True}
        every = [Shape(3, 2, 16, 16, DTYPES[0]), Shape(2, 1, 16, 3, DTYPES[1], mixed, LAYOUTS[2])]
    for shape in every:
        yield from of_shape(shape, device)
    for dtype in DTYPES:
        open_ended = [x for x in every if x.dtype == dtype and not x.by_distance]
        for shape in open_ended[:2]:
            yield Case("prefix", str(shape), partial(prefix, shape, device))
            for name in ("decode", "verify"):
                some = (SMALL if device == "cpu" else FULL)[name]
                yield Case("watch", f"{shape}, {name}", partial(watch, shape, device, some))
            some = (SMALL if device == "cpu" else FULL)["mixed"]
            yield Case("across", str(shape), partial(agree_across, shape, device, some))
            some = (SMALL if device == "cpu" else FULL)["decode"]
            yield Case("score", str(shape), partial(score, shape, device, some))
    for number, shape in enumerate(wide(device)):
        steps = SMALL if device == "cpu" else FULL
        for name in ("decode", "mixed"):
            yield Case("wide", f"{shape}, {name}", partial(agree, shape, device, steps[name]))
        if number % 5 == 0:
            yield Case("wide", f"{shape}, prefix", partial(prefix, shape, device))
            yield Case("wide", f"{shape}, watch", partial(watch, shape, device, steps["verify"]))
    yield from coded_cases(device)
    for dtype in DTYPES[: 1 if device == "cpu" else None]:
        for size, between in ((16, False), (3, True)):
            name = f"{dtype}, page {size}, {'between' if between else 'within'} storages"
            yield Case("copy", name, partial(copy, dtype, size, between, device))
    yield from state_cases(device)
    if device != "meta":
        for dtype in DTYPES[:: 2 if device == "cuda" else 3]:
            yield Case("grow", str(dtype), partial(grow, dtype, device))
    if device != "cpu":
        plain = next(x for x in every if x.dtype == torch.bfloat16 and not x.terms)
        yield Case("huge", str(plain), partial(huge, plain, device))


def outcome(case: Case, device: str) -> str:
    """Runs a case; what was wrong, or `PASSED`."""
    if device == "cpu" and not launch.interpreting():
        raise RuntimeError("expected TRITON_INTERPRET=1 where there is no GPU")
    try:
        case.run()
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]
    return PASSED


def lost() -> bool:
    """Whether the device answers no more, as after a read of memory that is not mapped."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
