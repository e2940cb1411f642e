"""A decoder's configuration by one set of names, from any author.

Files leave much to the classes of transformers, which are not asked here: a plan of a checkpoint
waits for no transformers. What a type implies stands in `facts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from pagedkv.errors import UnsupportedModelError
from pagedkv.names import DTYPES

from .facts import Facts, facts_of
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
# What every decoder says of itself.
SIZES = "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"
INNER = "text_config", "decoder"  # where a configuration has that of its decoder
# Sizes that stand in parts of a decoder's configuration.
NESTS = {
    "attn_config": ("kv_n_heads",),
    "ffn_config": ("ffn_hidden_size", "moe_num_experts", "moe_top_k"),
}
# What may be said of each layer apart; a pass takes as much as its widest layer.
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
    """A configuration's decoder, by one set of names and with what its type implies.

    Raises:
        UnsupportedModelError: `PagedCache` refuses it, as far as a configuration tells.
        ValueError: a size is missing, or is none.
    """
    inner = inner_of(config)
    found = config | {key: value for key, value in inner.items() if value is not None}
    for nest, names in NESTS.items():
        if isinstance(part := found.get(nest), Mapping):
            found |= {name: part[name] for name in names if part.get(name) is not None}
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
    _add_windows(found, kind)
    return SimpleNamespace(**found)


def leaves_out_sizes(config: Mapping[str, Any]) -> bool:
    """Whether a configuration says nothing of something that every decoder says."""
    found = {**config, **inner_of(config)}
    names = ((name, *ALIASES.get(name, ())) for name in SIZES)
    return any(all(found.get(other) is None for other in each) for each in names)


def inner_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the decoder inside that of a model; empty where they are one."""
    inner: Any = next((config[k] for k in INNER if config.get(k)), {})
    return dict(inner) if isinstance(inner, Mapping) else attributes(inner)


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A configuration whose model, and the decoder inside it, computes in a dtype."""
    inner = {k: {**config[k], "dtype": dtype} for k in INNER if isinstance(config.get(k), Mapping)}
    return {**config, **inner, "dtype": dtype}


def _add_shapes(found: dict[str, Any], kind: str) -> None:
    """Says of which shape K and V are, where a file says it otherwise than transformers does."""
    if facts_of(kind).attends_twice and (layers := found.get("num_layers")):
        found["num_hidden_layers"] = layers
        found["layer_types"] = ["full_attention"] * 2 * layers
    if found.get("kv_lora_rank"):
        dims = "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
        parts: list[Any] = [found.get(name) for name in dims]
        least = dict.fromkeys(dims, 1) | {"qk_rope_head_dim": 0}  # layers without positions
        if not all(type(part) is int and part >= least[name] for name, part in zip(dims, parts)):
            raise ValueError(
                f"model: expected {', '.join(dims)} beside kv_lora_rank in its config, got {parts}"
            )
        found["head_dim"] = parts[0] + parts[1]
        found["num_key_value_heads"] = found["num_attention_heads"]
    full_dim = found.get("global_head_dim") or facts_of(kind).full_head_dim
    if full_dim and not found.get("per_layer_config"):
        own = {"head_dim": full_dim}
        heads = found.get("num_global_key_value_heads")
        if heads and found.get("attention_k_eq_v", True):
            own["num_key_value_heads"] = heads
        names = found["layer_types"] or []
        full = [i for i, name in enumerate(names) if name == "full_attention"]
        found["per_layer_config"] = dict.fromkeys(full, own)


def _add_windows(found: dict[str, Any], kind: str) -> None:
    """Says which layers slide, where the configuration leaves that to the model's class."""
    window = found.setdefault("sliding_window", facts_of(kind).window or None)
    if found.get("layer_types") is not None:
        return
    count = found["num_hidden_layers"]
    every = found.get("sliding_window_pattern") or facts_of(kind).every
    from_a_layer = "max_window_layers" in found
    if not found.get("use_sliding_window", not from_a_layer) or not window:
        slides = [False] * count
        found["sliding_window"] = None
    elif isinstance(every, str):
        slides = [every[i % len(every)] == "L" for i in range(count)]
    elif every:
        slides = [bool((i + 1) % every) for i in range(count)]
    else:
        slides = [i >= (found.get("max_window_layers") or 0) for i in range(count)]
    if found.get("attention_chunk_size") is None:
        names = {False: "full_attention", True: "sliding_attention"}
        found["layer_types"] = [names[slide] for slide in slides]


