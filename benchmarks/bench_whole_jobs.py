"""Whole jobs with a small language model: what pages save in time and memory, and what they cost.

Greedy, on the CPU, at full size with all threads; ways take turns. Their first turn is the warm-up:
there the tokens are compared and the peak of the process's memory is read. A prefix is computed
anew in every turn, and pages are made anew.
"""

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from benchmarks.conftest import Alternate, Seconds, ratio
from benchmarks.measuring import shortest, with_peak
from benchmarks.peers.weights import rounded
from benchmarks.peers.whole_jobs import (
    LLAMA,
    LLAMA_HALF,
    OPENVINO,
    OPENVINO_FIRST,
    VLLM,
    Answer,
    Job,
    Way,
    peers,
)
from pagedkv import BatchGenerator, PagedCache

TIE = 1e-4  # two ways of adding may put logits that are this close in different orders

PLAIN, REPEATED = "plain generate, DynamicCache", "prefix once, repeated"
CONTINUOUS = "generate_batch"
PAGED, FORKED = "plain generate, PagedCache", "prefix once, PagedCache forked"
BATCH, UNPACKED = "BatchGenerator", "BatchGenerator, weights unpacked"
KEPT = "BatchGenerator, made before"


NAMES = ("layers", "rounds", "rows", "prefix", "own", "alone", "new", "long")
NAMES += ("answer", "prompts", "longest", "most_new", "batch")
SIZES = {
    "small": dict(zip(NAMES, (4, 3, 6, 192, 8, 64, 4, 384, 8, 16, 256, 24, 8))),
    "full": dict(zip(NAMES, (30, 3, 16, 256, 32, 128, 32, 2048, 64, 200, 1024, 128, 16))),
}


def make_job(rows: int, prefix: int, own: int, new: int, least: int | None = None) -> Job:
    """Random prompts; with `least` their own parts differ in length, padded on the left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 40_000, (rows, prefix + own), generator=generator)
    ids[:, :prefix] = ids[0, :prefix]
    lengths = torch.linspace(least or own, own, rows).long()
    mask = torch.ones_like(ids)
    mask[:, prefix:] = torch.arange(own) >= own - lengths[:, None]
    return Job(ids * mask, mask, prefix, new)


# ---------------------------------------------------------------------- the ways


def finish(model: Any, job: Job, cache: Any) -> Tensor:
    more = {"cache": cache, "max_new_tokens": job.new, "do_sample": False}
    out = model.generate(job.prompts, attention_mask=job.mask, **more)
    return out[:, job.prompts.shape[1] :]


def plain(model: Any, job: Job) -> Answer:
    cache = transformers.DynamicCache(config=model.config)
    return finish(model, job, cache), dense_bytes(cache)


def repeated(model: Any, job: Job) -> Answer:
    """Computes the prefix once and repeats its K and V for every row."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(job.prompts[:1, : job.prefix], cache=cache, logits_to_keep=1)
    cache.batch_repeat_interleave(len(job.prompts))
    return finish(model, job, cache), dense_bytes(cache)


def forked(model: Any, job: Job) -> Answer:
    """Computes the prefix once and shares its pages."""
    shared = PagedCache.prefill(model, job.prompts[:1, : job.prefix])
    cache = shared.fork(len(job.prompts))
    answer = finish(model, job, cache), cache.stats().live_bytes
    cache.close()
    shared.close()
    return answer


def paged(model: Any, job: Job) -> Answer:
    cache = PagedCache(model)
    answer = finish(model, job, cache), cache.stats().live_bytes
    cache.close()
    return answer


def generate_batch(model: Any, job: Job) -> Answer:
    """Transformers' continuous batching, which finds shared blocks by itself."""
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    sizes = {"page_size": 16, "num_blocks": 400, "max_batch_tokens": 512}
    config = transformers.ContinuousBatchingConfig(**sizes)
    chosen = transformers.GenerationConfig(max_new_tokens=job.new, do_sample=False, pad_token_id=0)
    try:
        out = model.generate_batch(
            job.prompts.tolist(), generation_config=chosen, continuous_batching_config=config
        )
    finally:
        model.set_attn_implementation(before)
    return torch.tensor([answer.generated_tokens for answer in out.values()]), 0


