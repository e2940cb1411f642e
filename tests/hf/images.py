"""Prompts with images in them, as a processor makes them."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

NESTED = {"idefics2", "idefics3", "smolvlm"}  # a row has several images


def looking(model: PreTrainedModel, *texts: Tensor) -> dict[str, Tensor]:
    """The same for a type whose processor cuts nothing: rows of one square image each."""
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
    begin, end = (getattr(config, f"{kind}_{where}_token_id") for where in ("start", "end"))
    image = torch.full((patches**2 // merge**2,), config.image_token_id)
    ids = torch.stack(
        [torch.cat([torch.tensor([1, 5, begin]), image, torch.tensor([end]), t]) for t in texts]
    )
    pixels = channels * vision.temporal_patch_size * size**2
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(len(texts) * patches**2, pixels, generator=generator),
        "image_grid_thw": torch.tensor([[1, patches, patches]] * len(texts)),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }
