"""Tiny models of every family that keeps recurrent states beside K and V."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from pagedkv.models import types_with

STATEFUL, STEPWISE, SHARING_BLOCKS = (
    {*types_with(name)} for name in ("states", "stepwise", "shares_block")
)

_SHAPE = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_ALL_HEADS = {**_SHAPE, "num_key_value_heads": 4}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
_DELTA = {
    **_SHAPE,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_QWEN_EXPERTS = {**_EXPERTS, "shared_expert_intermediate_size": 16}
_MAMBA = {**_SHAPE, "mamba_n_heads": 4, "mamba_d_state": 6, "mamba_n_groups": 2}
_CONV = {**_SHAPE, "layer_types": ["conv", "full_attention", "conv", "conv"]}
_SHARED = {**_ALL_HEADS, "layers_block_type": ["linear_attention", "hybrid"] * 2}

# family: (configuration class, its fields)
_INKLING = {
    **{**_SHAPE, "head_dim": 8, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1},
    **{"swa_head_dim": 16, "sliding_window_size": 8, "rel_extent": 5, "d_rel": 6},
    **{"conv_kernel_size": 3, "n_routed_experts": 2, "num_experts_per_tok": 1},
    **{"moe_intermediate_size": 16, "log_scaling_n_floor": 12},
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", {**_DELTA, **_QWEN_EXPERTS, "head_dim": 16}),
    "qwen3_5": ("Qwen3_5Text", {**_DELTA, "head_dim": 16}),
    "qwen3_5_moe": ("Qwen3_5MoeText", {**_DELTA, **_QWEN_EXPERTS, "head_dim": 16}),
    "olmo_hybrid": ("OlmoHybrid", _DELTA),
    "bamba": ("Bamba", {**_MAMBA, "attn_layer_indices": [2]}),
    "falcon_h1": ("FalconH1", {**_MAMBA, "mamba_d_ssm": 48}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {**_MAMBA, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"shared_intermediate_size": 16, "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    ),
    "nemotron_h": (
        "NemotronH",
        {**_SHAPE, "num_hidden_layers": 5, "head_dim": 8, "ssm_state_size": 6, "n_groups": 2}
        | {"mamba_num_heads": 4, "mamba_head_dim": 12, "n_routed_experts": 2}
        | {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16}
        | {"num_experts_per_tok": 1, "layers_block_type": None, "hybrid_override_pattern": "ME*-M"},
    ),
    "zamba2": (
        "Zamba2",
        {**_SHARED, "mamba_d_state": 6, "mamba_ngroups": 2, "n_mamba_heads": 4, "adapter_rank": 4},
    ),
    "lfm2": ("Lfm2", _CONV),
    "lfm2_moe": ("Lfm2Moe", {**_CONV, **_EXPERTS}),
    "zaya": (
        "Zaya",
        {**_SHAPE, **_EXPERTS, "head_dim": 8, "router_hidden_size": 8, "cca_time0": 3}
        | {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 8},
    ),
    "kimi_linear": (
        "KimiLinear",
        {**_ALL_HEADS, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        | {"v_head_dim": 8, "linear_head_dim": 6, "linear_num_heads": 3, "num_local_experts": 2}
        | {"num_experts_per_tok": 1, "moe_intermediate_size": 16}
        | {"layer_types": _DELTA["layer_types"]},
    ),
    # Index keys choose 8 tokens and those of a block that is not full; n-grams.
    "qwen4_exp": (
        "Qwen4ExpText",
        {**_DELTA, **_QWEN_EXPERTS, "head_dim": 8, "eos_token_id": 99, "hc_count": 2}
        | {"hc_lowrank": 8, "layer_types": ["linear_attention", "full_attention"] * 2}
        | {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8}
        | {"indexer_compress_ratio": 4, "indexer_budget": 8, "ple_layer_ids": [3]}
        | {"ple_embed_dim": 32, "heads_per_ngram": 2, "ngram_vocab_size_base": 50}
        | {"make_ngram_vocab_size_divisible_by": 8},
    ),
    # A bias for the last 5 tokens, or 8 of a window; heads of a window are others. Queries of the
    # others are scaled from the twelfth token on.
    "inkling_text": (
        "InklingText",
        {**_INKLING, "n_shared_experts": 1, "local_layer_ids": [0, 2, 3]}
        | {"mlp_layer_types": ["dense", "sparse"] * 2, "logits_mup_width_multiplier": 1.0},
    ),
    # The same with sinks that differ by query, attention between layers, and other convolutions.
    "inkling2_text": (
        "Inkling2Text",
        {**_INKLING, "unpadded_vocab_size": 101}
        | {"layer_types": ["hybrid_sliding", "hybrid"] * 2, "n_layers_per_attn_res_block": 2},
    ),
    "jamba": (
        "Jamba",
        {**_SHAPE, "num_experts": 2, "mamba_d_state": 6, "mamba_dt_rank": 4}
        | {"attn_layer_period": 4, "attn_layer_offset": 2, "use_mamba_kernels": False},
    ),
    "zamba": (
        "Zamba",
        {**_SHARED, "mamba_d_state": 6, "mamba_dt_rank": 4, "n_mamba_heads": 2}
        | {"use_mamba_kernels": False},
    ),
}
# Mamba-2 scans in chunks of 256 tokens unless told otherwise, which takes seconds here.
CHUNKS = {
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), "mamba_chunk_size"),
    **dict.fromkeys(("nemotron_h", "zamba2"), "chunk_size"),
}


def hybrid_config(family: str, **fields: Any) -> Any:
    name, own = HYBRIDS[family]
    return getattr(transformers, f"{name}Config")(**{**own, **fields})


def hybrid(family: str, **fields: Any) -> PreTrainedModel:
    """A random model in evaluation mode that never stops by itself."""
    config = hybrid_config(family, **fields)
    name = HYBRIDS[family][0].removesuffix("Text")
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():  # zeros would hide what they multiply
            torch.nn.init.normal_(parameter, 0, 0.3)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A model in a dtype, but for modules that are in float32 in any."""
    kept = model._keep_in_fp32_modules_strict or ()
    model = model.to(dtype)
    for name, parameter in model.named_parameters():
        if any(f".{part}." in f".{name}." for part in kept):
            parameter.data = parameter.data.float()
    return model


def tiny_hybrid(family: str = "qwen3_next", **fields: Any) -> PreTrainedModel:
    """Makes a tiny hybrid with short scans."""
    return hybrid(family, **({CHUNKS[family]: 16} if family in CHUNKS else {}), **fields)
