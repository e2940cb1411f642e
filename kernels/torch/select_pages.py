"""Reading only the pages that matter to a query: bounds of a page's keys, and the choice by them.

A page keeps, for every KV head and channel, the smallest key and a fifteenth of the range up to the
largest: the step and minimum of `int4_channel`, whose scales serve as they are. For a query q no
key of the page scores more than

    sum over channels of max(q * smallest, q * largest)

so the pages with the largest bounds are read, always with the first and the newest ones, and a
fixed number of them: nothing depends on lengths, so the choice can be part of a captured graph.
Nothing is freed. After Quest (arXiv 2406.10774), with one list for the query heads of a KV head.

Bytes moved a row: 4 x D for every page and KV head, then K and V of the pages chosen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagedkv.kernels.formats import Pages

from .codes import FP16_MAX, step_and_minimum
from .page_coding import read_pages

LARGEST = 0x7F7FFFFF  # the bits of the largest float32; those before it are of the next ones
NEWEST = 2  # pages that are always read: the one being written, and the one before


def page_bounds(keys: Tensor) -> Tensor:
    """Step and minimum of every channel: `[n, G, P, D]` complete pages to `[n, G, D, 2]`.

    NaN for keys that halves do not bound.
    """
    bounds = step_and_minimum(keys, -2)
    return bounds.masked_fill_(bounds.abs() == FP16_MAX, math.nan)


def score_columns(
    q: Tensor, bounds: Tensor, page_ids: Tensor, lens: Tensor, page_size: int
) -> Tensor:
    """How much a page can matter at most to the query heads of each KV head: `[n, G, m]` float32.

    Args:
        q: `[n, H, D]`, one query a row.
        bounds: `[N, G, D, 2]`; what those of the first and the newest pages say does not matter.
        page_ids: `[n, m]`, of each row's pages.
        lens: `[n]`, tokens of each row; at least 1.

    Returns:
        Infinity for the first and the newest pages, minus infinity for those behind a row's end.
        Pages for which some head has no bound that is a number stand above all that have one, and
        above those of later columns.
    """
    n, _, dim = q.shape
    empty = (page_ids < 0) | (page_ids >= bounds.shape[0])  # nothing there, or staging pages
    span = bounds[page_ids.masked_fill(empty, 0)].float()  # [n, m, G, D, 2]
    step, low = span.permute(0, 2, 3, 1, 4).unbind(-1)  # [n, G, D, m]
    by_head = q.view(n, bounds.shape[1], -1, dim).float()
    score = by_head.clamp(min=0) @ (low + 15 * step) + by_head.clamp(max=0) @ low
    column = torch.arange(page_ids.shape[1], device=q.device)
    unknown = (LARGEST - column.int()).view(torch.float32)
    score = torch.where(score.isfinite().all(2), score.amax(2), unknown)
    last = ((lens - 1) // page_size)[:, None, None]
    kept = (column == 0) | (column > last - NEWEST)
    return score.masked_fill(kept, math.inf).masked_fill(column > last, -math.inf)


def choose_columns(scores: Tensor, count: int) -> Tensor:
    """The `count` columns of the highest scores `[n, G, m]`, in ascending order: int64.

    Rows of fewer pages get all of them, and columns behind their end.
    """
    return scores.topk(count, -1).indices.sort(-1).values


def read_chosen(
    pages: Tensor | Pages, page_ids: Tensor, columns: Tensor, hidden: Tensor, dtype: torch.dtype
) -> Tensor:
    """K or V of the pages chosen: `[n, G, count * P, D]`, a copy.

    Args:
        page_ids: `[n, m]`.
        columns: `[n, G, count]`, of which the first one is 0.
        hidden: `[n, G, count * P]`, slots that are not read: what nobody wrote may be NaN. In their
            place comes something finite.
    """
    n, groups, _ = columns.shape
    ids = page_ids[:, None].expand(n, groups, -1).gather(2, columns).clamp(min=0)
    if isinstance(pages, Pages):
        heads = [
            read_pages(pages.head(g), ids[:, g].flatten(), dtype).view(n, 1, -1, pages.shape[3])
            for g in range(groups)
        ]
        return torch.cat(heads, 1).masked_fill_(hidden.unsqueeze(-1), 0)
    _, _, size, dim = pages.shape
    # Rows of D elements, wherever pages, heads and slots have them: copied one by one, they are
    # several times faster than an index of pages and heads.
    *strides, _ = pages.stride()
    unit = min(strides)
    page, head, slot = (stride // unit for stride in strides)
    ends = (count - 1 for count in pages.shape[:3])
    many = 1 + sum(end * step for end, step in zip(ends, (page, head, slot)))
    of_head = head * torch.arange(groups, device=ids.device)[:, None, None]
    rows = ids[..., None] * page + of_head + slot * torch.arange(size, device=ids.device)
    # The first slot of a text is always written; for a hidden one it is as good as any.
    rows = torch.where(hidden, rows[..., :1, 0], rows.flatten(2))
    chosen = pages.as_strided((many, dim), (unit, 1)).index_select(0, rows.flatten())
    return chosen.view(n, groups, -1, dim)


def slots_of(columns: Tensor, page_size: int) -> Tensor:
    """Where in its row each slot of the pages chosen is: `[n, G, count * P]`."""
    slot = columns[..., None] * page_size + torch.arange(page_size, device=columns.device)
    return slot.flatten(2)
