"""Copying whole pages, K and V of all layers at once, as copy-on-write does.

The baseline copies as many bytes from one contiguous tensor to another.
"""

from typing import NamedTuple

import pytest
import torch

from benchmarks import kernel_cases as cases
from benchmarks.measuring import Bench, What
from pagedkv import CacheConfig, PagedKVCache
from pagedkv.kernels import reference


class Pages(NamedTuple):
    """How many pages are copied, and of what; the pool holds four times as many."""

    layers: int
    count: int
    kv_heads: int
    head_dim: int
    page_size: int = 16

    def config(self, dtype: torch.dtype) -> CacheConfig:
        return CacheConfig(
            num_layers=self.layers,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=str(dtype).removeprefix("torch."),
            max_tokens=4 * self.count * self.page_size,
            page_size=self.page_size,
        )


CELLS = {
    "small": [Pages(2, 4, 2, 64), Pages(3, 1, 2, 64)],
    "cpu": [Pages(30, 1, 3, 64), Pages(30, 64, 3, 64), Pages(4, 64, 8, 128)],
    "cuda": [
        Pages(32, 1, 8, 128),
        Pages(32, 16, 8, 128),
        Pages(32, 256, 8, 128),
        Pages(32, 64, 8, 128, page_size=64),
        Pages(1, 1024, 8, 128),
    ],
}


def label(cell: Pages, dtype: torch.dtype) -> str:
    """Layers, pages, heads, page size, dtype."""
    layers, count, heads, dim, size = cell
    return f"L{layers}-N{count}-G{heads}-D{dim}-p{size}-{cases.NAMES[dtype]}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases.spread(metafunc, CELLS, (*cases.backends(), "copy"), label)


def bench_copy(bench: Bench, device: torch.device, cell: Pages, way: str) -> None:
    dtype = cases.dtype_here()
    config = cell.config(dtype)
    moved = 2 * cell.count * config.bytes_per_page()  # read, and written
    shape = {**cell._asdict(), "dtype": cases.NAMES[dtype]}
    what = What("copy", label(cell, dtype), way, moved, baseline=way == "copy", shape=shape)
    if way == "copy":
        source, target = torch.randn(2, moved // 8, device=device)  # half of it each
        bench(lambda: target.copy_(source), what, cases.check_pools([target], [source]))
        return
    storage = PagedKVCache(config, device=device, backend=way)._storage
    pools = [*storage.k, *storage.v]
    for pool in pools:
        pool.normal_()
    pages = torch.randperm(config.num_pages(), device=device)
    source, target = pages[: cell.count], pages[cell.count : 2 * cell.count]
    expected = [pool.clone() for pool in pools]
    for twin in expected:
        reference.copy_pages(twin, source, target)

    ids = source.cpu().numpy(), target.cpu().numpy()

    def call() -> None:
        storage.copy_pages(0, *ids)

    bench(call, what, cases.check_pools(pools, expected))
