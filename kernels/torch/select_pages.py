"""Reads only the pages that matter to a query: computes bounds of a page's keys, and chooses pages.

A page keeps, for every KV head and channel, the smallest key and a fifteenth of the range up to the
largest: these are the step and minimum of `int4_channel`, whose scales are used directly. For a
query q no key of the page scores more than

    sum over channels of max(q * smallest, q * largest)

so the pages with the largest bounds are read, always with the first and the newest ones. Their
number is fixed and does not depend on lengths, so a captured graph can choose pages. No page is
freed. After Quest (arXiv 2406.10774), with one list for the query heads of a KV head.

Bytes moved a row: 4 x D for every page and KV head, then K and V of the chosen pages.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagedkv.kernels.formats import Pages

from .codes import FP16_MAX, step_and_minimum
from .page_coding import read_pages

LARGEST = 0x7F7FFFFF  # the bits of the largest float32; numbers below are the next smaller ones
NEWEST = 2  # last pages that are always read: the one being written, and the one before


def page_bounds(keys: Tensor) -> Tensor:
    """Returns step and minimum of every channel, `[n, G, D, 2]`, of complete pages `[n, G, P, D]`.

    They are NaN if halves cannot bound the keys.
    """
    bounds = step_and_minimum(keys, -2)
    return bounds.masked_fill_(bounds.abs() == FP16_MAX, math.nan)


def score_columns(
    q: Tensor, bounds: Tensor, page_ids: Tensor, lens: Tensor, page_size: int
) -> Tensor:
    """Bounds the scores of pages for the query heads of each KV head: `[n, G, m]` float32.

    Args:
        q: `[n, H, D]`, one query a row.
        bounds: `[N, G, D, 2]`; the bounds of the first and the newest pages are ignored.
        page_ids: `[n, m]`, the ids of each row's pages.
        lens: `[n]`, tokens of each row; at least 1.

    Returns:
        Infinity for the first and the newest pages, minus infinity for pages behind a row's end.
        A page whose bound is not finite for some head ranks above all pages with finite bounds, and
        above such pages in later columns.
    """
    n, _, dim = q.shape
    empty = (page_ids < 0) | (page_ids >= bounds.shape[0])  # no page, or a staging page
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
    """Returns the `count` columns with the highest scores `[n, G, m]`, ascending, int64.

    Rows with fewer pages get all of them, and columns behind their end.
    """
    return scores.topk(count, -1).indices.sort(-1).values


def read_chosen(
    pages: Tensor | Pages, page_ids: Tensor, columns: Tensor, hidden: Tensor, dtype: torch.dtype
) -> Tensor:
    """Copies K or V of chosen pages: `[n, G, count * P, D]`.

    Args:
        page_ids: `[n, m]`.
        columns: `[n, G, count]`; the first one is 0.
        hidden: `[n, G, count * P]`, slots that are not read, because unwritten ones may be NaN: the
            result has finite numbers there.
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
    # Copies rows of D elements one by one, with any layout of pages, heads and slots: this is
    # several times faster than an index of pages and heads.
    *strides, _ = pages.stride()
    unit = min(strides)
    page, head, slot = (stride // unit for stride in strides)
    ends = (count - 1 for count in pages.shape[:3])
    many = 1 + sum(end * step for end, step in zip(ends, (page, head, slot)))
    of_head = head * torch.arange(groups, device=ids.device)[:, None, None]
    rows = ids[..., None] * page + of_head + slot * torch.arange(size, device=ids.device)
    # A hidden slot reads the text's first slot instead, which is always written.
    rows = torch.where(hidden, rows[..., :1, 0], rows.flatten(2))
    chosen = pages.as_strided((many, dim), (unit, 1)).index_select(0, rows.flatten())
    return chosen.view(n, groups, -1, dim)


def slots_of(columns: Tensor, page_size: int) -> Tensor:
    """Returns the place in its row of each slot of the chosen pages: `[n, G, count * P]`."""
    slot = columns[..., None] * page_size + torch.arange(page_size, device=columns.device)
    return slot.flatten(2)
