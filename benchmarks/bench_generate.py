"""Whole generations with a small language model: what sharing a prefix is worth, and what it costs.

Every way runs transformers' own greedy `generate` in fp32 on the CPU, in turn within one process.
The first turn is the warm-up: there the tokens are compared and the peak of the process's memory is
read; later turns are timed. The prefix is computed anew in every turn, and pages are made anew.
"""

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.conftest import Alternate, Figure, ratio

pytest.importorskip("transformers")

import transformers

from pagedkv import PagedCache

TIE = 1e-4  # logits this close may be told apart differently by two ways of adding

Answer = tuple[Tensor, int]  # the new tokens [B, new], bytes of K and V held at the end


@dataclass
class Job:
    """Prompts `[B, n]`, padded where `mask` is 0, the first `prefix` tokens the same in all."""

    prompts: Tensor
    mask: Tensor
    prefix: int
    new: int


NAMES = ("layers", "rounds", "rows", "prefix", "own", "alone", "new", "long")
SIZES = {
    "small": dict(zip(NAMES, (6, 1, 4, 32, 8, 16, 4, 256))),
    "full": dict(zip(NAMES, (30, 3, 16, 256, 32, 128, 32, 2048))),
}


@pytest.fixture
def shape(size: str) -> dict[str, int]:
    return SIZES[size]


@pytest.fixture(scope="module")
def model(smollm2_path: Path, size: str) -> Any:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path, dtype=torch.float32, num_hidden_layers=SIZES[size]["layers"]
    ).eval()
    model.generation_config.eos_token_id = None  # every row gets all its tokens
    model.generation_config.pad_token_id = 0
    with torch.no_grad():
        model(torch.arange(8)[None])  # touches all weights
    return model


def make_job(rows: int, prefix: int, own: int, new: int, shortest: int | None = None) -> Job:
    """Random prompts; with `shortest` their own parts differ in length, padded on the left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 40_000, (rows, prefix + own), generator=generator)
    ids[:, :prefix] = ids[0, :prefix]
    lengths = torch.linspace(shortest or own, own, rows).long()
    mask = torch.ones_like(ids)
    mask[:, prefix:] = torch.arange(own) >= own - lengths[:, None]
    return Job(ids * mask, mask, prefix, new)


# ---------------------------------------------------------------------- the ways


def finish(model: Any, job: Job, cache: Any) -> Tensor:
    more = {"past_key_values": cache, "max_new_tokens": job.new, "do_sample": False}
    out = model.generate(job.prompts, attention_mask=job.mask, **more)
    return out[:, job.prompts.shape[1] :]


def plain(model: Any, job: Job) -> Answer:
    cache = transformers.DynamicCache(config=model.config)
    return finish(model, job, cache), dense_bytes(cache)


def repeated(model: Any, job: Job) -> Answer:
    """The prefix computed once, its K and V repeated for every row."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(job.prompts[:1, : job.prefix], past_key_values=cache, logits_to_keep=1)
    cache.batch_repeat_interleave(len(job.prompts))
    return finish(model, job, cache), dense_bytes(cache)


def forked(model: Any, job: Job) -> Answer:
    """The prefix computed once, its pages shared."""
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
    model.set_attn_implementation("paged|sdpa")
    sizes = {"block_size": 16, "num_blocks": 400, "max_batch_tokens": 512}
    config = transformers.ContinuousBatchingConfig(**sizes)
    chosen = transformers.GenerationConfig(max_new_tokens=job.new, do_sample=False, pad_token_id=0)
    try:
        out = model.generate_batch(
            job.prompts.tolist(), generation_config=chosen, continuous_batching_config=config
        )
    finally:
        model.set_attn_implementation(before)
    return torch.tensor([answer.generated_tokens for answer in out.values()]), 0


def dense_bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


# ---------------------------------------------------------------------- checks and memory


