"""The torch backend's functions for coded pages: write, code and decode staging pages, gather.

`formats.py` says what words and scales mean; this file writes and reads them in pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkv.kernels.formats import Pages

from .codes import decode, encode


def write_kv(k: Tensor, v: Tensor, k_pages: Pages, v_pages: Pages, slots: Tensor) -> None:
    """Twin of `reference.write_kv`, for slots that are all >= 0.

    Tokens for staging pages are stored as they are, others are coded one by one.
    """
    for new, pages in ((k, k_pages), (v, v_pages)):
        count, _, size, _ = pages.data.shape
        page, slot = slots // size, slots % size
        if pages.staging is not None:
            pages.staging[page - count, :, slot] = new
        elif pages.format.dense:
            pages.data[page, :, slot] = new
        else:
            words, scales = encode_tokens(new, pages)
            pages.data[page, :, slot] = words
            if not pages.format.static:
                assert pages.scales is not None
                pages.scales[page, :, slot] = scales


def encode_tokens(x: Tensor, pages: Pages) -> tuple[Tensor, Tensor]:
    """Codes `[T, G, D]` token by token: words `[T, G, D / 2 or 4]`, scales `[T, G, ...]`."""
    assert pages.scales is not None
    return encode(x, pages.format, pages.scales[:, None] if pages.format.static else None)


def write_pages(
    k: Tensor, v: Tensor, k_pages: Pages, v_pages: Pages, first_token: Tensor, target: Tensor
) -> None:
    """Twin of `reference.write_pages`."""
    for new, pages in ((k, k_pages), (v, v_pages)):
        tokens = first_token[:, None] + torch.arange(pages.data.shape[2], device=new.device)
        _store(pages, target, new[tokens].transpose(1, 2))


def encode_pages(k_pages: Pages, v_pages: Pages, source: Tensor, target: Tensor) -> None:
    """Twin of `reference.encode_pages`."""
    for layer in _layers(k_pages, v_pages):
        assert layer.staging is not None
        _store(layer, target, layer.staging[source - layer.data.shape[0]])


def decode_pages(k_pages: Pages, v_pages: Pages, source: Tensor, target: Tensor) -> None:
    """Twin of `reference.decode_pages`."""
    for layer in _layers(k_pages, v_pages):
        assert layer.staging is not None
        values = read_pages(layer, source, layer.staging.dtype)
        layer.staging[target - layer.data.shape[0]] = values


def _layers(*pages: Pages) -> list[Pages]:
    return [one.each(lambda x: x[i]) for one in pages for i in range(one.data.shape[0])]  # noqa: B023


def _store(pages: Pages, target: Tensor, values: Tensor) -> None:
    """Codes values `[n, G, P, D]` into pages of one layer."""
    if pages.format.dense:
        pages.data[target] = values
        return
    assert pages.scales is not None
    static = pages.scales[:, None, None] if pages.format.static else None
    words, scales = encode(values, pages.format, static)
    pages.data[target] = words
    if static is None:
        pages.scales[target] = scales


def read_pages(pages: Pages, ids: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Values of pages of one layer, coded or staging: `[n, G, P, D]`.

    Args:
        ids: `[n]` int64.
        out: tensor that takes the values; made unless given.
    """
    count = pages.data.shape[0]
    # Page 0 stands in for staging pages: in a growing pool it always exists, the last may not.
    coded = ids if pages.staging is None else ids.masked_fill(ids >= count, 0)
    words = _chosen(pages.data, coded)
    if pages.format.dense:
        out = words if out is None else out.copy_(words)
    else:
        assert pages.scales is not None
        static = pages.format.static
        scales = pages.scales[:, None, None] if static else pages.scales.index_select(0, coded)
        out = decode(words, scales, pages.format, dtype, out)
    if pages.staging is not None:
        staged = (ids >= count).nonzero().squeeze(1)
        out[staged] = pages.staging[ids[staged] - count].to(out.dtype)
    return out


def _chosen(data: Tensor, ids: Tensor) -> Tensor:
    """Returns `data[ids]` of `[N, G, P, width]`; copies each page in one piece if possible."""
    by_slot = data.transpose(1, 2)
    if by_slot.is_contiguous():
        return by_slot.index_select(0, ids).transpose(1, 2)
    return data.index_select(0, ids)
