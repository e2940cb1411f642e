"""The bookkeeping of a step, without a model: numpy tables, one thread, no tensor but in the last.

The full size is 256 sequences of about 2048 tokens in 40,000 pages of 16. The sequences' lengths
differ by up to a page, so that every decode step opens and fills the same number of pages; a batch
in lockstep does all of that work in one step of sixteen, which is listed apart.
"""

from functools import partial
from itertools import cycle
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from benchmarks.conftest import Alternate, Figure, ratio
from pagedkv.pages import sequences
from pagedkv.pages import step as pages_step
from pagedkv.pages.check import check
from pagedkv.pages.ids import pack
from pagedkv.pages.tables import PageTables

PAGE = 16
SIZES = {
    "small": {"batch": 32, "tokens": 256, "pages": 1_000, "steps": 64, "pools": (1_000, 20_000)},
    "full": {"batch": 256, "tokens": 2048, "pages": 40_000, "steps": 320}
    | {"pools": (10_000, 1_000_000)},
}


def new_tables(pages: int, batch: int, longest: int) -> PageTables:
    return PageTables(
        [pages], [None], [True], page_size=PAGE, max_sequences=batch, max_length=longest
    )


def prefill(tables: PageTables, prompts: list[np.ndarray]) -> np.ndarray:
    """Adds the prompts and commits them, one step each: their sequence ids."""
    seqs = [sequences.add(tables, prompt) for prompt in prompts]
    for seq in seqs:
        ids = tables.uncached(seq)
        plan = pages_step.prepare(tables, tables.rows_of([seq]), np.asarray([ids.size]), ids, 2**31)
        pages_step.commit(tables, plan, None, ids)
    tables.changed.clear()
    return np.asarray(seqs)


def random_prompts(lengths: Any, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50_000, n, dtype=np.int32) for n in lengths]


def text_of(tables: PageTables, seq: int) -> np.ndarray:
    """What the pages of a sequence say its tokens are."""
    row = tables.row_of(seq)
    pages = tables.tables[0, row, : tables.num_pages[row]]
    return tables.index.tokens[pages].reshape(-1)[: tables.lengths[row]]


@pytest.mark.parametrize("case", ["count", "ids", "ids-lockstep"])
def bench_decode_step(
    shape: dict[str, Any], alternate: Alternate, figure: Figure, case: str
) -> None:
    batch, tokens, steps = shape["batch"], shape["tokens"], shape["steps"]
    warmup = 2 * PAGE
    tables = new_tables(shape["pages"], batch, tokens + 2 * steps)
    behind = np.arange(batch) % PAGE * (case != "ids-lockstep")
    prompts = random_prompts(tokens - behind)
    seqs = prefill(tables, prompts)
    ids = np.random.default_rng(1).integers(0, 50_000, (warmup + steps, batch))
    left = iter(ids)
    new = np.ones(batch, dtype=np.int64)

    def by_ids() -> None:
        rows = tables.rows_of(seqs)
        packed, count = pack("tokens", next(left), batch)
        plan = pages_step.prepare(tables, rows, count, packed, batch)
        pages_step.commit(tables, plan, None, packed)
        tables.changed.clear()  # what a step would send to the device

    def by_count() -> None:
        plan = pages_step.prepare(tables, tables.rows_of(seqs), new, None, batch)
        pages_step.commit(tables, plan, None, None)
        tables.changed.clear()

    one_step = by_count if case == "count" else by_ids
    for _ in range(warmup):
        one_step()
    check(tables)
    for i in range(0, batch, 7):
        fed = np.full(warmup, -1) if case == "count" else ids[:warmup, i]
        assert (text_of(tables, seqs[i]) == np.concatenate([prompts[i], fed])).all()

    times = [1e6 * spent for spent in alternate({case: one_step}, steps, warmup=0)[case]]
    if case == "count":
        figure("decode step, not publishing", median(times), "us", 40)
    elif case == "ids":
        figure("decode step, publishing", median(times), "us", 80)
    else:
        # Fewer steps than a page has slots are run where timing is disabled.
        phases = [median(times[i::PAGE]) for i in range(min(PAGE, len(times)))]
        figure("  all in lockstep: mean of sixteen steps", sum(phases) / len(phases), "us")
        figure("  all in lockstep: the slowest of sixteen", max(phases), "us")


def bench_fork(shape: dict[str, Any], alternate: Alternate, figure: Figure) -> None:
    tables = new_tables(shape["pages"], shape["batch"], 2 * shape["tokens"])
    (prompt,) = random_prompts([shape["tokens"]])
    (seq,) = prefill(tables, [prompt]).tolist()
    (fork,) = sequences.fork(tables, seq)
    assert (text_of(tables, fork) == prompt).all()
    check(tables)

    forks = [fork]

    def free() -> None:
        sequences.free(tables, forks)
        tables.changed.clear()

    def again() -> None:
        forks[:] = sequences.fork(tables, seq)

    times = alternate({"fork": again}, rounds=500, warmup=20, before=free)["fork"]
    figure(f"fork of {shape['tokens']} tokens", 1e6 * median(times), "us", 10)


