"""Sparse attention: each query attends only to the tokens that are given for it.

Every slot is treated as a page of one slot. So a query with n tokens is a decoding row of n pages,
at whose end the query stands. The kernels of every backend serve it like any decoding row.
Bytes moved: only K and V of the given tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkv.step.metadata import StepMetadata

from .call import Call, Chosen


def chosen_of(call: Call, indices: Tensor) -> Chosen:
    """Returns the tokens with these places in their texts; see `paged_attention`.

    Raises:
        ValueError, TypeError: pages of this kind cannot be read token by token, or the places do
            not fit the step.
    """
    step, group = call.step, call.group
    pages = tuple(page for page in call.pages if isinstance(page, Tensor))
    if step.config.groups[group].window is not None or step.config.policy is not None:
        raise ValueError("indices: expected a layer without a window, whose pages all stay")
    if call.scoring.tree is not None:
        raise ValueError("indices: expected none beside a tree, of which each query is a row here")
    if len(pages) < 2:
        raise ValueError(f"indices: expected dense pages, got {step.config.kv_format!r}")
    if call.scoring.is_biased:
        raise ValueError("indices: expected None with a bias by distance, which they do not tell")
    apart = indices.ndim == 3  # each KV head chooses for itself
    q, (tokens, own) = call.q, (step.num_tokens, step.positions[:, None])
    heads = step.config.shapes[group].num_kv_heads
    shape = [tokens, heads] if apart else [tokens]
    if [*indices.shape[:-1]] != shape or not indices.shape[-1]:
        raise ValueError(f"indices: expected shape {[*shape, 'n']}, got {list(indices.shape)}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices: expected int32 or int64, got {indices.dtype}")
    if indices.device != q.device:
        raise ValueError(f"indices: expected device {q.device}, got {indices.device}")
    if apart:
        if call.scoring.sinks is not None:
            raise ValueError("sinks: expected None where KV heads choose each for itself")
        q = q.reshape(tokens * heads, -1, q.shape[2])
        indices, own = indices.flatten(0, 1), own.repeat_interleave(heads, 0)
    behind = step.config.max_sequence_length  # ignored places are sorted behind all tokens
    counted = (indices >= 0) & (indices <= own)
    places = torch.where(counted, indices, behind).sort(1).values
    places[:, :1] = torch.minimum(places[:, :1], own)  # if there are none, the query itself
    counts = counted.sum(1).clamp_(min=1).int()
    k, v = (_by_slot(page, apart) for page in pages)
    if len(k) >= 2**31:
        raise ValueError(f"indices: expected fewer than 2**31 slots of all heads, got {len(k)}")
    return Chosen(q, (k, v), _slots(step, group, places, pages[0], apart), counts)


def _unit(pages: Tensor, apart: bool) -> int:
    """Returns how many elements apart two adjacent ids are, of slots or of heads of slots."""
    _, head, slot, _ = pages.stride()
    return min(head, slot) if apart else slot


def _by_slot(pages: Tensor, apart: bool = False) -> Tensor:
    """Views pages `[N, G, P, D]` as pages of one slot, and of one head if heads are apart."""
    count, heads, size, dim = pages.shape
    page, head, slot, _ = pages.stride()
    unit = _unit(pages, apart)
    last = (count - 1) * page + (size - 1) * slot + apart * (heads - 1) * head
    shape = last // unit + 1, 1 if apart else heads, 1, dim
    return pages.as_strided(shape, (unit, head, unit, 1))


def _slots(step: StepMetadata, group: int, places: Tensor, pages: Tensor, apart: bool) -> Tensor:
    """Returns the ids, as pages of one slot, of tokens at places `[T, n]` of a step's rows.

    Args:
        apart: whether each KV head has its own places, `[T * G, n]`.
    """
    table, size = step.page_table(group), step.config.page_size
    (page, head, slot, _), unit = pages.stride(), _unit(pages, apart)
    rows = torch.arange(len(table), device=table.device)
    rows = rows.repeat_interleave(step.query_start_loc.diff(), output_size=step.num_tokens)
    heads = torch.arange(len(places) // step.num_tokens, device=table.device)
    rows = rows.repeat_interleave(len(heads))
    columns = (places // size).clamp_(max=table.shape[1] - 1)
    ids = table[rows[:, None], columns].clamp_(min=0).long() * (page // unit)
    ids += places % size * (slot // unit)
    return (
        (ids.unflatten(0, (-1, len(heads))) + heads[:, None] * (head // unit)).flatten(0, 1).int()
    )
