"""A generator takes models or refuses them, before any of their forwards."""

import re

import pytest
import torch
from transformers import AutoModelForSequenceClassification, pipeline

from pagedkv import BatchGenerator, LayerStreamer, PagedCache
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.release import CHECKPOINTS_TAKE_NO_CACHE
from tests.batch.generating import assert_nothing_held, generator
from tests.batch.letters import letters, tokens
from tests.hf.tiny import attention_of, prompts, tiny

GREEDY = {"max_new_tokens": 4, "do_sample": False}
SIZES = {"max_tokens": 256, "page_size": 4}

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
    with generator(model) as batched:
        expected = tokens(batched.generate(rows, **GREEDY))
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
