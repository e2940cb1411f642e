"""Helpers for tests of `BatchGenerator`: `generate` for one prompt alone, and the comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagedkv import BatchGenerator, PagedKVCache
from pagedkv.batch.results import Result
from pagedkv.hf.model import cache_config
from tests.hf.tiny import CLOSE_CALL, NEW, generate, padded, prompts

PER_PROMPT = ("max_new_tokens", "temperature", "seed")


def generator(model: PreTrainedModel, tokenizer: Any = None, **fields: Any) -> BatchGenerator:
    """One over small pages of its own, which hold NaN wherever nothing was written."""
    own = {"step_tokens": fields.pop("step_tokens", 64)}
    own["draft"] = fields.pop("draft", None)
    own["pack_weights"] = fields.pop("pack_weights", False)
    own["verify_width"] = fields.pop("verify_width", 1 if own["draft"] is None else None)
    fields = {"max_tokens": 512, "page_size": 4, **fields}
    cache = PagedKVCache(cache_config(model, **fields), device="cpu", debug=True)
    return BatchGenerator(model, tokenizer, cache=cache, **own)


def alone(model: PreTrainedModel, prompt: Any, seed: int = 0, **options: Any) -> Any:
    """Runs `generate` for one prompt by itself, with scores."""
    torch.manual_seed(seed)
    return generate(model, padded([torch.as_tensor(prompt)]), **options)


def tokens_alone(model: PreTrainedModel, prompt: Any, seed: int = 0, **options: Any) -> list[int]:
    return alone(model, prompt, seed, **options).sequences[0, len(prompt) :].tolist()


def assert_same(result: Result, expected: Any) -> None:
    """A result holds the tokens of `alone`, up to where two scores are a close call."""
    new = len(expected.scores)
    tokens = expected.sequences[0, expected.sequences.shape[1] - new :].tolist()
    assert result.error is None
    if result.tokens == tokens:
        return
    same = [a == b for a, b in zip(result.tokens, tokens)]
    step = same.index(False) if False in same else len(same)
    best = expected.scores[min(step, new - 1)][0].topk(2).values
    assert step < new and best[0] - best[1] < CLOSE_CALL, (  # noqa: PT018
        f"prompt {result.index}, sample {result.sample}: {result.tokens}, expected {tokens}"
    )


def assert_like_alone(
    model: PreTrainedModel,
    prompts: Sequence[Any],
    sizes: dict[str, Any] | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> tuple[list[Result], BatchGenerator]:
    """Generates for all prompts at once and compares every result; both come back, closed."""
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    samples = options.get("num_return_sequences", 1)
    one_by_one: list[Any] = []
    computed: dict[Any, Any] = {}  # by prompt, seed and what else it has of its own
    for i, prompt in enumerate(prompts):
        own = {name: value for name, value in options.items() if name != "num_return_sequences"}
        for name in PER_PROMPT:
            if isinstance(own.get(name), (list, tuple)):
                own[name] = own[name][i]
        seed = own.pop("seed", 0)
        own |= {"tokenizer": tokenizer} if tokenizer else {}
        for k in range(samples):
            key = *map(int, prompt), -1, seed + k, *(own.get(name) for name in PER_PROMPT)
            if key not in computed:
                computed[key] = alone(model, prompt, seed + k, **own)
            one_by_one.append(computed[key])
    with generator(model, tokenizer, **(sizes or {})) as batched:
        results = batched.generate(prompts, **options)
        assert_nothing_held(batched)
    named = [(result.index, result.sample) for result in results]
    assert named == [(i, k) for i in range(len(prompts)) for k in range(samples)]
    for result, expected in zip(results, one_by_one, strict=True):
        assert_same(result, expected)
    return results, batched


def assert_nothing_held(batched: BatchGenerator) -> None:
    caches = [batched.cache] + ([batched._draft.cache] if batched._draft else [])
    for cache in caches:
        stats = cache.stats()
        assert cache.open_step is None
        assert stats.sequences == stats.live == stats.promised == 0
        cache.check()


def ragged() -> list[torch.Tensor]:
    """Lengths from one token to beyond every window, two of them with a prefix in common."""
    rows = prompts(5, 23, 1, 12, 2)
    return [*rows, torch.cat([rows[1][:18], rows[0]])]


def branches(*tails: int, prefix: int = 32) -> list[torch.Tensor]:
    """Prompts with this many tokens of their own behind a prefix."""
    shared = prompts(prefix)[0]
    own = [torch.cat([torch.tensor([2 + i]), prompts(n)[0][1:]]) for i, n in enumerate(tails)]
    return [torch.cat([shared, tail]) for tail in own]


@contextmanager
def failing(module: torch.nn.Module, at_call: int, error: BaseException) -> Iterator[None]:
    """Raises in one of the calls of a module's forward, counted from 0."""
    forward, calls = module.forward, iter(range(1 << 30))

    def broken(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at_call:
            raise error
        return forward(*args, **kwargs)

    module.forward = broken
    try:
        yield
    finally:
        del module.forward


def with_own(start: Tensor, *lengths: int) -> list[Tensor]:
    """Prompts that begin alike and part at once."""
    own = [torch.cat([torch.tensor([2 + i]), prompts(n)[0]]) for i, n in enumerate(lengths)]
    return [torch.cat([start, tail]) for tail in own]


def distinct(rows: Sequence[Tensor]) -> int:
    """Tokens that are computed if no prefix is computed twice."""
    return len({tuple(row[:n].tolist()) for row in rows for n in range(1, len(row) + 1)})
