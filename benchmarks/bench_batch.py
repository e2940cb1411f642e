"""Batch jobs with a small language model: rows that come and go, and our own part of a step.

Greedy, fp32, on the CPU. The job whose rows share a prefix is in `bench_generate.py`.
"""

from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.conftest import ratio
from benchmarks.measuring import shortest
from pagedkv import BatchGenerator

NAMES = ("layers", "prompts", "longest", "most_new", "batch", "rows", "steps")
SIZES = {
    "small": dict(zip(NAMES, (6, 12, 64, 8, 4, 8, 6))),
    "full": dict(zip(NAMES, (30, 200, 1024, 128, 16, 64, 60))),
}


# ---------------------------------------------------------------------- a mixed job


def bench_mixed_lengths(model: Any, shape: Any, alternate: Any, figure: Any) -> None:
    """Prompts and answers of all lengths in a pool of a quarter of what they need at once."""
    source = np.random.default_rng(0)
    count = shape["prompts"]
    lengths = np.exp(source.uniform(np.log(16), np.log(shape["longest"]), count)).astype(int)
    new = source.integers(1, shape["most_new"] + 1, count)
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
        for start in range(0, count, shape["batch"]):
            part = slice(start, start + shape["batch"])
            answers["static"] += static_batch(model, prompts[part], new[part])

    seconds = alternate({"static": static, "batched": batched}, rounds=1, warmup=0)
    tokens = int(new.sum())
    for name in seconds:
        figure(f"{count} prompts of 16..{shape['longest']}: {name}", median(seconds[name]), "s")
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


def static_batch(model: Any, prompts: list[list[int]], new: np.ndarray) -> list[list[int]]:
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


def bench_step_overhead(model: Any, shape: Any, benchmark: Any, figure: Any) -> None:
    """What happens between two forwards of decoding rows, the arg max over the vocabulary apart.

    Once with a model so small that the processor's caches stay ours, as they do where a card
    computes; once behind a real forward on the same cores, which sweeps them.
    """
    sizes_of = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64}
    sizes_of |= {"num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": None}
    config = transformers.LlamaConfig(max_position_embeddings=2048, **sizes_of)
    tiny = transformers.LlamaForCausalLM(config).eval()
    rows, steps = shape["rows"], shape["steps"]
    for name, each in (("caches warm", tiny), ("behind a forward", model)):
        gaps, widest = between_forwards(each, rows, steps)
        logits = torch.zeros(rows, widest)
        peak = shortest(lambda x=logits: x.argmax(-1).tolist(), 20)
        own = median(gaps) - peak
        target = 300 if each is tiny else None
        figure(f"{rows} decoding rows, our part of a step, {name}", own * 1e6, "us", target)
    benchmark.pedantic(lambda: between_forwards(tiny, rows, steps), rounds=1)


def between_forwards(model: Any, rows: int, steps: int) -> tuple[list[float], int]:
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
