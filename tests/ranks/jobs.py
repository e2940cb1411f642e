"""Jobs that ranks run. Called in the test's own process, one does the job alone."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from pagedkv import BatchGenerator, PagedCache, PagedKVCache
from pagedkv.hf.release import shared_out
from tests.hf.tiny import named, padded

CLOCKS = {"step_cost", "seconds", "draft_seconds"}
BYTES = {"peak"}  # of which a rank has its share


def rank() -> int:
    """This process's rank; 0 alone."""
    return dist.get_rank() if dist.is_initialized() else 0


@cache
def model_of(folder: str, ep: bool = False, attention: str = "sdpa") -> PreTrainedModel:
    """A model in float32, shared out among the ranks if there are several."""
    options: dict[str, Any] = {"attn_implementation": attention}
    if dist.is_initialized() and dist.get_world_size() > 1:
        options["distributed_config"] = shared_out(dist.get_world_size(), ep)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def generate(
    folder: str,
    prompts: Sequence[Any],
    calls: Sequence[dict[str, Any]],
    model: dict[str, Any] | None = None,
    draft: str | None = None,
    **sizes: Any,
) -> list[Any]:
    """Returns results and counts of a generator's calls, and what its pages can find afterwards."""
    sizes = {"max_tokens": 1024, "page_size": 4, **sizes}
    if draft is not None:
        sizes["draft"] = model_of(draft)
    found = []
    torch.manual_seed(100 + rank())  # what a rank draws for itself must not count
    with BatchGenerator(model_of(folder, **model or {}), **sizes) as batched:
        for call in calls:
            results = batched.generate(prompts, **{"max_new_tokens": 8, "do_sample": False, **call})
            batched.cache.check()
            stats = {k: v for k, v in asdict(batched.stats).items() if k not in CLOCKS | BYTES}
            found.append((list(map(asdict, results)), stats, findable(batched.cache)))
    del batched
    gc.collect()  # else a later call may find the pages of this one
    return found


def score(folder: str, prompts: Sequence[Any], continuations: Sequence[Any]) -> list[Any]:
    """Tokens and whether each is the likeliest, then the log-probabilities."""
    with BatchGenerator(model_of(folder), max_tokens=1024, page_size=4) as batched:
        scores = batched.score(prompts, continuations)
        batched.cache.check()
    flat = [one for own in scores for one in own]
    said = [(one.index, one.choice, one.tokens, one.greedy, one.error) for one in flat]
    return [said, [one.logprobs for one in flat]]


def stock(folder: str, prompts: Sequence[Any], **options: Any) -> list[Any]:
    """Runs transformers' own `generate` over a `PagedCache`."""
    model = model_of(folder)
    rows = padded([torch.as_tensor(ids) for ids in prompts])
    with torch.no_grad(), PagedCache(model, max_tokens=1024, page_size=4) as paged:
        out = model.generate(**rows, **named(paged), max_new_tokens=8, do_sample=False, **options)
        paged.kv.check()
    return out.tolist()


def heads(folder: str, **model: Any) -> list[int]:
    """KV heads of each layer group in a rank's pages."""
    with PagedCache(model_of(folder, **model), max_tokens=64) as paged:
        return [shape.num_kv_heads for shape in paged.kv.config.shapes]


def findable(kv: PagedKVCache) -> str:
    """A digest of what prompts find: pages, their tokens and their order, without names."""
    index, pool = kv._tables.index, kv._tables.pool
    said = [index.tokens, index.findable, pool.refcount, pool.filled]
    stats = {k: v for k, v in asdict(kv.stats()).items() if "bytes" not in k}
    order = [list(pages.values()) for pages in (*index._full, *index._partial)]
    return sha256(repr([[x.tobytes() for x in said], stats, order]).encode()).hexdigest()[:12]


def refused(folder: str, how: str, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The error that something raises, and what it says."""
    try:
        globals()[how](folder, *args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
