"""Prompts with images, whose positions run behind their tokens, and caches that are used again."""

import pytest
import torch

from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import PagedCache, masks
from tests.effort import each_value, few
from tests.hf.images import seeing, seeing_model
from tests.hf.tiny import assert_same_tokens, dense, generate, named, padded, prompts
from tests.hf.zoo import SHARED, built

CROPPED = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"]
KINDS = [*CROPPED, "qwen3_5", "qwen3_5_moe"]  # the last two keep states beside their pages
SIZES = {"page_size": 4, "max_tokens": 1024}


@pytest.fixture(params=few(KINDS, "qwen2_5_vl", "glm4v", "qwen3_5"))
def model(request):
    return seeing_model(request.param)


def more(batch, text):
    """A batch's rows with `text` behind each, without the images."""
    ids = batch["input_ids"]
    ids = torch.cat([ids, text.expand(len(ids), -1)], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def whole(model, batch, text):
    """Appends text to a batch's rows, with the images."""
    longer = more(batch, text)
    kinds = (longer["input_ids"] == model.config.image_token_id).int()
    return {**batch, **longer, "mm_token_type_ids": kinds}


def test_tokens_behind_an_image_are_those_of_the_dense_cache(model):
    batch = seeing(model, *prompts(9, 9))
    expected = generate(model, batch, dense(model))
    other = generate(model, seeing(model, *batch["input_ids"][:, -9:], seed=1), dense(model))
    assert (other.logits[0] - expected.logits[0]).abs().max() > 0.01, "the image is not seen"
    with PagedCache(model, **SIZES) as cache:
        assert_same_tokens(generate(model, batch, cache), expected)


def in_between(model, case):
    """Something that leaves other positions on the model."""
    if case == "another image":
        generate(model, seeing(model, *prompts(5), patches=8), dense(model))
    elif case == "another image, paged":
        with PagedCache(model, **SIZES) as cache:
            generate(model, seeing(model, *prompts(5), patches=8), cache)
    elif case == "text":
        generate(model, padded(prompts(7, 3)))


@pytest.mark.parametrize(
    ("model", "case"),
    each_value(KINDS[:-1], ["another image", "another image, paged", "text"]),
    indirect=["model"],
)
def test_a_prefix_with_an_image_is_used_again_whatever_the_model_saw_in_between(model, case):
    batch, (text,) = seeing(model, *prompts(6)), prompts(4)
    expected = generate(model, whole(model, batch, text), dense(model))
    with PagedCache(model, **SIZES) as prefix:
        with torch.no_grad():
            model(**batch, **named(prefix))
        with prefix.fork() as cache:
            assert_same_tokens(generate(model, more(batch, text), cache), expected)
        in_between(model, case)
        with prefix.fork() as cache:
            assert_same_tokens(generate(model, more(batch, text), cache), expected)
        in_between(model, case)
        with prefix.fork(2) as cache, torch.no_grad():
            ids = more(batch, text)["input_ids"].repeat(2, 1)
            again = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            actual = generate(model, again, cache)
            for row in range(2):
                assert actual.sequences[row].tolist() == expected.sequences[0].tolist()


def test_a_text_computed_after_an_image_has_the_positions_of_a_text(model):
    (text,), (rest,) = prompts(9), prompts(4)
    batch = more({"input_ids": text[None]}, rest)
    expected = generate(model, batch)
    in_between(model, "another image")
    with PagedCache.prefill(model, text, **SIZES) as prefix:
        in_between(model, "another image")
        with prefix.fork() as cache:
            assert_same_tokens(generate(model, batch, cache), expected)


def test_sequences_that_may_hold_images_are_refused_as_rows():
    model = built("qwen2_vl")
    cache = PagedCache.prefill(model, prompts(9)[0], **SIZES)
    with pytest.raises(UnsupportedModelError, match="rope_deltas"):
        PagedCache.of(model, cache.kv, cache.kv.fork(cache.rows[0]))
    cache.close()


# Where a processor says which tokens are an image's, and models that read these both ways.
SPANS = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}
SPANS["gemma4_unified"] = SPANS["gemma4"]


@pytest.mark.parametrize("kind", SPANS)
def test_spans_that_are_read_both_ways_are_refused_and_texts_are_served(kind, monkeypatch):
    monkeypatch.setattr(masks, "BLOCK_ELEMENTS", 40)  # two queries of two rows of nine tokens
    own = {} if kind == "gemma3" else {"use_bidirectional_attention": "vision"}
    model, batch = built(kind, sees=True, text_config=own), padded(prompts(9, 5))
    kinds = torch.zeros_like(batch["input_ids"])
    expected = generate(model, batch, **{SPANS[kind]: kinds})
    with PagedCache(model, **SIZES) as cache:
        spanning = kinds.clone()
        spanning[:, 4:7] = 1
        with torch.no_grad(), pytest.raises(UnsupportedModelError, match="images both ways"):
            model(**batch, **{SPANS[kind]: spanning}, **named(cache))
        assert cache.rows == []
        assert_same_tokens(generate(model, batch, cache, **{SPANS[kind]: kinds}), expected)
        cache.kv.check()


GEMMA4 = {
    "image_token_id": 190,
    "vision_config": {
        "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
        "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 64,
    },
}  # fmt: skip


def seeing_gemma4(*texts):
    """Rows with an image of four tokens each, of four patches each."""
    image, places = torch.full((4,), 190), torch.arange(16)
    ids = torch.stack([torch.cat([text[:3], image, text[3:]]) for text in texts])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.rand(len(ids), 16, 3 * 4**2),
        "image_position_ids": torch.stack([places % 4, places // 4], 1).repeat(len(ids), 1, 1),
        "mm_token_type_ids": (ids == 190).long(),
    }


@pytest.mark.parametrize("reads", [None, "vision"])
def test_images_are_served_where_they_are_read_causally(reads):
    text = {**SHARED, "global_head_dim": 16, "use_bidirectional_attention": reads}
    model = built("gemma4", sees=True, text_config=text, **GEMMA4)
    batch = seeing_gemma4(*prompts(9, 9))
    expected = generate(model, batch)
    other = generate(model, {**batch, "pixel_values": torch.rand(2, 16, 48)})
    assert (other.logits[0] - expected.logits[0]).abs().max() > 0.01, "the image is not seen"
    with PagedCache(model, **SIZES) as cache:
        if reads is None:
            assert_same_tokens(generate(model, batch, cache), expected)
        else:
            with pytest.raises(UnsupportedModelError, match="images both ways"):
                generate(model, batch, cache)
