"""Scores of given continuations: each context once, against one padded row for each choice.

The other way is what lm-eval's HFLM does, without its own bookkeeping: rows of a context and a
continuation in batches, longest first, padded on the right; logits of every position, and their
log-softmax in float32. One-token continuations of one context share a row. fp32 on the CPU. In the
first turn the answers are compared and the peak of the process's memory is read.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.conftest import ratio
from benchmarks.measuring import with_peak

pytest.importorskip("transformers")

from pagedkv import BatchGenerator

NEAR = 5e-4  # a sum of log-probabilities against another's: float32 log-softmax adds up its errors
BATCH = 8
PADDED, PAGED = f"padded rows in batches of {BATCH}, as lm-eval", "BatchGenerator.score"
NAMES = ("layers", "rounds", "contexts", "shared", "own", "many")
SIZES = {
    "small": dict(zip(NAMES, (4, 2, 4, 64, 8, 16))),
    "full": dict(zip(NAMES, (30, 3, 12, 256, 64, 192))),
}
Row = tuple[list[int], list[int]]  # context, continuation


class Asked:
    """Contexts, each with its continuations, of random ids."""

    def __init__(self, count: int, shared: int, own: int, lengths: list[int]) -> None:
        source = torch.Generator().manual_seed(0)

        def ids(n: int) -> list[int]:
            return torch.randint(10, 40_000, (n,), generator=source).tolist()

        prefix = ids(shared)
        self.contexts = [prefix + ids(own) for _ in range(count)]
        self.choices = [[ids(n) for n in lengths] for _ in self.contexts]

    def rows(self) -> list[Row]:
        pairs = zip(self.contexts, self.choices)
        return [(context, choice) for context, own in pairs for choice in own]


def padded(model: Any, asked: Asked) -> tuple[list[float], int]:
    """Sums by continuation, and the tokens that were computed, padding included."""
    rows = asked.rows()
    fed: dict[tuple[int, ...], list[int]] = {}
    for i, (context, choice) in enumerate(rows):
        fed.setdefault(tuple(context + choice[:-1]), []).append(i)
    texts = sorted(fed, key=len, reverse=True)
    sums, computed = [0.0] * len(rows), 0
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        ids = torch.zeros(len(batch), len(batch[0]), dtype=torch.long)
        for row, text in zip(ids, batch):
            row[: len(text)] = torch.tensor(text)
        computed += ids.numel()
        with torch.inference_mode():
            logprobs = model(ids, use_cache=False).logits.log_softmax(-1)
        for own, text in zip(logprobs, batch):
            for i in fed[text]:
                sums[i] = sum_of(own, *rows[i])
    return sums, computed


def sum_of(logprobs: Tensor, context: list[int], choice: list[int]) -> float:
    end = len(context) + len(choice) - 1
    own = logprobs[end - len(choice) : end]
    return float(own.gather(1, torch.tensor(choice)[:, None]).sum())


def compare(job: str, model: Any, asked: Asked, shape: Any, alternate: Any, claim: Any) -> None:
    generator = BatchGenerator(model, max_tokens=16_384)

    def paged() -> tuple[list[float], int]:
        generator.cache.clear_prefixes()
        scores = generator.score(asked.contexts, asked.choices)
        assert not any(score.error for own in scores for score in own)
        return [score.logprob for own in scores for score in own], generator.stats.computed

    try:
        (expected, fed), before = with_peak(lambda: padded(model, asked))
        (sums, computed), peak = with_peak(paged)
        assert sums == pytest.approx(expected, abs=NEAR, rel=1e-5)
        ways = {PADDED: lambda: padded(model, asked), PAGED: paged}
        seconds = alternate(job, ways, rounds=shape["rounds"], warmup=0)
    finally:
        generator.close()
    claim(job, "pagedkv / padded", ratio(seconds, PAGED, PADDED), target=0.4)
    claim(job, "tokens computed, pagedkv / padded", computed / fed)
    if before and peak:
        claim(job, "peak memory of pagedkv, above the model", peak, "MiB")
        claim(job, "peak memory of padded rows", before, "MiB")


def bench_choices(model: Any, shape: Any, alternate: Any, claim: Any) -> None:
    """Four choices of several tokens behind each context; contexts share nothing."""
    tokens = shape["shared"] + shape["own"]
    asked = Asked(shape["contexts"], 0, tokens, [5, 10, 15, 20])
    compare("four sentences to choose from", model, asked, shape, alternate, claim)


def bench_letters(model: Any, shape: Any, alternate: Any, claim: Any) -> None:
    """Four choices of one token; contexts begin with the same examples."""
    asked = Asked(shape["contexts"], shape["shared"], shape["own"], [1] * 4)
    compare("four letters behind examples", model, asked, shape, alternate, claim)


def bench_one_context(model: Any, shape: Any, alternate: Any, claim: Any) -> None:
    """Many continuations of one context."""
    asked = Asked(1, 0, shape["shared"] // 2, [10] * shape["many"])
    compare("many answers to one context", model, asked, shape, alternate, claim)
