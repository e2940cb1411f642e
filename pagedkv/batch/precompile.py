"""Finds the kernels that the steps of a model launch, before there is a prompt.

The model runs one step of each kind over a few pages of their own, and attention launches are noted
down instead of made. So the model itself says which heads, windows and terms of scores its layers
have, and its own pages stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pagedkv.cache.cache import PagedKVCache
from pagedkv.config import CacheConfig
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.model import query_heads

from .packed import PackedModel

if TYPE_CHECKING:
    from pagedkv.kernels.triton.launch import Launch

FEW = 2, 16  # new tokens of rows that kernels serve like decoding ones, but with several queries
PROMPT = 17  # new tokens of rows that kernels serve as prompts: more than these
LONGEST = 1 << 14  # tokens for which graphs plan a row: so many that kernels cut it into parts
DECODED = 16  # decoding steps; a policy that watches queries does so in one of them


@torch.inference_mode()
def launches_of(packed: PackedModel) -> list[Launch]:
    """Returns the launches of a model's steps: decoding, verifying, prompts, prefixes and forks.

    The model computes a few hundred tokens, with attention launches noted down instead of made.
    """
    from pagedkv.kernels.triton.launch import noted  # there is no Triton where torch attends

    with _pages_beside(packed) as (beside, kv), noted(only=True) as launches:
        page, long = kv.config.page_size, kv.add()
        _run(beside, [long], _length(kv.config) - 1)  # the next token completes a page
        forked = kv.fork(long)[0]
        _run(beside, [long, forked], 1)  # copies a page that both have
        _run_padded(beside, [long, forked])
        for new in FEW:
            _run(beside, [long], new)
        short = kv.add()
        _run(beside, [short], 2 * page + PROMPT)
        _run(beside, [long, short], PROMPT)
        for _ in range(DECODED if kv.config.retention else 0):
            _run(beside, [long, forked], 1)
    return launches


def _length(config: CacheConfig) -> int:
    """Tokens of the longest row before its last steps: whole pages, more than attention reads."""
    return (2 + max(1, config.pages_read)) * config.page_size


@contextmanager
def _pages_beside(packed: PackedModel) -> Iterator[tuple[PackedModel, PagedKVCache]]:
    """Gives the model over other pages of the same kind, as few as the steps need."""
    config, kv = packed.kv.config, packed.kv
    length = _length(config) + 2 * config.page_size + 4 * PROMPT + DECODED
    few = replace(
        config,
        max_tokens=3 * length,
        max_sequences=4,
        max_sequence_length=max(length, LONGEST),
        max_step_tokens=length,
        host_tokens=0,
        growth_step=None,
        max_states=8,
    )
    made = PagedKVCache(few, device=kv.placement, backend=kv.backend)
    made.follow(kv.ranks)
    yield packed.over(made), made


def _run(packed: PackedModel, seqs: Sequence[int], new: int) -> None:
    """Runs a step of `new` tokens for each row."""
    ids = torch.zeros(len(seqs) * new, dtype=torch.int64, device="cpu")
    with packed.kv.step(seqs, ids, num_new=new) as step:
        packed.logits(step)


def _run_padded(packed: PackedModel, seqs: Sequence[int]) -> None:
    """Runs a decoding step as graphs replay it, with room for prefixes where rows can share."""
    from pagedkv.attention import on_triton

    kv, heads = packed.kv, query_heads(packed.model)
    if heads is None:  # such a model gets no graphs
        return
    step = kv.prepare(seqs, torch.zeros(len(seqs), dtype=torch.int64, device="cpu"), num_new=1)
    rooms = {
        number: on_triton.room_for_prefixes(step, number, len(seqs), heads)
        for number, group in enumerate(kv.config.groups)
        if group.window is None and not kv.config.pages_read
    }
    try:
        with suppress(UnsupportedModelError):  # a model that gets no graphs
            packed.logits(step.padded(len(seqs), rooms))
    finally:
        kv.abort(step)


def compile_for(packed: PackedModel, workers: int | None = None) -> int:
    """Compiles the kernels that steps of a model launch, into Triton's cache on disk.

    Returns:
        How many kernels were compiled because the cache lacked them; 0 if there is none to compile.

    Raises:
        RuntimeError: a kernel does not compile; the others are in the cache.
    """
    if packed.kv.backend != "triton":
        return 0
    from pagedkv.kernels.triton.ahead import compile_all, jobs_of
    from pagedkv.kernels.triton.launch import target_of

    if not (arch := target_of(packed.kv.device).arch):  # kernels are interpreted
        return 0
    jobs = jobs_of(launches_of(packed))
    done = compile_all(jobs, arch, workers, launchers=torch.cuda.is_available())
    if wrong := [one.error for one in done if one.error]:
        raise RuntimeError(f"{len(wrong)} of {len(done)} kernels do not compile: {wrong[0]}")
    return sum(not one.cached for one in done)
