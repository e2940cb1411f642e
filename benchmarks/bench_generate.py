"""Whole generations with a small language model: what sharing a prefix is worth, and what it costs.

Every way runs transformers' own greedy `generate` in fp32 on the CPU, in turn within one process.
The first turn is the warm-up: there the tokens are compared and the peak of the process's memory is
read; later turns are timed. The prefix is computed anew in every turn, and pages are made anew.
"""

import importlib.util
from collections.abc import Callable, Sequence
from copy import deepcopy
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
from benchmarks.measuring import shortest, with_peak

pytest.importorskip("transformers")

import transformers

from pagedkv import BatchGenerator, PagedCache

TIE = 1e-4  # logits this close may be told apart differently by two ways of adding

Answer = tuple[Tensor, int]  # the new tokens [B, new], bytes of K and V held at the end
Way = Callable[[Any, "Job"], Answer]


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
    """The prefix computed once, its K and V repeated for every row."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(job.prompts[:1, : job.prefix], cache=cache, logits_to_keep=1)
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
    """A list of prompts; the prefix is found, not told."""
    prompts = [ids[mask.bool()] for ids, mask in zip(job.prompts, job.mask, strict=True)]
    with BatchGenerator(model, **options) as generator:
        results = generator.generate(prompts, max_new_tokens=job.new, do_sample=False)
        assert not any(result.error for result in results)
        tokens = torch.tensor([result.tokens for result in results])
        return tokens, generator.cache.stats().live_bytes


def batch_packed(model: Any, job: Job) -> Answer:
    return batch(model, job, pack_weights=True)


def peers(job: Job, folder: Path, precision: str) -> list[Way]:
    """Other programs with the same weights, as far as they are installed."""
    prompts, rows = job.prompts.tolist(), len(job.prompts)
    room = job.prefix + rows * (job.prompts.shape[1] - job.prefix + job.new + 32)
    ways: list[Way] = []
    if importlib.util.find_spec("llama_cpp") and precision == "f32":
        from benchmarks.peers.llama_cpp import LlamaJob, float_gguf

        llama = LlamaJob(float_gguf(folder), rows, room, torch.get_num_threads())

        def llama_cpp(model: Any, job: Job) -> Answer:
            return torch.from_numpy(llama.generate(prompts, job.prefix, job.new)), 0

        ways.append(llama_cpp)
    if importlib.util.find_spec("openvino_genai"):
        from benchmarks.peers.openvino import OpenVinoJob, half_gguf

        vino = OpenVinoJob(half_gguf(folder), rows, room, torch.get_num_threads(), precision)

        def openvino(model: Any, job: Job) -> Answer:
            """All prompts at once."""
            return torch.from_numpy(vino.generate(prompts, job.new)), 0

        def openvino_prefix_first(model: Any, job: Job) -> Answer:
            return torch.from_numpy(vino.generate(prompts, job.new, job.prefix)), 0

        ways += [openvino, openvino_prefix_first]
    return ways


def dense_bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


# ---------------------------------------------------------------------- checks


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


# ---------------------------------------------------------------------- the jobs


class Run:
    """One job done in several ways: answers and peaks of the first turn, seconds of the others.

    With `plain_once` plain generation, where it takes minutes, is timed in the first turn alone.
    Tokens are held to those of plain generation, but for peers, which have kernels of their own,
    and for precisions in which ties are many.
    """

    def __init__(
        self, model: Any, job: Job, functions: list[Way], alternate: Alternate, rounds: int,
        plain_once: bool = False, others: Sequence[Way] = (),
    ) -> None:  # fmt: skip
        ways = {f.__name__: partial(f, model, job) for f in (*others, *functions)}
        exact = {f.__name__ for f in functions} if model.dtype == torch.float32 else set()
        self.bytes, self.peaks, self.tokens, first = {}, {}, {}, {}
        for name, way in ways.items():
            begin = perf_counter()
            (self.tokens[name], self.bytes[name]), self.peaks[name] = with_peak(way)
            first[name] = perf_counter() - begin
            if name in exact and name != "plain":
                require_same_tokens(model, job, self.tokens["plain"], self.tokens[name], name)
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


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def bench_shared_prefix(
    model: Any, shape: Any, alternate: Alternate, figure: Figure, tmp_path: Path, precision: str
) -> None:
    """A job like the demo's: many short questions behind one prefix."""
    job = make_job(shape["rows"], shape["prefix"], shape["own"], shape["new"])
    whole = len(model.model.layers) == 30
    others = peers(job, tmp_path, precision) if whole else []
    ways = [plain, repeated, forked, batch, batch_packed]
    if precision == "bf16":
        model = deepcopy(model).bfloat16()
    else:
        ways.insert(2, generate_batch)
    run = Run(model, job, ways, alternate, shape["rounds"], others=others)
    rows = f"{shape['rows']} rows, {shape['prefix']} shared + {shape['own']} tokens"
    run.report(figure, f"{rows}, {precision}:")
    for name in run.tokens.keys() - {"plain"}:
        same = int((run.tokens[name] == run.tokens["plain"]).sum())
        figure(f"    {name}: tokens that are plain's, of {job.new * shape['rows']}", same, "")
    figure("    matrix products alone, the bound", products(model, job), "s")
    for other in ("plain", "repeated"):
        figure(f"  forked / {other}", ratio(run.seconds, "forked", other), "x")
    targets = {"repeated": 1 / 1.1, "generate_batch": 1 / 1.3, "forked": 1.0}
    for other in targets.keys() & run.seconds.keys():
        figure(f"  batch / {other}", ratio(run.seconds, "batch", other), "x", targets[other])
    targets = {"openvino": 1 / 1.6, "openvino_prefix_first": 1 / 0.7}
    for way in others:
        name = way.__name__
        figure(
            f"  batch_packed / {name}",
            ratio(run.seconds, "batch_packed", name),
            "x",
            targets.get(name),
        )


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


def bench_nothing_shared(model: Any, shape: Any, alternate: Alternate, figure: Figure) -> None:
    """What pages cost where they gain nothing."""
    job = make_job(shape["rows"], 0, shape["alone"], shape["new"])
    run = Run(model, job, [plain, paged], alternate, shape["rounds"])
    run.report(figure, f"{shape['rows']} rows, {shape['alone']} tokens, nothing shared:")
    figure("  paged / plain", ratio(run.seconds, "paged", "plain"), "x", 1.1)


def bench_long_prefix(model: Any, shape: Any, alternate: Alternate, figure: Figure) -> None:
    """A long prefix with questions of unequal length, padded on the left behind the prefix."""
    long = shape["long"]
    job = make_job(shape["rows"], long, long // 8, min(8, shape["new"]), least=long // 128)
    ways = [plain, repeated, forked]
    run = Run(model, job, ways, alternate, shape["rounds"], plain_once=True)
    run.report(figure, f"{shape['rows']} rows, {long} shared + {long // 128}..{long // 8} tokens:")
    figure("  forked / plain", ratio(run.seconds, "forked", "plain"), "x", 0.2)
    figure("  forked / repeated", ratio(run.seconds, "forked", "repeated"), "x")
    held = run.bytes["forked"] / run.bytes["repeated"]
    figure("  bytes of K and V, forked / repeated", held, "x", 0.25)
