"""Promises of transformers to those who run its forwards and its generation rules themselves."""

import inspect
import types

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerationMode

from tests.effort import few
from tests.hf.test_contract import promise
from tests.hf.tiny import FAMILIES, VARIED, VOCAB, tiny

RULES = {
    "_prepare_generation_config": ["generation_config"],
    "_validate_model_kwargs": ["model_kwargs"],
    "_prepare_special_tokens": ["generation_config", "device"],
    "_prepare_generated_length": [
        "generation_config",
        "has_default_max_length",
        "has_default_min_length",
        "model_input_name",
        "input_ids_length",
        "inputs_tensor",
    ],
    "_validate_generated_length": [
        "generation_config",
        "input_ids_length",
        "has_default_max_length",
    ],
    "_get_logits_processor": [
        "generation_config",
        "input_ids_seq_length",
        "encoder_input_ids",
        "prefix_allowed_tokens_fn",
        "logits_processor",
        "device",
        "model_kwargs",
    ],
    "_get_stopping_criteria": ["generation_config", "stopping_criteria", "tokenizer"],
}


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.mark.parametrize("name", RULES)
def test_the_steps_of_generate_can_be_called_one_by_one(model, name):
    method = getattr(model, name, None)
    promise(isinstance(method, types.MethodType), f"has {name} on its models")
    accepted = list(inspect.signature(method).parameters)
    for parameter in RULES[name]:
        promise(parameter in accepted, f"lets {name} be given {parameter}")
    if name in ("_prepare_generated_length", "_validate_generated_length"):
        promise(accepted[: len(RULES[name])] == RULES[name], f"takes {name}'s arguments in order")


def test_unknown_options_come_back_and_are_then_refused(model):
    config, unknown = model._prepare_generation_config(None, max_new_tokens=3, no_such_option=1)
    promise(config.max_new_tokens == 3, "applies options to the generation configuration")
    promise(unknown == {"no_such_option": 1}, "hands back options that are none")
    with pytest.raises(ValueError, match="no_such_option"):
        model._validate_model_kwargs(unknown)


def test_lists_of_rules_work_on_one_row_without_padding(model):
    config, _ = model._prepare_generation_config(
        GenerationConfig(), max_new_tokens=3, eos_token_id=[4, 5], repetition_penalty=2.0
    )
    model._prepare_special_tokens(config, device=model.device)
    promise(config._eos_token_tensor.tolist() == [4, 5], "keeps end tokens in `_eos_token_tensor`")
    model._prepare_generated_length(config, True, True, "input_ids", 2, torch.ones(1, 2))
    promise(config.max_length == 5, "counts `max_length` from the prompt's begin")
    processors = model._get_logits_processor(
        config, input_ids_seq_length=2, logits_processor=LogitsProcessorList(), model_kwargs={}
    )
    scores = processors(torch.tensor([[7, 8]]), torch.ones(1, VOCAB))
    promise(float(scores[0, 7]) == 0.5, "applies processors to ids of one row")
    criteria = model._get_stopping_criteria(config, StoppingCriteriaList(), tokenizer=None)
    done = criteria(torch.tensor([[7, 4]]), None)
    promise(done.tolist() == [True], "answers stopping criteria with one bool a row")


def test_greedy_search_and_sampling_go_by_these_names():
    config = GenerationConfig(do_sample=False)
    promise(config.get_generation_mode() == GenerationMode.GREEDY_SEARCH, "calls greedy so")
    config = GenerationConfig(do_sample=True)
    promise(config.get_generation_mode() == GenerationMode.SAMPLE, "calls sampling so")


@pytest.mark.parametrize("family", few(FAMILIES, *VARIED))
def test_logits_can_be_asked_for_by_place(family):
    model = tiny(family)
    ids = torch.arange(3, 9)[None]
    places = torch.tensor([1, 4])
    with torch.no_grad():
        every = model(ids).logits
        some = model(ids, logits_to_keep=places).logits
    promise(some.shape == (1, 2, VOCAB), "takes places as `logits_to_keep`")
    # Two more rows or fewer in a product may be added up in another order.
    close = torch.allclose(some, every[:, places], rtol=1e-5, atol=1e-4)
    promise(close, "gives the logits of the places asked for")


def test_sampling_is_softmax_and_one_multinomial(model):
    ids = torch.arange(3, 9)[None]
    torch.manual_seed(7)
    out = model.generate(
        ids, max_new_tokens=1, do_sample=True, top_k=0, attention_mask=torch.ones_like(ids)
    )
    with torch.no_grad():
        shares = model(ids).logits[:, -1].softmax(-1)
    generator = torch.Generator().manual_seed(7)
    drawn = torch.multinomial(shares[0], 1, generator=generator)
    promise(out[0, -1:].equal(drawn), "draws the next token as we do")
