"""Helpers for tests of all modes of `generate`: the models, and both ways to run them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagedkv.hf import PagedCache
from tests.hf.tiny import LATENT, generate, named, tiny
from tests.hybrids import HYBRIDS, tiny_hybrid

SIZES = {"max_tokens": 512, "page_size": 4}
# Families of `tiny.py` whose layers differ in the shape of K and V, or share these.
UNEVEN = [
    "gemma3n", "gemma4", "gemma4_one_shape", "gemma4_large", "gemma4_unified", "mimo_v2_flash",
    *LATENT,
]  # fmt: skip


@functools.cache
def made(family: str) -> PreTrainedModel:
    """A model of a family, the same for all tests."""
    torch.manual_seed(0)
    return (tiny_hybrid if family in HYBRIDS else tiny)(family)


def paged(model: PreTrainedModel, batch, cache: PagedCache | None = None, **options) -> Tensor:
    """Runs `generate` over a cache, which must be whole afterwards."""
    torch.manual_seed(5)
    with cache or PagedCache(model, **SIZES) as cache:
        found = generate(model, batch, **named(cache), **options).sequences
        cache.kv.check()
    return found


def own(model: PreTrainedModel, batch, **options) -> Tensor:
    """Runs `generate` over the model's own cache."""
    torch.manual_seed(5)
    return generate(model, batch, **options).sequences


def visible(cache: PagedCache) -> tuple[list[int], list[Tensor]]:
    """All bytes that a row can see."""
    found = [cache.kv.length(row) for row in cache.rows]
    tensors = []
    for row in cache.rows:
        for layer in range(cache.kv.config.num_layers):
            tensors += cache.kv.gather(row, layer)
        for layer in range(len(cache.kv.config.states)):
            tensors += cache.kv.read_state([row], layer)
    return found, [tensor.clone() for tensor in tensors]