def require_same_tokens(model: Any, job: Job, expected: Tensor, got: Tensor, name: str) -> None:
    """Row by row; a row may part where its two best logits lie within `TIE`."""
    assert got.shape == expected.shape, name
    for row in (got != expected).any(1).nonzero().flatten().tolist():
        at = int((got[row] != expected[row]).nonzero()[0])
        prompt = job.prompts[row][job.mask[row].bool()]
        with torch.no_grad():
            logits = model(torch.cat([prompt, expected[row, :at]])[None]).logits[0, -1]
        two = logits[[expected[row, at], got[row, at]]]
        apart = float((logits.max() - two).max())
        assert apart <= TIE, f"{name}: row {row} differs at token {at}, logits {apart:.2g} apart"


def with_peak(way: Callable[[], Answer]) -> tuple[Answer, float | None]:
    """The answer, and how far the process's resident memory rose above its start, in MiB.

    Linux can forget the peak so far; elsewhere None.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return way(), None
    before = _status("VmRSS")
    answer = way()
    return answer, (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


# ---------------------------------------------------------------------- the jobs


class Run:
    """One job done in several ways: answers and peaks of the first turn, seconds of the others.

    With `plain_once` plain generation, where it takes minutes, is timed in the first turn alone.
    """

    def __init__(
        self, model: Any, job: Job, functions: list[Any], alternate: Alternate, rounds: int,
        plain_once: bool = False,
    ) -> None:  # fmt: skip
        ways = {f.__name__: partial(f, model, job) for f in functions}
        self.bytes, self.peaks, tokens, first = {}, {}, {}, {}
        for name, way in ways.items():
            begin = perf_counter()
            (tokens[name], self.bytes[name]), self.peaks[name] = with_peak(way)
            first[name] = perf_counter() - begin
            require_same_tokens(model, job, tokens["plain"], tokens[name], name)
        assert model.config._attn_implementation == "sdpa", "every way puts the model back"
        if plain_once:
            del ways["plain"]
        self.seconds = {"plain": [first["plain"]] * rounds}
        self.seconds |= alternate(ways, rounds=rounds, warmup=0)

    def report(self, figure: Figure, title: str) -> None:
        for i, name in enumerate(self.seconds):
            figure(f"{title if not i else ' '} {name}", median(self.seconds[name]), "s")
            if self.peaks[name] is not None:
                figure(f"    {name}: peak memory above the model", self.peaks[name], "MiB")


def bench_shared_prefix(model: Any, shape: Any, alternate: Alternate, figure: Figure) -> None:
    """The demo's job: many short questions behind one prefix."""
    job = make_job(shape["rows"], shape["prefix"], shape["own"], shape["new"])
    ways = [plain, repeated, generate_batch, forked]
    run = Run(model, job, ways, alternate, shape["rounds"])
    run.report(figure, f"{shape['rows']} rows, {shape['prefix']} shared + {shape['own']} tokens:")
    for other in ("plain", "repeated", "generate_batch"):
        figure(f"  forked / {other}", ratio(run.seconds, "forked", other), "x")


def bench_nothing_shared(model: Any, shape: Any, alternate: Alternate, figure: Figure) -> None:
    """What pages cost where they gain nothing."""
    job = make_job(shape["rows"], 0, shape["alone"], shape["new"])
    run = Run(model, job, [plain, paged], alternate, shape["rounds"])
    run.report(figure, f"{shape['rows']} rows, {shape['alone']} tokens, nothing shared:")
    figure("  paged / plain", ratio(run.seconds, "paged", "plain"), "x", 1.1)


def bench_long_prefix(model: Any, shape: Any, alternate: Alternate, figure: Figure) -> None:
    """A long prefix with questions of unequal length, padded on the left behind the prefix."""
    long = shape["long"]
    job = make_job(shape["rows"], long, long // 8, min(8, shape["new"]), shortest=long // 128)
    ways = [plain, repeated, forked]
    run = Run(model, job, ways, alternate, shape["rounds"], plain_once=True)
    run.report(figure, f"{shape['rows']} rows, {long} shared + {long // 128}..{long // 8} tokens:")
    figure("  forked / plain", ratio(run.seconds, "forked", "plain"), "x", 0.2)
    figure("  forked / repeated", ratio(run.seconds, "forked", "repeated"), "x")
    held = run.bytes["forked"] / run.bytes["repeated"]
    figure("  bytes of K and V, forked / repeated", held, "x", 0.25)
