"""Releases of transformers: how they call a cache, and what newer ones no longer refuse themselves.

Finds a forward that a release feeds tokens again, or without the cache that it was given: releases
from 5.18 on pass no mask of ones, whose width told of both.
"""

import warnings
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from pagedkv import BatchGenerator, PagedCache
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import release
from pagedkv.hf.release import CACHE, cache_argument
from tests.hf.tiny import named, padded, prompts, tiny

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


DOORS = {
    "PagedCache": lambda model: PagedCache(model, **SIZES).close(),
    "prefill": lambda model: PagedCache.prefill(model, IDS, **SIZES).close(),
    "BatchGenerator": lambda model: BatchGenerator(model, **SIZES).close(),
}


@pytest.mark.parametrize("door", DOORS)
def test_what_is_told_of_a_release_points_at_the_callers_line(monkeypatch, door):
    monkeypatch.setattr(release, "NEWEST", "5.1.0")
    release.warn_if_untested.cache_clear()
    model = tiny("llama")
    with pytest.warns(UserWarning, match=r"newer than 5\.1\.0") as heard:
        DOORS[door](model)
    release.warn_if_untested.cache_clear()
    told = [one.filename for one in heard if "newer than" in str(one.message)]
    assert told == [__file__]


def embedded(model, batch, cache):
    embeds = model.get_input_embeddings()(batch["input_ids"])
    mask = batch["attention_mask"]
    own = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(0)}
    with torch.no_grad():
        model(inputs_embeds=embeds, **own, **named(cache))


def test_padded_rows_of_unknown_text_are_refused_by_name_where_a_mask_fits_no_ids():
    model, batch = tiny("llama"), padded(prompts(9, 5))
    longer = torch.cat([batch["input_ids"], prompts(4)[0].expand(2, -1)], 1)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(longer[:, :4])], 1)
    with PagedCache(model, **SIZES) as cache:
        embedded(model, batch, cache)
        for wrong, ids in (({"attention_mask": mask[:, 2:]}, longer), ({}, longer[:, -4:])):
            with pytest.raises(ValueError, match=rf"^({CACHE}|attention_mask): .*holds 9 tokens"):
                model.generate(ids, **wrong, **named(cache), **GREEDY)
            assert cache.seen == 9
        found = model.generate(longer, attention_mask=mask, **named(cache), **GREEDY)
    assert found.equal(model.generate(longer, attention_mask=mask, **GREEDY))


@pytest.mark.parametrize("ids", [[1.5], [-1], [101], [3, 2**40]])
def test_a_prefix_that_is_no_ids_of_the_model_is_refused_before_any_forward(ids):
    model = tiny("llama")
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward began"))
    with pytest.raises(ValueError, match=r"^ids: expected integers from 0 to 100, got "):
        PagedCache.prefill(model, ids, **SIZES)
