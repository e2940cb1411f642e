"""A cache is refused before any of its memory is taken."""

import re

import numpy as np
import pytest

from pagedkv import CacheConfig, PagedKVCache, PagedKVError
from pagedkv.errors import BudgetExceeded
from tests.cases import one_group, two_groups


def test_more_bytes_than_there_is_memory_are_refused_before_anything_is_allocated():
    config = CacheConfig(80, 64, 256, "float32", max_tokens=2**27)
    with pytest.raises(BudgetExceeded) as caught:
        PagedKVCache(config, device="cpu")
    assert isinstance(caught.value, MemoryError)
    assert caught.value.needed == config.nbytes
    assert 0 < caught.value.available < config.nbytes
    assert re.search(r"\d", str(caught.value))


def test_tables_for_which_there_is_no_memory_are_refused_before_they_are_made():
    """If pages are small, or come as they are needed, tables take more memory than the pages."""
    config = CacheConfig(1, 1, 1, "float16", max_tokens=2**31 - 16, growth_step=16)
    with pytest.raises(
        BudgetExceeded, match="tables for 2147483632 tokens, 256 sequences"
    ) as caught:
        PagedKVCache(config, device="cpu")
    assert caught.value.needed == config.nbytes_of_books


def test_the_tables_that_are_counted_are_those_that_are_made():
    for config in (
        CacheConfig(1, 1, 8, "float16", max_tokens=2**18),
        two_groups(16, max_tokens=2**14),
    ):
        tables = PagedKVCache(config, device="cpu")._tables
        found = tables.tables.nbytes + tables.index.tokens.nbytes + tables.column_of.nbytes
        found += sum(x.nbytes for x in vars(tables.pool).values() if isinstance(x, np.ndarray))
        assert 0.8 * config.nbytes_of_books < found < 1.2 * config.nbytes_of_books


@pytest.mark.parametrize("device", ["gpu", "", "cpu:one", 1.5, None])
def test_what_is_no_device_is_answered_with_names_of_devices(device):
    with pytest.raises(
        (ValueError, TypeError), match=rf"device: expected auto, cpu, .* got {device!r}$"
    ):
        PagedKVCache(one_group(), device=device)


@pytest.mark.parametrize(
    "options", [{"device": "abacus"}, {"backend": "abacus"}, {"backend": "triton"}], ids=str
)
def test_an_unknown_device_or_a_backend_that_cannot_run_is_refused(options):
    with pytest.raises((ValueError, RuntimeError, PagedKVError, ImportError, NotImplementedError)):
        PagedKVCache(one_group(), **{"device": "cpu", **options})
