"""Every family of decoders generates the same tokens from pages as from transformers' own cache."""

import pytest

from pagedkv.hf import PagedCache
from tests.effort import examples, sampled
from tests.hf.tiny import (
    FAMILIES,
    NEW,
    assert_same_tokens,
    attention_of,
    generate,
    padded,
    prompts,
    tiny,
)


@pytest.fixture(params=FAMILIES)
def model(request):
    model = tiny(request.param)
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # SDPA leaves the softcap out
    return model


@sampled
def test_greedy_tokens_are_the_same_for_every_page_size_and_no_dense_keys_are_built(
    model, monkeypatch
):
    batch = padded(prompts(13, 5, 9))
    before, expected = attention_of(model), generate(model, batch, max_new_tokens=NEW)
    monkeypatch.setattr(PagedCache, "update_dense", None)
    for page_size in (4, 1, 16)[: examples(3)]:
        with PagedCache(model, page_size=page_size, max_tokens=512) as cache:
            found = generate(model, batch, cache, max_new_tokens=NEW)
            assert_same_tokens(found, expected)
            cache.kv.check()
        assert attention_of(model) == before
