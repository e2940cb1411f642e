"""Reads a decoder's configuration by one set of names, whoever wrote it.

Files leave much to the classes of transformers. `defaults.py` reads the source of these, so that a
plan of a checkpoint need not import transformers. `facts.py` has what a type implies beyond that.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from pagedkv.errors import UnsupportedModelError
from pagedkv.names import DTYPES

from .defaults import decoder_type, defaults_of
from .facts import Facts, facts_of
from .layer_names import add_choices, add_windows, layer_names, rotated
from .refusals import of_type

SHORT = {**DTYPES, "fp8": "float8", "nf4": "int4", "fp4": "int4", "mxfp4": "int4"}

# Names that configurations use for the same thing.
ALIASES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "kv_n_heads"),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "n_ctx"),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "shared_expert_intermediate_size": (
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "experts_per_token": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_k",
        "moe_topk",
        "moe_top_k",
        "top_k_experts",
    ),
    "dtype": ("torch_dtype",),
}
# Sizes that every decoder's configuration says.
SIZES = "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"
INNER = "text_config", "decoder"  # fields in which a configuration has its decoder's
# Sizes that stand in parts of a decoder's configuration, and their names outside of these.
NESTS = {
    "attn_config": {"kv_n_heads": "kv_n_heads"},
    "ffn_config": {name: name for name in ("ffn_hidden_size", "moe_num_experts", "moe_top_k")},
    "linear_attn_config": {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    },
    "sparse_attention_config": {
        "sparse_num_index_heads": "index_n_heads",
        "sparse_index_dim": "index_head_dim",
        "sparse_block_size": "index_block_size",
        "sparse_topk_blocks": "index_topk_blocks",
        "sparse_local_block": "index_local_blocks",
    },
}
# Sizes that may be lists, one for each layer; a pass takes as much as its widest layer.
WIDEST = "intermediate_size", "moe_intermediate_size", "experts_per_token"
INTEGERS = (
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "max_position_embeddings",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "sliding_window",
    "max_window_layers",
)


def settings_of(config: dict[str, Any]) -> SimpleNamespace:
    """Returns the decoder's configuration, by one set of names and with what its type implies.

    Raises:
        UnsupportedModelError: `PagedCache` refuses it, as far as a configuration tells.
        ValueError: a size is missing or invalid.
    """
    inner = inner_of(config)
    if inner:
        told = (str(each.get("model_type") or "") for each in (config, inner))
        inner["model_type"] = decoder_type(*told) or None
    elif not defaults_of(kind := str(config.get("model_type") or "")).is_flat:
        raise ValueError(
            f"model: expected text_config in its config, of which {kind} reads its decoder"
        )
    inner = _completed(inner or config)
    found = config | {key: value for key, value in inner.items() if value is not None}
    for nest, names in NESTS.items():
        if isinstance(part := found.get(nest), Mapping):
            found |= {
                ours: part[name] for name, ours in names.items() if part.get(name) is not None
            }
    if reason := of_type(found, config, layer_names(found) or ()):
        name = config.get("model_type") or found.get("model_type")
        raise UnsupportedModelError(f"model: {name} cannot use pages: {reason}")
    for name, others in ALIASES.items():
        values = [found[other] for other in (name, *others) if found.get(other) is not None]
        found[name] = values[0] if values else None
    kind = found.setdefault("model_type", "")
    found["layer_types"] = layer_names(found)
    if found["layer_types"] is not None and not found["num_hidden_layers"]:
        found["num_hidden_layers"] = len(found["layer_types"])
    for name in SIZES:
        value = found.get(name)
        if value is None and name == "num_attention_heads" and found["num_hidden_layers"]:
            raise UnsupportedModelError(f"model: {kind or 'it'} has no attention heads, so no K, V")
        if type(value) is not int or value < 1:
            raise ValueError(f"model: expected {name} in its config, a positive int, got {value!r}")
    for name in WIDEST:
        if isinstance(each := found.get(name), (list, tuple)):
            found[name] = max(each, default=None)
    for name in INTEGERS:
        value = found.get(name)
        if isinstance(value, (list, tuple)):
            raise UnsupportedModelError(f"model: {kind} has several values of {name}, not one")
        if value is not None and (type(value) is not int or value < 0):
            raise ValueError(f"model: expected {name} in its config to be an int, got {value!r}")
    found["intermediate_size"] = found["intermediate_size"] or 4 * found["hidden_size"]
    found["num_key_value_heads"] = found["num_key_value_heads"] or (
        1 if found.get("multi_query") else found["num_attention_heads"]
    )
    _add_sizes(found, facts_of(kind))
    _add_shapes(found, kind)
    found["head_dim"] = (
        found.get("head_dim")
        or facts_of(kind).head_dim
        or found["hidden_size"] // found["num_attention_heads"]
    )
    add_windows(found)
    add_choices(found)
    found["no_rope_layers"] = rotated(found)
    heads = [x.get("num_attention_heads") or 0 for x in _each_layer(found)]
    heads += [found.get("swa_num_attention_heads") or 0]
    found["num_attention_heads"] = max(found["num_attention_heads"], *heads, 0)
    return SimpleNamespace(**found)


def _each_layer(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the fields that hold for some layers alone."""
    layers = found.get("per_layer_config") or {}
    each = layers.values() if isinstance(layers, Mapping) else layers
    return [x if isinstance(x, Mapping) else vars(x) for x in each]


