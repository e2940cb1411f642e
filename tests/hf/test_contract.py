"""Promises of transformers to its caches and attention functions, one test per extension point.

Only transformers is tested here, with stand-ins for our parts. A release that breaks a promise
fails with a sentence that says which one; `docs/compat.md` says what rests on it.
"""

import inspect
import sys
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pagedkv.hf.attention import over_pages
from pagedkv.hf.strange import HARMLESS
from pagedkv.models import facts_of
from tests.hf.tiny import WITH_SINKS, attention_of, generate, named, padded, prompts, tiny

NAME = "contract"
FAMILIES = [
    "llama", "mistral", "gemma2", "gemma3", "gpt2", "gpt_neox", "opt", "phi3", "mixtral", "gpt_oss",
]  # fmt: skip


def promise(kept: Any, sentence: str) -> None:
    """A failure reads: transformers no longer ..., see docs/compat.md."""
    if not kept:
        pytest.fail(f"transformers no longer {sentence}; see docs/compat.md", pytrace=False)


class Length(int):
    """An int of our own, recognised by its type."""


class Layer(DynamicLayer):
    """A cache layer that keeps what it was given and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[tuple, dict]] = []
        self.returned: list[tuple] = []

    def update(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        keys, values = super().update(*args)
        keys.mark = self
        self.returned.append((keys, values))
        return keys, values

    def get_mask_sizes(self, query_length):
        length, offset = super().get_mask_sizes(query_length)
        return Length(length), offset


class Spy:
    """A model under a registered attention of that name, and everything it was asked."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layers = [Layer() for _ in range(model.config.num_hidden_layers)]
        self.cache = Cache(layers=self.layers)
        self.attended: list[tuple[tuple, dict]] = []
        self.masked: list[tuple[tuple, dict]] = []
        AttentionInterface.register(NAME, self.attend)
        AttentionMaskInterface.register(NAME, self.mask)
        model.set_attn_implementation(NAME)

    def attend(self, *args, **kwargs):
        self.attended.append((args, kwargs))
        module, query, key, value, mask = args[:5]
        known = {name: kwargs[name] for name in ("dropout", "scaling") if name in kwargs}
        return sdpa_attention_forward(module, query, key, value, mask, **known)

    def mask(self, *args, **kwargs):
        self.masked.append((args, kwargs))
        return sdpa_mask(*args, **kwargs)


@pytest.fixture
def spy(monkeypatch):
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    return lambda family="llama": Spy(tiny(family))


@torch.no_grad()
def two_steps(spy: Spy) -> dict:
    """A padded prefill and one more token."""
    batch = padded(prompts(7, 4))
    spy.model(**batch, **named(spy.cache))
    mask = torch.cat([batch["attention_mask"], torch.ones(2, 1, dtype=torch.long)], dim=1)
    spy.model(torch.full((2, 1), 7), attention_mask=mask, **named(spy.cache))
    return batch


# ------------------------------------------------------------------ the cache


def test_base_classes_have_the_members_we_build_on():
    ours = {"update", "get_mask_sizes", "get_seq_length", "get_max_length", "lazy_initialization"}
    wanted = CacheLayerMixin.__abstractmethods__
    promise(wanted <= ours, f"is content with {sorted(ours)} in a layer: {sorted(wanted - ours)}")
    layer_flags = {"is_compileable", "is_croppable", "supports_early_init"}
    lost = {name for name in ours | layer_flags if not hasattr(CacheLayerMixin, name)}
    promise(not lost, f"has {sorted(lost)} in CacheLayerMixin")
    methods = {
        "update", "get_seq_length", "get_mask_sizes", "get_max_length", "get_query_offset",
        "reorder_cache", "crop", "reset", "batch_repeat_interleave", "batch_select_indices",
        "activate_past_recording", "batch_size", "is_sliding", "is_croppable", "is_compileable",
    }  # fmt: skip
    lost = {name for name in methods if not hasattr(Cache, name)}
    promise(not lost, f"has {sorted(lost)} in Cache")


