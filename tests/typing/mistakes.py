# ruff: noqa: B018, F401, I001
"""Mistakes of a user, each of which checkers find in its line."""

from __future__ import annotations

from typing import Any

import pagedkv
from pagedkv import BatchGenerator, CacheConfig, LayerStreamer, PagedCache, Result, StepMetadata
from pagedkv import PagedKvCache  # error: a name in another case

pagedkv.nonsense  # error: no such name


def fields(model: Any) -> None:
    PagedCache(model, kv_fromat="int8")  # error: a misspelt field
    PagedCache(model, page_size="big")  # error: neither a number nor "auto"
    PagedCache(model, max_sequences="8")  # error: no number
    PagedCache.prefill(model, [1], pagesize=4)  # error: a misspelt field
    BatchGenerator(model, page_sise=16)  # error: a misspelt field
    BatchGenerator(model, step_tokens="many")  # error: no number
    CacheConfig(1, 2, 8, "float32", 64, kv_fromat="int8")  # error: a misspelt field
    CacheConfig(1, 2, 8, "float32")  # error: max_tokens is missing
    CacheConfig.from_model(model, max_tokens=64, budgett=9)  # error: a misspelt field
    LayerStreamer.from_pretrained(3)  # error: no path


def attributes(cache: PagedCache, result: Result, step: StepMetadata) -> None:
    cache.forks(3)  # error: no such method
    cache.fork("three")  # error: no number
    result.txt  # error: no such field
    result.tokens.lower()  # error: a list of ids
    step.possitions  # error: no such field
