"""The bookkeeping of a step: numpy tables alone, the whole cache, and a cache under a tiny model.

Full size is 256 sequences of about 2048 tokens in 40,000 pages of 16. The sequences' lengths differ
by up to a page, so that every decode step opens and fills the same number of pages.
"""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from benchmarks.conftest import Alternate, ratio
from benchmarks.measuring import shortest
from pagedkv.config import CacheConfig
from pagedkv.pages import sequences
from pagedkv.pages import step as pages_step
from pagedkv.pages.check import check
from pagedkv.pages.ids import pack
from pagedkv.pages.tables import PageTables
from pagedkv.planner.shards import own_tokens

PAGE = 16
SIZES = {
    "small": {"batch": 32, "tokens": 256, "pages": 1_000, "steps": 64, "pools": (1_000, 20_000)}
    | {"behind": (5, 128, 16, 4)},  # prompts, tokens of a prefix, of a prompt's own, new ones
    "full": {"batch": 256, "tokens": 2048, "pages": 40_000, "steps": 320}
    | {"pools": (10_000, 1_000_000), "behind": (20, 256, 32, 8)},
}


def new_tables(pages: int, batch: int, longest: int) -> PageTables:
    sizes = {"max_tokens": pages * PAGE, "max_sequences": batch, "max_sequence_length": longest}
    return PageTables(CacheConfig(1, 1, 16, "float32", page_size=PAGE, **sizes))


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
    """The tokens of a sequence, read from its pages."""
    row = tables.row_of(seq)
    pages = tables.tables[0, row, : tables.num_pages[row]]
    return tables.index.tokens[pages].reshape(-1)[: tables.lengths[row]]


def bench_page_tables(shape: dict[str, Any], alternate: Alternate, claim: Any) -> None:
    """A decode step of the tables alone: fed by count, or with ids, so that prefixes are found."""
    batch, tokens, steps = shape["batch"], shape["tokens"], shape["steps"]
    prompts = random_prompts(tokens - np.arange(batch) % PAGE)
    ids = np.random.default_rng(1).integers(0, 50_000, (2 * PAGE + steps, batch))
    by_count, with_ids = "fed by count", "fed with ids, prefixes found again"
    made = {
        name: new_tables(shape["pages"], batch, tokens + 2 * steps) for name in (by_count, with_ids)
    }
    seqs = {name: prefill(tables, prompts) for name, tables in made.items()}
    left, new = iter(ids), np.ones(batch, dtype=np.int64)

    def one_step(name: str) -> None:
        tables = made[name]
        count, packed = new, None
        if name == with_ids:
            packed, count = pack("tokens", next(left), batch)
        plan = pages_step.prepare(tables, tables.rows_of(seqs[name]), count, packed, batch)
        pages_step.commit(tables, plan, None, packed)
        tables.changed.clear()  # what a step would send to the device

    for name in made:
        for _ in range(2 * PAGE):
            one_step(name)
        check(made[name])
    for name, fed in ((by_count, np.full_like(ids, -1)), (with_ids, ids)):
        for i in range(0, batch, 7):
            expected = np.concatenate([prompts[i], fed[: 2 * PAGE, i]])
            assert (text_of(made[name], seqs[name][i]) == expected).all()
    job = "a decode step, tables alone"
    seconds = alternate(job, {n: partial(one_step, n) for n in made}, steps, warmup=0)
    for name, target in ((by_count, 40), (with_ids, 80)):
        claim(job, name, 1e6 * median(seconds[name]), "us", target)
    claim(job, "with ids / by count", ratio(seconds, with_ids, by_count))


