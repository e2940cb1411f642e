"""One layer's decode attention on the CPU, over pages and over contiguous K and V.

16 rows, 9 query heads, 3 KV heads of 64, pages of 16, fp32. Over pages each call also writes the
new token's K and V, as it does in a model; the contiguous baselines already hold them, except for
`cat`, which appends as `DynamicCache` does. `repeat` is what transformers does under a mask: cat,
then repeat_kv, then SDPA. Every slot that holds no token is NaN.
"""

from collections.abc import Callable, Iterator
from statistics import median

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.nn.utils.rnn import pad_sequence

from benchmarks.bench_kernels import SMALL, placed, right, rows
from benchmarks.cells import Case
from benchmarks.conftest import Alternate, Figure, ratio
from benchmarks.peers.dense import dense
from pagedkv import paged_attention, write_kv

B, PAGE = 16, 16
SIZES = {"small": (256, 512), "full": (512, 4096)}


@pytest.fixture(params=["one", "all"])
def threads(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.get_num_threads()
    torch.set_num_threads(1 if request.param == "one" else before)
    yield "1 thread" if request.param == "one" else f"{before} threads"
    torch.set_num_threads(before)


def share_of_neighbours(case: Case) -> float:
    """How many pages of a row follow the page before them in memory."""
    steps = torch.cat([case.row_ids(row).diff() for row in range(B)])
    return float((steps == 1).float().mean())


def baselines(case: Case) -> dict[str, Callable[[], Tensor]]:
    """Ways to attend over contiguous `[B, G, N, D]`, right padded with zeros: `[B, H, D]` each."""
    lengths = case.cell.kv_lens

    def padded(pages: Tensor) -> Tensor:
        each = [dense(pages, case.page_table[b : b + 1], n)[0] for b, n in enumerate(lengths)]
        held = pad_sequence([x.transpose(0, 1) for x in each], batch_first=True)
        return held.transpose(1, 2).contiguous()

    q, k, v = case.q[:, :, None], padded(case.k_pages), padded(case.v_pages)
    past_k, past_v, new_k, new_v = (
        x[:, :, part].contiguous() for part in (slice(-1), slice(-1, None)) for x in (k, v)
    )
    mask = (torch.arange(k.shape[2]) < case.kv_lens[:, None])[:, None, None]

    def per_row() -> Tensor:
        each = ((q[b, None], k[b, None, :, :n], v[b, None, :, :n]) for b, n in enumerate(lengths))
        return torch.cat([sdpa(*x, enable_gqa=True) for x in each])[:, :, 0]

    def cat() -> Tensor:
        keys, values = torch.cat([past_k, new_k], 2), torch.cat([past_v, new_v], 2)
        return sdpa(q, keys, values, enable_gqa=True)[:, :, 0]

    def repeat() -> Tensor:
        both = torch.cat([past_k, new_k], 2), torch.cat([past_v, new_v], 2)
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in both)
        return sdpa(q, keys, values, attn_mask=mask)[:, :, 0]

    if len(set(lengths)) == 1:
        whole = lambda: sdpa(q, k, v, enable_gqa=True)[:, :, 0]  # noqa: E731
        return {"contiguous": whole, "cat": cat, "repeat": repeat}
    masked = lambda: sdpa(q, k, v, attn_mask=mask, enable_gqa=True)[:, :, 0]  # noqa: E731
    return {"contiguous": per_row, "padded and masked": masked, "repeat": repeat}


@pytest.mark.parametrize("lengths", ["short", "long", "ragged"])
def bench_decode(
    size: str, alternate: Alternate, figure: Figure, threads: str, lengths: str
) -> None:
    short, long = SIZES[size]
    # Where a page is full the new token would take one of its own.
    spread = [n - (n % PAGE == 1) for n in torch.linspace(long // 8, long, B).long().tolist()]
    label, of_row = {
        "short": (str(short), [short] * B),
        "long": (str(long), [long] * B),
        "ragged": (f"{long // 8}..{long}", spread),
    }[lengths]
    cell = rows(SMALL, of_row, (1,) * B, page=PAGE)
    ways: dict[str, Callable[[], object]] = {}
    for shuffled in (True, False):
        ready = placed(cell, shuffled)
        neighbours = share_of_neighbours(ready.case)
        assert neighbours < 0.05 if shuffled else neighbours == 1
        check = right(ready.case)
        if shuffled:
            ways |= baselines(ready.case)
            for way in ways.values():
                check(way)
            ways["write"] = lambda x=ready: write_kv(x.k, x.v, x.step, 0)
        ready.forget()
        name = "shuffled" if shuffled else "consecutive"
        ways[name] = lambda x=ready: paged_attention(x.case.q, x.k, x.v, x.step, 0)
        check(ways[name])
    ways["shuffled"] = ways.pop("shuffled")  # the last one is what is listed
    seconds = alternate(ways, rounds=60 if lengths == "short" else 15, warmup=3)
    figure(f"{threads}, {label} tokens, contiguous SDPA", 1e3 * median(seconds["contiguous"]), "ms")
    targets = {"shuffled": 2.5, "consecutive": 1.5}
    for name in ways:
        if name != "contiguous":
            target = targets.get(name) if threads == "1 thread" and lengths != "ragged" else None
            figure(f"  {name} / contiguous", ratio(seconds, name, "contiguous"), "x", target)
