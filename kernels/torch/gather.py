"""Gathers the pages of a bucket of rows into scratch, as plain tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagedkv.kernels.formats import Pages, is_view_of_k

from . import page_coding as coded
from .buckets import Bucket


def gather(
    k_pages: Tensor | Pages,
    v_pages: Tensor | Pages,
    page_table: Tensor,
    bucket: Bucket,
    scratch: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gathers K and V of a bucket: `[n, G, length, D]`, views of scratch; V may be a view of K."""
    k = _gather_half(k_pages, page_table, bucket, scratch[0])
    if is_view_of_k(k_pages, v_pages):
        return k, k[..., : v_pages.shape[3]]
    return k, _gather_half(v_pages, page_table, bucket, scratch[1])


def _gather_half(
    pages: Tensor | Pages, page_table: Tensor, bucket: Bucket, scratch: Tensor
) -> Tensor:
    n, m = bucket.count, bucket.num_pages
    num_pages, heads, page_size, dim = pages.shape
    if bucket.page_ids is None:
        columns = torch.from_numpy(bucket.first_page[:, None] + np.arange(m)).to(page_table.device)
        columns = columns.clamp_(max=page_table.shape[1] - 1)
        ids = page_table[bucket.rows].gather(1, columns)
        bucket.page_ids = ids.clamp_(0, num_pages - 1).flatten()
    into = scratch[: n * m * page_size * heads * dim]
    if isinstance(pages, Pages):
        slots = into.view(n * m, page_size, heads, dim)
        coded.read_pages(pages, bucket.page_ids, into.dtype, slots.transpose(1, 2))
    elif pages.transpose(1, 2).is_contiguous():
        slots = into.view(n * m, page_size, heads, dim)
        torch.index_select(pages.transpose(1, 2), 0, bucket.page_ids, out=slots)
    else:
        into = into.view(n, heads, m, page_size, dim)
        into.copy_(pages[bucket.page_ids].view(n, m, heads, page_size, dim).transpose(1, 2))
        rows = into.flatten(2, 3)
        if bucket.lengths is not None:
            flat = rows.transpose(1, 2).flatten(0, 1)
            flat.index_fill_(0, _padding(bucket, page_size, into), 0)
            rows = flat.unflatten(0, (n, -1)).transpose(1, 2)
        return rows[:, :, bucket.skip : bucket.skip + bucket.length]
    if bucket.lengths is not None:
        slots.view(-1, heads, dim).index_fill_(0, _padding(bucket, page_size, into), 0)
    rows = slots.view(n, m * page_size, heads, dim).transpose(1, 2)
    return rows[:, :, bucket.skip : bucket.skip + bucket.length]


def _padding(bucket: Bucket, page_size: int, like: Tensor) -> Tensor:
    if bucket.padding is None:
        assert bucket.lengths is not None
        slot = np.arange(bucket.num_pages * page_size)
        beyond = slot >= bucket.skip + bucket.lengths[:, None]
        bucket.padding = torch.from_numpy(np.flatnonzero(beyond)).to(like.device)
    return bucket.padding
