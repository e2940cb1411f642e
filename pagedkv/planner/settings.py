"""A decoder's configuration by one set of names, whoever wrote it, and what pages cannot serve.

Configurations leave much to the classes of transformers, which are not asked here: a plan needs no
transformers. What a type implies stands in tables, and tests hold them against the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from pagedkv.errors import UnsupportedModelError
from pagedkv.layers import CROSS, LATENT
from pagedkv.layers.kinds import KEEPS
from pagedkv.layers.states import FAMILIES
from pagedkv.names import DTYPES

from .mixers import add_sizes, layer_names

SHORT = {**DTYPES, "fp8": "float8", "nf4": "int4", "fp4": "int4", "mxfp4": "int4"}

# Names that configurations use for the same thing.
ALIASES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "n_ctx"),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "first_sparse": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "experts_per_token": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_k",
        "moe_topk",
        "top_k_experts",
    ),
    "dtype": ("torch_dtype",),
}
# What a model type does without its configuration saying so.
TIED = {
    "gemma3n_text", "gemma4_text", "gemma4_unified_text", "minicpm3", "youtu",
    "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "gemma", "gemma2", "gemma3", "gemma3_text",
    "gpt2", "gpt_bigcode", "granite_swa", "opt", "smollm3", "starcoder2", "vaultgemma",
}  # fmt: skip
TWO_MATRICES = {
    "apertus", "apertus1p5_text", "arcee", "bert", "bert-generation", "biogpt", "camembert",
    "codegen",
    "data2vec-text", "electra", "ernie", "fuyu", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "jais2",
    "nanochat", "nemotron", "nemotron_h", "opt", "persimmon", "phi", "roberta",
    "roberta-prelayernorm", "roc_bert", "starcoder2", "xlm-roberta", "xlm-roberta-xl",
}  # fmt: skip
# Channels a token has at once behind attention, in multiples of the inner width, where that is more
# than gate, up and product: one matrix for gate and up, whose output stays; clamps and biases.
AT_ONCE = {"glm": 4, "glm4": 4, "phi3": 4, "gpt_oss": 9}
# The torch backend computes their scores explicitly, because of attention sinks.
EXPLICIT = {"gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"}
QKV_BIASES = {"qwen2", "qwen2_moe", "gpt2", "gpt_neox", "opt", "phi", "starcoder2", "gpt_bigcode"}
SLIDES_FOR = {  # every n-th is full
    "gemma2": 2, "gpt_oss": 2, "cohere2": 4, "gemma3_text": 6, "gemma3n_text": 5, "gemma4_text": 6,
    "gemma4_unified_text": 6,
}  # fmt: skip
HEAD_DIMS = {
    "gemma": 256, "gemma2": 256, "gemma3_text": 256, "gemma3n_text": 256, "gemma4_text": 256,
    "gemma4_unified_text": 256, "mimo_v2_flash": 192,
}  # fmt: skip
WINDOWS = {
    "gemma2": 4096, "gemma3_text": 4096, "gemma3n_text": 512, "gemma4_text": 512,
    "gemma4_unified_text": 512, "cohere2": 4096, "gpt_oss": 128,
}  # fmt: skip
# Types that no configuration tells apart from those which pages serve, by the reason.
REFUSED = {
    "its attention does not go through transformers' attention interface": {
        "big_bird", "blip", "bloom", "cpmant", "falcon", "gpt_neo",
        "gpt_neox_japanese", "megatron-bert", "mpt", "openai-gpt", "rembert", "roformer",
        "reformer", "trocr", "xglm", "xlm", "xlnet",
    },
    "encoder-decoder models keep a second cache for cross-attention": {
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "florence2", "marian", "mbart",
        "mvp", "pegasus", "pix2struct", "plbart", "pp_formulanet", "prophetnet", "t5gemma2", "udop",
        "whisper",
    },
    "its attention is not causal": {"git", "kosmos-2", "kosmos-2.5"},
    "it changes K and V after the cache": {"diffllama", "jetmoe"},
    "it changes the attention mask layer by layer": {"doge"},
    "its configuration names a window that its attention does not keep to": {"moshi"},
    "its attention sinks are not served": {"flint"},
    "it has no layers of its own to plan": {"blt"},
}  # fmt: skip
# Not causal unless their configuration says `is_decoder`.
ENCODERS = {
    "bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta",
    "roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
# Whose states have a form of their own.
OTHER_STATES = {"inkling_text", "mamba2", "minimax", "recurrent_gemma", "rwkv", "xlstm"}

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
    """A configuration's decoder, by one set of names and with what its type implies."""
    inner: Any = next((config[k] for k in ("text_config", "decoder") if config.get(k)), {})
    inner = inner if isinstance(inner, Mapping) else attributes(inner)
    found = config | {key: value for key, value in inner.items() if value is not None}
    require_pages(found, str(config.get("model_type", "")))
    for name, others in ALIASES.items():
        values = [found[other] for other in (name, *others) if found.get(other) is not None]
        found[name] = values[0] if values else None
    kind = found.setdefault("model_type", "")
    found["layer_types"] = layer_names(found)
    if found["layer_types"] is not None and not found["num_hidden_layers"]:
        found["num_hidden_layers"] = len(found["layer_types"])
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        value = found.get(name)
        if value is None and name == "num_attention_heads" and found["num_hidden_layers"]:
            raise UnsupportedModelError(f"model: {kind or 'it'} has no attention heads, so no K, V")
        if type(value) is not int or value < 1:
            raise ValueError(f"model: expected {name} in its config, a positive int, got {value!r}")
    if kind == "gemma3n_text" and isinstance(sizes := found["intermediate_size"], (list, tuple)):
        found["intermediate_size"] = max(sizes, default=None)  # one for each layer
    if kind == "ernie4_5_vl_moe_text" and isinstance(found.get("moe_intermediate_size"), list):
        # Experts for text, and as many for images.
        found["moe_intermediate_size"] = sum(found["moe_intermediate_size"])
    if isinstance(per_token := found["experts_per_token"], (list, tuple)):  # one for each layer
        found["experts_per_token"] = max(per_token, default=None)
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
    add_sizes(found, kind)
    _add_shapes(found, kind)
    found["head_dim"] = (
        found.get("head_dim")
        or HEAD_DIMS.get(kind)
        or found["hidden_size"] // found["num_attention_heads"]
    )
    found["tied"] = config.get("tie_word_embeddings", found.get("tie_word_embeddings"))
    if found["tied"] is None:
        found["tied"] = kind in TIED
    _add_windows(found, kind)
    return SimpleNamespace(**found)