def bench_prompt_again(shape: dict[str, Any], alternate: Alternate, claim: Any) -> None:
    """A prompt that is there already, found or forked, beside one that is new; pools are full."""
    tokens = shape["tokens"]
    prompts = random_prompts([tokens] * 32)
    small, large = shape["pools"]
    new, found, far, forked = ("a new prompt", "found again", "found in a large pool", "forked")
    made = {
        name: new_tables(large if name == far else small, 8, tokens) for name in (new, found, far)
    }
    for tables in made.values():
        room = int(tables.pool.num_pages[0]) * PAGE // tokens - len(prompts)
        for i in range(room):
            sequences.free(tables, prefill(tables, random_prompts([tokens], seed=i + 1)))
        for prompt in prompts:
            sequences.free(tables, prefill(tables, [prompt]))
        assert tables.pool.num_cached[0] > 0.95 * tables.pool.num_pages[0]
    made[forked] = new_tables(small, 8, tokens)
    (running,) = prefill(made[forked], prompts[:1]).tolist()

    held = list[tuple[str, int]]()
    turns = {name: cycle(prompts) for name in (found, far)}
    unseen = iter(random_prompts([tokens] * (shape["steps"] + 40), seed=10**6))

    def again(name: str) -> None:
        held.append((name, sequences.add(made[name], next(turns[name]))))

    def compute() -> None:
        held.append((new, int(prefill(made[new], [next(unseen)])[0])))

    def fork() -> None:
        held.append((forked, sequences.fork(made[forked], running)[0]))

    def free() -> None:
        for name, seq in held:
            length = tokens - (name in turns)  # a prompt that is found lacks its last token
            assert made[name].lengths[made[name].row_of(seq)] == length
            sequences.free(made[name], [seq])
            made[name].changed.clear()
        held.clear()

    ways = {new: compute, found: partial(again, found), far: partial(again, far), forked: fork}
    for way in ways.values():
        way()
    for name, seq in held[1:]:
        assert (text_of(made[name], seq) == prompts[0][: tokens - (name in turns)]).all()
        check(made[name])
    free()
    job = "a prompt that is there already"
    seconds = alternate(job, ways, rounds=shape["steps"], warmup=32, before=free)
    for name, target in ((found, 150), (far, 150), (forked, 10)):
        claim(job, name, 1e6 * median(seconds[name]), "us", target)
    claim(job, "found again / new", ratio(seconds, found, new))
    claim(job, "found in a large pool / in a small one", ratio(seconds, far, found), target=1.25)
    claim(job, "forked / found again", ratio(seconds, forked, found))


