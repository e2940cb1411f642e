"""Scores of given continuations: each context once, against one padded row for each choice.

The other way is what lm-eval's HFLM does, without its own bookkeeping: rows of a context and a
continuation in batches, longest first, padded on the right; logits of every position, and their
log-softmax in float32. One-token continuations of one context share a row. fp32 on the CPU. In the
first turn the answers are compared and the peak of the process's memory is read. Where llama.cpp is
installed, it scores one of the jobs.
"""

import importlib.util
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.conftest import ratio
from benchmarks.measuring import with_peak
from benchmarks.peers.llama_cpp import LlamaJob
from benchmarks.peers.weights import rounded, write_gguf
from benchmarks.peers.whole_jobs import LLAMA

pytest.importorskip("transformers")

from pagedkv import BatchGenerator

NEAR = 5e-4  # how far sums of log-probabilities may differ: errors of float32 log-softmax add up
BATCH = 8
PADDED, PAGED = f"padded rows in batches of {BATCH}, as lm-eval", "BatchGenerator.score"
NAMES = ("layers", "rounds", "contexts", "shared", "own", "many", "documents")
SIZES = {
    "small": dict(zip(NAMES, (4, 2, 4, 64, 8, 16, 6))),
    "full": dict(zip(NAMES, (30, 3, 12, 256, 64, 192, 24))),
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


def compare(
    job: str, model: Any, asked: Asked, shape: Any, alternate: Any, claim: Any,
    peer: LlamaJob | None = None,
) -> None:  # fmt: skip
    """Times the ways in turn.

    Args:
        peer: scores them, too; padded rows, which take minutes, are then timed only once.
    """
    generator = BatchGenerator(model, max_tokens=16_384)

    def paged() -> tuple[list[float], int]:
        generator.cache.clear_prefixes()
        scores = generator.score(asked.contexts, asked.choices)
        assert not any(score.error for own in scores for score in own)
        return [score.logprob for own in scores for score in own], generator.stats.computed

    def in_llama() -> list[float]:
        assert peer is not None
        return peer.score(asked.contexts, asked.choices, shape["shared"])

    try:
        begin = perf_counter()
        (expected, fed), before = with_peak(lambda: padded(model, asked))
        known = {} if peer is None else {PADDED: [perf_counter() - begin] * shape["rounds"]}
        (sums, computed), peak = with_peak(paged)
        assert sums == pytest.approx(expected, abs=NEAR, rel=1e-5)
        ways: dict[str, Any] = {PAGED: paged}
        ways |= {PADDED: lambda: padded(model, asked)} if peer is None else {LLAMA: in_llama}
        away = np.abs(np.subtract(in_llama(), expected)).max() if peer else 0.0
        seconds = alternate(job, ways, rounds=shape["rounds"], warmup=0, known=known)
    finally:
        generator.close()
    claim(job, "pagedkv / padded", ratio(seconds, PAGED, PADDED), target=0.4)
    claim(job, "tokens computed, pagedkv / padded", computed / fed)
    if peer:
        claim(job, "pagedkv / llama.cpp", ratio(seconds, PAGED, LLAMA), target=0.5)
        claim(job, "a sum of llama.cpp differs from padded rows' by at most", float(away), "nats")
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


def bench_behind_examples(
    model: Any, shape: Any, alternate: Any, claim: Any, tmp_path: Path
) -> None:
    """Four choices of several tokens; contexts begin with the same examples."""
    asked = Asked(shape["documents"], shape["shared"], 48, [8] * 4)
    peer = None
    if importlib.util.find_spec("llama_cpp") and len(model.model.layers) == 30:
        room = shape["shared"] + 48 + 4 * 32
        file = write_gguf(tmp_path, np.float32)
        model, peer = rounded(model), LlamaJob(file, 5, room, torch.get_num_threads())
    compare("four sentences behind examples", model, asked, shape, alternate, claim, peer)
