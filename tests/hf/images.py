"""Prompts with images or audio in them, as a processor makes them."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.hf.sounds import AUDIO, heard, hearing_model
from tests.hf.zoo import _MROPE, _SPARSE, built

BY_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids")
NESTED = {"idefics2", "idefics3", "smolvlm"}  # a row has several images
ENDS_LINES = {"hy_v4_vl"}  # with a token behind each line of an image


def looking(model: PreTrainedModel, *texts: Tensor) -> dict[str, Tensor]:
    """Encodes rows of one square image each, for a type whose processor cuts nothing."""
    vision = model.config.vision_config
    size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
    shape = len(texts), getattr(vision, "num_channels", 3), size, size
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    given = {"pixel_values": pixels[:, None] if model.config.model_type in NESTED else pixels}
    taken = inspect.signature(model.get_image_features).parameters
    if "image_sizes" in taken:
        given["image_sizes"] = torch.tensor([[size, size]] * len(texts))
    with torch.no_grad():
        counts = tokens_of(model.get_image_features(**given), len(texts))
    token = getattr(model.config, "image_token_id", None)
    token = model.config.image_token_index if token is None else token
    rows = [
        torch.cat([torch.tensor([1, 5]), torch.full((count,), token), text])
        for count, text in zip(counts, texts, strict=True)
    ]
    ids = torch.stack(rows)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **given}


def tokens_of(features: Any, images: int) -> list[int]:
    """Tokens that each image takes in a prompt."""
    features = getattr(features, "pooler_output", features)
    if isinstance(features, (list, tuple)) and len(features) == images:
        return [image.shape[0] if image.dim() == 2 else image.shape[1] for image in features]
    features = features[0] if isinstance(features, (list, tuple)) else features
    flat = features.shape[0] if features.dim() == 2 else features.shape[:2].numel()
    return [flat // images] * images


def seeing(model, *texts, patches=4, seed=0):
    """Rows of a few tokens, an image of `patches` squared, and a text: equally long texts."""
    config, vision = model.config, model.config.vision_config
    merge, size = vision.spatial_merge_size, vision.patch_size
    channels = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
    kind = "vision" if hasattr(config, "vision_start_token_id") else "image"
    begin, end = (getattr(config, f"{kind}_{where}_token_id", 6) for where in ("start", "end"))
    lines = patches // merge
    image = torch.full((lines * (lines + (config.model_type in ENDS_LINES)),), image_token(model))
    ids = torch.stack(
        [torch.cat([torch.tensor([1, 5, begin]), image, torch.tensor([end]), t]) for t in texts]
    )
    frames = getattr(vision, "temporal_patch_size", int(hasattr(vision, "temporal_merge_size")))
    frames = 1 if config.model_type in ENDS_LINES else frames
    pixels = (channels * frames * size**2,) if frames else (channels, size, size)
    generator = torch.Generator().manual_seed(seed)
    prompt = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(len(texts) * patches**2, *pixels, generator=generator),
        "image_grid_thw": torch.tensor([[1, patches, patches]] * len(texts)),
    }
    if config.model_type in GRIDDED:
        return prompt
    return {**prompt, "mm_token_type_ids": (ids == image_token(model)).int()}


def _plain(tokens, size, *lead, sized=False, **own):
    return own, tokens, (*lead, 3, size, size), sized


_SMALL = {"vision_config": {"image_size": 24}}
# Models that count the tokens of an image like text: their own fields, how many an image has, the
# shape of its pixels, and whether these come with `image_sizes`.
PLAIN = {
    "aya_vision": _plain(9, 24, 1, **_SMALL),
    "cohere2_vision": _plain(9, 24, 1, **_SMALL),
    "gemma3": _plain(4, 24, 1, **_SMALL, mm_tokens_per_image=4),
    "got_ocr2": _plain(4, 32, 1),
    "idefics3": _plain(9, 24, 1, 1, **_SMALL),
    "inkling_mm_model": ({}, 4, (4, 2, 4, 4, 3), False),  # a token for each patch of two frames
    "internvl": _plain(4, 56, 1, vision_config={"image_size": [56, 56], "patch_size": [14, 14]}),
    "lighton_ocr": _plain(9, 28, 1, sized=True),
    "llava": _plain(64, 32, 1),
    "mistral3": _plain(9, 28, 1, sized=True),
    "mistral_large4": _plain(9, 28, 1, sized=True),
    "smolvlm": _plain(9, 24, 1, 1, **_SMALL),
}
# Models whose positions run behind their tokens.
MROPE = {
    "qwen2_vl": {},
    "qwen2_5_vl": {},
    "qwen3_vl": {"vision_config": {"deepstack_visual_indexes": [0, 1]}},
    "glm4v": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "qwen4_exp": {
        "text_config": {**_SPARSE, "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}}
    },
    "qwen3_vl_moe": {
        "vision_config": {"deepstack_visual_indexes": [0, 1]},
        "text_config": {"rope_parameters": {**_MROPE, "mrope_interleaved": True}},
    },
    "glm46v": {},
    "glm4v_moe": {},
    "glm_ocr": {},
    "paddleocr_vl": {},
    "hy_v4_vl": {},
}
# The same pixels, but counted like text.
GRIDDED: dict[str, dict[str, Any]] = {"glm5_next": {}, "minimax_m3_vl": {}}
# The same, whose images packed rows do not serve.
MROPE_ALONE = {"ernie4_5_vl_moe": {}}


def seeing_model(kind):
    """A random model of an image-text type that looks at small images, or hears short audio."""
    if kind in AUDIO:
        return hearing_model(kind)
    own = {**MROPE, **MROPE_ALONE, **GRIDDED}
    model = built(kind, sees=True, **(own[kind] if kind in own else PLAIN[kind][0]))
    for name, parameter in model.named_parameters():
        if "projection" in name and not parameter.any():  # all images would look alike
            torch.nn.init.normal_(parameter, 0, 0.3)
    return model


def pictured(model, text, patches=4, seed=0):
    """A prompt of one image or audio and a text, as a processor returns it, of any of these."""
    kind = model.config.model_type
    if kind in AUDIO:
        return heard(model, text, seed=seed)
    if kind in MROPE or kind in GRIDDED:
        return seeing(model, text, patches=patches, seed=seed)
    _, tokens, shape, sized = PLAIN[kind]
    image = torch.full((tokens,), image_token(model))
    ids = torch.cat([torch.tensor([1, 5]), image, text])[None]
    generator = torch.Generator().manual_seed(seed)
    prompt = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(*shape, generator=generator),
    }
    return {**prompt, "image_sizes": torch.tensor([shape[-2:]])} if sized else prompt


def behind(prompt, more, model):
    """A prompt with more tokens behind it."""
    ids = torch.cat([prompt["input_ids"], more[None]], dim=1)
    longer = {**prompt, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "mm_token_type_ids" in prompt:
        longer["mm_token_type_ids"] = (ids == image_token(model)).int()
    return longer


def joined(*prompts):
    """Prompts one behind the other as one prompt, all images in it."""
    return {
        name: torch.cat([prompt[name] for prompt in prompts], dim=int(name in BY_TOKEN))
        for name in prompts[0]
    }


def without(name):
    """Spoils a prompt: takes one of its inputs away."""
    return lambda row: {key: value for key, value in row.items() if key != name}


def changed(name, change):
    """Spoils a prompt: changes one of its inputs."""
    return lambda row: {**row, name: change(row[name])}


def image_token(model):
    """The id that stands in a text for each token of an image, or of audio."""
    config, what = model.config, "audio" if model.config.model_type in AUDIO else "image"
    return getattr(config, f"{what}_token_id", None) or getattr(config, f"{what}_token_index")
