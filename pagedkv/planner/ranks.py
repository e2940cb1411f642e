"""Counts what one process holds, if transformers shares out a model's layers among several.

Transformers cuts most matrices, by a plan in the model's class, which is read from the model
without weights. Norms, routers and the matrices that make latents stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from pagedkv.errors import UnsupportedModelError
from pagedkv.models import kv_shapes, layer_kinds
from pagedkv.models.model import Skeleton
from pagedkv.models.weights import Weight

from .model_shape import ModelShape


def share_of(whole: ModelShape, ranks: int) -> ModelShape:
    """Returns the part of a model that one of several processes holds, as a smaller model.

    Raises:
        UnsupportedModelError: transformers has no plan to share out its type, or a head would be
            cut in two.
    """
    if ranks == 1:
        return whole
    skeleton = whole.model.skeleton
    if not skeleton.is_planned:
        raise UnsupportedModelError(
            "ranks: transformers has no plan by which processes share out "
            f"{whole.settings.model_type}"
        )
    weights = skeleton.weights

    def kept(nbytes: int, part: str, layer: int | None = None) -> int:
        chosen = (w for w in weights if w.part == part and layer in (None, *w.layers))
        return round(nbytes * _kept(chosen, ranks))

    layers = tuple(kept(nbytes, "layer", i) for i, nbytes in enumerate(whole.layers))
    head = kept(whole.head, "head")
    smaller = (sum(layers) + head) / max(1, sum(whole.layers) + whole.head)
    return replace(
        whole,
        settings=_settings(whole, skeleton, ranks),
        layers=layers,
        embedding=kept(whole.embedding, "embedding"),
        tables=kept(whole.tables, "tables"),
        head=head,
        active=int(whole.active * smaller),
        experts=None,
        whole=whole,
    )


def _kept(weights: Any, ranks: int) -> float:
    """Returns the share of some weights that one process holds."""
    every = mine = 0.0
    for weight in weights:
        every += weight.elements
        mine += weight.elements / (ranks if weight.cut else 1)
    return mine / every if every else 1.0


def _settings(whole: ModelShape, skeleton: Skeleton, ranks: int) -> SimpleNamespace:
    """Returns the configuration of the part that one process computes."""
    c = copy(whole.settings)
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        width = getattr(c, name, None)
        if width and any(_cuts(weight, width) for weight in skeleton.weights):
            setattr(c, name, -(-width // ranks))
    if not skeleton.shares_heads:
        return c
    kept = [shape.num_kv_heads for shape in c.shapes if not shape.v_is_k]
    for heads in (*kept, c.num_key_value_heads, c.num_attention_heads):
        if heads % ranks:
            raise UnsupportedModelError(
                f"ranks: {whole.name} has {heads} {'KV ' if kept else ''}heads, which {ranks} "
                f"processes cannot share out whole; take a number of them that divides {heads}"
            )
    for name in ("linear_num_key_heads", "linear_num_value_heads"):  # default: attention's heads
        if hasattr(c, name):
            setattr(c, name, getattr(c, name) or c.num_attention_heads)
    c.num_attention_heads //= ranks
    c.num_key_value_heads //= ranks
    if each := getattr(c, "per_layer_config", None):
        c.per_layer_config = _divided(each, ranks)
    c.shapes = kv_shapes(c, layer_kinds(c))
    return c


def _cuts(weight: Weight, width: int) -> bool:
    return weight.cut and bool({width, 2 * width} & {*weight.shape})


def _divided(each: Any, ranks: int) -> Any:
    """Returns settings of single layers, with the KV heads of one process."""

    def one(fields: Mapping[str, Any]) -> dict[str, Any]:
        heads = fields.get("num_key_value_heads")
        return {**fields, **({"num_key_value_heads": heads // ranks} if heads else {})}

    if isinstance(each, Mapping):
        return {layer: one(fields) for layer, fields in each.items()}
    return [one(fields if isinstance(fields, Mapping) else vars(fields)) for fields in each]
