"""Prompts with images or audio; a wrong one is its own row's error."""

import re

import numpy as np
import pytest
import torch

from pagedkv.batch.image_prompts import ImagePrompt
from pagedkv.hf.image_numbers import FIRST_IMAGE_NUMBER
from tests.batch.generating import assert_nothing_held, assert_same, generator
from tests.batch.letters import letters
from tests.hf.images import changed, image_token, pictured, seeing_model, without
from tests.hf.tiny import generate, prompts, tiny

OF_IMAGES = ("pixel_values", "image_grid_thw")
OPTIONS = {"max_new_tokens": 6, "do_sample": False}
CHAT = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}z"
)


@pytest.fixture
def model():
    return seeing_model("qwen2_5_vl")


@pytest.fixture
def llava():
    """A model, the processor that goes with it, and an image."""
    pytest.importorskip("PIL")
    from PIL import Image
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = letters()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(**sizes),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT,
    )
    model = seeing_model("llava")
    model.config.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    pixels = np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    return model, processor, Image.fromarray(pixels)


def test_an_image_is_given_as_its_processor_returns_it_or_as_what_the_processor_takes(llava):
    model, processor, image = llava
    chat = [
        {
            "role": "user",
            "content": [{"type": "image", "image": image}, {"type": "text", "text": "cd"}],
        }
    ]
    processed = processor(text="ab<image>cd", images=[image], return_tensors="pt")
    alike = {"text": "<image>cdz", "images": [image]}
    rows = [processed, {"text": "ab<image>cd", "images": [image]}, chat, alike, "abc"]
    with generator(model, processor) as batched:
        results = batched.generate(rows, **OPTIONS)
        assert_same(results[0], generate(model, dict(processed), max_new_tokens=6))
    assert [result.error for result in results] == [None] * 5
    assert results[1].tokens == results[0].tokens
    assert results[2].tokens == results[3].tokens
    assert results[1].cached_tokens == processed["input_ids"].shape[1] - 1
    assert results[0].text == processor.tokenizer.decode(
        results[0].tokens, skip_special_tokens=True
    )


def messages(*content):
    return [{"role": "user", "content": [*content]}]


def test_messages_go_through_the_template_of_a_processor_whose_tokenizer_has_none(llava):
    model, processor, _ = llava
    processor.tokenizer.chat_template = None
    with generator(model, processor) as batched:
        said, text = batched.generate([messages({"type": "text", "text": "cd"}), "cdz"], **OPTIONS)
    assert said.tokens == text.tokens


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_messages_with_what_is_not_served_are_no_texts(llava, kind):
    model, processor, _ = llava
    row = messages({"type": kind, kind: "no such file"}, {"type": "text", "text": "cd"})
    processor.tokenizer.chat_template = CHAT
    errors = [f"prompt: expected messages of text and image, got {kind}", "needs the model's proc"]
    for given, error in zip((processor, processor.tokenizer), errors, strict=True):
        with generator(model, given) as batched:
            bad, good = batched.generate([row, "cd"], **OPTIONS)
        assert error in bad.error
        assert good.error is None


def test_a_processor_that_is_found_beside_the_checkpoint_reads_and_writes(llava, tmp_path):
    model, processor, image = llava
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    model.config._name_or_path = str(tmp_path)
    with generator(model) as batched:
        (result,) = batched.generate([{"text": "ab<image>cd", "images": [image]}], **OPTIONS)
    assert result.error is None
    assert result.text == processor.tokenizer.decode(result.tokens, skip_special_tokens=True)


def test_an_image_without_its_processor_is_its_rows_error(llava):
    model, processor, image = llava
    processed = processor(text="<image>cd", images=[image], return_tensors="pt")
    with generator(model) as batched:
        results = batched.generate([{"text": "<image>cd", "images": [image]}, processed], **OPTIONS)
    assert "processor" in results[0].error
    assert "in place of the tokenizer" in results[0].error
    assert results[1].error is None


def test_what_a_processor_raises_is_its_rows_error(llava):
    model, processor, _ = llava
    with generator(model, processor) as batched:
        rows = [{"text": "<image>", "images": ["no such file"]}, "abc"]
        bad, good = batched.generate(rows, **OPTIONS)
    assert "its processor raised" in bad.error
    assert good.error is None


def with_more_pixels(row):
    return {name: torch.cat([row[name]] * (1 + (name in OF_IMAGES))) for name in row}


