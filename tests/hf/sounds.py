"""Prompts with audio in them, as a processor makes them."""

import torch

from tests.hf.tiny import padded
from tests.hf.zoo import built

TOKENS = 6  # that each audio takes
_FOUR_TO_ONE = {"num_mel_bins": 8, "intermediate_size": 128}  # frames to tokens
_WHISPER = {"num_mel_bins": 8, "max_source_positions": 24}
_MASK = "input_features_mask"
# By type: its own fields, the shape of what is heard, and its mask: name, length, and how much of
# it is no padding.
AUDIO = {
    "glmasr": ({"audio_config": _FOUR_TO_ONE}, (8, 64), (_MASK, 64, 48)),
    "granite_speech": (
        {"encoder_config": {"input_dim": 8, "hidden_dim": 32, "context_size": 20}}
        | {"has_lora_adapter": False},
        (45, 8),
        (_MASK, 9, TOKENS),
    ),
    "qwen2_audio": ({"audio_config": _WHISPER}, (8, 48), ("feature_attention_mask", 48, 24)),
    "qwen3_asr": (
        {"audio_config": {"num_mel_bins": 8, "downsample_hidden_size": 8}},
        (8, 100),
        (_MASK, 100, 48),
    ),
    "voxtral": (
        {"audio_token_id": 190, "audio_config": {**_FOUR_TO_ONE, **_WHISPER}},
        (8, 48),
        None,
    ),
}


def hearing_model(kind):
    """A random model of an audio-text type that listens to short audio."""
    return built(kind, **AUDIO[kind][0])


def heard(model, *texts, seed=0):
    """Rows of a few tokens, an audio of their own, and a text; padded on the left."""
    _, shape, mask = AUDIO[model.config.model_type]
    audio = torch.full((TOKENS,), model.config.audio_token_id)
    batch = padded([torch.cat([torch.tensor([1, 5]), audio, text]) for text in texts])
    generator = torch.Generator().manual_seed(seed)
    batch["input_features"] = torch.randn(len(texts), *shape, generator=generator)
    if mask:
        name, length, whole = mask
        batch[name] = (torch.arange(length) < whole).repeat(len(texts), 1)
    return batch
