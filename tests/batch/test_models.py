"""A generator takes models or refuses them, before any of their forwards."""

import re
from functools import partial

import pytest
import torch
from transformers import AutoModelForSequenceClassification, pipeline

from pagedkv import BatchGenerator, LayerStreamer, PagedCache
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.release import CACHE, CHECKPOINTS_TAKE_NO_CACHE
from tests.batch.generating import assert_like_alone, assert_nothing_held, generator, ragged
from tests.batch.letters import letters, tokens
from tests.contents import Boom
from tests.hf.own import own_model, truth
from tests.hf.tiny import attention_of, generate, named, padded, prompts, tiny

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


class Ignores:
    def forward(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
        cache = kwargs.get(CACHE)
        past = 0 if cache is None else cache.get_seq_length()
        places = (torch.arange(input_ids.shape[1]) + past)[None]
        return super().forward(input_ids, attention_mask, places, **kwargs)


def test_positions_that_a_forward_names_and_ignores_are_missed_before_a_step():
    model, before = of_class(own_model(), Ignores), "sdpa"
    with pytest.raises(UnsupportedModelError, match="the same whatever position_ids it is given"):
        BatchGenerator(model, **SIZES)
    assert attention_of(model) == before
    with pytest.raises(UnsupportedModelError, match=r"is another by .* for packed rows"):
        BatchGenerator(model, unknown="check", **SIZES)


@pytest.mark.filterwarnings("ignore:model. no list knows")
def test_a_model_that_needs_no_positions_is_served_once_it_was_tried():
    model, (prompt,) = own_model(), prompts(9)
    torch.nn.init.zeros_(model.places.weight)
    with BatchGenerator(model, unknown="check", **SIZES) as batched:
        given = tokens(batched.generate([prompt, *prompts(5, 3)], **GREEDY))
    assert given[0] == truth(model, prompt, 4)


class KeepsTheLast:
    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = found.logits[:, -1:]
        return found


def test_a_forward_that_gives_other_logits_than_asked_for_is_refused_by_their_count():
    with generator(of_class(tiny(), KeepsTheLast)) as batched:
        with pytest.raises(UnsupportedModelError, match="logits of 1 tokens, where 3 of 17"):
            batched.generate(prompts(9, 5, 3), **GREEDY)
        assert_nothing_held(batched)


# ------------------------------------------------------------------ another way to generate


class Penalises:
    def generate(self, *args, **options):
        return super().generate(*args, repetition_penalty=1.8, **options)


class Draws:
    @torch.no_grad()
    def _sample(self, *args, **options):
        return super()._sample(*args, **options)


class Feeds:
    """Says what `shift` is at each step."""

    def prepare_inputs_for_generation(
        self, input_ids, cache=None, past_key_values=None, attention_mask=None, **options
    ):
        given = named(past_key_values if cache is None else cache)
        given |= {"attention_mask": attention_mask, **options}
        made = super().prepare_inputs_for_generation(input_ids, **given)
        return {**made, "shift": self.shift}

    def forward(self, *args, shift=0, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = found.logits.roll(shift, -1)
        return found


class Counts:
    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **options):
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, **options)


@pytest.mark.parametrize("kind", [Penalises, Draws, Feeds, Counts])
def test_a_class_that_generates_in_its_own_way_is_refused(kind):
    model = of_class(tiny(), kind)
    with pytest.raises(UnsupportedModelError, match=r"its own \w+\(\) may choose or feed tokens"):
        BatchGenerator(model, **SIZES)


@pytest.mark.parametrize("way", [lambda _: lambda *_, **__: torch.zeros(1, 1), partial])
def test_a_model_that_was_given_another_generate_is_refused(way):
    model = tiny()
    model.generate = way(model.generate)
    with pytest.raises(UnsupportedModelError, match=r"its own generate\(\) may choose"):
        BatchGenerator(model, **SIZES)


@pytest.mark.parametrize(("shift", "why"), [(0, None), (3, "its logits is another")])
def test_what_a_class_feeds_its_forwards_can_be_tried(shift, why):
    model = of_class(tiny(), Feeds)
    model.shift = shift
    rows = prompts(9, 5)
    if why is not None:
        with pytest.raises(UnsupportedModelError, match=why):
            BatchGenerator(model, unknown="check", **SIZES)
        return
    with pytest.warns(UserWarning, match="no list knows"):
        batched = BatchGenerator(model, unknown="check", **SIZES)
    with batched:
        given = tokens(batched.generate(rows, **GREEDY))
    assert given == [
        generate(model, padded([row]), max_new_tokens=4).sequences[0, len(row) :].tolist()
        for row in rows
    ]


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
