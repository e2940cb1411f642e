"""Every family of decoders generates the same tokens from pages as from transformers' own cache."""

import pytest

from pagedkv.hf import PagedCache
from tests.effort import examples, few, sampled
from tests.hf.tiny import (
    FAMILIES,
    NEW,
    VARIED,
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
def test_greedy_tokens_are_the_same_for_every_page_size(model):
    batch = padded(prompts(13, 5, 9))
    before, expected = attention_of(model), generate(model, batch, max_new_tokens=NEW)
    for page_size in (4, 1, 16)[: examples(3)]:
        with PagedCache(model, page_size=page_size, max_tokens=512) as cache:
            found = generate(model, batch, cache, max_new_tokens=NEW)
            assert_same_tokens(found, expected)
            cache.kv.check()
        assert attention_of(model) == before


@pytest.mark.parametrize("model", few(FAMILIES, *VARIED[::2]), indirect=True)
def test_three_beams_are_the_same(model):
    batch = padded(prompts(13, 5, 9))
    beams = {"num_beams": 3, "max_new_tokens": NEW}
    expected = generate(model, batch, **beams)
    with PagedCache(model, page_size=4, max_tokens=2048) as cache:
        assert_same_tokens(generate(model, batch, cache, **beams), expected)
        cache.kv.check()