def with_fewer_tokens(row):
    return {name: row[name][:, :5] for name in ("input_ids", "attention_mask")} | {
        name: row[name] for name in OF_IMAGES
    }


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (without("image_grid_thw"), "image_grid_thw: expected it beside pixel_values"),
        (changed("pixel_values", lambda x: x[:-4]), "pixel_values: expected the 16 patches"),
        (changed("image_grid_thw", lambda x: x * 2), "pixel_values: expected the 128 patches"),
        (with_more_pixels, "computing its images: Image features and image tokens do not match"),
        (changed("image_grid_thw", lambda x: x[:0]), "pixel_values: expected the 0 patches"),
        (
            changed("input_ids", lambda x: x[:, 1:4]),
            "mm_token_type_ids: expected 1 for",
        ),
        (with_fewer_tokens, "image_grid_thw: expected grids that fit the 2 image tokens"),
        (changed("input_ids", lambda x: x.clamp(max=7)), "pixel_values: expected tokens"),
        (changed("input_ids", lambda x: x.repeat(2, 1)), r"input_ids: .*got shape \[2, "),
        (changed("attention_mask", lambda x: x * 0), "attention_mask: expected ones, got padding"),
        (changed("input_ids", lambda x: x[:, :0]), "expected at least one token"),
        (changed("pixel_values", lambda x: x.to("meta")), "Cannot copy out of meta tensor"),
        (changed("pixel_values", lambda _: [object()]), "pixel_values: expected a tensor"),
        (lambda row: {**row, "vision_mask": row["input_ids"] > 9}, "is given vision_mask with"),
        (
            lambda row: {**without("pixel_values")(row), "pixel_value": row["pixel_values"]},
            "image_grid_thw, pixel_value: expected pixel_values with it",
        ),
        (lambda row: {"input_ids": row["input_ids"]}, "pixel_values: the text has 4 tokens"),
        (lambda row: {**row, "pixel_values_videos": row["pixel_values"]}, "pixel_values_videos"),
    ],
)
def test_pixels_that_do_not_fit_their_text_are_their_rows_error(model, spoil, error):
    good, row = (pictured(model, text) for text in prompts(6, 5))
    with generator(model) as batched:
        bad, result = batched.generate([spoil(row), good], **OPTIONS)
        assert_nothing_held(batched)
    assert re.search(error, bad.error), bad.error
    assert_same(result, generate(model, good, **OPTIONS))


def test_an_image_for_a_model_without_eyes_is_its_rows_error():
    model, seeing = tiny(), seeing_model("qwen2_5_vl")
    image, text = pictured(seeing, torch.arange(2, 6)), torch.arange(2, 9)
    image["input_ids"] = image["input_ids"].clamp(max=90)
    with generator(model) as batched:
        bad, good = batched.generate([image, text], **OPTIONS)
    assert "takes no images" in bad.error
    assert good.error is None


def test_an_image_that_is_read_both_ways_is_refused_with_the_reason():
    model = seeing_model("gemma3")
    row = pictured(model, *prompts(5))
    both = {**row, "token_type_ids": (row["input_ids"] == image_token(model)).int()}
    with generator(model) as batched:
        refused, plain, again = batched.generate([both, row, both], **OPTIONS)
        assert_nothing_held(batched)
    assert "spans of images both ways" in refused.error
    assert "spans of images both ways" in again.error, "it was found as it was read one way"
    assert_same(plain, generate(model, row, **OPTIONS))


def test_a_processors_mapping_without_images_is_a_text(model):
    (text,) = prompts(6)
    row = {"input_ids": text[None], "attention_mask": torch.ones_like(text[None])}
    with generator(model) as batched:
        first, second = batched.generate([row, text], **OPTIONS)
        assert batched.stats.vision_forwards == 0
    assert first.tokens == second.tokens
    assert second.cached_tokens == 5


# ------------------------------------------------------------------ what images are found by


def found_by(*images, seed=0, change=None):
    """The text by which a prompt is found, of images given as height and width in patches."""
    ids = [3]
    for height, width in images:
        ids += [9] * (height * width // 4) + [4]
    ids = np.array(ids, np.int32)
    patches = sum(height * width for height, width in images)
    inputs = {
        "pixel_values": torch.randn(patches, 5, generator=torch.Generator().manual_seed(seed)),
        "image_grid_thw": torch.tensor([[1, *image] for image in images]),
        "mm_token_type_ids": torch.as_tensor(ids == 9)[None].int(),
    }
    if change is not None:
        change(inputs)
    return ImagePrompt(ids, inputs, np.flatnonzero(ids == 9), None).text.tolist()


def test_image_tokens_stand_as_numbers_that_no_vocabulary_has():
    text = found_by((4, 4), (4, 8))
    assert [x for x in text if x < FIRST_IMAGE_NUMBER] == [3, 4, 4]
    assert len(set(text)) == 2 + 4 + 8
    assert max(text) < 2**31


def test_an_image_is_found_by_its_pixels_its_grid_and_nothing_else():
    text = found_by((4, 4), (4, 8))
    assert found_by((4, 4), (4, 8)) == text
    assert found_by((4, 4), (8, 4))[:6] == text[:6]
    assert found_by((2, 8))[1] != text[1]

    def change_last(inputs):
        inputs["pixel_values"][-1, -1] += 1e-6

    other = found_by((4, 4), (4, 8), change=change_last)
    assert other[:6] == text[:6]
    assert not set(other[6:-1]) & set(text[6:-1])
    assert found_by((4, 4), change=lambda inputs: inputs.update(more=3))[1] != found_by((4, 4))[1]


def test_images_that_cannot_be_told_apart_are_found_together():
    def one_row_more(inputs):
        inputs["pixel_values"] = torch.cat([inputs["pixel_values"], torch.zeros(1, 5)])

    first, second = (found_by((4, 4), (4, 4), seed=s, change=one_row_more) for s in (0, 1))
    assert not {x for x in first if x > 4} & {x for x in second if x > 4}


def test_images_whose_tokens_are_not_as_many_as_their_patches_say_are_found_together():
    def text(seed):
        patches = torch.zeros(44, 5)
        patches[36:] = seed
        ids = np.array([3, *[9] * 14, 4, *[9] * 4, 4, *[9] * 4], np.int32)
        inputs = {
            "pixel_values": patches,
            "image_grid_thw": torch.tensor([[1, 6, 6], [1, 2, 2], [1, 2, 2]]),
        }
        return ImagePrompt(ids, inputs, np.flatnonzero(ids == 9), None).text.tolist()

    first, second = text(1), text(2)
    assert not {x for x in first if x > 9} & {x for x in second if x > 9}
