"""The mask function that transformers calls under the name `pagedkv`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from pagedkv.errors import UnsupportedModelError

from .forward import ForwardCache, PagedLength

BLOCK_ELEMENTS = 1 << 22  # of a mask that is looked at, made for so many queries at a time


# A compiler would specialise on the objects that this function looks at.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def mask_function(
    *, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """The padding mask for our caches, `[B, kv_length]` bool; for others the mask of SDPA."""
    lengths = {"q_length": q_length, "kv_length": kv_length}
    if not isinstance(kv_length, PagedLength):
        return sdpa_mask(**lengths, attention_mask=attention_mask, **kwargs)
    cache = kv_length.cache
    strange = kwargs.get("use_vmap") or not kwargs.get("allow_is_causal_skip", True)
    if strange and not _is_plain(cache, **lengths, **kwargs):
        raise UnsupportedModelError(
            "attention_mask: this model asks for a mask that is not plain causal or sliding: it "
            "reads spans of images both ways, or the prompt holds packed sequences, which paged "
            "attention does not serve. Prompts of text alone work"
        )
    cache.mask_made = True
    if attention_mask is None or not cache.shared_layers:
        return attention_mask
    # Models that share K and V between layers cut masks to the queries whose logits are wanted.
    by_query = attention_mask[:, None, None].expand(-1, 1, q_length, -1)
    by_query._pagedkv = attention_mask  # type: ignore[attr-defined]
    return by_query


def _is_plain(cache: ForwardCache, q_length: int, kv_length: int, **kwargs: Any) -> bool:
    """Whether a mask is causal or sliding after all, as that of a text without images is.

    A mask is told by functions of single places, so it is made and held against plain ones. That
    takes milliseconds place by place; for one query, as every step has it, all are asked at once.
    """
    windows = {*cache.kv.config.windows}
    plain = [
        causal_mask_function if window is None else sliding_window_causal_mask_function(window)
        for window in windows
    ]
    first = kwargs.pop("q_offset", 0)
    whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    kwargs |= {**whole, "kv_length": int(kv_length)}
    if q_length == 1:
        kwargs["use_vmap"] = False
    block = max(1, BLOCK_ELEMENTS // (kwargs["kv_length"] * kwargs["batch_size"]))
    for start in range(0, q_length, block):
        place = {"q_length": min(block, q_length - start), "q_offset": first + start}
        asked = sdpa_mask(**{**kwargs, **place})
        usual = {**kwargs, **place, "use_vmap": False}
        plain = [f for f in plain if torch.equal(sdpa_mask(**{**usual, "mask_function": f}), asked)]
    return bool(plain)
