"""Batch jobs with a small language model: everything between a list of prompts and its texts.

Greedy, fp32, on the CPU unless said otherwise. Ways that are compared take turns in one process and
every token is compared first, as in `bench_generate.py`. Prefixes cached by an earlier turn are
forgotten before the next.
"""

import importlib.util
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from benchmarks.bench_generate import (
    Job,
    generate_batch,
    make_job,
    model,  # noqa: F401  the fixture
    plain,
    repeated,
    require_same_tokens,
    shape,  # noqa: F401  the fixture
)
from benchmarks.conftest import ratio
from benchmarks.measuring import shortest
from pagedkv import BatchGenerator

NAMES = ("prompts", "longest", "most_new", "batch", "rows", "steps")
SIZES = {
    "small": dict(zip(NAMES, (12, 64, 8, 4, 8, 6))),
    "full": dict(zip(NAMES, (200, 1024, 128, 16, 64, 60))),
}


@pytest.fixture
def sizes(size: str) -> dict[str, int]:
    return SIZES[size]


# ---------------------------------------------------------------------- the demo's job


def bench_shared_prefix_batch(
    model: Any,  # noqa: F811
    shape: dict[str, int],  # noqa: F811
    alternate: Any,
    figure: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Many short questions behind one prefix that nobody pointed out."""
    job = make_job(shape["rows"], shape["prefix"], shape["own"], shape["new"])
    ways = {f.__name__: (lambda f=f: f(model, job)[0]) for f in (repeated, generate_batch)}
    generator = BatchGenerator(model)
    llama = llama_way(job, tmp_path_factory) if len(model.model.layers) == 30 else None
    if llama is not None:
        ways["llama_cpp"] = llama
    ways["batch"] = lambda: batch(generator, job)
    expected = plain(model, job)[0]
    for name, way in ways.items():
        tokens = way()
        same = int((tokens == expected).all(1).sum())
        figure(f"{name}: of {len(expected)} rows equal to generate's, token by token", same, "rows")
        if name != "llama_cpp":  # which has kernels of its own: only told
            require_same_tokens(model, job, expected, tokens, name)
    generator.close()
    generator = BatchGenerator(model)
    seconds = alternate(ways, rounds=shape["rounds"], warmup=0)
    title = f"{shape['rows']} rows, {shape['prefix']} shared + {shape['own']} tokens:"
    for i, name in enumerate(seconds):
        figure(f"{title if not i else ' '} {name}", median(seconds[name]), "s")
    figure("    of it matrix products alone, the bound", products(model, job), "s")
    figure("  batch / repeated", ratio(seconds, "batch", "repeated"), "x", 1 / 1.1)
    figure("  batch / generate_batch", ratio(seconds, "batch", "generate_batch"), "x", 1 / 1.3)
    if llama is not None:
        figure("  batch / llama_cpp", ratio(seconds, "batch", "llama_cpp"), "x")
    generator.close()


def batch(generator: BatchGenerator, job: Job) -> torch.Tensor:
    """The job as a list of prompts; the prefix is found, not told."""
    generator.cache.clear_prefixes()
    prompts = [ids[mask.bool()] for ids, mask in zip(job.prompts, job.mask, strict=True)]
    results = generator.generate(prompts, max_new_tokens=job.new, do_sample=False)
    assert not any(result.error for result in results)
    return torch.tensor([result.tokens for result in results])


def products(model: Any, job: Job) -> float:  # noqa: F811
    """Seconds that the model's matrix products take by themselves, each token computed once."""
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    head = model.get_output_embeddings()
    rows, own = len(job.prompts), job.prompts.shape[1] - job.prefix

    def once(tokens: int, wanted: int) -> float:
        inputs = {m.in_features: torch.randn(tokens, m.in_features) for m in layers}

        def multiply() -> None:
            for m in layers:
                x = inputs[m.in_features]
                torch.nn.functional.linear(x[:wanted] if m is head else x, m.weight, m.bias)

        return shortest(multiply, 3)

    with torch.inference_mode():
        steps = ((job.prefix, 1), (rows * own, rows), (rows, rows))
        first, second, decode = (once(*step) for step in steps)
    return first + second + (job.new - 1) * decode


def llama_way(job: Job, folders: pytest.TempPathFactory) -> Any:
    """The job in llama.cpp on the same fp32 weights, if llama-cpp-python is installed."""
    if importlib.util.find_spec("llama_cpp") is None:
        return None
    from benchmarks.peers.llama_cpp import LlamaJob, float_gguf

    prompts, rows = job.prompts.tolist(), len(job.prompts)
    room = job.prefix + rows * (job.prompts.shape[1] - job.prefix + job.new + 32)
    file = float_gguf(folders.getbasetemp())
    llama = LlamaJob(file, rows, room, torch.get_num_threads())
    return lambda: torch.from_numpy(llama.generate(prompts, job.prefix, job.new))


# ---------------------------------------------------------------------- a mixed job


def bench_mixed_lengths(model: Any, sizes: Any, alternate: Any, figure: Any) -> None:  # noqa: F811
    """Prompts and answers of all lengths in a pool of a quarter of what they need at once."""
    source = np.random.default_rng(0)
    count = sizes["prompts"]
    lengths = np.exp(source.uniform(np.log(16), np.log(sizes["longest"]), count)).astype(int)
    new = source.integers(1, sizes["most_new"] + 1, count)
    prompts = [source.integers(10, 40_000, n).tolist() for n in lengths]
    pool = int((lengths + new).sum()) // 4
    generator = BatchGenerator(model, max_tokens=pool)
    answers: dict[str, list[list[int]]] = {}

    def batched() -> None:
        generator.cache.clear_prefixes()
        results = generator.generate(prompts, max_new_tokens=new.tolist(), do_sample=False)
        assert not any(result.error for result in results)
        answers["batched"] = [result.tokens for result in results]

    def static() -> None:
        """Batches in the order given, each as long as its longest prompt and its longest answer."""
        answers["static"] = []
        for start in range(0, count, sizes["batch"]):
            part = slice(start, start + sizes["batch"])
            answers["static"] += static_batch(model, prompts[part], new[part])

    seconds = alternate({"static": static, "batched": batched}, rounds=1, warmup=0)
    tokens = int(new.sum())
    for name in seconds:
        figure(f"{count} prompts of 16..{sizes['longest']}: {name}", median(seconds[name]), "s")
        figure("    tokens a second", tokens / median(seconds[name]), "/s")
    figure("  batched / static", ratio(seconds, "batched", "static"), "x", 0.5)
    stats = generator.stats
    assert stats.peak is not None
    assert stats.peak.live <= stats.peak.pages
    figure("  pages at the fullest / pool", stats.peak.live / stats.peak.pages, "x", 1.0)
    figure("  rows put back", stats.preemptions, "rows")
    same = sum(a == b for a, b in zip(answers["batched"], answers["static"], strict=True))
    figure("  answers equal, token by token", same, "rows")
    generator.close()


def static_batch(model: Any, prompts: list[list[int]], new: np.ndarray) -> list[list[int]]:  # noqa: F811
    """What transformers' `generate` gives for one padded batch, cut to each row's length."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    out = model.generate(ids, attention_mask=mask, max_new_tokens=int(new.max()), do_sample=False)
    return [row[longest : longest + n].tolist() for row, n in zip(out, new, strict=True)]


# ---------------------------------------------------------------------- our own part of a step


def bench_step_overhead(model: Any, sizes: Any, benchmark: Any, figure: Any) -> None:  # noqa: F811
    """What happens between two forwards of decoding rows, the arg max over the vocabulary apart.

    Once with a model so small that the processor's caches stay ours, as they do where a card
    computes; once behind a real forward on the same cores, which sweeps them.
    """
    sizes_of = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64}
    sizes_of |= {"num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": None}
    config = transformers.LlamaConfig(max_position_embeddings=2048, **sizes_of)
    tiny = transformers.LlamaForCausalLM(config).eval()
    rows, steps = sizes["rows"], sizes["steps"]
    for name, each in (("caches warm", tiny), ("behind a forward", model)):
        gaps, widest = between_forwards(each, rows, steps)
        logits = torch.zeros(rows, widest)
        peak = shortest(lambda x=logits: x.argmax(-1).tolist(), 20)
        own = median(gaps) - peak
        target = 300 if each is tiny else None
        figure(f"{rows} decoding rows, our part of a step, {name}", own * 1e6, "us", target)
    benchmark.pedantic(lambda: between_forwards(tiny, rows, steps), rounds=1)


def between_forwards(model: Any, rows: int, steps: int) -> tuple[list[float], int]:  # noqa: F811
    """Seconds from the end of one forward to the begin of the next, and the vocabulary."""
    source = np.random.default_rng(0)
    prompts = [source.integers(10, 500, n).tolist() for n in np.linspace(16, 80, rows).astype(int)]
    moments: list[float] = []
    note = lambda *_: moments.append(perf_counter())  # noqa: E731
    hooks = [model.register_forward_pre_hook(note), model.register_forward_hook(note)]
    with BatchGenerator(model, max_tokens=rows * (96 + steps)) as generator:
        generator.generate(prompts, max_new_tokens=steps, do_sample=False)
    for hook in hooks:
        hook.remove()
    gaps = [begin - end for end, begin in zip(moments[1::2], moments[2::2])]
    return gaps[-steps // 2 :], model.config.vocab_size
