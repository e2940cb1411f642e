"""One layer's decode attention on the CPU, over pages and over contiguous K and V.

16 rows, 9 query heads, 3 KV heads of 64, pages of 16, fp32. Over pages each call also writes the
new token's K and V, as it does in a model; the contiguous baselines already hold them, except for
`cat`, which appends as `DynamicCache` does. `repeat` is what transformers does under a mask: cat,
then repeat_kv, then SDPA. Every slot that holds no token is NaN.
"""

from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.conftest import ratio
from pagedkv import CacheConfig, PagedKVCache, paged_attention, write_kv

B, H, G, D, PAGE = 16, 9, 3, 64, 16
SIZES = {"small": (256, 512), "full": (512, 4096)}


class Case(NamedTuple):
    """One decode step: the query, and the K and V of every row, the new token last."""

    q: Tensor  # [B, H, D]
    k: Tensor  # [B, N, G, D], right padded with zeros
    v: Tensor
    lengths: Tensor  # [B], the new token included

    @property
    def ragged(self) -> bool:
        return bool((self.lengths != self.lengths[0]).any())


@pytest.fixture(params=["one", "all"])
def threads(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.get_num_threads()
    torch.set_num_threads(1 if request.param == "one" else before)
    yield "1 thread" if request.param == "one" else f"{before} threads"
    torch.set_num_threads(before)


def make_case(lengths: Tensor) -> Case:
    torch.manual_seed(0)
    longest = int(lengths.max())
    k, v = (torch.randn(B, longest, G, D) for _ in range(2))
    unused = (torch.arange(longest) >= lengths[:, None])[..., None, None]
    return Case(torch.randn(B, H, D), k.masked_fill(unused, 0), v.masked_fill(unused, 0), lengths)


def truth(case: Case) -> Tensor:
    """Row by row in float64, without any mask."""
    rows = []
    for b, n in enumerate(case.lengths.tolist()):
        k, v = (x[b, :n].double().repeat_interleave(H // G, dim=1) for x in (case.k, case.v))
        weights = (torch.einsum("hd,nhd->hn", case.q[b].double(), k) * D**-0.5).softmax(-1)
        rows.append(torch.einsum("hn,nhd->hd", weights, v))
    return torch.stack(rows)


def fill_cache(case: Case, order: str) -> tuple[PagedKVCache, list[int]]:
    """A cache that holds all but the newest token of each row, in pages of that order."""
    columns = -(-case.lengths // PAGE)
    pages = int(columns.sum())
    config = CacheConfig(
        num_layers=1,
        num_kv_heads=G,
        head_dim=D,
        dtype="float32",
        max_tokens=pages * PAGE,
        max_sequences=pages + B,
    )
    cache = PagedKVCache(config, device="cpu")
    cache._storage.poison(0, torch.arange(pages))
    if order == "shuffled":  # one page each, given back in random order, scrambles the free pages
        seqs = [cache.add() for _ in range(pages)]
        with cache.step(seqs, num_new=PAGE, layers=()):
            pass
        cache.free(np.random.default_rng(0).permutation(seqs))
    seqs = [cache.add() for _ in range(B)]
    for b, (seq, n) in enumerate(zip(seqs, case.lengths.tolist())):
        with cache.step([seq], num_new=n - 1) as step:
            write_kv(case.k[b, : n - 1], case.v[b, : n - 1], step, 0)
    return cache, seqs


def share_of_neighbours(table: Tensor, lengths: Tensor) -> float:
    """How many pages of a row follow the page before them in memory."""
    steps = table.diff(dim=1)
    real = torch.arange(steps.shape[1]) + 1 < -(-lengths // PAGE)[:, None]
    return float((steps[real] == 1).float().mean())


def baselines(case: Case) -> dict[str, Callable[[], Tensor]]:
    """Ways to attend over contiguous `[B, G, N, D]`: `[B, H, D]` each."""
    q = case.q[:, :, None]
    k, v = (x.transpose(1, 2).contiguous() for x in (case.k, case.v))
    past_k, past_v = (x[:, :, :-1].contiguous() for x in (k, v))
    new_k, new_v = (x[:, :, -1:].contiguous() for x in (k, v))
    mask = (torch.arange(k.shape[2]) < case.lengths[:, None])[:, None, None]
    lengths = case.lengths.tolist()

    def contiguous() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, :, 0]

    def per_row() -> Tensor:
        rows = (
            F.scaled_dot_product_attention(
                q[b, None], k[b, None, :, :n], v[b, None, :, :n], enable_gqa=True
            )
            for b, n in enumerate(lengths)
        )
        return torch.cat(list(rows))[:, :, 0]

    def masked() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[:, :, 0]

    def cat() -> Tensor:
        keys, values = torch.cat([past_k, new_k], 2), torch.cat([past_v, new_v], 2)
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)[:, :, 0]

    def repeat() -> Tensor:
        keys, values = torch.cat([past_k, new_k], 2), torch.cat([past_v, new_v], 2)
        keys, values = (x.repeat_interleave(H // G, dim=1) for x in (keys, values))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)[:, :, 0]

    if case.ragged:
        return {"contiguous": per_row, "padded and masked": masked, "repeat": repeat}
    return {"contiguous": contiguous, "cat": cat, "repeat": repeat}


@pytest.mark.parametrize("lengths", ["short", "long", "ragged"])
def bench_decode(
    size: str,
    alternate: Callable[..., dict[str, list[float]]],
    figure: Callable[..., None],
    threads: str,
    lengths: str,
) -> None:
    short, long = SIZES[size]
    spread = torch.linspace(long // 8, long, B).long()
    spread -= (spread % PAGE == 1).long()  # there the new token would take a page of its own
    of_row = {"short": torch.full((B,), short), "long": torch.full((B,), long), "ragged": spread}
    case = make_case(of_row[lengths])
    expected = truth(case)
    last = torch.arange(B), case.lengths - 1
    k, v = case.k[last], case.v[last]

    ways = baselines(case)
    steps = {}
    for order in ("shuffled", "consecutive"):
        cache, seqs = fill_cache(case, order)
        step = steps[order] = cache.prepare(seqs, num_new=1)
        neighbours = share_of_neighbours(step.page_table(), case.lengths)
        assert neighbours == 1 if order == "consecutive" else neighbours < 0.05
    ways["write"] = lambda: write_kv(k, v, steps["shuffled"], 0)
    ways["consecutive"] = lambda: paged_attention(case.q, k, v, steps["consecutive"], 0)
    ways["shuffled"] = lambda: paged_attention(case.q, k, v, steps["shuffled"], 0)

    for name, way in ways.items():
        if name != "write":
            torch.testing.assert_close(way().double(), expected, atol=1e-5, rtol=0, msg=name)
    seconds = alternate(ways, rounds=60 if lengths == "short" else 15, warmup=3)

    label = {"short": str(short), "long": str(long), "ragged": f"{long // 8}..{long}"}[lengths]
    figure(f"{threads}, {label} tokens, contiguous SDPA", 1e3 * median(seconds["contiguous"]), "ms")
    targets = {"shuffled": 2.5, "consecutive": 1.5}
    for name in ways:
        if name != "contiguous":
            target = targets.get(name) if threads == "1 thread" and lengths != "ragged" else None
            figure(f"  {name} / contiguous", ratio(seconds, name, "contiguous"), "x", target)
