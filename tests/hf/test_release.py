"""Releases of transformers: how they call a cache, and what newer ones no longer refuse themselves.

Finds a forward that a release feeds tokens again, or without the cache that it was given: releases
from 5.18 on pass no mask of ones, whose width told of both.
"""

import warnings
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from pagedkv import PagedCache
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import release
from pagedkv.hf.release import CACHE, cache_argument
from tests.hf.tiny import named, prompts, tiny

GREEDY = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
SIZES = {"page_size": 4, "max_tokens": 512}
IDS = prompts(9)[0][None]


@pytest.mark.parametrize("length", [9, 6])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_ids_that_are_no_longer_than_embeddings_that_are_held_are_refused(family, length):
    model = tiny(family)
    with PagedCache(model, **SIZES) as cache:
        with torch.no_grad():
            model(inputs_embeds=model.get_input_embeddings()(IDS), **named(cache))
        before = cache.kv.gather(cache.rows[0], 0)[0].clone()
        with pytest.raises(ValueError, match=rf"^({CACHE}|attention_mask): .*holds 9 tokens"):
            model.generate(IDS[:, :length], **named(cache), **GREEDY)
        assert cache.seen == 9
        assert torch.equal(cache.kv.gather(cache.rows[0], 0)[0], before)
        longer = torch.cat([IDS, IDS[:, :3]], 1)
        found = model.generate(longer, **named(cache), **GREEDY)
    assert torch.equal(found, model.generate(longer, **GREEDY))


@pytest.mark.parametrize("drafts", ["lookup", "assistant"])
def test_drafts_behind_embeddings_that_are_held_are_refused(drafts):
    model = tiny("llama")
    how = {"lookup": {"prompt_lookup_num_tokens": 3}, "assistant": {"assistant_model": model}}
    with PagedCache(model, **SIZES) as cache:
        with torch.no_grad():
            model(inputs_embeds=model.get_input_embeddings()(IDS), **named(cache))
        longer = torch.cat([IDS, IDS], 1)
        with pytest.raises(ValueError, match=rf"^({CACHE}|attention_mask): .*holds \d+ tokens"):
            model.generate(longer, **named(cache), **how[drafts], **GREEDY)


@pytest.mark.parametrize("where", ["generation_config", "argument"])
def test_use_cache_false_beside_a_cache_is_refused(where):
    model = tiny("llama")
    told = {"use_cache": False} if where == "argument" else {}
    model.generation_config.use_cache = where == "argument"
    with (
        PagedCache(model, **SIZES) as cache,
        pytest.raises(ValueError, match=r"^use_cache: expected True .*generation_config"),
    ):
        model.generate(IDS, **named(cache), **told, **GREEDY)


def test_a_forward_that_takes_its_cache_to_no_layer_is_refused():
    model = tiny("llama")

    class Without(type(model)):
        def forward(self, *args, **kwargs):
            kwargs[CACHE] = None
            return super().forward(*args, **kwargs)

    model.__class__ = Without
    with (
        PagedCache(model, **SIZES) as cache,
        pytest.raises(UnsupportedModelError, match="passed none of its layers"),
    ):
        model(IDS, **named(cache))
    with pytest.raises(UnsupportedModelError, match="passed none of its layers"):
        PagedCache.prefill(model, IDS, **SIZES)


def test_gradient_checkpointing_in_training_is_right_or_refused():
    model = tiny("llama")
    expected, found = model.generate(IDS, **GREEDY), None
    model.train()
    switch = "activation_checkpointing_enable"  # the word from 5.24 on
    getattr(model, switch, model.gradient_checkpointing_enable)()
    with PagedCache(model, **SIZES) as cache:
        try:
            found = model.generate(IDS, **named(cache), **GREEDY)
        except UnsupportedModelError as refused:
            advice = str(refused)
    assert "turn gradient checkpointing off" in advice if found is None else found.equal(expected)


def test_a_forward_is_asked_for_the_word_it_takes_its_cache_by():
    class Older(PreTrainedModel):
        def forward(self, input_ids=None, past_key_values=None):
            """A model of one's own, from before the rename."""

    class Passing(PreTrainedModel):
        def forward(self, *args, **kwargs):
            """A model that hands on whatever it gets."""

    assert cache_argument(Older) == "past_key_values"
    assert cache_argument(Passing) == CACHE
    assert cache_argument(tiny("llama")) == CACHE


@pytest.mark.parametrize("newer", [True, False])
def test_a_release_newer_than_the_newest_tested_one_is_told_once(newer):
    major, minor, *_ = release.NEWEST.split(".")
    name = f"{major}.{int(minor) + 1}.0" if newer else f"{release.NEWEST}.dev0"
    release.warn_if_untested.cache_clear()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(2):
            release.warn_if_untested(name)
    release.warn_if_untested.cache_clear()
    told = [str(one.message) for one in heard]
    assert len(told) == newer
    assert all(name in text and "pagedkv check MODEL" in text for text in told)


def test_the_releases_named_here_are_those_that_are_installed_and_promised():
    root = Path(__file__).resolve().parents[2]
    pinned = (root / "constraints.txt").read_text()
    assert f"\ntransformers=={release.NEWEST}\n" in pinned
    asked = (root / "pyproject.toml").read_text()
    assert f'"transformers>={release.OLDEST.removesuffix(".0")}"' in asked
    assert f"transformers-{release.OLDEST}\n" in (root / "Makefile").read_text()
