"""Attention to the tokens that are given for each query: sparse attention.

A slot is a page of one slot. So a query with n tokens is a row of n pages whose last token it is,
and the kernels of every backend attend to it as to a row that decodes: none knows of such queries.
Bytes moved: K and V of the tokens given, and no others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkv.step.metadata import StepMetadata

from .call import Call, Chosen


def chosen_of(call: Call, indices: Tensor) -> Chosen:
    """The tokens with these places in their texts; see `paged_attention`.

    Raises:
        ValueError, TypeError: pages of this kind are not read token by token, or the places do not
            fit the step.
    """
    step, group = call.step, call.group
    pages = tuple(page for page in call.pages if isinstance(page, Tensor))
    if step.config.groups[group].window is not None or step.config.policy is not None:
        raise ValueError("indices: expected a layer without a window, whose pages all stay")
    if len(pages) < 2:
        raise ValueError(f"indices: expected dense pages, got {step.config.kv_format!r}")
    if call.scoring.is_biased:
        raise ValueError("indices: expected None with a bias by distance, which they do not tell")
    if indices.ndim != 2 or len(indices) != step.num_tokens or not indices.shape[1]:
        shape = [step.num_tokens, "n"]
        raise ValueError(f"indices: expected shape {shape}, got {list(indices.shape)}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices: expected int32 or int64, got {indices.dtype}")
    if indices.device != call.q.device:
        raise ValueError(f"indices: expected device {call.q.device}, got {indices.device}")
    own = step.positions[:, None]
    behind = step.config.max_sequence_length  # after all tokens, so that those come first
    counted = (indices >= 0) & (indices <= own)
    tokens = torch.where(counted, indices, behind).sort(1).values
    tokens[:, :1] = torch.minimum(tokens[:, :1], own)  # of none: itself, which is written
    counts = counted.sum(1).clamp_(min=1).int()
    k, v = (_by_slot(page) for page in pages)
    if len(k) >= 2**31:
        raise ValueError(f"indices: expected fewer than 2**31 slots of all heads, got {len(k)}")
    return Chosen((k, v), _slots(step, group, tokens, pages[0]), counts)


def _by_slot(pages: Tensor) -> Tensor:
    """Pages `[N, G, P, D]` as pages of one slot, a view whose ids count in steps of a slot."""
    count, heads, size, dim = pages.shape
    page, head, slot, _ = pages.stride()
    return pages.as_strided(
        ((count - 1) * (page // slot) + size, heads, 1, dim), (slot, head, slot, 1)
    )


def _slots(step: StepMetadata, group: int, tokens: Tensor, pages: Tensor) -> Tensor:
    """The ids, among pages of one slot, of tokens `[T, n]` of the rows of a step."""
    table, size = step.page_table(group), step.config.page_size
    rows = torch.arange(len(table), device=table.device)
    rows = rows.repeat_interleave(step.query_start_loc.diff(), output_size=step.num_tokens)
    columns = (tokens // size).clamp_(max=table.shape[1] - 1)
    ids = table[rows[:, None], columns].clamp_(min=0)
    return (ids * (pages.stride(0) // pages.stride(2)) + tokens % size).int()