def batch(model: Any, job: Job, **options: Any) -> Answer:
    """Gives a list of prompts, whose shared prefix is found."""
    with BatchGenerator(model, **options) as generator:
        return batch_kept(generator, model, job)


def made_before(model: Any) -> BatchGenerator:
    """A generator of a copy of the model, because it changes a model's attention while it lives."""
    return BatchGenerator(deepcopy(model))


def batch_kept(generator: BatchGenerator, model: Any, job: Job) -> Answer:
    """Gives the list to a generator made before, because peers have loaded their model before."""
    prompts = [ids[mask.bool()] for ids, mask in zip(job.prompts, job.mask, strict=True)]
    generator.cache.clear_prefixes()  # also of a closed one that somebody still holds
    results = generator.generate(prompts, max_new_tokens=job.new, do_sample=False)
    assert not any(result.error for result in results)
    tokens = torch.tensor([result.tokens for result in results])
    return tokens, generator.cache.stats().live_bytes


def batch_unpacked(model: Any, job: Job) -> Answer:
    return batch(model, job, pack_weights=False)


def dense_bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


# ---------------------------------------------------------------------- checks


def require_same_tokens(model: Any, job: Job, expected: Tensor, got: Tensor, name: str) -> None:
    """Compares rows, which may part where their two best logits lie within `TIE`."""
    assert got.shape == expected.shape, name
    for row in (got != expected).any(1).nonzero().flatten().tolist():
        at = int((got[row] != expected[row]).nonzero()[0])
        prompt = job.prompts[row][job.mask[row].bool()]
        with torch.no_grad():
            logits = model(torch.cat([prompt, expected[row, :at]])[None]).logits[0, -1]
        two = logits[[expected[row, at], got[row, at]]]
        apart = float((logits.max() - two).max())
        assert apart <= TIE, f"{name}: row {row} differs at token {at}, logits {apart:.2g} apart"


# ---------------------------------------------------------------------- the jobs


class Run:
    """A job done in several ways: answers and peaks of the first turn, seconds of the others.

    If plain generation takes minutes, it is timed in the first turn alone (`plain_once`). Tokens
    have to equal those of plain generation, except those of peers, which have kernels of their own,
    and those in bfloat16, which has many ties.
    """

    def __init__(
        self, model: Any, job: Job, named: dict[str, Way], peers: dict[str, Way] | None = None
    ) -> None:
        self.bytes, self.peaks, self.tokens, self.first = {}, {}, {}, {}
        self.ways = {
            name: partial(way, model, job) for name, way in ((peers or {}) | named).items()
        }
        for name, way in self.ways.items():
            begin = perf_counter()
            (self.tokens[name], self.bytes[name]), self.peaks[name] = with_peak(way)
            self.first[name] = perf_counter() - begin
            if name in named and name != PLAIN and model.dtype == torch.float32:
                require_same_tokens(model, job, self.tokens[PLAIN], self.tokens[name], name)
        assert model.config._attn_implementation == "sdpa", "every way puts the model back"

    def times(
        self, name: str, alternate: Alternate, table: Any, rounds: int, plain_once: bool = False
    ) -> Seconds:
        """Times the ways in turn; puts their peaks and tokens into the table."""
        slow = {PLAIN: [self.first[PLAIN]] * rounds} if plain_once else {}
        ways = {way: call for way, call in self.ways.items() if way not in slow}
        seconds = alternate(name, ways, rounds=rounds, warmup=0, known=slow)
        for way, spent in seconds.items():
            same = (self.tokens[way] == self.tokens[PLAIN]).float().mean()
            row = {"job": name, "way": way, "s": f"{median(spent):.3g}"}
            row["peak MiB"] = "" if way == VLLM else f"{self.peaks[way] or 0:.0f}"
            table(row | {"tokens as plain": f"{same:.0%}"})
        return seconds


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def bench_shared_prefix(
    model: Any, shape: Any, alternate: Alternate, claim: Any, table: Any, tmp_path: Path,
    precision: str,
) -> None:  # fmt: skip
    """A job like the demo's: many short questions behind one prefix."""
    job = make_job(shape["rows"], shape["prefix"], shape["own"], shape["new"])
    model = as_for_peers(model)
    ways: dict[str, Way] = {PLAIN: plain, REPEATED: repeated, FORKED: forked, BATCH: batch}
    ways[UNPACKED] = batch_unpacked
    if precision == "bf16":
        model = deepcopy(model).bfloat16()
    else:
        ways[CONTINUOUS] = generate_batch
    name = f"a shared prefix, {precision}"
    with others(model, job, tmp_path, precision) as found, made_before(model) as generator:
        ways[KEPT] = partial(batch_kept, generator)
        seconds = Run(model, job, ways, found).times(name, alternate, table, shape["rounds"])
    claim(name, "forked / plain", ratio(seconds, FORKED, PLAIN), target=0.6)
    claim(name, "forked / repeated", ratio(seconds, FORKED, REPEATED), target=1.0)
    known = {"plain": (PLAIN, None), "repeated": (REPEATED, 1 / 1.1), "forked": (FORKED, 1.0)}
    known |= {CONTINUOUS: (CONTINUOUS, 1 / 1.3), "weights unpacked": (UNPACKED, None)}
    for said, (way, target) in known.items():
        if way in seconds:
            claim(name, f"{BATCH} / {said}", ratio(seconds, BATCH, way), target=target)
    beside: dict[str, float | None] = {OPENVINO: 1 / 2.6, OPENVINO_FIRST: 1 / 0.85}
    beside |= {VLLM: 1 / 1.15, LLAMA: 1 / 1.6, LLAMA_HALF: None}
    claim_beside_peers(name, seconds, beside, claim)
    claim(name, "matrix products alone, the bound", products(model, job), "s")


