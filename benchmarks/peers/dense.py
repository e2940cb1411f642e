"""Attention over contiguous K and V: torch's own as a peer, and the truth in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.cells import Call, Case, Check, Peer

SAMPLED = 1024  # query tokens that are checked, when there are more
CHUNK = 64  # query tokens whose scores are in memory at once


def alike(case: Case) -> Iterator[tuple[slice, slice, int, int]]:
    """Neighbouring rows of one shape: rows, tokens, length, new tokens per row."""
    shapes = zip(case.cell.kv_lens, case.cell.new)
    row = token = 0
    for (length, new), group in groupby(shapes):
        count = len(list(group))
        yield slice(row, row + count), slice(token, token + count * new), length, new
        row, token = row + count, token + count * new


def dense(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """Rows of pages as `[B, G, length, D]`: one pass over the memory, then views."""
    count = -(-length // pages.shape[2])
    ids = table[:, :count].flatten()
    rows = pages.transpose(0, 1).index_select(1, ids)  # [G, B * count, P, D]
    return rows.view(pages.shape[1], len(table), -1, pages.shape[3]).transpose(0, 1)[:, :, :length]


def attend_dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of the last tokens: q `[B, new, H, D]`, K and V `[B, G, length, D]`."""
    rows, new, h, d = q.shape
    g, length = k.shape[1:3]
    if new == 1:  # the heads of a group become queries, so that K and V are read once
        grouped = q.view(rows, g, h // g, d)
        return F.scaled_dot_product_attention(grouped, k, v, scale=scale).reshape(rows, h, -1)
    mask = None if new == length else causal_lower_right(new, length)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=h != g,
    )
    return out.transpose(1, 2).reshape(rows * new, h, -1)


def sdpa(gather: bool) -> Peer:
    """SDPA on contiguous K and V, cuDNN or flash first; without the gather it is a ceiling."""
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    order += [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def peer(case: Case) -> Call:
        def keys(rows: slice, length: int) -> tuple[Tensor, Tensor]:
            table = case.page_table[rows]
            return dense(case.k_pages, table, length), dense(case.v_pages, table, length)

        buckets = list(alike(case))
        ready = [None if gather else keys(rows, length) for rows, _, length, _ in buckets]
        out, on_gpu = case.output(), case.q.device.type == "cuda"

        def call() -> Tensor:
            with sdpa_kernel(order, set_priority=True) if on_gpu else nullcontext():
                for (rows, tokens, length, new), at_hand in zip(buckets, ready):
                    k, v = at_hand or keys(rows, length)
                    q = case.q[tokens].unflatten(0, (-1, new))
                    out[tokens] = attend_dense(q, k, v, case.scale)
            return out

        return call

    return peer


def sample(case: Case) -> Tensor:
    """Tokens to check: all of them, or a random choice with the ends of every row."""
    count = len(case.q)
    if count <= SAMPLED:
        return torch.arange(count)
    starts = torch.tensor((0, *case.cell.new)).cumsum(0)
    some = torch.randint(count, (SAMPLED,))
    return torch.cat([starts[:-1], starts[1:] - 1, some]).unique()


def truth(case: Case, tokens: Tensor) -> Tensor:
    """Computes some tokens' output, `[len(tokens), H, D]`, in float64 from gathered K and V."""
    (h, g, d), width = case.cell.heads, case.v_pages.shape[3]
    out = torch.empty(len(tokens), h, width, dtype=torch.float64, device=case.q.device)
    starts = torch.tensor((0, *case.cell.new)).cumsum(0)
    for row, (length, new) in enumerate(zip(case.cell.kv_lens, case.cell.new)):
        table = case.page_table[row : row + 1]
        k, v = (dense(x, table, length)[0].double() for x in (case.k_pages, case.v_pages))
        chosen = ((tokens >= starts[row]) & (tokens < starts[row + 1])).nonzero()[:, 0]
        for at in chosen.split(CHUNK):
            last = (tokens[at] - starts[row] + length - new).to(out.device)
            q = case.q[tokens[at].to(out.device)].double().view(len(at), g, h // g, d)
            scores = torch.einsum("nghd,gkd->nghk", q, k) * case.scale
            hidden = torch.arange(length, device=out.device) > last[:, None]
            weights = scores.masked_fill_(hidden[:, None, None], -torch.inf).softmax(-1)
            out[at.to(out.device)] = torch.einsum("nghk,gkd->nghd", weights, v).flatten(1, 2)
    return out


def error(out: Tensor, true: Tensor) -> float:
    """Norm of the difference over the norm of the truth; NaN if anything is."""
    return ((out.double() - true).norm() / true.norm()).item()


def check_attention(case: Case) -> Check:
    """Compares some tokens' output with the truth."""
    tokens = sample(case)
    true = truth(case, tokens)
    tokens = tokens.to(case.q.device)
    return lambda call: error(call()[tokens], true)