def bench_cache(
    shape: dict[str, Any],
    alternate: Alternate,
    claim: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A decode step of the whole cache with its tensors: traced, and with layers on two devices.

    The second device is the CPU by another name, so it adds only what a copy costs the host.
    """
    import torch

    from pagedkv import CacheConfig, PagedKVCache
    from pagedkv.storage import Placement, placement

    # CPU tensors name no device number; without this patch both devices would count as one.
    monkeypatch.setattr(placement, "_named", torch.device)

    batch, tokens, steps = shape["batch"], shape["tokens"], shape["steps"]
    sizes = {"max_sequences": batch, "max_sequence_length": tokens + 4 * steps}
    config = CacheConfig(2, 1, 2, "float32", max_tokens=shape["pages"] * PAGE, **sizes)
    first, second = torch.device("cpu"), torch.device("cpu", 1)
    trace = tmp_path / "a.trace"
    caches = {
        "as it is": PagedKVCache(config, device=first),
        "traced": PagedKVCache(config, device=first, trace=trace),
        "two devices": PagedKVCache(config, device=Placement(first, (first, second))),
    }
    texts = random_prompts(tokens - np.arange(batch) % PAGE)
    for cache in caches.values():
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

    ids = np.random.default_rng(1).integers(0, 50_000, batch)
    expected, *others = (one_step(name, ids) for name in caches)
    assert all(torch.equal(a, b) for other in others for a, b in zip(expected, other, strict=True))
    assert len(caches["two devices"]._devices.each) == 2
    job = "a decode step of the cache"
    seconds = alternate(job, {n: partial(one_step, n, ids) for n in caches}, steps, warmup=16)
    assert trace.read_bytes().count(b'"commit"') >= 2
    plain, traced, two = caches
    claim(job, "sent to the device", caches[plain]._devices.each[0][0].bytes_sent / 1024, "KiB", 4)
    claim(job, plain, 1e6 * median(seconds[plain]), "us")
    claim(job, "traced / not", ratio(seconds, traced, plain))
    claim(job, "layers on two devices / on one", ratio(seconds, two, plain), target=1.7)


@pytest.mark.filterwarnings("ignore:.* has the forward hook")  # which times it
def bench_between_forwards(shape: dict[str, Any], record: Any, claim: Any) -> None:
    """Time from the end of a forward to the begin of the next, with a model of one small layer.

    So small a model leaves the processor's caches to us, as a model on a card does.
    """
    import torch

    from benchmarks.bench_whole_jobs import BATCH, PLAIN, padded_batch
    from pagedkv import BatchGenerator

    tiny = one_layer()
    rows, steps = shape["batch"] // 4, shape["steps"] // 5
    source = np.random.default_rng(0)
    prompts = [source.integers(10, 500, n).tolist() for n in np.linspace(16, 80, rows).astype(int)]

    def ours() -> None:
        with BatchGenerator(tiny, max_tokens=rows * (96 + steps)) as generator:
            generator.generate(prompts, max_new_tokens=steps, do_sample=False)

    def theirs() -> None:
        padded_batch(tiny, prompts, np.full(rows, steps))

    name = "between two forwards"
    seconds = {PLAIN: gaps(tiny, theirs, steps), BATCH: gaps(tiny, ours, steps)}
    record(name, seconds)
    claim(name, f"{BATCH} / generate", median(seconds[BATCH]) / median(seconds[PLAIN]))
    logits = torch.zeros(rows, tiny.config.vocab_size)
    peak = shortest(lambda: logits.argmax(-1).tolist(), 20)
    own = 1e6 * (median(seconds[BATCH]) - peak)
    claim(name, f"{BATCH} without the arg max", own, "us", 300)


def one_layer() -> Any:
    """A language model of one small layer."""
    import transformers

    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": None}
    config = transformers.LlamaConfig(max_position_embeddings=2048, pad_token_id=0, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def bench_many_prefixes(shape: dict[str, Any], alternate: Alternate, claim: Any) -> None:
    """Prompts behind 200 prefixes in random order, in pages for a tenth of the prefixes.

    A list is known beforehand, so prompts with one prefix can be put together; prompts of an
    iterator run in the order in which they come.
    """
    from pagedkv import BatchGenerator

    source, count = np.random.default_rng(0), 200
    each, prefix, own, new = shape["behind"]
    starts = source.integers(10, 500, (count, prefix)).repeat(each, axis=0)
    prompts = np.hstack([starts, source.integers(10, 500, (len(starts), own))])
    prompts = source.permutation(prompts).tolist()
    distinct = sum(own_tokens(prompts))
    known, comes = "a list", "an iterator"
    computed, answers = dict[str, int](), dict[str, list[list[int]]]()
    with BatchGenerator(one_layer(), max_tokens=count * prefix // 10) as generator:

        def job(name: str) -> None:
            generator.cache.clear_prefixes()
            given = prompts if name == known else iter(prompts)
            results = generator.generate(given, max_new_tokens=new, do_sample=False)
            answers[name] = [result.tokens for result in results]
            computed[name] = generator.stats.computed - (new - 1) * len(prompts)

        name, ways = "200 prefixes, pages for 20", {n: partial(job, n) for n in (known, comes)}
        seconds = alternate(name, ways, rounds=1, warmup=0)
    assert answers[known] == answers[comes]
    claim(name, "tokens computed / distinct", computed[known] / distinct, target=1.01)
    claim(name, "tokens computed, a list / an iterator", computed[known] / computed[comes])
    claim(name, "a list / an iterator", ratio(seconds, known, comes))


def gaps(model: Any, generate: Callable[[], None], steps: int) -> list[float]:
    """Seconds between the forwards of the later half of the steps."""
    moments: list[float] = []
    note = lambda *_: moments.append(perf_counter())  # noqa: E731
    hooks = [model.register_forward_pre_hook(note), model.register_forward_hook(note)]
    generate()
    for hook in hooks:
        hook.remove()
    found = [begin - end for end, begin in zip(moments[1::2], moments[2::2])]
    return found[-steps // 2 :]
