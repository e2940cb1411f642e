"""What one of several processes holds, among which transformers shares out a model's layers.

It cuts matrices as the plan in a model's class says: most of them, not all. Norms, routers and the
matrices that make latents stay whole. `pagedkv plan` needs no transformers, so what its classes
leave whole stands in tables, those of the newest release that is tested; tests hold them against
the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from pagedkv.errors import UnsupportedModelError
from pagedkv.models import kv_shapes, layer_kinds

from .formula import parts_of_layer
from .shapes import ModelShape

# Parts of a layer that can be cut; the others are small, or made for all heads.
CUT = ("attention", "feed", "beside experts", "experts", "shared", "mixer")
# Types without a plan: transformers refuses them (5.17 gave all of them to each process).
UNPLANNED = {
    "biogpt", "bitnet", "chameleon", "ctrl", "gpt2", "gpt_bigcode", "idefics", "mllama_text_model",
    "modernbert-decoder", "opt", "persimmon", "stablelm", "zamba", "zamba2", "zaya",
}  # fmt: skip
# Types of whose layers experts are cut, where there are some, and no other part.
ONLY_EXPERTS = {
    "afmoe", "bamba", "emu3_text_model", "falcon_h1", "gpt_oss", "granitemoe", "granitemoehybrid",
    "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "jamba", "lfm2",
    "lfm2_moe", "nemotron_h", "phimoe", "qwen3_vl_text",
}  # fmt: skip
# Parts that are left whole in other types.
WHOLE = {
    "attention": {"axk1", "deepseek_v3", "kimi_linear", "mistral4", "youtu"},
    "feed": {"step3p5"},
    "experts": {"gpt_oss"},
    "shared": {
        "cohere2_moe", "exaone_moe", "glm4_moe_lite", "granitemoe_swa", "qwen2_moe", "solar_open",
    },
    "mixer": {"kimi_linear", "olmo_hybrid"},
}  # fmt: skip
# Types whose q, k and v are cut and put together again: each process attends with all heads.
GATHERED = {
    "flex_olmo", "minimax_m2", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "phi3", "phi4_multimodal",
    "step3p5",
}  # fmt: skip
WHOLE_HEADS = {"nemotron_h"}  # where the head is not the embedding


def share_of(whole: ModelShape, ranks: int) -> ModelShape:
    """What one of so many processes holds and computes of a model: as if it were a smaller one.

    Raises:
        UnsupportedModelError: they cannot share it out: transformers has no plan of its type, or
            a head would be cut in two.
    """
    if ranks == 1:
        return whole
    kind = whole.settings.model_type
    if kind in UNPLANNED:
        raise UnsupportedModelError(
            f"ranks: transformers has no plan by which processes share out {kind}"
        )
    c, settings = whole.settings, _settings(whole, ranks)
    layers = tuple(
        _cut(nbytes, _share(c, layer), ranks) for layer, nbytes in enumerate(whole.layers)
    )
    return replace(
        whole,
        settings=settings,
        layers=layers,
        embedding=_cut(whole.embedding, 1.0, ranks),
        head=_cut(whole.head, float(kind not in WHOLE_HEADS), ranks),
        active=int(whole.active * sum(layers) / sum(whole.layers)),
        experts=None,
        of=whole,
    )


def _cut(nbytes: int, share: float, ranks: int) -> int:
    """Bytes that stay of so many, of which a share is cut."""
    return round(nbytes * (1 - share + share / ranks))


def _is_cut(c: SimpleNamespace, part: str) -> bool:
    part = "feed" if part == "beside experts" else part
    if c.model_type in WHOLE.get(part, ()):
        return False
    return part in CUT and (part == "experts" or c.model_type not in ONLY_EXPERTS)


def _share(c: SimpleNamespace, layer: int) -> float:
    """How much of a layer is cut."""
    parts, small = parts_of_layer(c, layer)
    sizes = {name: sum(matrices) for name, matrices in parts.items()}
    cut = sum(size for name, size in sizes.items() if _is_cut(c, name))
    return cut / (small + sum(sizes.values()))


def _settings(whole: ModelShape, ranks: int) -> SimpleNamespace:
    """The configuration of what one process computes."""
    c = copy(whole.settings)
    for name, part in (
        ("intermediate_size", "feed"),
        ("moe_intermediate_size", "experts"),
        ("shared_expert_intermediate_size", "shared"),
    ):
        if _is_cut(c, part) and getattr(c, name, None):
            setattr(c, name, -(-getattr(c, name) // ranks))
    if not _is_cut(c, "attention") or c.model_type in GATHERED:
        return c
    kept = [shape.num_kv_heads for shape in c.shapes if not shape.v_is_k]
    for heads in (*kept, c.num_key_value_heads, c.num_attention_heads):
        if heads % ranks:
            raise UnsupportedModelError(
                f"ranks: {whole.name} has {heads} {'KV ' if kept else ''}heads, which {ranks} "
                f"processes cannot share out whole; take a number of them that divides {heads}"
            )
    for name in ("linear_num_key_heads", "linear_num_value_heads"):  # else those of attention
        if hasattr(c, name):
            setattr(c, name, getattr(c, name) or c.num_attention_heads)
    c.num_attention_heads //= ranks
    c.num_key_value_heads //= ranks
    if each := getattr(c, "per_layer_config", None):
        c.per_layer_config = _divided(each, ranks)
    c.shapes = kv_shapes(c, layer_kinds(c))
    return c


def _divided(each: Any, ranks: int) -> Any:
    """What is said of some layers alone, with the KV heads of one process."""

    def one(fields: Mapping[str, Any]) -> dict[str, Any]:
        heads = fields.get("num_key_value_heads")
        return {**fields, **({"num_key_value_heads": heads // ranks} if heads else {})}

    if isinstance(each, Mapping):
        return {layer: one(fields) for layer, fields in each.items()}
    return [one(fields if isinstance(fields, Mapping) else vars(fields)) for fields in each]
