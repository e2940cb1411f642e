"""Prompts with images in them, as a processor makes them."""

import torch


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
