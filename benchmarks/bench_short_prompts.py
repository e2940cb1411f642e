"""Many short prompts of a tiny model: what a row costs beside its products.

The other way is `generate` over padded batches of prompts in the order of their lengths. One
thread; prefixes are forgotten before every turn. Random prompts of 8 to 32 tokens share a token now
and then, and no page.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.conftest import Alternate, ratio

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.bench_whole_jobs import BATCH, padded_batch
from pagedkv import BatchGenerator

NEW, ROWS, VOCABULARY = 8, 256, 1000
PADDED = f"generate, padded batches of {ROWS}, by length"
SIZES = {"small": (3, 500), "full": (3, 10_000)}  # rounds, prompts


@pytest.fixture(scope="module")
def tiny() -> Any:
    """Two layers of 64 channels, whose products take a tenth of the time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,  # every row gets all its tokens
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def in_pages(generator: BatchGenerator, prompts: list[list[int]]) -> list[list[int]]:
    generator.cache.clear_prefixes()
    results = generator.generate(prompts, max_new_tokens=NEW, do_sample=False)
    assert not any(result.error for result in results)
    return [result.tokens for result in results]


def padded(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: dict[int, list[int]] = {}
    for start in range(0, len(order), ROWS):
        at = order[start : start + ROWS]
        new = np.full(len(at), NEW)
        answers |= zip(at, padded_batch(model, [prompts[i] for i in at], new), strict=True)
    return [answers[i] for i in range(len(prompts))]


@pytest.mark.usefixtures("one_thread")
def bench_short_prompts(tiny: Any, shape: Any, alternate: Alternate, claim: Any) -> None:
    """Prompts of 8 to 32 tokens, 8 new ones each."""
    rounds, count = shape
    source = np.random.default_rng(0)
    lengths = source.integers(8, 33, count)
    prompts = [source.integers(10, VOCABULARY, n).tolist() for n in lengths]
    name = f"{count:,} prompts of 8 to 32 tokens"
    with BatchGenerator(tiny, max_tokens=1 << 16) as generator:
        first, other = in_pages(generator, prompts), padded(tiny, prompts)
        ways = {PADDED: partial(padded, tiny), BATCH: partial(in_pages, generator)}
        calls = {way: partial(call, prompts) for way, call in ways.items()}
        seconds = alternate(name, calls, rounds=rounds, warmup=0)
    claim(name, f"{BATCH} / padded batches", ratio(seconds, BATCH, PADDED), target=1.0)
    claim(name, "a prompt", min(seconds[BATCH]) / count * 1e6, "us", target=1e6 / 2000)
    same = sum(a == b for a, b in zip(first, other, strict=True))
    claim(name, "answers equal, token by token", same, f"of {count}")
