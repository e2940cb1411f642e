"""A program as the documents write it, through every front door: checkers find nothing in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, assert_type

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import pagedkv
from pagedkv import (
    AttentionPlan,
    BatchGenerator,
    BudgetExceeded,
    CacheConfig,
    CacheStats,
    LayerGroup,
    LayerStreamer,
    OutOfPagesError,
    PagedCache,
    PagedKVCache,
    Result,
    StepMetadata,
    attach,
    attend_pages,
    detach,
    paged_attention,
    plan_memory,
)
from pagedkv.retention import PageRecords, Policy, Sinks


@dataclass(frozen=True)
class Fading(Policy):
    """A policy of one's own."""

    recent: int = 64
    needs = ("mass",)

    def keep_scores(self, pages: PageRecords) -> Any:
        return pages.mass / pages.age


def own_loop(queries: Tensor, keys: Tensor, values: Tensor) -> CacheStats:
    config = CacheConfig(
        num_layers=2,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        max_tokens=4096,
        page_size="auto",
        max_sequences=None,
        kv_format=("int8", "dense"),
        groups=(LayerGroup((0, 1)),),
        retention=Sinks(Fading()),
        budget=512,
        keep=0.5,
    )
    assert_type(config.page_size, int)
    assert_type(config.max_sequences, int)
    cache = PagedKVCache(config, device="cpu")
    seq = cache.add([1, 2, 3])
    twin = cache.fork(seq, 2)
    out = queries
    with cache.step([seq, *twin], [[4], [5], [6]]) as step:
        assert_type(step, StepMetadata)
        assert_type(step.positions, Tensor)
        for layer in range(config.num_layers):
            out = paged_attention(queries, keys, values, step, layer)
    assert_type(out, Tensor)
    plan = AttentionPlan(queries, keys, page_size=16)
    assert_type(attend_pages(queries, keys, values, plan), Tensor)
    both = attend_pages(queries, keys, values, plan, return_lse=True)
    assert_type(both, tuple[Tensor, Tensor])
    cache.truncate(seq, cache.length(seq) - 1)
    try:
        cache.add([int(out.argmax())])
    except OutOfPagesError as error:
        print(error)
    cache.check()
    return cache.stats()


def drop_in(model: LlamaForCausalLM, ids: Tensor, mask: Tensor) -> Tensor:
    shared = PagedCache.prefill(model, ids[0, :9], max_tokens=8192, page_size="auto")
    with shared, shared.fork(len(ids)) as cache:
        assert_type(cache, PagedCache)
        print(cache.stats(), cache.rows, cache.batch_size, cache.get_seq_length())
    with PagedCache(
        model, page_size=16, max_sequences=None, growth_step=512, retention=Fading(), budget=256
    ) as rows:
        model(input_ids=ids, attention_mask=mask, cache=rows)
        rows.crop(-1)
    attach(model)
    detach(model)
    return ids


def batch_job(model: LlamaForCausalLM, tokenizer: Any) -> Iterator[str]:
    config = CacheConfig.from_model(
        model.config, max_tokens=4096, kv_format="int8", dtype="float16"
    )
    with BatchGenerator(
        model, tokenizer, max_tokens=4096, page_size="auto", max_sequences=None, step_tokens=256
    ) as generator:
        for result in generator.stream(["a", "b"], max_new_tokens=8, num_return_sequences=2):
            assert_type(result, Result)
            if result.error is None and result.finish_reason != "length":
                yield f"{result.index} {result.sample} {result.text} {result.tokens[-1]}"
            yield str(result.cached_tokens)
        print(generator.stats.computed, generator.stats.reused, config.nbytes)


def stream(folder: str) -> None:
    try:
        plan = plan_memory(folder, device_memory="8GiB", batch=4, length=2048)
        print(plan, plan.step_tokens, plan.cache.page_size)
        with LayerStreamer.from_pretrained(folder, device_memory="8GiB", length=2048) as streamer:
            print(streamer.model, streamer.stats)
        with LayerStreamer.from_pretrained(folder, plan=plan, dtype=torch.float16) as streamer:
            print(BatchGenerator(streamer.model, plan=plan).generate([[1, 2, 3]]))
    except BudgetExceeded as error:
        print(error)


print(pagedkv.__version__)