def bench_readmission(shape: dict[str, Any], alternate: Alternate, figure: Figure) -> None:
    """A prompt whose pages are all cached comes back, in two pools full of cached pages."""
    tokens = shape["tokens"]
    prompts = random_prompts([tokens] * 32)
    pools = {f"{pages:,} pages": new_tables(pages, 8, tokens) for pages in shape["pools"]}
    for tables in pools.values():
        room = int(tables.pool.num_pages[0]) * PAGE // tokens - len(prompts)
        for i in range(room):
            sequences.free(tables, prefill(tables, random_prompts([tokens], seed=i + 1)))
        for prompt in prompts:
            sequences.free(tables, prefill(tables, [prompt]))
        assert tables.pool.num_cached[0] > 0.95 * tables.pool.num_pages[0]

    held = list[tuple[PageTables, int]]()
    turns = {name: cycle(prompts) for name in pools}

    def add(name: str) -> None:
        held.append((pools[name], sequences.add(pools[name], next(turns[name]))))

    def free() -> None:
        for tables, seq in held:
            assert tables.lengths[tables.row_of(seq)] == tokens - 1, "all but the last is found"
            sequences.free(tables, [seq])
            tables.changed.clear()
        held.clear()

    for tables in pools.values():
        seq = sequences.add(tables, prompts[0])
        assert (text_of(tables, seq) == prompts[0][:-1]).all()
        sequences.free(tables, [seq])
        check(tables)
    ways = {name: partial(add, name) for name in pools}
    seconds = alternate(ways, rounds=320, warmup=32, before=free)
    for name in pools:
        figure(f"re-admission of {tokens} tokens, {name}", 1e6 * median(seconds[name]), "us", 150)
    small, large = pools
    figure("  large pool / small pool", ratio(seconds, large, small), "x", 1.25)


def bench_upload(
    shape: dict[str, Any], benchmark: Any, figure: Figure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same decode step through the whole cache: what is sent to the device, and its time."""
    from pagedkv import CacheConfig, PagedKVCache
    from pagedkv.step.metadata import StepMetadata

    batch, tokens, steps = shape["batch"], shape["tokens"], shape["steps"]
    sizes = {"max_sequences": batch, "max_sequence_length": tokens + 2 * steps}
    config = CacheConfig(1, 1, 2, "float32", max_tokens=shape["pages"] * PAGE, **sizes)
    cache = PagedKVCache(config, device="cpu")
    seqs = [cache.add(p) for p in random_prompts(tokens - np.arange(batch) % PAGE)]
    with cache.step(seqs) as step:
        step.mark_written()
    ids = iter(np.random.default_rng(1).integers(0, 50_000, (16 + steps, batch)))

    step = cache.prepare(seqs, next(ids))
    table = step.page_table().numpy()
    for i, row in enumerate(cache._tables.rows_of(seqs)):
        columns = int(cache._tables.num_pages[row])
        assert (table[i, :columns] == cache._tables.tables[0, row, :columns]).all()
    step.mark_written()
    cache.commit(step)

    sent, uploads = [], []
    make = StepMetadata.__init__

    def timed_make(*args: Any) -> None:
        begin = perf_counter()
        make(*args)
        uploads.append(1e6 * (perf_counter() - begin))
        sent.append(cache._devices.each[0][0].bytes_sent / 1024)

    monkeypatch.setattr(StepMetadata, "__init__", timed_make)

    def one_step() -> None:
        step = cache.prepare(seqs, next(ids))
        step.mark_written()
        cache.commit(step)

    benchmark.pedantic(one_step, rounds=steps, warmup_rounds=15)
    figure("sent to the device per step", median(sent[-steps:]), "KiB", 4)
    figure("upload and the step's tensors", median(uploads[-steps:]), "us")


def bench_two_devices(
    shape: dict[str, Any],
    alternate: Alternate,
    figure: Figure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A decode step through the cache with its layers on one device, and on two that copies go to.

    The second one is the CPU by another name: what a copy takes the host is all there is to it.
    """
    import torch

    from pagedkv import CacheConfig, PagedKVCache
    from pagedkv.storage import Placement, placement

    # Tensors of the CPU do not name a number; without this one the two devices were one.
    monkeypatch.setattr(placement, "_named", torch.device)

    batch, tokens, steps = shape["batch"], shape["tokens"], shape["steps"]
    sizes = {"max_sequences": batch, "max_sequence_length": tokens + 4 * steps}
    config = CacheConfig(2, 1, 2, "float32", max_tokens=shape["pages"] * PAGE, **sizes)
    first, second = torch.device("cpu"), torch.device("cpu", 1)
    placements = {"one device": (first, first), "two devices": (first, second)}
    caches, texts = {}, random_prompts(tokens - np.arange(batch) % PAGE)
    for name, places in placements.items():
        cache = caches[name] = PagedKVCache(config, device=Placement(first, places))
        with cache.step([cache.add(text) for text in texts]) as step:
            step.mark_written()

    def one_step(name: str, ids: np.ndarray) -> list[torch.Tensor]:
        cache = caches[name]
        step = cache.prepare(np.arange(batch), ids)
        here = [step.at(layer) for layer in (0, 1)]
        seen = [x for at in here for x in (at.page_table(), at.slots())]
        step.mark_written()
        cache.commit(step)
        return seen

    source = np.random.default_rng(1)
    ids = source.integers(0, 50_000, batch)
    for one, two in zip(*(one_step(name, ids) for name in caches), strict=True):
        assert torch.equal(one, two)
    assert len(caches["two devices"]._devices.each) == 2
    ways = {name: partial(one_step, name, ids) for name in caches}
    seconds = alternate(ways, rounds=steps, warmup=16)
    one, two = caches
    figure("decode step with its tensors, one device", 1e6 * median(seconds[one]), "us")
    figure("  two devices / one device", ratio(seconds, two, one), "x", 1.7)
