"""Finds the part of a model's attention that tensor parallelism leaves on one rank.

Configurations tell the heads of the whole model. The projections themselves show how many of them a
rank computes: some plans share out their outputs, some gather them, some leave them whole.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pagedkv.config import CacheConfig
from pagedkv.errors import UnsupportedModelError
from pagedkv.ranks import ranks_of

# Names of projections that make K, alone or beside Q and V.
PROJECTIONS = ("k_proj", "qkv_proj", "qkv", "query_key_value", "Wqkv", "W_pack", "c_attn")

_PARTS: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()


def parts_of_heads(model: PreTrainedModel) -> int:
    """Returns into how many parts the heads of a model are cut; this rank computes one part.

    Collective, once for each model: a projection may gather its outputs.
    """
    ranks = ranks_of(model)
    if ranks.size == 1:
        return 1
    if model not in _PARTS:
        made = _projection(model)
        _PARTS[model] = 1 if made is None or _width(made) == made.out_features else ranks.size
    return _PARTS[model]


def on_this_rank(model: PreTrainedModel, whole: CacheConfig) -> CacheConfig:
    """Cuts a cache for all heads down to the heads of this rank.

    Raises:
        UnsupportedModelError: heads would be cut.
    """
    parts = parts_of_heads(model)
    if parts == 1:
        return whole
    for heads in {shape.num_kv_heads for shape in whole.shapes if not shape.v_is_k}:
        if heads % parts:
            raise UnsupportedModelError(
                f"its {heads} KV heads cannot be shared out whole among {parts} processes; take a "
                f"number of them that divides {heads}"
            )
    groups = tuple(
        group if group.v_is_k else replace(group, num_kv_heads=group.num_kv_heads // parts)
        for group in whole.groups
    )
    latents = all(shape.v_is_k for shape in whole.shapes)
    heads = whole.num_kv_heads if latents else whole.num_kv_heads // parts
    return replace(whole, num_kv_heads=heads, groups=groups)


def _projection(model: PreTrainedModel) -> Any:
    """Returns a layer of the decoder that makes K; None if none has a known name."""
    text: Any = model.config.get_text_config(decoder=True)
    for module in model.modules():
        if getattr(module, "config", None) is text and hasattr(module, "layer_idx"):
            for name in PROJECTIONS:
                made = module._modules.get(name)
                if isinstance(made, nn.Linear):
                    return made
    return None


@torch.no_grad()
def _width(made: nn.Linear) -> int:
    """Returns how many numbers a projection gives for a token on this rank."""
    token = torch.zeros(1, 1, made.in_features, dtype=made.weight.dtype, device=made.weight.device)
    return int(made(token).shape[-1])


def of_rank(model: PreTrainedModel, fingerprint: bytes) -> bytes:
    """Returns a fingerprint for the pages of one rank, which hold only its heads."""
    ranks = ranks_of(model)
    if ranks.size == 1:
        return fingerprint
    return fingerprint + b" rank %d of %d" % (ranks.rank, ranks.size)
