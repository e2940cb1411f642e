"""`PagedCache` over models that keep recurrent states beside K and V: what is theirs alone."""

import numpy as np
import pytest
import torch

from pagedkv.errors import LayerWritesError, OutOfPagesError, UnsupportedModelError
from pagedkv.hf import PagedCache
from tests.effort import few
from tests.hf.modes import SIZES, made, own, paged, visible
from tests.hf.tiny import generate, named, padded, prompts
from tests.hybrids import HYBRIDS, STEPWISE

SERVED = sorted(HYBRIDS)
CHUNKED = sorted(set(SERVED) - STEPWISE)
SOME = ("qwen3_next", "lfm2", "falcon_h1", "nemotron_h")

chunked = pytest.mark.parametrize("family", few(CHUNKED, *SOME))


@pytest.fixture
def model_of():
    return made


# ------------------------------------------------------------------ a forward that fails


def test_a_state_layer_that_was_not_entered_is_named(model_of):
    model = model_of("qwen3_next")
    mixer = model.model.layers[1].linear_attn
    forward, mixer.forward = mixer.forward, lambda hidden_states, **_: hidden_states
    try:
        with PagedCache(model, **SIZES) as cache, torch.no_grad():
            with pytest.raises(LayerWritesError, match="state layers 1 wrote nothing"):
                model(prompts(5)[0][None], **named(cache), use_cache=True)
            assert cache.rows == []
            cache.kv.check()
    finally:
        mixer.forward = forward


def test_too_few_slots_are_an_error_before_anything_changed(model_of):
    model = model_of("lfm2")
    with PagedCache(model, max_states=2, **SIZES) as cache, torch.no_grad():
        model(prompts(6)[0][None], **named(cache), use_cache=True)
        forked = cache.fork(3)
        before = visible(forked)
        with pytest.raises(OutOfPagesError, match=r"3 state slots.*max_states"):
            model(torch.tensor([[3]] * 3), **named(forked), use_cache=True)
        now = visible(forked)
        assert now[0] == before[0]
        assert all(map(torch.equal, now[1], before[1]))
        forked.close()
        cache.kv.check()


def test_a_batch_of_another_size_is_refused_before_a_state_is_read(model_of):
    model = model_of("qwen3_next")
    with PagedCache(model, **SIZES) as cache, torch.no_grad():
        model(prompts(6)[0][None], **named(cache), use_cache=True)
        with pytest.raises(ValueError, match="expected 1 rows as before, got 2"):
            model(torch.tensor([[3]] * 2), **named(cache), use_cache=True)
        model(torch.tensor([[3]]), **named(cache), use_cache=True)
        assert cache.seen == 7
        cache.kv.check()


# ------------------------------------------------------------------ shorter texts


@chunked
def test_a_text_goes_back_to_a_checkpoint_and_nowhere_else(model_of, family):
    model, (text,) = model_of(family), prompts(12)
    with torch.no_grad(), PagedCache(model, rollback=8, **SIZES) as cache:
        model(text[None, :8], **named(cache), use_cache=True)
        cache.checkpoint()
        expected = model(text[None, 8:], **named(cache), use_cache=True).logits
        with pytest.raises(ValueError, match=r"a length of .* with a checkpoint .8., got 10"):
            cache.crop(-2)
        assert cache.get_seq_length() == 12
        cache.crop(8)
        assert torch.equal(model(text[None, 8:], **named(cache), use_cache=True).logits, expected)
        cache.reset()
        assert cache.kv.stats().states == 0  # nobody else can find the checkpoint


# ------------------------------------------------------------------ refused


@chunked
def test_padding_behind_a_rows_tokens_is_refused(model_of, family):
    model, (prefix,) = model_of(family), prompts(8)
    tails = padded(prompts(5, 3))
    mask = torch.cat([torch.ones(2, 8, dtype=torch.long), tails["attention_mask"]], 1)
    with PagedCache.prefill(model, prefix, **SIZES) as cache, cache.fork(2) as forked:
        before = visible(forked)
        with (
            torch.no_grad(),
            pytest.raises(UnsupportedModelError, match="padding behind a row's tokens"),
        ):
            model(tails["input_ids"], attention_mask=mask, **named(forked))
        assert all(map(torch.equal, visible(forked)[1], before[1]))


@pytest.mark.parametrize("family", sorted(STEPWISE))
def test_several_tokens_behind_a_state_that_a_scan_would_lose_are_refused(model_of, family):
    model, (text,) = model_of(family), prompts(8)
    with torch.no_grad(), PagedCache(model, **SIZES) as cache:
        model(text[None, :5], **named(cache), use_cache=True)
        with pytest.raises(UnsupportedModelError, match="lose it in this model's scan"):
            model(text[None, 5:], **named(cache), use_cache=True)
        model(text[None, 5:6], **named(cache), use_cache=True)
        assert cache.get_seq_length() == 6


@pytest.mark.parametrize("family", few(CHUNKED, "lfm2"))
def test_assisted_decoding_is_refused_before_it_drafts(model_of, family):
    model, batch = model_of(family), padded([torch.tensor([7, 8, 9] * 4)])
    with PagedCache(model, **SIZES) as cache:
        with pytest.raises((UnsupportedModelError, ValueError), match="assisted"):
            generate(model, batch, **named(cache), prompt_lookup_num_tokens=3)
        cache.reset()
        assert torch.equal(paged(model, batch), own(model, batch))


def test_layers_that_are_called_one_by_one_are_refused(model_of):
    model = model_of("qwen3_next")
    with PagedCache(model, **SIZES) as cache, torch.no_grad():
        hidden = torch.randn(1, 3, model.config.hidden_size)
        with pytest.raises(UnsupportedModelError, match="cannot be called one by one"):
            model.model.layers[0].linear_attn(hidden, cache)


def test_states_are_counted_by_formula(model_of):
    for family in ("qwen3_next", "lfm2"):
        model = model_of(family)
        with PagedCache(model, **SIZES) as cache, torch.no_grad():
            model(prompts(5)[0][None], **named(cache), use_cache=True)
            stored = cache.kv._states
            assert stored.nbytes == stored._capacity * cache.kv.config.bytes_per_state
            assert np.flatnonzero(cache.kv._tables.states.pool.refcount).size == 1


def test_a_model_without_states_is_refused_the_cache_of_one_with_them():
    mine, other, batch = made("kimi_linear"), made("deepseek_v3"), padded(prompts(9, 5))
    with PagedCache(mine, **SIZES) as cache, PagedCache(other, **SIZES):
        with pytest.raises(ValueError, match=r"expected a cache of this model, got one of another"):
            generate(other, batch, cache)
        assert torch.equal(paged(mine, batch, cache), own(mine, batch))
