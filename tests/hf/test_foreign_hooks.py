"""Forward hooks of others: what they see, and the warning that says so."""

import warnings
from functools import partial

import pytest
import torch

from pagedkv import BatchGenerator, PagedCache
from pagedkv.hf.foreign_hooks import foreign_hook
from tests.batch.generating import assert_like_alone, generator
from tests.hf.adapted import adapted
from tests.hf.images import seeing_model
from tests.hf.tiny import named, prompts, tiny
from tests.hybrids import tiny_hybrid

GREEDY = {"max_new_tokens": 4, "do_sample": False}


def steers(module, args, output):
    """Adds to every token alike."""
    return output + 0.25


class Steers:
    def hook(self, module, args):
        """A method, before the forward."""

    def __call__(self, module, args, output):
        """An object."""


HOOKS = {
    "steers": lambda layer: layer.register_forward_hook(steers),
    "Steers.hook": lambda layer: layer.register_forward_pre_hook(Steers().hook),
    "Steers": lambda layer: layer.register_forward_hook(Steers()),
    "steers ": lambda layer: layer.register_forward_hook(partial(steers)),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_others_are_told_once_by_module_and_shape_at_the_callers_line(name):
    model = tiny()
    hook = HOOKS[name](model.model.layers[1].mlp)
    with generator(model) as batched:
        why = rf"model\.layers\.1\.mlp has the forward hook {__name__}\.{name.strip()}, .*\[1, T, "
        with pytest.warns(UserWarning, match=why) as heard:
            batched.generate(prompts(5), **GREEDY)
        assert [one.filename for one in heard] == [__file__]
        batched.generate(prompts(5), **GREEDY)
        batched.score(prompts(5), [[3]])
    hook.remove()
    with generator(model) as batched:
        batched.generate(prompts(5), **GREEDY)


@pytest.mark.parametrize("path", ["", "lm_head", "model", "model.embed_tokens", "model.norm"])
def test_every_module_that_sees_packed_rows_is_looked_at(path):
    model = tiny()
    model.get_submodule(path).register_forward_hook(Steers())
    with generator(model) as batched, pytest.warns(UserWarning, match="has the forward hook"):
        batched.score(prompts(5), [[3]])


def test_a_hook_that_treats_all_tokens_alike_is_right():
    model = tiny()
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(steers)
    with pytest.warns(UserWarning, match="sees packed rows"):
        assert_like_alone(model, prompts(9, 5, 7))


def test_a_hook_that_takes_the_last_token_sees_the_rows_of_a_paged_cache_as_ever():
    model, rows = tiny(), torch.stack(prompts(7, 7, 7))

    def last(module, args, output):
        return torch.cat([output[:, :-1], output[:, -1:] + 2.0], 1)

    model.model.layers[0].mlp.register_forward_hook(last)
    with PagedCache(model, max_tokens=256) as cache:
        got = model.generate(rows, **named(cache), **GREEDY)
    assert got.equal(model.generate(rows, **GREEDY))


def quiet(model, **fields):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with BatchGenerator(model, max_tokens=256, page_size=4, **fields) as batched:
            assert batched.generate(prompts(5, 9), **GREEDY)[0].error is None
            return foreign_hook(batched.model)


@pytest.mark.parametrize("kind", ["PEFT", "accelerate", "compiled", "hybrid", "cache", "packed"])
def test_hooks_of_ours_and_of_those_who_know_what_they_do_are_no_others(kind):
    model = tiny_hybrid("qwen3_next") if kind == "hybrid" else tiny()
    if kind == "PEFT":
        model = adapted(model)
    elif kind == "accelerate":
        import accelerate

        accelerate.cpu_offload(model, execution_device="cpu")
        accelerate.hooks.remove_hook_from_submodules(model)
        hook = accelerate.hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True)
        accelerate.hooks.add_hook_to_module(model.model.layers[0], hook)
    elif kind == "compiled":
        model.model.layers[0].mlp.compile(backend="eager")
    held = PagedCache(model, max_tokens=256, page_size=4) if kind == "cache" else None
    assert quiet(model, pack_weights=kind == "packed") is None
    del held


def test_a_tower_that_sees_images_sees_no_packed_rows():
    model = seeing_model("qwen2_vl")
    tower = next(part for name, part in model.named_modules() if name.endswith("visual"))
    tower.blocks[0].register_forward_hook(steers)
    assert foreign_hook(model) is None
    model.get_decoder().layers[0].register_forward_hook(steers)
    assert "layers.0 has the forward hook" in foreign_hook(model)