def as_for_peers(model: Any) -> Any:
    """Returns the whole model with the weights that peers read; a cut model stays as it is."""
    return rounded(model) if is_whole(model) else model


def others(
    model: Any, job: Job, folder: Path, precision: str
) -> AbstractContextManager[dict[str, Way]]:
    return peers(model, job, folder, precision) if is_whole(model) else nullcontext({})


def is_whole(model: Any) -> bool:
    return len(model.model.layers) == 30


def products(model: Any, job: Job) -> float:
    """Seconds that the model's matrix products take by themselves, each token computed once."""
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    head = model.get_output_embeddings()
    rows, own = len(job.prompts), job.prompts.shape[1] - job.prefix

    def once(tokens: int, wanted: int) -> float:
        inputs = {
            m.in_features: torch.randn(tokens, m.in_features, dtype=m.weight.dtype) for m in layers
        }

        def multiply() -> None:
            for m in layers:
                x = inputs[m.in_features]
                torch.nn.functional.linear(x[:wanted] if m is head else x, m.weight, m.bias)

        return shortest(multiply, 3)

    with torch.inference_mode():
        steps = ((job.prefix, 1), (rows * own, rows), (rows, rows))
        first, second, decode = (once(*step) for step in steps)
    return first + second + (job.new - 1) * decode


def bench_nothing_shared(model: Any, shape: Any, alternate: Any, claim: Any, table: Any) -> None:
    """Pages where they gain nothing."""
    job = make_job(shape["rows"], 0, shape["alone"], shape["new"])
    name, run = "nothing shared", Run(model, job, {PLAIN: plain, PAGED: paged})
    seconds = run.times(name, alternate, table, shape["rounds"])
    claim(name, "PagedCache / DynamicCache", ratio(seconds, PAGED, PLAIN), target=1.1)


