"""Small caches with a host tier, and what they hold."""

import torch

from pagedkv import PagedKVCache, write_kv
from pagedkv.offload.host_storage import HostStorage
from tests.cases import one_group

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def make(config=None, **fields) -> PagedKVCache:
    return PagedKVCache(
        config or one_group(**{"host_tokens": 64, **fields}), device="cpu", debug=True
    )


def write_anything(cache: PagedKVCache, step, seed: int) -> None:
    """K and V that are nobody else's."""
    source = torch.Generator().manual_seed(seed)
    shape = (step.num_tokens, cache.config.num_kv_heads, cache.config.head_dim)
    for layer in range(cache.config.num_layers):
        write_kv(*(torch.randn(shape, generator=source) for _ in "kv"), step, layer)


class Copies:
    """Pages copied out and in."""

    def __init__(self, monkeypatch) -> None:
        self.out, self.into = [], []
        for name, counts in (("keep", self.out), ("bring", self.into)):
            inner = getattr(HostStorage, name)

            def call(host, group, kind, here, there, inner=inner, counts=counts):
                counts.append(here.size)
                return inner(host, group, kind, here, there)

            monkeypatch.setattr(HostStorage, name, call)
