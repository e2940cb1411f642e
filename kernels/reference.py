"""The mathematics, on one page: a plain-torch twin of every launcher.

Slow and obvious on purpose. Tests compare the other implementations with these functions; float64
tensors give the truth. Shapes and symbols are those of `docs/notation.md`; page tensors are logical
`[N, G, P, D]`, whatever their strides are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .formats import Pages
from .torch.codes import decode, encode


def write_kv(
    k: Tensor, v: Tensor, k_pages: Tensor | Pages, v_pages: Tensor | Pages, slots: Tensor
) -> None:
    """Writes token t of `k` and `v` `[T, G, D]` to slot `slots[t]`, in place; -1 writes nothing.

    If there are staging pages, only their slots are written: coded pages are written whole, by
    `write_pages` and `encode_pages`. V's pages may be the first columns of K's.
    """
    for new, pages in ((k, Pages.of(k_pages)), (v, Pages.of(v_pages))):
        count, _, page_size, _ = pages.data.shape
        for token, slot in enumerate(slots.tolist()):
            page, at = divmod(slot, page_size)
            if slot < 0 or (pages.staging is not None and page < count):
                continue
            if pages.staging is not None:
                pages.staging[page - count, :, at] = new[token]
            elif pages.format.dense:
                pages.data[page, :, at] = new[token]
            else:
                words, scales = encode(new[token, :, None], pages.format, _static(pages))
                pages.data[page, :, at] = words[:, 0]
                if pages.scales is not None and not pages.format.static:
                    pages.scales[page, :, at] = scales[:, 0]


def _static(pages: Pages) -> Tensor | None:
    """A static scale as `encode` and `decode` take it."""
    return pages.scales[:, None, None] if pages.scales is not None else None


def encode_pages(k_pages: Pages, v_pages: Pages, source: Tensor, target: Tensor) -> None:
    """Codes whole staging pages of all layers, in place: page `source[i]` becomes `target[i]`.

    Args:
        k_pages, v_pages: with an axis of layers in front of all their tensors.
        source: `[n]` int64, ids of staging pages.
        target: `[n]` int64, ids of coded pages.
    """
    for pages in (*_layers(k_pages), *_layers(v_pages)):
        assert pages.staging is not None
        _put(pages, target, pages.staging[source - pages.data.shape[0]])


def write_pages(
    k: Tensor,
    v: Tensor,
    k_pages: Pages,
    v_pages: Pages,
    first_token: Tensor,
    target: Tensor,
) -> None:
    """Codes pages that one step fills, in place: `target[i]` holds tokens `first_token[i] ..`.

    Args:
        k, v: `[T, G, D]`, of one layer.
        first_token, target: `[n]` int64.
    """
    for new, pages in ((k, k_pages), (v, v_pages)):
        size = pages.data.shape[2]
        rows = first_token[:, None] + torch.arange(size, device=first_token.device)
        _put(pages, target, new[rows].transpose(1, 2))


def decode_pages(k_pages: Pages, v_pages: Pages, source: Tensor, target: Tensor) -> None:
    """Decodes pages of all layers, in place: page `target[i]` gets the values of `source[i]`.

    Args:
        k_pages, v_pages: as in `encode_pages`.
        source: `[n]` int64, ids of coded pages.
        target: `[n]` int64, ids of staging pages.
    """
    for pages in (*_layers(k_pages), *_layers(v_pages)):
        assert pages.staging is not None
        values = read_pages(pages, source, pages.staging.dtype)
        pages.staging[target - pages.data.shape[0]] = values


def _layers(pages: Pages) -> list[Pages]:
    """Splits pages that have an axis of layers in front into those of each layer."""
    return [pages.each(lambda x: x[layer]) for layer in range(len(pages.data))]  # noqa: B023


def _put(pages: Pages, target: Tensor, values: Tensor) -> None:
    """Codes `[n, G, P, D]` as pages."""
    if pages.format.dense:
        pages.data[target] = values
        return
    words, scales = encode(values, pages.format, _static(pages))
    pages.data[target] = words
    if pages.scales is not None and not pages.format.static:
        pages.scales[target] = scales


def read_pages(pages: Tensor | Pages, page_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Copies what is in pages, be they coded, dense or staging pages: `[n, G, P, D]`."""
    pages = Pages.of(pages)
    ids, count = page_ids.long(), len(pages.data)
    coded = ids if pages.staging is None else ids.clamp(max=count - 1)
    if pages.format.dense:
        found = pages.data[coded].to(dtype)
    else:
        assert pages.scales is not None
        scales = _static(pages) if pages.format.static else pages.scales[coded]
        assert scales is not None
        found = decode(pages.data[coded], scales, pages.format, dtype)
    if pages.staging is not None:
        found[ids >= count] = pages.staging[ids[ids >= count] - count].to(dtype)
    return found


