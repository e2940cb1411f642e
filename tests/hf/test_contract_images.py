"""Promises of transformers about models that see, one test per extension point; see compat.md."""

import pytest
import torch
from transformers import DynamicCache

from tests.effort import few
from tests.hf.images import ENDS_LINES, GRIDDED, MROPE, PLAIN, image_token, pictured, seeing_model
from tests.hf.test_contract import promise
from tests.hf.tiny import named, prompts


@pytest.mark.parametrize("kind", few([*MROPE, *GRIDDED, *PLAIN], "qwen2_5_vl", "internvl"))
def test_a_model_calls_its_decoder_with_images_in_its_embeddings(kind):
    model, given = seeing_model(kind), []
    decoder = model.get_decoder()
    decoder.register_forward_pre_hook(
        lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True
    )
    text = prompts(5)[0]
    rows = [pictured(model, text, seed=seed) for seed in (0, 1)]
    for row in rows:
        model(**row, **named(DynamicCache(config=decoder.config)))
    promise(len(given) == 2, "calls its decoder as a module")
    promise(
        all(not args and "inputs_embeds" in kwargs for args, kwargs in given), "names embeddings"
    )
    first, second = (kwargs["inputs_embeds"] for _, kwargs in given)
    differ = (first != second).any(-1)
    expected = rows[0]["input_ids"] == image_token(model)
    if kind in ENDS_LINES:  # of two patches each, by what all images have there
        expected[0, expected[0].nonzero()[2::3]] = False
    promise(
        torch.equal(differ, expected),
        "puts an image into the embeddings of its tokens and of no others",
    )


@pytest.mark.parametrize("kind", few(MROPE, "qwen2_5_vl", "glm4v"))
def test_a_model_that_is_given_positions_keeps_them_and_its_offset(kind):
    model = seeing_model(kind)
    row, given = pictured(model, *prompts(5)), []
    holder = next(part for part in model.modules() if hasattr(part, "get_rope_index"))
    kinds = {name: row[name] for name in ("mm_token_type_ids", "image_grid_thw")}
    positions, deltas = holder.get_rope_index(row["input_ids"], **kinds)
    promise(
        positions.shape[1:] == row["input_ids"].shape, "tells positions as [axes, rows, tokens]"
    )
    promise(deltas.numel() == 1, "tells one offset for a row")
    holder.rope_deltas = mark = torch.tensor([[-7]])
    decoder = model.get_decoder()
    decoder.register_forward_pre_hook(
        lambda _, args, kwargs: given.append(kwargs["position_ids"]), with_kwargs=True
    )
    model(**row, position_ids=positions)
    promise(torch.equal(given[0], positions), "hands given positions on")
    promise(holder.rope_deltas is mark, "leaves rope_deltas alone where positions are given")


@pytest.mark.parametrize("kind", few(MROPE, "qwen2_5_vl", "glm4v"))
def test_generate_asks_a_model_for_positions_before_it_marks_its_cache(kind):
    model, given = seeing_model(kind), []
    row, cache = pictured(model, *prompts(5)), DynamicCache(config=model.get_decoder().config)
    make = model._prepare_position_ids_for_generation

    def asked(inputs, arguments):
        given.append((inputs, {**arguments}, hasattr(cache, "_is_user_defined")))
        return make(inputs, arguments)

    model._prepare_position_ids_for_generation = asked
    model.generate(**row, **named(cache), max_new_tokens=2, do_sample=False)
    promise(len(given) == 1, "asks for positions once, by the attribute of the model")
    inputs, arguments, marked = given[0]
    promise(torch.equal(inputs, row["input_ids"]), "with the ids of whole rows")
    promise(arguments.items() >= named(cache).items(), "with the cache among the arguments")
    promise({*row} <= {"input_ids", *arguments}, "with images, before features are made of them")
    promise(not marked and cache._is_user_defined, "before it marks the cache")
