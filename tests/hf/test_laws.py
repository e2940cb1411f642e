"""Laws that need no list of models: a model of one's own is right, or refused before a token."""

import pytest
import torch

from pagedkv import BatchGenerator
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import PagedCache
from tests.effort import few
from tests.hf.own import own_model, truth
from tests.hf.tiny import WINDOW, generate, padded, prompts, tiny
from tests.hf.zoo import built

SIZES = {"page_size": 4, "max_tokens": 512}
NEW = 12


def through_cache(model, prompt):
    with PagedCache(model, **SIZES) as cache:
        try:
            rows = generate(model, padded([prompt]), cache, max_new_tokens=NEW).sequences
        finally:
            cache.kv.check()
            assert cache.rows or not cache.stats().sequences
    return rows[0, len(prompt) :].tolist()


def through_batch(model, prompt):
    others = prompts(9, 31)
    with BatchGenerator(model, **SIZES) as generator:
        rows = [row.tolist() for row in (others[0], prompt, others[1])]
        return generator.generate(rows, max_new_tokens=NEW, do_sample=False)[1].tokens


doors = pytest.mark.parametrize("door", [through_cache, through_batch], ids=["cache", "batch"])


@pytest.fixture
def prompt():
    return prompts(24)[0]


@doors
@pytest.mark.parametrize(
    "habit",
    ["", "slides", "counts by the layer's length", "moves K and V", "gives K as V"],
)
def test_model_of_ones_own_gives_the_tokens_it_gives_without_a_cache(door, habit, prompt):
    model = own_model(habit)
    assert door(model, prompt) == truth(model, prompt, NEW)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("habit", ["counts by the shape of K", "moves K and V"])
def test_shapes_are_true_and_moves_that_move_nothing_are_free(mode, habit, prompt):
    model = own_model(habit)
    with mode():
        assert through_cache(model, prompt) == truth(model, prompt, NEW)


REFUSED = {
    "changes K": "layer 0 .* changes",
    "changes V": r"layer 0 .* changes .*tanh",
    "uses V outside": "layer 0 .* changes",
    "repeats K and V": "layer 0 .* changes",
    "biases its mask": "attention_mask",
    "slides in turn": "layer 1 .* window of 8",
    "keeps its last input on the cache": "last_0: this model keeps it on its cache",
    "keeps its last input on a layer of the cache": "last_0: this model keeps it on its cache",
}


@doors
@pytest.mark.parametrize("habit", REFUSED)
def test_model_that_would_be_wrong_is_refused_by_name(door, habit, prompt):
    with pytest.raises(UnsupportedModelError, match=REFUSED[habit]):
        door(own_model(habit), prompt)


def test_attributes_of_a_caller_are_taken_between_forwards():
    model = own_model()
    with PagedCache(model, **SIZES) as cache:
        cache.note = "first"
        out = generate(model, padded(prompts(9)), cache).sequences
        cache.told = cache.layers[0].told = len(out)
        generate(model, padded(prompts(9)), cache)
        assert (cache.note, cache.told, cache.layers[0].told) == ("first", 1, 1)


@pytest.mark.parametrize("habit", ["counts by the shape of K", "counts by the cache's length"])
def test_lengths_that_packed_rows_do_not_have_in_common_are_refused(habit, prompt):
    with pytest.raises(UnsupportedModelError, match="length"):
        through_batch(own_model(habit), prompt)


@doors
def test_windows_that_a_configuration_tells_by_layer_are_served(door, prompt):
    kinds = ["sliding_attention", "full_attention"] * 2
    model = own_model("slides in turn", layer_types=kinds)
    assert door(model, prompt) == truth(model, prompt, NEW)


STRAY = ["llama", "gpt2", "minimax_m2", "glm4_moe", "deepseek_v3", "olmo2", "phi", "hy_v3"]


@doors
@pytest.mark.parametrize("kind", few(STRAY, "llama", "minimax_m2", "deepseek_v3"))
def test_stray_window_in_a_configuration_is_refused_by_name(door, kind, prompt):
    with pytest.raises(UnsupportedModelError, match=r"sliding_window: layer 0 .* window of 8"):
        door(built(kind, sliding_window=WINDOW), prompt)


@doors
def test_mask_of_another_window_than_the_pages_have_is_refused(door, prompt):
    model = tiny("gemma3")
    with PagedCache(model, **SIZES):
        model.config.sliding_window = WINDOW - 1  # after pages were made
        with pytest.raises(UnsupportedModelError, match=r"sliding_window: layer 0 .* window of 7"):
            door(model, prompt)


@pytest.mark.slow
@pytest.mark.parametrize("habit", ["", "changes V", "uses V outside"])
def test_a_compiled_model_keeps_the_laws(habit, prompt):
    model = own_model(habit)
    expected = truth(model, prompt, NEW)
    model.compile(backend="eager")
    if not habit:
        assert through_cache(model, prompt) == expected
    else:
        with pytest.raises(UnsupportedModelError, match=REFUSED[habit]):
            through_cache(model, prompt)
    torch.compiler.reset()
