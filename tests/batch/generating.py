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
# With no others than these a token follows from the logits alone.
GREEDY = {"do_sample", "max_new_tokens", "eos_token_id", "pad_token_id"}
# What a model's own configuration may say without changing that.
IDLE = {"bos_token_id", "pad_token_id", "use_cache", "output_attentions", "output_hidden_states"}
IDLE |= {"_from_model_config", "transformers_version"}


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


def is_greedy(model: PreTrainedModel, options: dict[str, Any]) -> bool:
    """Whether each token is the best one by its logits, and the most tokens are said."""
    plain = options.keys() <= GREEDY and {*model.generation_config.to_diff_dict()} <= IDLE
    return plain and not options["do_sample"] and options["max_new_tokens"] is not None


@torch.no_grad()
def own_logits(model: PreTrainedModel, text: Any) -> Tensor:
    return model(torch.as_tensor(text)[None], use_cache=False).logits[0]


def assert_greedy(
    model: PreTrainedModel, prompt: Any, result: Result, max_new_tokens: int, ends: Any = None
) -> None:
    """Each token is the best one of the model's own forward over the whole text, without a cache.

    Then they are the tokens of greedy `generate`, close calls aside. One forward says so, where
    `generate` takes one for each token.
    """
    tokens = result.tokens
    assert result.error is None
    ends = {ends} if isinstance(ends, int) else {*(ends or ())}
    assert not ends & {*tokens[:-1]}
    assert len(tokens) == max_new_tokens or tokens[-1] in ends
    behind = behind_the_best(model, prompt, tokens)
    assert behind.max() < CLOSE_CALL, f"prompt {result.index}: {tokens} are behind by {behind}"


def behind_the_best(model: PreTrainedModel, prompt: Any, tokens: Sequence[int]) -> Tensor:
    """How much lower the logit of each token is than the highest one."""
    text = torch.cat([torch.as_tensor(prompt), torch.tensor(tokens)])
    logits = own_logits(model, text)[-1 - len(tokens) : -1]
    return logits.max(-1).values - logits[range(len(tokens)), tokens]


def assert_like_alone(
    model: PreTrainedModel,
    prompts: Sequence[Any],
    sizes: dict[str, Any] | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> tuple[list[Result], BatchGenerator]:
    """Generates for all prompts at once and compares every result; both come back, closed.

    The model computes afterwards what it computed before, to the bit.
    """
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    samples = options.pop("num_return_sequences", 1)
    greedy = samples == 1 and is_greedy(model, options)
    each = [of_prompt(i, options) for i in range(len(prompts))]
    longest = max(prompts, key=len)
    before = own_logits(model, longest)
    one_by_one: list[Any] = []
    computed: dict[Any, Any] = {}  # by prompt, seed and what else it has of its own
    for prompt, own in zip(prompts if not greedy else (), each):
        seed = own.pop("seed", 0)
        own |= {"tokenizer": tokenizer} if tokenizer else {}
        for k in range(samples):
            key = *map(int, prompt), -1, seed + k, *(own.get(name) for name in PER_PROMPT)
            if key not in computed:
                computed[key] = alone(model, prompt, seed + k, **own)
            one_by_one.append(computed[key])
    with generator(model, tokenizer, **(sizes or {})) as batched:
        results = batched.generate(prompts, num_return_sequences=samples, **options)
        assert_nothing_held(batched)
    assert torch.equal(own_logits(model, longest), before)
    named = [(result.index, result.sample) for result in results]
    assert named == [(i, k) for i in range(len(prompts)) for k in range(samples)]
    for i, result in enumerate(results):
        if greedy:
            own = each[i]
            assert_greedy(model, prompts[i], result, own["max_new_tokens"], own.get("eos_token_id"))
        else:
            assert_same(result, one_by_one[i])
    return results, batched


def of_prompt(i: int, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a prompt, of which each may have some of its own."""
    own = dict(options)
    for name in PER_PROMPT:
        if isinstance(own.get(name), (list, tuple)):
            own[name] = own[name][i]
    return own


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