def _completed(text: dict[str, Any]) -> dict[str, Any]:
    """Completes a decoder's configuration with its class's values where a file says nothing."""
    found = defaults_of(str(text.get("model_type") or ""))
    given = {
        found.older.get(name, name): value for name, value in text.items() if value is not None
    }
    given = text | given
    alike = [(name, *others) for name, others in ALIASES.items()]
    told = {name for names in alike if not given.keys().isdisjoint(names) for name in names}
    whole = {name: value for name, value in found.values.items() if name not in told} | given
    read = *SIZES, "sliding_window"
    ours = {name: whole.get(of) for name, of in found.older.items() if name in read}
    return ours | whole


def leaves_out_sizes(config: Mapping[str, Any]) -> bool:
    """Whether a configuration lacks a size that every decoder's configuration says."""
    found = {**config, **inner_of(config)}
    names = ((name, *ALIASES.get(name, ())) for name in SIZES)
    return any(all(found.get(other) is None for other in each) for each in names)


def inner_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the decoder's configuration inside a model's; empty if both are one."""
    inner: Any = next((config[k] for k in INNER if config.get(k)), {})
    return dict(inner) if isinstance(inner, Mapping) else attributes(inner)


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Returns a configuration by which a model, and the decoder in it, computes in a dtype."""
    inner = {k: {**config[k], "dtype": dtype} for k in INNER if isinstance(config.get(k), Mapping)}
    return {**config, **inner, "dtype": dtype}


def _add_shapes(found: dict[str, Any], kind: str) -> None:
    """Adds the shape of K and V, for types whose files say it differently from transformers."""
    if facts_of(kind).attends_twice and (layers := found.get("num_layers")):
        found["num_hidden_layers"] = layers
        found["layer_types"] = ["full_attention"] * 2 * layers
    if found.get("kv_lora_rank"):
        if found.get("v_head_dim") is None:  # as in minicpm3
            found["v_head_dim"] = found["hidden_size"] // found["num_attention_heads"]
        dims = "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
        parts: list[Any] = [found.get(name) for name in dims]
        least = dict.fromkeys(dims, 1) | {"qk_rope_head_dim": 0}  # 0 for layers without positions
        if not all(type(part) is int and part >= least[name] for name, part in zip(dims, parts)):
            raise ValueError(
                f"model: expected {', '.join(dims)} beside kv_lora_rank in its config, got {parts}"
            )
        found["head_dim"] = parts[0] + parts[1]
        found["num_key_value_heads"] = found["num_attention_heads"]
    if facts_of(kind).layers == "second of four" and not found.get("per_layer_config"):
        usual = {"num_attention_heads": 64, "head_dim": 256, "kv_lora_rank": 1024}
        usual |= {"qk_nope_head_dim": 192, "v_head_dim": 128}
        own = {name: found.get(f"swa_{name}") or value for name, value in usual.items()}
        turned = found.get("swa_qk_rope_head_dim") or own["head_dim"] - own["qk_nope_head_dim"]
        own["qk_rope_head_dim"] = turned
        names = found["layer_types"] or []
        slides = [i for i, name in enumerate(names) if name == "sliding_attention"]
        found["per_layer_config"] = dict.fromkeys(slides, own)
    full_dim = found.get("global_head_dim") or facts_of(kind).full_head_dim
    if full_dim and not found.get("per_layer_config"):
        own = {"head_dim": full_dim}
        heads = found.get("num_global_key_value_heads")
        if heads and found.get("attention_k_eq_v", True):
            own["num_key_value_heads"] = heads
        names = found["layer_types"] or []
        full = [i for i, name in enumerate(names) if name == "full_attention"]
        found["per_layer_config"] = dict.fromkeys(full, own)


def _add_sizes(found: dict[str, Any], facts: Facts) -> None:
    """Adds sizes that a family derives from others."""
    if facts.shares_block:
        wide = 2 * found["hidden_size"] // found["num_attention_heads"]
        found["head_dim"] = found.get("attention_head_dim") or wide
    if facts.states == "kimi delta":
        heads = found["num_attention_heads"]
        dim = found.get("head_dim") or found["hidden_size"] // heads
        usual = {"linear_head_dim": dim, "linear_num_heads": heads, "linear_conv_kernel_dim": 4}
        found |= {name: found.get(name) or value for name, value in usual.items()}
    if found.get("block_auto_adjust_ff_dim"):
        size = int(
            2 * found["intermediate_size"] / 3 * (found.get("block_ffn_dim_multiplier") or 1)
        )
        unit = found.get("block_multiple_of") or 1
        found["intermediate_size"] = -(-size // unit) * unit


def dtype_name(parameter: str, value: Any, known: Mapping[str, Any]) -> str:
    """Returns the full name of a dtype."""
    name = SHORT.get(str(value).removeprefix("torch."), str(value).removeprefix("torch."))
    if name not in known:
        raise ValueError(f"{parameter}: expected one of {', '.join(known)}, got {value!r}")
    return name


def attributes(config: Any) -> dict[str, Any]:
    """Returns an object's fields as a dict."""
    is_class = isinstance(config, type)  # a class has the methods, but no fields
    if hasattr(config, "to_dict") and not is_class:
        return dict(config.to_dict())
    if hasattr(config, "__dict__") and not is_class:
        return dict(vars(config))
    got = f"the class {config.__name__}" if is_class else type(config).__name__
    raise TypeError(
        "model: expected a config (dict or object), a folder, an id on the hub or a model in "
        f"memory, got {got}"
    )