def copy_pages(pages: Tensor, source: Tensor, target: Tensor, into: Tensor | None = None) -> None:
    """Copies whole pages of all layers of `[L, N, G, P, D]`, in place or `into` another storage."""
    (pages if into is None else into)[:, target] = pages[:, source].clone()


def gather_pages(
    pages: Tensor | Pages,
    page_ids: Tensor,
    begin: int,
    end: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Copies the tokens in slots `begin..end` of a row of pages: `[end - begin, G, D]`.

    Args:
        dtype: what they are decoded into; default that of the pages.
    """
    found = read_pages(pages, page_ids, dtype or Pages.of(pages).data.dtype)
    return found.transpose(1, 2).flatten(0, 1)[begin:end].clone()


def paged_attention(
    q: Tensor,
    k_pages: Tensor | Pages,
    v_pages: Tensor | Pages,
    page_table: Tensor,
    kv_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    distance_bias: Tensor | None = None,
    tree: Tensor | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of every row's new tokens over the row's pages.

    Row b owns queries `query_start_loc[b] .. query_start_loc[b + 1]`, the last of its
    `kv_lens[b]` tokens. A query at position i sees positions j with `i - window < j <= i`.

    Args:
        q: `[T, H, D]`.
        page_table: `[B, max_pages]`, int. Entries that no visible position needs are not read.
        kv_lens: `[B]`, int, tokens. Counts the new ones.
        query_start_loc: `[B + 1]`, int.
        sinks: `[H]`, a score per head that takes its share of the weights and has no value.
        alibi_slopes: `[H]`; the score of a token d places in front of the query is slope * d less.
        distance_bias: `[T, H, n]`, what such a score is more; nothing from n places on.
        tree: `[T]` int64. Bit d of a query says whether it sees the token d places in front of it,
            for d below 63; it sees all that are farther. There is no window then, and no bias.
        causal: if not, every query sees all tokens of its row; there are no terms by distance then.

    Returns:
        Output `[T, H, D]` in the dtype of `q`, D that of V, and the log-sum-exp of the scores, the
        sink's included, `[T, H]` in float32 (float64 for float64 input). A query without keys gives
        zeros and -inf, or its sink.
    """
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(*q.shape[:2], Pages.of(v_pages).head_dim)
    none = torch.full(q.shape[1:2], -math.inf, dtype=exact, device=q.device)
    sink = none if sinks is None else sinks.to(exact)
    lse = sink.expand(q.shape[:2]).clone()
    _, kv_heads, page_size, _ = Pages.of(k_pages).data.shape
    group_size = q.shape[1] // kv_heads
    for row, kv_len in enumerate(kv_lens.tolist()):
        start, stop = query_start_loc[row : row + 2].tolist()
        for token in range(start, stop):
            last = kv_len - (stop - token if causal else 1)  # position of this query, if causal
            first = 0 if window is None else max(0, last - window + 1)
            if last < first:
                continue
            ids = page_table[row, first // page_size : last // page_size + 1]
            begin = first % page_size
            k, v = (
                gather_pages(pages, ids, begin, begin + last - first + 1, exact)
                for pages in (k_pages, v_pages)
            )
            k = k.repeat_interleave(group_size, dim=1)  # [n, H, D]
            v = v.repeat_interleave(group_size, dim=1)
            scores = torch.einsum("hd,nhd->hn", q[token].to(exact), k) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                distance = torch.arange(last - first, -1, -1, device=q.device)
                scores = scores - alibi_slopes.to(exact)[:, None] * distance
            if distance_bias is not None:
                near = distance_bias[token].to(exact)[:, : last - first + 1].flip(-1)
                scores[:, -near.shape[1] :] += near
            if tree is not None:
                back = last - torch.arange(first, last + 1, device=q.device)
                hidden = ((tree[token] >> back.clamp(max=63)) & 1 == 0) & (back < 63)
                scores = scores.masked_fill(hidden, -math.inf)
            lse[token] = torch.logaddexp(scores.logsumexp(-1), sink)
            weights = (scores - lse[token, :, None]).exp()
            out[token] = torch.einsum("hn,nhd->hd", weights, v).to(q.dtype)
    return out, lse
