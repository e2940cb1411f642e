"""Fewer bytes on a card: what `benchmarks.gpu.run --grid capacity` measures.

It times `paged_attention` as a model calls it: over pages of every format beside bf16 pages
("ours"), over chosen pages beside all of them, and in steps that are watched for a policy. All
results but those of chosen pages are first compared with attention over what the pages hold. If
FlashInfer is installed, its decoding over bf16 and fp8 pages of the same shape runs as well.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.cells import Call, Case, Cell, Heads, Ready
from benchmarks.peers import dense
from pagedkv import CacheConfig, PagedKVCache, paged_attention, write_kv
from pagedkv.attention.api import gather_kv

TARGET = "int8, fp8 must <= 0.67x (goal 0.56x), int4 0.45x (0.33x); read 0.25x (0.17x)"
TARGET += "; watched, one step in 16, 1.3x (1.15x)"
CHUNK = 8192  # tokens written in one step
FORMATS: dict[str, Any] = {
    "ours": {},
    "int8": {"kv_format": "int8"},
    "fp8": {"kv_format": "fp8"},
    "int4": {"kv_format": "int4"},
    "int8/int4": {"kv_format": ("int8", "int4")},
}
WATCHED = "watched"


def cells() -> list[Cell]:
    """Returns the cells, the most important first; each has 512 MiB of pages or more in bf16."""
    return [
        Cell(
            f"capacity/b{batch}/{length >> 10}k",
            Heads(32, 8, 128),
            (length + 1,) * batch,
            (1,) * batch,
            page_size=16,
            peers=("flashinfer", "flashinfer-fp8"),
            target=TARGET,
            kind="capacity",
        )
        for batch, length in ((8, 32_768), (16, 16_384), (32, 4096))
    ]


def variants(cell: Cell) -> dict[str, dict[str, Any]]:
    """Returns each way's fields of the cache; ways with chosen pages only if a text is long."""
    found, length = dict(FORMATS), max(cell.kv_lens)
    if length > 32 * cell.page_size:
        found["read 1/8"] = {"read_tokens": length // 8 // 32 * 32}
        found["int4, read 1/8"] = FORMATS["int4"] | found["read 1/8"]
    found[WATCHED] = {"retention": "importance", "budget": -(-length // 16) * 16}
    return found


def fill(cell: Cell, fields: dict[str, Any], device: torch.device) -> tuple[PagedKVCache, Any]:
    """A cache of one layer of random K and V, and the open step of the sequences' next token."""
    _, g, d = cell.heads
    batch, most = len(cell.new), max(cell.kv_lens)
    sizes = {"max_tokens": batch * (most + 64), "max_sequences": batch, "max_step_tokens": CHUNK}
    cache = PagedKVCache(CacheConfig(1, g, d, "bfloat16", **sizes, **fields), device=device)
    source = torch.Generator(device).manual_seed(0)
    size = torch.rand(g, d, generator=source, device=device) * 4  # of K's channels
    seqs = [cache.add() for _ in cell.new]
    for seq, length in zip(seqs, cell.kv_lens):
        for begin in range(0, length - 1, CHUNK):
            count = min(CHUNK, length - 1 - begin)
            k, v = torch.randn(2, count, g, d, generator=source, device=device)
            with cache.step([seq], num_new=count) as step:
                write_kv((k * size).bfloat16(), v.bfloat16(), step, 0)
    return cache, cache.prepare(seqs, num_new=1)


def prepare(case: Case, variant: str) -> Ready:
    """A decoding step's attention over pages of one kind."""
    h, g, d = case.cell.heads
    cache, step = fill(case.cell, variants(case.cell)[variant], case.q.device)
    source = torch.Generator(case.q.device).manual_seed(1)
    qkv = torch.randn(len(case.q), h + 2 * g, d, generator=source, device=case.q.device)
    q, k, v = (x.contiguous() for x in qkv.bfloat16().split([h, g, g], 1))
    if variant == WATCHED:
        step.queries = step.num_new  # as in every 16th step

    def check(call: Call) -> float:
        out = call()
        true = []
        for row, kv in zip(q, gather_kv(step, 0)):
            k, v = (x.double().transpose(0, 1)[None] for x in kv)
            true.append(dense.attend_dense(row[None, None].double(), k, v, d**-0.5))
        return dense.error(out, torch.cat(true))

    # Chosen pages leave something out on purpose: tests compare them with what was chosen.
    chosen = cache.config.read_tokens is not None
    call = partial(paged_attention, q, k, v, step, 0)
    return Ready(call, None if chosen else check, cache._storage.nbytes)
