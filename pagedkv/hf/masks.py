"""The mask function that transformers calls under the name `pagedkv`."""

from __future__ import annotations

import weakref
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from pagedkv.config import field_of
from pagedkv.errors import UnsupportedModelError
from pagedkv.models.kinds import Sight

from .before import masks_before
from .forward_cache import ForwardCache, PagedLength, uncompiled
from .handles import MaskHandle

BLOCK_ELEMENTS = 1 << 22  # of a mask that is compared: it is made for so few queries at a time


@uncompiled
def mask_function(
    *, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """Returns a handle of the mask for a cache of ours, else the mask of the model's former way."""
    lengths = {"q_length": q_length, "kv_length": kv_length}
    if not isinstance(kv_length, PagedLength):
        make = masks_before(config := kwargs.get("config"))
        if field_of(config, "num_kv_shared_layers"):
            # Gemma 4's last layers then compute their last queries alone, but not under the name of
            # `sdpa` without a mask: torch would count queries from the first key.
            kwargs["allow_is_causal_skip"] = False
        made: Tensor | None = make(**lengths, attention_mask=attention_mask, **kwargs)
        return made
    cache = kv_length.cache
    sights = _sights_of(cache, attention_mask, **lengths, **kwargs)
    if not sights:
        raise UnsupportedModelError(
            "attention_mask: this model asks for a mask that is not plain causal or sliding: it "
            "reads spans of images both ways, or the prompt holds packed sequences, which paged "
            "attention does not serve. Prompts of text alone work"
        )
    shape = kwargs["batch_size"], 1, q_length, int(kv_length)
    device = kwargs.get("device", cache.kv.device)
    handle = MaskHandle.made(cache, sights, attention_mask, shape, device)
    cache.latest_mask = weakref.ref(handle)  # for modules that are called without one
    return handle


def _sights_of(
    cache: ForwardCache, padding: Tensor | None, q_length: int, kv_length: int, **kwargs: Any
) -> list[Sight]:
    """Returns the kinds of mask that this one may be: causal, sliding, or causal within chunks.

    A mask is given as a function of single places. Even if the function is no plain one, the mask
    may be plain, as for a text without images: so it is made, and compared with plain ones. That
    takes milliseconds place by place; for one query, as in every decoding step, all places are
    computed at once.
    """
    asked, batch = kwargs.get("mask_function", causal_mask_function), kwargs["batch_size"]
    found = [*dict.fromkeys((Sight(kwargs.get("local_size")), *cache.kv.config.sights))]
    plain = {sight: _plain(sight, padding, batch) for sight in found}
    if alike := [sight for sight in found if _made_alike(asked, plain[sight])]:
        return alike
    first = kwargs.pop("q_offset", 0)
    whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    kwargs |= {**whole, "kv_length": int(kv_length)}
    if q_length == 1:
        kwargs["use_vmap"] = False
    block = max(1, BLOCK_ELEMENTS // (kwargs["kv_length"] * kwargs["batch_size"]))
    for start in range(0, q_length, block):
        place = {"q_length": min(block, q_length - start), "q_offset": first + start}
        mask = sdpa_mask(**{**kwargs, **place})
        usual = {**kwargs, **place, "use_vmap": False}
        found = [
            sight
            for sight in found
            if torch.equal(sdpa_mask(**{**usual, "mask_function": plain[sight]}), mask)
        ]
    return found


def _plain(sight: Sight, padding: Tensor | None, batch: int) -> Any:
    """Returns transformers' own mask function; its chunks begin behind the padding of a row."""
    if sight.window is None:
        return causal_mask_function
    if not sight.chunked:
        return sliding_window_causal_mask_function(sight.window)
    if padding is None:
        left = torch.zeros(batch, dtype=torch.int64, device="cpu")
    else:
        left = (padding.cumsum(-1) == 0).sum(-1)
    return chunked_causal_mask_function(sight.window, left)


def _made_alike(a: Any, b: Any) -> bool:
    """Whether two functions have the same code and close over the same numbers and functions."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_made_alike, a, b))
    if isinstance(a, FunctionType):
        cells = (tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (a, b))
        return a.__code__ is b.__code__ and _made_alike(*cells)
    if isinstance(a, Tensor):
        return torch.equal(a, b.to(a.device))
    return type(a) is int and bool(a == b)