def _add_shapes(found: dict[str, Any], kind: str) -> None:
    """Says of which shape K and V are, where a file says it otherwise than transformers does."""
    if kind == "longcat_flash" and (layers := found.get("num_layers")):
        # Each of its layers attends twice, as two layers of a cache.
        found["num_hidden_layers"] = layers
        found["layer_types"] = ["full_attention"] * 2 * layers
    if found.get("kv_lora_rank"):
        dims = "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
        parts: list[Any] = [found.get(name) for name in dims]
        if not all(type(part) is int and part > 0 for part in parts):
            raise ValueError(
                f"model: expected {', '.join(dims)} beside kv_lora_rank in its config, got {parts}"
            )
        found["head_dim"] = parts[0] + parts[1]
        found["num_key_value_heads"] = found["num_attention_heads"]
    if kind.startswith("gemma4") and not found.get("per_layer_config"):
        own = {"head_dim": found.get("global_head_dim") or 512}
        heads = found.get("num_global_key_value_heads")
        if heads and found.get("attention_k_eq_v", True):
            own["num_key_value_heads"] = heads
        names = found["layer_types"] or []
        full = [i for i, name in enumerate(names) if name == "full_attention"]
        found["per_layer_config"] = dict.fromkeys(full, own)


def _add_windows(found: dict[str, Any], kind: str) -> None:
    """Says which layers slide, where the configuration leaves that to the model's class."""
    window = found.setdefault("sliding_window", WINDOWS.get(kind))
    if found.get("layer_types") is not None:
        return
    count = found["num_hidden_layers"]
    every = found.get("sliding_window_pattern") or SLIDES_FOR.get(kind)
    if not found.get("use_sliding_window", not kind.startswith("qwen")) or not window:
        slides = [False] * count
        found["sliding_window"] = None
    elif isinstance(every, str):
        slides = [every[i % len(every)] == "L" for i in range(count)]
    elif every:
        slides = [bool((i + 1) % every) for i in range(count)]
    else:
        first = found.get("max_window_layers") if kind.startswith("qwen") else 0
        slides = [i >= (first or 0) for i in range(count)]
    if found.get("attention_chunk_size") is None:
        names = {False: "full_attention", True: "sliding_attention"}
        found["layer_types"] = [names[slide] for slide in slides]


