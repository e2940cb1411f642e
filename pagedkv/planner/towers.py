"""Towers for images beside a decoder: which models load theirs, and what one weighs.

Towers have less in common than decoders. The formula is that of a transformer over patches and of
what joins it to the decoder; headers of a checkpoint, where there are some, are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedkv.models.names import attributes

FEEDS_OUT = {"glm4v_vision", "glm4v_moe_vision"}  # whose `intermediate_size` is what joins them
GATED_FEEDS = {"pixtral", "silu"}  # a type of tower or an activation whose feed has three matrices


def takes_images(config: Mapping[str, Any]) -> bool:
    """Whether a configuration says something about images."""
    return any(word in name for name in config for word in ("vision", "visual", "image"))


def tower_weights(config: Mapping[str, Any]) -> int:
    """Weights of the tower that a configuration describes; 0 for one of another form, or none."""
    found = config.get("vision_config") or {}
    v = found if isinstance(found, Mapping) else attributes(found)
    inner = config.get("text_config") or config
    out = _size(inner if isinstance(inner, Mapping) else attributes(inner), "hidden_size")
    wide, layers = _size(v, "embed_dim", "hidden_size"), _size(v, "num_hidden_layers", "depth")
    if not (out and wide and layers):
        return 0
    feed = _size(v, "out_hidden_size" if v.get("model_type") in FEEDS_OUT else "intermediate_size")
    matrices = 2 + bool(GATED_FEEDS & {v.get("model_type"), v.get("hidden_act")})
    block = wide * (4 * wide + matrices * (feed or 4 * wide))
    patch = _size(v, "patch_size") or 16
    embedding = 3 * patch**2 * (_size(v, "temporal_patch_size") or 1)
    positions = (_size(v, "image_size") // patch) ** 2
    merged = wide * (_size(v, "spatial_merge_size") or 1) ** 2
    joins = 1 + len(v.get("deepstack_visual_indexes") or ())
    joined = joins * (merged + out) * (merged if merged > wide else out)
    return layers * block + wide * (embedding + positions) + joined


def _size(config: Mapping[str, Any], *names: str) -> int:
    """The first of these sizes that is given, one side where it has two; 0 without one."""
    for name in names:
        value = config.get(name)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if type(value) is int and value > 0:
            return value
    return 0
