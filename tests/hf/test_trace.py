"""`trace=` of `PagedCache` and `BatchGenerator` records pages of their own."""

import pytest
import torch

from pagedkv import BatchGenerator, PagedCache, PagedKVCache
from pagedkv.hf.model import cache_config
from pagedkv.trace import replay
from tests.hf.tiny import named, tiny
from tests.trace.recorded import assert_same_pages


@pytest.fixture(scope="module")
def model():
    return tiny()


def test_generate_is_recorded_with_its_forks_and_beams(model, tmp_path):
    ids = torch.arange(1, 10)[None]
    plain = PagedCache(model, max_tokens=256, page_size=4)
    cache = PagedCache(model, max_tokens=256, page_size=4, trace=tmp_path / "a.trace")
    assert plain.kv is not cache.kv
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3}
    expected = model.generate(ids, **named(plain), **options)
    assert torch.equal(model.generate(ids, **named(cache), **options), expected)
    assert_same_pages(replay(tmp_path / "a.trace"), cache.kv)


def test_a_batch_is_recorded(model, tmp_path):
    sizes = {"max_tokens": 256, "page_size": 4, "verify_width": 3}
    generator = BatchGenerator(model, trace=tmp_path / "a.trace", **sizes)
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [7, 8]]
    generator.generate(prompts, max_new_tokens=8, do_sample=False)
    assert_same_pages(replay(tmp_path / "a.trace"), generator.cache)


def test_pages_of_the_same_trace_are_one_pool(model, tmp_path):
    sizes = {"max_tokens": 128, "page_size": 4, "trace": tmp_path / "a.trace"}
    a, b = PagedCache(model, **sizes), PagedCache(model, **sizes)
    assert a.kv is b.kv


def test_pages_that_are_there_already_are_not_recorded_from_their_middle(model, tmp_path):
    kv = PagedKVCache(cache_config(model, 128), device="cpu")
    with pytest.raises(ValueError, match="trace: expected none beside a cache"):
        PagedCache(model, cache=kv, trace=tmp_path / "a.trace")
    assert not (tmp_path / "a.trace").exists()
