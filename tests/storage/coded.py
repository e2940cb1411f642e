"""Texts fed into pages in fewer bits, and the bytes that they became."""

import torch

from pagedkv import CacheConfig, paged_attention
from pagedkv.attention.api import gather_kv

CODED = ["fp8", "int8", "int4"]
PAIRS = [*CODED, ("int8", "int4"), ("int4", "fp8"), ("dense", "int4"), ("int8", "dense")]
HEADS, DIM, LAYERS = 2, 32, 2


def config(kv_format, **fields):
    sizes = {"max_tokens": 512, "page_size": 16, "max_sequences": 8, **fields}
    return CacheConfig(LAYERS, HEADS, DIM, "float32", kv_format=kv_format, **sizes)


def kv(tokens, seed=0):
    """K and V of every layer `[L, n, G, D]`: K with channels of very different size."""
    source = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, LAYERS, tokens, HEADS, DIM, generator=source)
    return k * (4 * torch.rand(HEADS, DIM, generator=source)), v


def feed(cache, seqs, texts, accepted=None):
    """One step: each sequence gets its `(k, v)`; returns what attention made of each layer."""
    counts = [k.shape[1] for k, _ in texts]
    outs = []
    step = cache.prepare(seqs, num_new=counts)
    for layer in range(LAYERS):
        k, v = (torch.cat([text[i][layer] for text in texts]) for i in (0, 1))
        q = torch.cat([v, k], 1)  # 4 query heads
        outs.append((q, paged_attention(q, k, v, step, layer), gather_kv(step, layer)))
    cache.commit(step, accepted)
    cache.check()
    return counts, outs


def part(text, begin, end):
    return tuple(x[:, begin:end] for x in text)


def words(cache, seq):
    """All bytes of a sequence's pages but for the last, page by page."""
    tables, storage = cache._tables, cache._storage
    row = tables.row_of(seq)
    pages = tables.tables[0, row, : int(tables.lengths[row]) // cache.config.page_size]
    found = []
    for of in storage._groups[0]:
        for page in pages.tolist():
            count = of.data.shape[1]
            if page < count:
                found.append(of.data[:, page].clone())
                if of.scales is not None and not of.format.static:
                    found.append(of.scales[:, page].clone())
            else:
                found.append(of.staging[:, page - count].clone())
    return found
