"""A layer of a cache shows its K and V, and lets nobody change them."""

import pytest
import torch

from pagedkv import BatchGenerator
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import PagedCache
from tests.hf.tiny import WINDOW, assert_close, dense, named, padded, prompts, tiny
from tests.hybrids import tiny_hybrid

SIZES = {"page_size": 4, "max_tokens": 512}


pytestmark = pytest.mark.usefixtures("without_gradients")


def filled(model, batch, **fields):
    """A cache and transformers' own, behind the same forward."""
    theirs = dense(model)
    model(**batch, **named(theirs))
    ours = PagedCache(model, **{**SIZES, **fields})
    model(**batch, **named(ours))
    return ours, theirs


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma4", "deepseek_v3", "mimo_v2_flash"])
def test_keys_and_values_are_those_of_transformers_own_cache(family):
    model, batch = tiny(family), padded(prompts(WINDOW - 1, 4))
    real = batch["attention_mask"].bool()
    ours, theirs = filled(model, batch)
    with ours:
        for mine, own, (keys, values, _) in zip(ours.layers, theirs.layers, ours):
            assert (mine.dtype, mine.device) == (own.keys.dtype, own.keys.device)
            for got, read, expected in (
                (mine.keys, keys, own.keys),
                (mine.values, values, own.values),
            ):
                assert got.shape == expected.shape
                assert torch.equal(got, read)
                assert not got.transpose(1, 2)[~real].any()
                assert_close(got.transpose(1, 2)[real], expected.transpose(1, 2)[real])


def test_a_window_shows_the_tokens_it_holds_where_they_came():
    model, batch = tiny("mistral"), padded(prompts(30))
    ours, theirs = filled(model, batch)
    with ours:
        held, kept = ours.layers[0].keys, theirs.layers[0].keys
        assert held.shape[2] == 30
        assert not held[:, :, :16].any()
        assert_close(held[:, :, 1 - WINDOW :], kept)


def test_layers_of_an_empty_cache_show_nothing_and_a_copy_changes_nothing():
    model, batch = tiny(), padded(prompts(6))
    with PagedCache(model, **SIZES) as cache:
        assert list(cache) == [(None, None, None)] * 2
        model(**batch, **named(cache))
        before = cache.layers[1].values.clone()
        cache.layers[1].values.zero_()
        assert torch.equal(cache.layers[1].values, before)


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize(
    "model", [tiny, lambda: tiny_hybrid("qwen3_next")], ids=["llama", "hybrid"]
)
def test_keys_and_values_cannot_be_set(model, name):
    model = model()
    with PagedCache(model, **SIZES) as cache:
        model(**padded(prompts(6)), **named(cache))
        layer = cache.paged[0]
        with pytest.raises(UnsupportedModelError, match=rf"layers\[0\].{name}: .* in pages"):
            setattr(layer, name, getattr(layer, name) * 2)
        with pytest.raises(UnsupportedModelError, match=r"layers\[0\].keys"):
            layer.offload()
        cache.kv.check()


def test_keys_are_not_read_within_a_forward_nor_where_tokens_were_forgotten():
    model = tiny()
    with PagedCache(model, **SIZES) as cache:
        look = model.model.layers[1].register_forward_pre_hook(lambda *_: cache.layers[0].keys)
        with pytest.raises(UnsupportedModelError, match="between forwards"):
            model(**padded(prompts(6)), **named(cache))
        look.remove()
    with PagedCache(model, **SIZES, retention="fifo", budget=8) as cache:
        model(**padded(prompts(6)), **named(cache))
        with pytest.raises(UnsupportedModelError, match=r"cache\.kv\.gather"):
            _ = cache.layers[0].keys
    with BatchGenerator(model, **SIZES) as generator:
        look = model.model.layers[1].register_forward_pre_hook(
            lambda _, args, kwargs: kwargs[next(iter(named(0)))].layers[0].keys, with_kwargs=True
        )
        with pytest.raises(UnsupportedModelError, match=r"generator\.cache\.gather"):
            generator.generate([[5, 6, 7]], max_new_tokens=2)
        look.remove()