def require_pages(found: Mapping[str, Any], outer: str) -> None:
    """Refuses by name what `PagedCache` refuses, as far as a configuration tells.

    Args:
        found: a decoder's configuration.
        outer: the type of the model whose decoder it is.
    """
    kind = str(found.get("model_type", ""))
    kinds = layer_names(found) or ()
    states = {name for name in kinds if KEEPS.get(name) in ("state", "both")}
    strange = sorted(set(kinds) - KEEPS.keys() | (set() if kind in FAMILIES else states))
    reason = next((why for why, types in REFUSED.items() if {kind, outer} & types), None)
    if found.get("is_encoder_decoder"):
        reason = "encoder-decoder models keep a second cache for cross-attention"
    elif _is_bidirectional(found, kind, outer):
        reason = "its attention is not causal"
    elif found.get("cross_attention_layers"):
        reason = CROSS
    elif found.get("kv_lora_rank") and kind not in LATENT:
        reason = f"its latent attention (MLA) is not one of {', '.join(sorted(LATENT))}"
    elif _differs_by_layer(found):
        reason = "its layers differ in their query heads or their width"
    elif strange:
        reason = f"layers of kind {', '.join(strange)} keep no pages"
    elif kinds and all(KEEPS[name] in ("state", "none") for name in kinds):
        reason = "none of its layers has K and V"
    elif kind in OTHER_STATES:
        reason = "it keeps a recurrent state beside K and V"
    elif kind in FAMILIES and not kinds:
        reason = "it keeps a recurrent state in layers that its configuration does not list"
    if reason:
        raise UnsupportedModelError(f"model: {outer or kind} cannot use pages: {reason}")


def _is_bidirectional(found: Mapping[str, Any], kind: str, outer: str) -> bool:
    both_ways = found.get("use_bidirectional_attention")
    if both_ways is None:
        both_ways = outer == "paligemma"
    encoder = kind in ENCODERS and not found.get("is_decoder")
    return encoder or both_ways in (True, "all") or found.get("is_causal") is False


def _differs_by_layer(found: Mapping[str, Any]) -> bool:
    """Whether layers differ in more than the shape of K and V."""
    layers = found.get("per_layer_config") or {}
    each = layers.values() if isinstance(layers, Mapping) else layers
    return any(name in layer for layer in each for name in ("num_attention_heads", "hidden_size"))


def dtype_name(parameter: str, value: Any, known: Mapping[str, Any]) -> str:
    """A dtype by its full name."""
    name = SHORT.get(str(value).removeprefix("torch."), str(value).removeprefix("torch."))
    if name not in known:
        raise ValueError(f"{parameter}: expected one of {', '.join(known)}, got {value!r}")
    return name


def attributes(config: Any) -> dict[str, Any]:
    """An object's fields; of a `PretrainedConfig` those of its decoder."""
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    if hasattr(config, "__dict__"):
        return dict(vars(config))
    raise TypeError(
        "model: expected a config (dict or object), a folder or an id on the hub, got "
        f"{type(config).__name__}"
    )