def test_cache_is_built_from_layers_and_asks_them():
    layers = [Layer(), Layer()]
    cache = Cache(layers=layers)
    promise(cache.layers is layers or cache.layers == layers, "keeps the layers a Cache is given")
    k = torch.zeros(1, 1, 3, 2)
    cache.update(k, k, 1)
    promise(len(layers[1].calls) == 1, "hands Cache.update on to the layer of that index")
    promise(cache.get_seq_length(1) == 3, "asks the layer for its length")
    promise(type(cache.get_mask_sizes(1, 1)[0]) is Length, "asks the layer for its mask sizes")
    promise(cache.is_compileable is False, "compiles only caches whose layers allow it")


@pytest.mark.parametrize("family", FAMILIES)
def test_update_gets_keys_values_layer_and_the_arguments_of_attention_only(spy, family):
    spy = spy(family)
    two_steps(spy)
    for layer in spy.layers:
        promise(len(layer.calls) == 2, "calls update once per layer and forward")
        for args, kwargs in layer.calls:
            alone = len(args) == 2 and kwargs.keys() <= {"kwargs"}
            promise(alone, "calls update(keys, values, layer, kwargs=...) with nothing else")
            shapes = {(x.ndim, x.shape[0], x.shape[2]) for x in args}
            promise(
                shapes <= {(4, 2, 7), (4, 2, 1)}, "gives update keys of [batch, heads, new, dim]"
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_visited_in_order(spy, family):
    spy = spy(family)
    two_steps(spy)
    order = [spy.layers.index(args[2].mark) for args, _ in spy.attended]
    promise(order == list(range(len(spy.layers))) * 2, "visits the layers of a cache in order")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_update_returns_reaches_the_attention_function_untouched(spy, family):
    spy = spy(family)
    two_steps(spy)
    returned = [pair for step in (0, 1) for pair in [x.returned[step] for x in spy.layers]]
    promise(len(returned) == len(spy.attended), "attends once per layer and forward")
    for (keys, values), (args, _) in zip(returned, spy.attended):
        promise(args[2] is keys, "hands the very K that update returned to the attention function")
        promise(args[3] is values, "hands the very V that update returned to attention")
        promise(hasattr(args[2], "mark"), "leaves attributes on the K that update returned")


def test_a_call_of_a_module_is_a_frame_with_the_module_in_it():
    found = []

    def look(module, args):
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == "_call_impl":
                found.append(frame.f_locals.get("self"))
            frame = frame.f_back

    inner = torch.nn.Identity()
    inner.register_forward_pre_hook(look)
    outer = torch.nn.Sequential(inner)
    outer(torch.zeros(1))
    promise(found[:2] == [inner, outer], "calls a module in a frame `_call_impl` of its own")


def test_hooks_are_called_in_order_and_always_called_ones_after_an_error_too():
    module, order = torch.nn.Identity(), []
    module.register_forward_hook(lambda *_: order.append("plain"))
    module.register_forward_hook(lambda *_: order.append("always"), always_call=True)
    module(torch.zeros(1))
    promise(order == ["plain", "always"], "calls forward hooks in the order of `_forward_hooks`")
    order.clear()
    key = next(iter(module._forward_hooks))
    module._forward_hooks[key] = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        module(torch.zeros(1))
    promise(order == ["always"], "calls always-called hooks after a hook that raised")


# ------------------------------------------------------------------ attention and masks


def test_registered_names_are_known_and_accepted(spy):
    spy = spy()
    promise(NAME in ALL_ATTENTION_FUNCTIONS.valid_keys(), "lists what AttentionInterface registers")
    promise(NAME in ALL_MASK_ATTENTION_FUNCTIONS, "lists what AttentionMaskInterface registers")
    promise(attention_of(spy.model) == NAME, "lets set_attn_implementation take a registered name")
    config = spy.model.config
    promise(config.get_text_config(decoder=True) is config, "has get_text_config(decoder=True)")
    spy.model.set_attn_implementation("sdpa")
    promise(attention_of(spy.model) == "sdpa", "lets set_attn_implementation go back")
    made = AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    promise(attention_of(made) == NAME, "builds models with a registered attn_implementation")


def test_name_without_a_mask_function_gets_no_mask(spy):
    # Not a promise but a trap, and the reason why both names are registered together.
    spy = spy()
    del AttentionMaskInterface._global_mapping[NAME]
    two_steps(spy)
    masks = {args[4] for args, _ in spy.attended}
    promise(masks == {None}, "gives a name without mask function no mask (which is good news)")


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_function_is_called_as_ours_expects(spy, family):
    spy = spy(family)
    two_steps(spy)
    named = set(inspect.signature(over_pages).parameters) | HARMLESS
    for args, kwargs in spy.attended:
        promise(len(args) == 5, "calls attention(module, query, key, value, mask, **kwargs)")
        promise(isinstance(args[0], torch.nn.Module), "passes the module first")
        batch, heads, new, dim = args[1].shape
        fits = (batch, new, dim) == (2, args[1].shape[2], args[2].shape[3])
        promise(fits and not heads % args[2].shape[1], "passes queries of [batch, heads, new, dim]")
        strange = {name for name, x in kwargs.items() if x is not None and x is not False} - named
        promise(not strange, f"passes only what we know to attention, but {sorted(strange)} too")
        promise(not kwargs.get("dropout"), "passes dropout 0 in evaluation mode")
    if family in ("mistral", "gemma2", "gemma3", "gpt_oss"):
        windows = {kwargs.get("sliding_window") for _, kwargs in spy.attended}
        wanted = {8} if family == "mistral" else {8, None}
        promise(windows == wanted, "passes each layer's sliding_window to its attention")
    if family == "gemma2":
        softcap = spy.model.config.attn_logit_softcapping
        seen = {kwargs.get("softcap") for _, kwargs in spy.attended}
        promise(seen == {softcap}, "passes softcap to attention")


@pytest.mark.parametrize("family", WITH_SINKS)
def test_sinks_are_passed_as_one_score_per_head(spy, family):
    spy = spy(family)
    assert facts_of(spy.model.config.model_type).sinks
    two_steps(spy)
    for args, kwargs in spy.attended:
        sinks = kwargs.get("s_aux")
        promise(sinks is args[0].sinks, f"passes the sinks of {family} to attention as s_aux")
        promise(sinks.shape == (args[1].shape[1],), f"has one sink per head in {family}")


@pytest.mark.parametrize("family", FAMILIES)
def test_mask_function_is_called_as_ours_expects(spy, family):
    spy = spy(family)
    batch = two_steps(spy)
    needed = {"q_length", "kv_length", "attention_mask", "mask_function"}
    needed |= {"allow_is_causal_skip", "use_vmap"}
    promise(spy.masked, "asks the registered mask function for a mask")
    for args, kwargs in spy.masked:
        promise(not args, "calls mask functions with keywords only")
        lost = needed - set(kwargs)
        promise(not lost, f"passes {sorted(lost)} to mask functions")
        promise(type(kwargs["kv_length"]) is Length, "hands the cache's own length to the mask")
        mask = kwargs["attention_mask"]
        flat = mask.dtype == torch.bool and mask.shape == (2, int(kwargs["kv_length"]))
        promise(flat, "passes the padding mask as bool [batch, keys]")
        plain = kwargs["allow_is_causal_skip"] is True and not kwargs["use_vmap"]
        promise(plain, "marks plain causal masks by allow_is_causal_skip and use_vmap")
    first = spy.masked[0][1]["attention_mask"]
    promise(torch.equal(first, batch["attention_mask"].bool()), "passes the user's own mask")


def test_masks_beyond_plain_causal_are_marked(spy):
    from transformers.masking_utils import create_causal_mask

    spy = spy()
    asked = {
        "inputs_embeds": torch.zeros(1, 4, 8),
        "attention_mask": None,
        **named(None),
        "config": spy.model.config,
    }
    create_causal_mask(**asked, or_mask_function=lambda b, h, q, k: q == k)
    create_causal_mask(**asked, position_ids=torch.tensor([[0, 1, 0, 1]]))
    marks = [(x["use_vmap"], x["allow_is_causal_skip"]) for _, x in spy.masked]
    promise(marks[0][0], "marks a mask with a function of its own by use_vmap")
    promise(not marks[1][1], "marks packed texts by allow_is_causal_skip=False")


def test_the_mask_of_sdpa_takes_what_we_pass_on():
    mask = set(inspect.signature(sdpa_mask).parameters)
    promise({"kv_length", "attention_mask"} <= mask, "has sdpa_mask(kv_length=, attention_mask=)")


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_names_its_eager_function_and_carries_the_models_configuration(spy, family):
    spy = spy(family)
    two_steps(spy)
    for args, _ in spy.attended:
        forward = inspect.unwrap(type(args[0]).forward)
        eager = "eager_attention_forward" in forward.__code__.co_names
        promise(eager, "names eager_attention_forward in the forward of an attention class")
        promise(args[0].config is spy.model.config, "gives attention the model's own configuration")
    for _, kwargs in spy.masked:
        promise(kwargs["config"] is spy.model.config, "gives mask functions the configuration")


# ------------------------------------------------------------------ generate


def watched(model: PreTrainedModel) -> list[int]:
    """Fills, during later forwards, with the number of ids each was given."""
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return seen


def test_generate_passes_only_ids_the_cache_has_not_seen(spy):
    spy = spy()
    seen, batch = watched(spy.model), padded(prompts(9, 5))
    first = generate(spy.model, batch, spy.cache, max_new_tokens=3).sequences
    promise(seen == [9, 1, 1], "passes a prompt once and then one id at a time")
    mask = torch.cat([batch["attention_mask"], torch.ones(2, 3, dtype=torch.long)], dim=1)
    generate(spy.model, {"input_ids": first, "attention_mask": mask}, spy.cache, max_new_tokens=1)
    promise(seen[3:] == [1], "cuts ids that get_seq_length says are cached")
    promise(spy.cache.get_seq_length() == 12, "counts padding in the length of a cache")


def test_generate_marks_a_cache_before_it_cuts_ids_by_its_length(spy, monkeypatch):
    spy, marked = spy(), []
    length = spy.cache.get_seq_length

    def asked(*args, **names):
        marked.append(getattr(spy.cache, "_is_user_defined", False))
        return length(*args, **names)

    monkeypatch.setattr(spy.cache, "get_seq_length", asked)
    seen = watched(spy.model)
    spy.model.register_forward_pre_hook(lambda *_: marked.append("forward"))
    generate(spy.model, padded(prompts(9, 5)), spy.cache, max_new_tokens=1)
    before = marked[: marked.index("forward")]
    promise(before and all(before), "sets _is_user_defined before it asks for the length")
    promise(seen == [9], "passes whole rows to a cache that reports no tokens")


def test_beams_reorder_the_cache_by_a_flat_index(spy, monkeypatch):
    spy, asked = spy(), []
    monkeypatch.setattr(spy.cache, "reorder_cache", lambda index: asked.append(index))
    generate(spy.model, padded(prompts(5, 5)), spy.cache, num_beams=3, max_new_tokens=4)
    promise(len(asked) >= 3, "calls reorder_cache between the steps of beam search")
    flat = all(x.shape == (6,) and not x.is_floating_point() for x in asked)
    promise(flat, "calls reorder_cache with one index per batch row and beam")


def test_assisted_decoding_takes_tokens_back_by_negative_crops(spy, monkeypatch):
    spy, asked = spy(), []
    crop, recorded = spy.cache.crop, []
    monkeypatch.setattr(spy.cache, "crop", lambda n: (asked.append(n), crop(n)))
    monkeypatch.setattr(spy.cache, "activate_past_recording", lambda: recorded.append(True))
    batch = padded([prompts(5)[0].repeat(3)])
    generate(spy.model, batch, spy.cache, prompt_lookup_num_tokens=4, max_new_tokens=12)
    promise(asked, "crops the cache after each step of assisted decoding")
    promise(recorded, "announces assisted decoding by activate_past_recording")
    kinds = all(isinstance(n, int) or (torch.is_tensor(n) and n.ndim == 0) for n in asked)
    promise(kinds, "crops by an int or a 0-d tensor")
    promise(all(int(n) <= 0 for n in asked), "crops by the number of tokens to remove, negated")
    promise(any(int(n) < 0 for n in asked), "crops rejected tokens")