def bench_long_prefix(model: Any, shape: Any, alternate: Any, claim: Any, table: Any) -> None:
    """A long prefix with questions of unequal length, padded on the left behind the prefix."""
    long = shape["long"]
    job = make_job(shape["rows"], long, long // 8, min(8, shape["new"]), least=long // 128)
    run = Run(model, job, {PLAIN: plain, REPEATED: repeated, FORKED: forked})
    name = "a long prefix"
    seconds = run.times(name, alternate, table, shape["rounds"], plain_once=long > 1000)
    claim(name, "forked / plain", ratio(seconds, FORKED, PLAIN), target=0.2)
    claim(name, "forked / repeated", ratio(seconds, FORKED, REPEATED))
    held = run.bytes[FORKED] / run.bytes[REPEATED]
    claim(name, "bytes of K and V, forked / repeated", held, target=0.25)


def bench_mixed_lengths(model: Any, shape: Any, alternate: Alternate, claim: Any) -> None:
    """Prompts and answers of all lengths, in a pool for a quarter of their tokens."""
    source, count, size = np.random.default_rng(0), shape["prompts"], shape["batch"]
    lengths = np.exp(source.uniform(np.log(16), np.log(shape["longest"]), count)).astype(int)
    new = source.integers(1, shape["most_new"] + 1, count)
    prompts = [source.integers(10, 40_000, n).tolist() for n in lengths]
    generator = BatchGenerator(model, max_tokens=int((lengths + new).sum()) // 4)
    static, answers = f"generate, padded batches of {size}", dict[str, list[list[int]]]()

    def batched() -> None:
        generator.cache.clear_prefixes()
        results = generator.generate(prompts, max_new_tokens=new.tolist(), do_sample=False)
        assert not any(result.error for result in results)
        answers[BATCH] = [result.tokens for result in results]

    def in_order() -> None:
        """Each batch as long as its longest prompt and its longest answer."""
        parts = [slice(start, start + size) for start in range(0, count, size)]
        answers[static] = [x for at in parts for x in padded_batch(model, prompts[at], new[at])]

    name, ways = "prompts of all lengths", {static: in_order, BATCH: batched}
    seconds = alternate(name, ways, rounds=1 if count > 16 else shape["rounds"], warmup=0)
    claim(name, f"{BATCH} / padded batches", ratio(seconds, BATCH, static), target=0.5)
    stats = generator.stats
    assert stats.peak is not None
    claim(name, "pages at the fullest / pool", stats.peak.live / stats.peak.pages, target=1.0)
    same = sum(a == b for a, b in zip(answers[BATCH], answers[static], strict=True))
    claim(name, "answers equal, token by token", same, f"of {count}")
    generator.close()


def bench_one_prompt(
    model: Any, shape: Any, alternate: Alternate, claim: Any, table: Any, tmp_path: Path
) -> None:
    """One long prompt and its answer: nothing is shared, and a step has one row."""
    job = make_job(1, 0, shape["long"], shape["answer"])
    model = as_for_peers(model)
    ways: dict[str, Way] = {PLAIN: plain, BATCH: batch}
    with others(model, job, tmp_path, "f32") as found, made_before(model) as generator:
        ways[KEPT] = partial(batch_kept, generator)
        run = Run(model, job, ways, found)
        seconds = run.times("one prompt", alternate, table, shape["rounds"])
    claim("one prompt", f"{BATCH} / plain", ratio(seconds, BATCH, PLAIN))
    beside = {OPENVINO: 1.1, VLLM: None, LLAMA: None, LLAMA_HALF: None}
    claim_beside_peers("one prompt", seconds, beside, claim)


def claim_beside_peers(
    job: str, seconds: Seconds, targets: dict[str, float | None], claim: Any
) -> None:
    """Claims the time of a generator made before over each peer's, whose model is loaded, too."""
    for peer, target in targets.items():
        if peer in seconds:
            claim(job, f"{KEPT} / {peer}", ratio(seconds, KEPT, peer), target=target)


def padded_batch(model: Any, prompts: list[list[int]], new: np.ndarray) -> list[list[int]]:
    """The answers of transformers' `generate` to one padded batch, cut to each row's length."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    out = model.generate(ids, attention_mask=mask, max_new_tokens=int(new.max()), do_sample=False)
    return [row[longest : longest + n].tolist() for row, n in zip(out, new, strict=True)]
