"""The attention function that transformers calls under the name `pagedkv`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedkv.errors import UnsupportedModelError
from pagedkv.kernels.torch.sdpa import without_cudnn

from .before import attention_before, mask_of_chosen
from .forward_cache import changed_after_cache, uncompiled, waiting
from .handles import MaskHandle, staged_of
from .paged_layers import SharedLatents
from .staged import Staged
from .strange import refuse_strange, refuse_strange_sinks


@uncompiled
def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Any:
    """Attends over pages if K came from a `PagedCache`, else as the model did before.

    Args:
        query: `[B, H, q, D]`.
        key, value: the ones that `update` returned, or made of latents that it returned.
        attention_mask: as `mask_function` returned it.
        kwargs: see `over_pages`.
    """
    staged: Staged | None = staged_of(key, value)
    missed: Staged | None = waiting.last() if waiting.last is not None else None
    waiting.last = None
    if staged is None and missed is not None:
        staged = missed.expanded_by(module, key, value)
    if missed is not None and missed is not staged and missed.layer.staged is missed:
        missed.layer.staged = None
        if getattr(module, "layer_idx", None) == missed.layer.index:
            raise changed_after_cache(missed.layer.index)
    if staged is None and missed is None and isinstance(attention_mask, MaskHandle):
        layers, at = attention_mask.cache.layers, getattr(module, "layer_idx", -1)
        if at in range(len(layers)) and isinstance(layers[at], SharedLatents):
            staged = layers[at].expanded_by(module, key, value)
    if staged is not None:
        return over_pages(staged, module, query, attention_mask, **kwargs)
    if isinstance(attention_mask, MaskHandle):
        raise changed_after_cache(attention_mask.cache.forward_layer)
    attention_mask = mask_of_chosen(module, query, key, attention_mask, kwargs)
    attend = attention_before(module, kwargs)
    with without_cudnn(query.device):
        return attend(module, query, key, value, attention_mask, **kwargs)


def over_pages(
    staged: Staged,
    module: torch.nn.Module,
    query: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attends to K and V that a layer has staged, and to the pages.

    Args:
        s_aux: `[H]`, attention sinks.
        indices, block_indices: a handle of the tokens that queries read, if the mask has none;
            None for all tokens.
        position_bias: `[B, H, q, n]`, a bias by distance; see `distance_bias.py`.
        sinks: `[B, H, q, 1]`, sinks that differ by query.

    Returns:
        `[B, q, H, D]`, zeros for padding tokens; no weights.
    """
    if kwargs.get("is_causal") is None:  # an argument wins over the module's own
        kwargs["is_causal"] = getattr(module, "is_causal", None)
    refuse_strange(dropout, kwargs)
    refuse_strange_sinks(module, s_aux)
    layer = staged.layer
    mask = layer.mask(attention_mask)
    mask.require_sight(layer.index, layer.sight)
    if sliding_window is not None and sliding_window != layer.window:
        raise UnsupportedModelError(
            f"sliding_window: layer {layer.index} uses {sliding_window}, its configuration says "
            f"{layer.window}"
        )
    terms = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    handles = (one for one in (mask.chosen, indices, block_indices) if one is not None)
    chosen = layer.chosen(next(handles, None))
    if chosen is not None:
        terms["indices"] = chosen
    by_query = {"position_bias": position_bias, "query_sinks": sinks}
    given = {name: term for name, term in by_query.items() if term is not None}
    if given:
        _require_by_query(staged, query, sinks, next(iter(given)))
    terms |= given
    return staged.attend(query, mask.padding, **terms), None


def _require_by_query(staged: Staged, query: Tensor, sinks: Tensor | None, name: str) -> None:
    """Raises where terms that differ by query are not known: over latents, or what is written."""
    if staged.attended or type(staged) is not Staged:
        raise UnsupportedModelError(
            f"{name}: paged attention does not know this argument in layer {staged.layer.index}, "
            "which attends to latents, or to the K and V of another layer"
        )
    if sinks is not None and sinks.shape != (*query.shape[:3], 1):
        raise UnsupportedModelError(
            f"sinks: expected one of each query, {[*query.shape[:3], 1]}, got {[*sinks.shape]}"
        )
