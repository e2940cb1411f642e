"""The attention and masks of a model before it was attached; its calls without pages use them."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pagedkv.errors import UnsupportedModelError
from pagedkv.models import facts_of
from pagedkv.models.seen import seen_of

from .foreign_code import homes_of, origin_of
from .forward_cache import NAME
from .model import text_config


@dataclass(eq=False)
class Before:
    """The attention of a model before it was attached.

    Attributes:
        config: its decoder's; attention modules have it, and calls for masks are given it.
        name: the name of its attention; of a model made with ours, the one it would have without.
    """

    config: Any
    name: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> Before:
        """Returns the present attention of a model; `_known` finds it while it is kept."""
        config = text_config(model)
        name, known = config._attn_implementation, _known.get(id(config))
        if name == NAME and known is not None:
            return known  # another model with this configuration is attached
        if facts_of(config.model_type).written:
            name = "eager"  # so a layer computes under a name that it does not know
        elif name == NAME:
            name = "sdpa" if model._supports_sdpa else "eager"
        made = _known[id(config)] = cls(config, name)
        return made


_known: weakref.WeakValueDictionary[int, Before] = weakref.WeakValueDictionary()
_SAME = {"transformers", "torch", "pagedkv"}  # packages whose functions compute what ours does


def require_replaceable(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError if a model calls an attention function of others.

    Over pages ours is called in its place, whatever it computes. A model that was looked at was
    compared as it is.

    Args:
        model: one that is attached.
    """
    config = text_config(model)
    if seen_of(config) is not None:
        return
    name = Before.of(model).name
    for kind in {type(one) for one in model.modules() if getattr(one, "config", None) is config}:
        interfaces = [one for _, one in _named(kind) if isinstance(one, AttentionInterface)]
        if not interfaces or "/" in str(name):  # of the hub, whose kernels compute attention
            continue
        attention = _eager_of(kind) if name == "eager" else interfaces[0].get(name)
        own = {base.__module__ for base in kind.__mro__}
        for code in (attention, AttentionMaskInterface().get(name)):
            if code is None or {one.partition(".")[0] for one in homes_of(code) - own} <= _SAME:
                continue
            called, other = ".".join(origin_of(code)), "eager" if name == "sdpa" else "sdpa"
            raise UnsupportedModelError(
                f"attn_implementation: {name!r} of {kind.__name__} calls {called}, and over pages "
                "another function takes its place; if both compute the same, "
                f"`model.set_attn_implementation({other!r})` says so"
            )


def attention_before(module: nn.Module, terms: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the attention function that an attention module called before.

    Args:
        terms: the named arguments that it is called with.
    """
    before = _known.get(id(getattr(module, "config", None)))
    if before is None:  # the model was given our attention by name alone
        if known := [name for name in ("softcap", "s_aux") if terms.get(name) is not None]:
            raise UnsupportedModelError(
                f"{known[0]}: SDPA leaves it out, and no other attention of this model is known; "
                "`attach(model)` has calls without pages use its own"
            )
        return sdpa_attention_forward
    if before.name != "eager":  # a model's file may have another interface with the same names
        named = (one for _, one in _named(type(module)))
        interfaces = (one for one in named if isinstance(one, AttentionInterface))
        found: Callable[..., Any] = next(interfaces, AttentionInterface())[before.name]
        return found
    if (eager := _eager_of(type(module))) is not None:
        return eager
    raise UnsupportedModelError(
        f"attn_implementation: {type(module).__name__} does not name its eager attention, which "
        "calls without pages have to use; load the model with 'sdpa'"
    )


def _eager_of(kind: type) -> Callable[..., Any] | None:
    """Returns the eager attention that a class of modules names in its forward."""
    for name, one in _named(kind):
        if callable(one) and ("eager" in name or "eager" in getattr(one, "__name__", "")):
            return one
    return None


def mask_of_chosen(
    module: Any, query: Tensor, key: Tensor, mask: Any, terms: dict[str, Any]
) -> Any:
    """Narrows the mask of a call without pages to the tokens that the model's indexer chose.

    Under `eager` and `sdpa` a model does this itself; under other names it passes the tokens on.

    Args:
        query, key: `[B, heads, n, D]`.
        mask: `[B, 1, q, length]`, bool or added to scores.
        terms: as for `attention_before`; `indices` `[B, q, n]` or `block_indices` `[B, G, q, n]`
            are removed if they are used here.
    """
    before = _known.get(id(getattr(module, "config", None)))
    name = next((n for n in ("indices", "block_indices") if terms.get(n) is not None), None)
    if name is None or (before is not None and before.name not in ("eager", "sdpa")):
        return mask
    indices = terms.pop(name)
    if name == "block_indices":
        length, (dtype, device) = key.shape[2], (query.dtype, query.device)
        places = torch.arange(length - query.shape[2], length, device=device)[None]
        return module.indexer.build_block_mask(indices, mask, length, dtype, device, places)
    seen = torch.zeros(*indices.shape[:2], mask.shape[-1], dtype=torch.bool, device=mask.device)
    seen = seen.scatter_(-1, indices.long(), True).unsqueeze(1)
    if mask.dtype == torch.bool:
        return mask & seen
    return mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def _named(kind: type) -> Iterator[tuple[str, Any]]:
    """Yields the globals, with names, that the forwards of a class and of its bases name."""
    for one in kind.__mro__:
        forward = inspect.unwrap(vars(one).get("forward", id))
        if isinstance(forward, FunctionType):
            names = forward.__code__.co_names
            known = forward.__globals__
            yield from ((name, known[name]) for name in names if name in known)


def masks_before(config: Any) -> Callable[..., Any]:
    """Returns the function that made masks before; a name without a function makes none."""
    before, interface = _known.get(id(config)), AttentionMaskInterface()
    if facts_of(config.model_type).written and getattr(config, "alibi", False):
        raise UnsupportedModelError(
            f"alibi: {config.model_type} adds its bias twice in calls without pages, as it does in "
            "transformers under 'eager'; close the `PagedCache` or `BatchGenerator` before them"
        )
    name = "sdpa" if before is None else before.name
    return interface.get(name, lambda **_: None)
