"""A generator takes models or refuses them, before any of their forwards."""

import re

import pytest
import torch
from transformers import AutoModelForSequenceClassification, pipeline

from pagedkv import BatchGenerator, LayerStreamer, PagedCache
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.release import CHECKPOINTS_TAKE_NO_CACHE
from tests.batch.generating import assert_like_alone, assert_nothing_held, generator, ragged
from tests.batch.letters import letters, tokens
from tests.contents import Boom
from tests.hf.tiny import attention_of, prompts, tiny

GREEDY = {"max_new_tokens": 4, "do_sample": False}
SIZES = {"max_tokens": 256, "page_size": 4}

# ------------------------------------------------------------------ a forward that names nothing


def of_class(model, kind):
    """A model as its user's subclass."""
    model.__class__ = type("Own", (kind, type(model)), {})
    return model


class PassesOn:
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class NamesIds:
    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids=input_ids, **kwargs)


class NeedsAllLogits:
    def forward(self, *args, logits_to_keep=0, **kwargs):
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("kind", [PassesOn, NamesIds, NeedsAllLogits])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_forward_that_hands_on_what_it_gets_is_served(family, kind):
    assert_like_alone(of_class(tiny(family), kind), ragged(), {"step_tokens": 8})


def test_it_is_served_within_a_class_of_adapters_as_well():
    import peft

    model = of_class(tiny(), PassesOn)  # whose adapter changes nothing yet
    rows = prompts(9, 5)
    expected = tokens_of(model, rows)
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    with generator(peft.get_peft_model(model, config).eval()) as batched:
        assert tokens(batched.generate(rows, **GREEDY)) == expected


def tokens_of(model, rows):
    with generator(model) as batched:
        return tokens(batched.generate(rows, **GREEDY))


class Drops:
    def forward(self, input_ids=None, **kwargs):
        kwargs.pop("position_ids", None)
        return super().forward(input_ids=input_ids, **kwargs)


class CountsItself:
    def forward(self, input_ids=None, **kwargs):
        kwargs["position_ids"] = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids=input_ids, **kwargs)


class Raises:
    def forward(self, *args, **kwargs):
        raise Boom


@pytest.mark.parametrize("kind", [Drops, CountsItself, Raises])
def test_a_forward_that_keeps_positions_to_itself_is_refused_before_any_layer(kind):
    model = of_class(tiny(), kind)
    before = attention_of(model)
    model.model.layers[0].register_forward_pre_hook(lambda *_: pytest.fail("a layer ran"))
    with pytest.raises(UnsupportedModelError, match="hands no position_ids on to its decoder"):
        BatchGenerator(model, **SIZES)
    assert attention_of(model) == before
    assert not model.model._forward_pre_hooks


# ------------------------------------------------------------------ no language model


@pytest.mark.parametrize("kind", ["LlamaModel", "LlamaForSequenceClassification"])
def test_a_model_that_does_not_generate_is_refused_when_the_generator_is_made(kind):
    model = tiny()
    before = attention_of(model)
    other = model.model
    if kind != "LlamaModel":
        other = AutoModelForSequenceClassification.from_config(model.config)
    for argument, make in (
        ("model", lambda: BatchGenerator(other, **SIZES)),
        ("draft", lambda: BatchGenerator(model, draft=other, **SIZES)),
    ):
        why = rf"^{argument}: expected one that generates, as AutoModelForCausalLM .*, got {kind}"
        with pytest.raises(TypeError, match=why):
            make()
    assert attention_of(model) == before
    PagedCache(other, **SIZES).close()


def held_in(kind, model):
    if kind == "DataParallel":
        return torch.nn.DataParallel(model)
    if kind == "TextGenerationPipeline":
        return pipeline("text-generation", model=model, tokenizer=letters())
    return {"str": "some/model", "NoneType": None, "OptimizedModule": torch.compile(model)}[kind]


HELD = {
    "DataParallel": "; give its `.module`",
    "TextGenerationPipeline": "; give its `.model`",
    "str": "; load it first: AutoModelForCausalLM.from_pretrained('some/model')",
    "OptimizedModule": "; `model.compile()` compiles in place",
    "NoneType": "",
}


@pytest.mark.parametrize("kind", HELD)
def test_what_only_holds_a_model_is_refused_with_the_way_to_it(kind):
    model = tiny()
    given, why = held_in(kind, model), re.escape(f": expected a transformers model, got {kind}")
    why += f"{re.escape(HELD[kind])}$"
    with PagedCache(model, **SIZES) as cache:
        row = cache.kv.add()
        for make in (
            lambda: PagedCache(given, **SIZES),
            lambda: PagedCache.prefill(given, [3, 4], **SIZES),
            lambda: PagedCache.of(given, cache.kv, [row]),
            lambda: BatchGenerator(given, **SIZES),
        ):
            with pytest.raises(TypeError, match=f"^model{why}"):
                make()
        if given is not None:
            with pytest.raises(TypeError, match=f"^draft{why}"):
                BatchGenerator(model, draft=given, **SIZES)


def test_a_streamer_is_given_files_and_no_model():
    with pytest.raises(TypeError, match=r"^path: expected a folder, or an id .*LlamaForCausalLM"):
        LayerStreamer.from_pretrained(tiny())


# ------------------------------------------------------------------ training


def test_checkpointed_gradients_in_training_are_right_or_refused_before_any_forward():
    model, rows = tiny(), prompts(9, 5)
    expected = tokens_of(model, rows)
    model.train()
    switch = "activation_checkpointing_enable"  # the word from 5.24 on
    getattr(model, switch, model.gradient_checkpointing_enable)()
    with generator(model) as batched:
        if CHECKPOINTS_TAKE_NO_CACHE:
            hook = model.register_forward_pre_hook(lambda *_: pytest.fail("a forward began"))
            why = r"training mode with gradient checkpointing.*model\.eval\(\) or model\.gradient_"
            for call in (
                lambda: batched.stream(rows, **GREEDY),
                lambda: batched.score(rows, [[5]]),
            ):
                with pytest.raises(UnsupportedModelError, match=why):
                    call()
            hook.remove()
            model.eval()
        assert tokens(batched.generate(rows, **GREEDY)) == expected
        assert_nothing_held(batched)
