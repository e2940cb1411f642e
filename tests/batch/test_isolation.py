"""What one prompt holds changes no answer to another."""

import math

import pytest
import torch

pytest.importorskip("transformers")

from pagedkv import BatchGenerator, PagedKVCache
from pagedkv.hf.model import cache_config
from tests.attention.test_not_numbers import BACKENDS
from tests.hf.tiny import tiny

OPTIONS = {"max_new_tokens": 4, "do_sample": False}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prompt_that_is_no_number_leaves_its_beginning_as_it_is_for_others(backend):
    """Kept pages of a prefix were computed beside the tokens behind it."""
    model, shared, overflows = tiny(), [*range(5, 25)], 100
    with torch.no_grad():
        model.get_input_embeddings().weight[overflows, 0] = math.inf
    cache = PagedKVCache(cache_config(model, max_tokens=256), device="cpu", backend=backend)
    with BatchGenerator(model, cache=cache) as batched:
        (expected,) = batched.generate([[*shared, 3]], **OPTIONS)
        cache.clear_prefixes()
        batched.generate([[*shared, overflows, 4]], **OPTIONS)
        (found,) = batched.generate([[*shared, 3]], **OPTIONS)
    assert found.cached_tokens
    assert found.tokens == expected.tokens
