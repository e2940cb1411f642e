"""A decoder's configuration by one set of names, whoever wrote it, and what pages cannot serve.

Configurations leave much to the classes of transformers, which are not asked here: a plan needs no
transformers. What a type implies stands in tables, and tests hold them against the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from pagedkv.errors import UnsupportedModelError

SHORT = {
    "fp32": "float32", "f32": "float32", "fp16": "float16", "f16": "float16", "half": "float16",
    "bf16": "bfloat16", "fp8": "float8", "nf4": "int4", "fp4": "int4", "mxfp4": "int4",
}  # fmt: skip

# Names that configurations use for the same thing.
ALIASES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "n_ctx"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "first_sparse": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"),
    "dtype": ("torch_dtype",),
}
# What a model type does without its configuration saying so.
TIED = {
    "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "gemma", "gemma2", "gemma3", "gemma3_text",
    "gpt2", "gpt_bigcode", "granite_swa", "opt", "smollm3", "starcoder2", "vaultgemma",
}  # fmt: skip
TWO_MATRICES = {
    "apertus", "arcee", "bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie",
    "fuyu", "gpt2", "gpt_bigcode", "gpt_neox", "jais2", "nanochat", "nemotron", "opt", "persimmon",
    "phi", "roberta", "roberta-prelayernorm", "roc_bert", "starcoder2", "xlm-roberta",
    "xlm-roberta-xl",
}  # fmt: skip
# Channels a token has at once behind attention, in multiples of the inner width, where that is more
# than gate, up and product: one matrix for gate and up, whose output stays; clamps and biases.
AT_ONCE = {"glm": 4, "glm4": 4, "phi3": 4, "gpt_oss": 9}
# The torch backend computes their scores explicitly, because of attention sinks.
EXPLICIT = {"gpt_oss", "granite_swa", "granitemoe_swa"}
QKV_BIASES = {"qwen2", "qwen2_moe", "gpt2", "gpt_neox", "opt", "phi", "starcoder2", "gpt_bigcode"}
SLIDES_FOR = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "gemma3_text": 6}  # every n-th is full
HEAD_DIMS = {"gemma": 256, "gemma2": 256, "gemma3_text": 256}
WINDOWS = {"gemma2": 4096, "gemma3_text": 4096, "cohere2": 4096, "gpt_oss": 128}
# Their attention does not go through transformers' attention interface (or keeps a state).
WITHOUT_PAGES = {
    "bamba", "big_bird", "biogpt", "bloom", "codegen", "cpmant", "falcon", "falcon_h1", "git",
    "gpt_neo", "gpt_neox_japanese", "gptj", "granitemoehybrid", "inkling_text", "jamba",
    "kimi_linear", "lfm2", "mamba2", "megatron-bert", "mpt", "nemotron_h", "olmo_hybrid",
    "openai-gpt", "qwen3_next", "recurrent_gemma", "rembert", "roformer", "stablelm", "xglm",
    "xlnet", "xlstm", "zamba", "zamba2",
}  # fmt: skip

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
    for name, others in ALIASES.items():
        values = [found[other] for other in (name, *others) if found.get(other) is not None]
        found[name] = values[0] if values else None
    kind = found.setdefault("model_type", "")
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        value = found.get(name)
        if value is None and name == "num_attention_heads" and found["num_hidden_layers"]:
            raise UnsupportedModelError(f"model: {kind or 'it'} has no attention heads, so no K, V")
        if type(value) is not int or value < 1:
            raise ValueError(f"model: expected {name} in its config, a positive int, got {value!r}")
    for name in INTEGERS:
        value = found.get(name)
        if value is not None and (type(value) is not int or value < 0):
            raise ValueError(f"model: expected {name} in its config to be an int, got {value!r}")
    found["num_key_value_heads"] = found["num_key_value_heads"] or (
        1 if found.get("multi_query") else found["num_attention_heads"]
    )
    found["head_dim"] = (
        found.get("head_dim")
        or HEAD_DIMS.get(kind)
        or found["hidden_size"] // found["num_attention_heads"]
    )
    found["intermediate_size"] = found["intermediate_size"] or 4 * found["hidden_size"]
    found["tied"] = found.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if found["tied"] is None:
        found["tied"] = kind in TIED
    _add_windows(found, kind)
    return SimpleNamespace(**found)


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


def require_pages(c: SimpleNamespace) -> None:
    """Refuses by name what `PagedCache` refuses, as far as a configuration tells."""
    reason = None
    if getattr(c, "is_encoder_decoder", False):
        reason = "encoder-decoder models keep a second cache for cross-attention"
    elif getattr(c, "kv_lora_rank", None):
        reason = "multi-head latent attention (MLA) rebuilds K and V after the cache"
    elif getattr(c, "num_kv_shared_layers", None):
        reason = "some of its layers share the K and V of others"
    elif c.model_type.startswith(("gemma4", "mimo_v2")):
        reason = "its layers differ in the shape of K and V"
    elif c.model_type in WITHOUT_PAGES:
        reason = "its attention does not go through transformers' attention interface"
    elif kinds := sorted(set(c.layer_types or ()) - {"full_attention", "sliding_attention"}):
        reason = f"layers of kind {', '.join(kinds)} keep no pages"
    if reason:
        raise UnsupportedModelError(f"model: {c.model_type} cannot use pages: {reason}")


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
