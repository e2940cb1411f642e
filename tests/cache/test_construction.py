"""What a cache is refused before any of its memory is taken."""

import re

import pytest

from pagedkv import CacheConfig, PagedKVCache, PagedKVError
from pagedkv.errors import BudgetExceeded
from tests.cases import one_group


def test_more_bytes_than_there_is_memory_are_refused_before_anything_is_allocated():
    config = CacheConfig(80, 64, 256, "float32", max_tokens=2**27)
    with pytest.raises(BudgetExceeded) as caught:
        PagedKVCache(config, device="cpu")
    assert isinstance(caught.value, MemoryError)
    assert caught.value.needed == config.nbytes
    assert 0 < caught.value.available < config.nbytes
    assert re.search(r"\d", str(caught.value))


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