NEWER = {"attention": "full_attention", "mamba": "linear_attention"}
LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def layer_names(found: Mapping[str, Any]) -> list[str] | None:
    """The kind of each layer by its newer name; None for a model whose layers all attend.

    Args:
        found: a decoder's configuration.
    """
    listed = found.get("layer_types") or found.get("layers_block_type")
    if listed is not None:
        return [NEWER.get(name, name) for name in listed]
    if sparse := (found.get("sparse_attention_config") or {}).get("sparse_attention_freq"):
        return ["minimax_m3_sparse" if one else "full_attention" for one in sparse]
    if pattern := found.get("hybrid_override_pattern"):
        return [LETTERS.get(letter, letter) for letter in pattern]
    rule, count = facts_of(found.get("model_type")).layers, found.get("num_hidden_layers")
    if rule in (None, "listed") or not isinstance(count, int):
        return None
    layers, attends, other = range(count), "full_attention", "linear_attention"
    chosen: set[int] = set()
    if rule == "every nth":
        every = found.get("full_attention_interval") or found.get("layer_group_size") or 4
        chosen = {i for i in layers if (i + 1) % every == 0}
    elif rule == "indices":
        chosen = set(found.get("attn_layer_indices") or ())
    elif rule == "periods":
        period, offset = found.get("attn_layer_period", 8), found.get("attn_layer_offset", 4)
        chosen = {i for i in layers if i % period == offset}
    elif rule == "convolutions":
        chosen, other = set(found.get("full_attn_idxs") or layers), "conv"
    elif rule == "all":
        chosen, attends = set(layers), "hybrid"
    elif rule == "kimi":
        told = (found.get("linear_attn_config") or {}).get("full_attn_layers")
        chosen = {i - 1 for i in told} if told else {i for i in layers if i and i % 4 == 0}
    elif rule == "sixths":
        chosen = {i for i in layers if i == 0 or (i + 1) % 6 == 0}
        other = "sliding_attention"
    return [attends if i in chosen else other for i in layers]


def _add_sizes(found: dict[str, Any], facts: Facts) -> None:
    """Adds sizes that a family derives from others."""
    if facts.shares_block:
        wide = 2 * found["hidden_size"] // found["num_attention_heads"]
        found["head_dim"] = found.get("attention_head_dim") or wide
    if facts.states == "kimi delta":
        told = found.get("linear_attn_config") or {}
        names = {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}
        ours = "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"
        for name, (theirs, usual) in zip(ours, names.items()):
            found[name] = told.get(theirs) or found.get(name) or usual
    if found.get("block_auto_adjust_ff_dim"):
        size = int(
            2 * found["intermediate_size"] / 3 * (found.get("block_ffn_dim_multiplier") or 1)
        )
        unit = found.get("block_multiple_of") or 1
        found["intermediate_size"] = -(-size // unit) * unit


def dtype_name(parameter: str, value: Any, known: Mapping[str, Any]) -> str:
    """A dtype by its full name."""
    name = SHORT.get(str(value).removeprefix("torch."), str(value).removeprefix("torch."))
    if name not in known:
        raise ValueError(f"{parameter}: expected one of {', '.join(known)}, got {value!r}")
    return name


def attributes(config: Any) -> dict[str, Any]:
    """An object's fields; of a `PretrainedConfig` those of its decoder."""
    is_class = isinstance(config, type)  # which has the methods, and no fields
    if hasattr(config, "to_dict") and not is_class:
        return dict(config.to_dict())
    if hasattr(config, "__dict__") and not is_class:
        return dict(vars(config))
    got = f"the class {config.__name__}" if is_class else type(config).__name__
    raise TypeError(
        "model: expected a config (dict or object), a folder, an id on the hub or a model in "
        f"memory, got {got}"
    )
