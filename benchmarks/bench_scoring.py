"""Scores of given continuations: each context once, against one row for each choice.

The other way is what lm-eval's HFLM does, without its own bookkeeping: rows of a context and a
continuation in batches; logits of every position, and their log-softmax in float32. fp32 on the
CPU. In the first turn the answers are compared and the peak of the process's memory is read.
"""

import importlib.util
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch

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
NAMES = ("layers", "rounds", "shared", "documents")
SIZES = {"small": dict(zip(NAMES, (4, 2, 64, 6))), "full": dict(zip(NAMES, (30, 3, 256, 24)))}
OWN, CHOICE = 48, 8  # tokens of a context of its own, and of a continuation


class Asked:
    """Contexts that begin alike, each with four continuations, of random ids."""

    def __init__(self, count: int, shared: int) -> None:
        source = torch.Generator().manual_seed(0)

        def ids(n: int) -> list[int]:
            return torch.randint(10, 40_000, (n,), generator=source).tolist()

        prefix = ids(shared)
        self.contexts = [prefix + ids(OWN) for _ in range(count)]
        self.choices = [[ids(CHOICE) for _ in range(4)] for _ in self.contexts]


def in_rows(model: Any, asked: Asked) -> tuple[list[float], int]:
    """Sums by continuation, and the tokens that were computed."""
    pairs = list(zip(asked.contexts, asked.choices))
    rows = [torch.tensor(context + choice) for context, own in pairs for choice in own]
    sums: list[float] = []
    for batch in torch.stack(rows).split(BATCH):
        with torch.inference_mode():
            logprobs = model(batch[:, :-1], use_cache=False).logits.log_softmax(-1)
        own = logprobs[:, -CHOICE:].gather(2, batch[:, -CHOICE:, None])
        sums += own.sum((1, 2)).tolist()
    return sums, len(rows) * (len(rows[0]) - 1)


def bench_behind_examples(
    model: Any, shape: Any, alternate: Any, claim: Any, tmp_path: Path
) -> None:
    """Four choices of several tokens; contexts begin with the same examples.

    llama.cpp, where it is, scores them, too; padded rows, which take minutes, then run only once.
    """
    job, peer = "four sentences behind examples", None
    asked = Asked(shape["documents"], shape["shared"])
    if importlib.util.find_spec("llama_cpp") and len(model.model.layers) == 30:
        room = shape["shared"] + OWN + 4 * 32
        file = write_gguf(tmp_path, np.float32)
        model, peer = rounded(model), LlamaJob(file, 5, room, torch.get_num_threads())
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
        (expected, fed), before = with_peak(lambda: in_rows(model, asked))
        known = {} if peer is None else {PADDED: [perf_counter() - begin] * shape["rounds"]}
        (sums, computed), peak = with_peak(paged)
        assert sums == pytest.approx(expected, abs=NEAR, rel=1e-5)
        ways: dict[str, Any] = {PAGED: paged}
        ways |= {PADDED: lambda: in_rows(model, asked)} if peer is None else {LLAMA: in_llama}
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
