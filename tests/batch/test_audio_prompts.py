"""Audio as its processor makes it, and what does not fit; `test_step_images.py` has the tokens."""

import re

import numpy as np
import pytest
import torch

from pagedkv.batch.image_prompts import ImagePrompt
from pagedkv.errors import UnsupportedModelError
from tests.batch.generating import assert_nothing_held, assert_same, generator
from tests.batch.letters import letters
from tests.hf.images import changed, joined, pictured, seeing_model, without
from tests.hf.sounds import heard, hearing_model
from tests.hf.tiny import generate, prompts

OPTIONS = {"max_new_tokens": 6, "do_sample": False}
CHAT = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}<audio>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}z"
)


@pytest.fixture
def model():
    return hearing_model("qwen2_audio")


@pytest.fixture
def processor(model):
    """The processor that goes with the model."""
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    tokenizer = letters()
    tokenizer.add_tokens(["<audio>"], special_tokens=True)
    model.config.audio_token_id = tokenizer.convert_tokens_to_ids("<audio>")
    frames = 2 * model.config.audio_config.max_source_positions
    features = WhisperFeatureExtractor(feature_size=8)
    features.n_samples = frames * features.hop_length
    return Qwen2AudioProcessor(features, tokenizer, chat_template=CHAT, audio_token="<audio>")


def test_audio_is_given_as_its_processor_returns_it_or_as_what_the_processor_takes(
    model, processor
):
    audio = np.random.default_rng(0).standard_normal(4000).astype(np.float32)
    raw = {"text": "ab<audio>cdz", "audio": [audio]}
    processed = processor(**raw, return_tensors="pt")
    said = [{"type": "text", "text": "ab"}, {"type": "audio", "audio": audio}]
    chat = [{"role": "user", "content": [*said, {"type": "text", "text": "cd"}]}]
    with generator(model, processor) as batched:
        results = batched.generate([processed, raw, chat, "abc"], **OPTIONS)
    assert_same(results[0], generate(model, dict(processed), max_new_tokens=6))
    assert [result.error for result in results] == [None] * 4
    assert results[0].tokens == results[1].tokens == results[2].tokens
    assert results[1].cached_tokens == processed["input_ids"].shape[1] - 1


def test_an_image_for_a_processor_of_audio_is_not_dropped_by_its_template(model, processor):
    row = [{"role": "user", "content": [{"type": "image", "image": "no such file"}]}]
    with generator(model, processor) as batched:
        (bad,) = batched.generate([row], **OPTIONS)
    assert bad.error == "prompt: expected messages of text and audio, got image"


def unexpanded(row):
    """One token of text for the whole audio, as older processors wrote it."""
    own = {name: torch.cat([row[name][:, :3], row[name][:, 8:]], 1) for name in OF_TEXT}
    return {**row, **own}


OF_TEXT = ("input_ids", "attention_mask")


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (without("input_features"), "feature_attention_mask: expected input_features with it"),
        (lambda row: {"input_ids": row["input_ids"]}, "has 6 tokens of audio, so it needs the"),
        (without("feature_attention_mask"), "while computing its audio: "),
        (changed("input_features", lambda x: x.repeat(2, 1, 1)), "while computing its audio: "),
        (changed("input_ids", lambda x: x.clamp(max=100)), "expected tokens 190 in the text"),
        (changed("feature_attention_mask", torch.ones_like), "audio tokens do not match"),
        (unexpanded, r"expected a token of the text for each .* got 8 tokens"),
        (lambda row: {**row, "pixel_values": torch.ones(1, 3, 8, 8)}, "is given pixel_values with"),
        (lambda row: {**row, "video_features": torch.ones(1)}, "expected audio, packed rows serve"),
    ],
)
def test_audio_that_does_not_fit_its_text_is_its_rows_error(model, spoil, error):
    good, row = (heard(model, text) for text in prompts(6, 5))
    with generator(model) as batched:
        bad, result = batched.generate([spoil(row), good], **OPTIONS)
        assert_nothing_held(batched)
    assert re.search(error, bad.error), bad.error
    assert_same(result, generate(model, good, **OPTIONS))


def test_audio_for_a_model_that_sees_is_its_rows_error(model):
    seeing = seeing_model("llava")
    row = {**heard(model, *prompts(5)), "input_ids": pictured(seeing, *prompts(5))["input_ids"]}
    with generator(seeing) as batched:
        (bad,) = batched.generate([row], **OPTIONS)
    assert "input_features: expected images" in bad.error


def test_what_is_heard_less_of_is_another_audio(model):
    """Audio that is known by its features alone, though a mask says where it ends."""
    row = heard(model, *prompts(5))
    shorter = {**row, "feature_attention_mask": row["feature_attention_mask"].clone()}
    shorter["feature_attention_mask"][0, 23:] = False  # which makes as many tokens
    with generator(model) as batched:
        results = batched.generate([row, shorter], **OPTIONS)
        assert batched.stats.vision_forwards == 2
    assert results[1].cached_tokens <= 2
    assert_same(results[1], generate(model, shorter, **OPTIONS))


def test_each_audio_of_a_prompt_is_known_by_itself():
    """Prompts that go on with another audio, and would find nothing of the first."""
    model = hearing_model("voxtral")
    first, second, third = (heard(model, t, seed=i) for i, t in enumerate(prompts(4, 3, 3)))

    def text_of(row):
        ids = row["input_ids"][0].numpy()
        return ImagePrompt(ids, without("input_ids")(row), np.flatnonzero(ids == 190), None).text

    one, other = text_of(joined(first, second)), text_of(joined(first, third))
    differ = np.flatnonzero(one != other)
    assert differ[0] == first["input_ids"].shape[1] + 2
    assert len({*one[one >= 2**30]}) == 12


def test_a_model_whose_generate_switches_adapters_is_refused():
    """Granite Speech, whose adapters act on prompts with audio alone."""
    model = hearing_model("granite_speech")
    model._hf_peft_config_loaded = True
    with pytest.raises(UnsupportedModelError, match="switches adapters on for audio"):
        generator(model)
