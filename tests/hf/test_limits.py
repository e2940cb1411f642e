"""A pool that is full, a cache that is closed, pages that do not fit: said early, survived."""

import pytest
import torch

from pagedkv.errors import OutOfPagesError, TooManySequencesError, UnsupportedModelError
from pagedkv.hf import PagedCache
from tests.hf.tiny import (
    assert_same_tokens,
    attention_of,
    build,
    generate,
    named,
    padded,
    prompts,
    tiny,
)


def test_full_pool_is_an_error_before_any_write_and_freeing_helps():
    model = tiny()
    sizes = {"page_size": 4, "max_tokens": 64}
    batch = padded(prompts(10, 6))
    expected = generate(model, batch, max_new_tokens=14)
    with PagedCache(model, **sizes) as cache, PagedCache(model, **sizes) as other:
        generate(model, padded(prompts(24)), other, max_new_tokens=2)
        with pytest.raises(OutOfPagesError, match="Free or truncate") as full:
            generate(model, batch, cache, max_new_tokens=14)
        assert full.value.pages_needed > full.value.pages_free
        length = cache.get_seq_length()
        assert 10 < length < 23
        assert [cache.kv.length(row) for row in cache.rows] == [length, length - 4]
        cache.kv.check()
        other.close()
        text = {"input_ids": expected.sequences[:, : length + 1]}
        new = torch.ones(2, length + 1 - 10, dtype=torch.long)
        text["attention_mask"] = torch.cat([batch["attention_mask"], new], dim=1)
        rest = generate(model, text, cache, max_new_tokens=23 - length)
        expected.logits = expected.logits[length - 9 :]
        assert_same_tokens(rest, expected)
        cache.kv.check()


def test_more_rows_than_sequences_are_refused_and_none_stays():
    model = tiny()
    with PagedCache(model, max_tokens=256, max_sequences=4) as cache:
        with pytest.raises(TooManySequencesError, match="max_sequences"):
            generate(model, padded(prompts(5, 5, 5)), cache, num_beams=2)
        assert cache.stats().sequences == 0
        generate(model, padded(prompts(5, 5)), cache, num_beams=2)


def test_prompt_that_can_never_fit_is_refused_at_once():
    model = tiny()
    with (
        PagedCache(model, page_size=4, max_tokens=16) as cache,
        pytest.raises(ValueError, match="can never fit"),
    ):
        generate(model, padded(prompts(17)), cache)


def test_step_too_long_for_the_window_layers_is_refused_with_advice():
    model = tiny("gemma3")
    batch = padded(prompts(9, 9))
    expected = generate(model, batch)
    with PagedCache(model, page_size=4, max_tokens=256, max_step_tokens=16) as cache:
        with pytest.raises(ValueError, match=r"max_step_tokens: .* chunks"):
            generate(model, batch, cache)
        assert cache.stats().live == 0
        assert_same_tokens(generate(model, batch, cache, prefill_chunk_size=8), expected)


def test_closed_cache_is_refused():
    model = tiny()
    cache = PagedCache(model, max_tokens=64)
    batch = padded(prompts(6))
    generate(model, batch, cache)
    cache.close()
    cache.close()
    uses = [
        lambda: generate(model, padded(prompts(30)), cache),
        lambda: generate(model, batch, cache),  # shorter than what the cache has seen
        cache.fork,
        lambda: cache.crop(-1),
        lambda: cache.batch_repeat_interleave(2),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="closed"):
            use()


def test_sizes_beside_a_given_cache_are_refused():
    model = tiny()
    with PagedCache(model, max_tokens=64) as cache:
        with pytest.raises(ValueError, match="cache:"):
            PagedCache(model, cache=cache.kv, page_size=4)
        with PagedCache(model, cache=cache.kv) as other:
            assert other.kv is cache.kv
    assert attention_of(model) == "sdpa"


def test_pages_of_another_shape_of_model_are_refused():
    small, large = tiny(), build("Llama", **{**tiny().config.to_dict(), "num_hidden_layers": 3})
    for mine, theirs in ((small, large), (large, small)):
        with PagedCache(theirs, max_tokens=64) as cache:
            with pytest.raises(ValueError, match="layers"):
                PagedCache(mine, cache=cache.kv)
            assert attention_of(mine) == "sdpa"


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("layers", [(2, 3), (3, 2), (2, 2)], ids=["larger", "smaller", "equal"])
@torch.no_grad()
def test_cache_of_another_model_is_stopped(layers, attached):
    mine, theirs = (tiny(num_hidden_layers=n) for n in layers)
    (text,) = prompts(5)
    with PagedCache(theirs, max_tokens=64) as cache, PagedCache(mine, max_tokens=64) as own:
        if not attached:
            own.close()

        def loop():
            for token in text:  # the first step alone may be right by chance
                mine(token[None, None], **named(cache))

        with pytest.raises((ValueError, UnsupportedModelError)):
            loop()
