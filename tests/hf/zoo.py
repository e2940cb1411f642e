"""Every type of model that transformers has, built so small that all of them fit a test.

A default configuration is shrunk by the names of its fields; what a type asks for beyond that
stands in `OWN`. Layers of every kind a default names stay, twice each.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT,
)

TYPES = sorted({*CAUSAL, *IMAGE_TEXT})
VOCAB = 200
WINDOW = 8

_BY_NAME: dict[int | float, str] = {
    32: "hidden_size n_embd d_model dim embed_dim word_embed_proj_dim out_hidden_size emb_dim "
    "projection_dim text_hidden_size encoder_hidden_size projector_hidden_size lru_width "
    "patch_embed_hidden_size embedding_size input_embedding_size hidden_size_global input_size "
    "output_dim embedding_dim vision_output_dim output_embedding_size image_token_embed_dim "
    "projector_input_dim projector_output_dim projection_hidden_size attention_hidden_size "
    "image_size crop_size",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size d_ff dim_ff dff "
    "d_inner n_inner mlp_dim intermediate_size_mlp dense_intermediate_size ffn_hidden_size "
    "expert_ffn_hidden_size feed_forward_size merged_hidden_size alignment_intermediate_size "
    "projection_intermediate_size",
    16: "moe_intermediate_size shared_expert_intermediate_size kv_lora_rank q_lora_rank "
    "o_lora_rank moe_shared_expert_intermediate_size share_expert_dim shared_intermediate_size "
    "router_hidden_size hc_lowrank",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim kv_channels index_head_dim d_kv "
    "dim_head sliding_window mamba_d_state mamba_d_head state_size mamba_head_dim ssm_state_size "
    "linear_key_head_dim linear_value_head_dim linear_head_dim attention_chunk_size time_step_rank "
    "global_head_dim mamba_n_heads mamba_num_heads hidden_size_per_layer_input swa_head_dim "
    "attention_window_size sliding_window_size local_attention mamba_headdim d_rel adapter_rank",
    4: "num_attention_heads num_heads n_head n_heads encoder_attention_heads num_experts "
    "decoder_attention_heads n_routed_experts num_local_experts moe_num_experts attention_heads "
    "mamba_dt_rank linear_num_value_heads linear_num_heads index_n_heads num_position_embeddings "
    "laurel_rank swa_num_attention_heads num_sliding_attention_heads zero_expert_num patch_size",
    2: "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers depth layers "
    "num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k "
    "linear_num_key_heads swa_num_key_value_heads num_kv_heads resampler_depth num_query_groups "
    "mamba_n_groups n_groups num_global_layers num_layers_per_stack num_decoder_layers "
    "num_encoder_layers num_key_value_groups o_groups decoder_start_layer",
    1: "first_k_dense_replace n_group topk_group n_shared_experts num_shared_experts "
    "moe_num_shared_experts num_dense_layers moe_layer_start_index mamba_ngroups kv_n_heads "
    "num_expert_group n_mamba_heads num_mem_blocks",
    256: "max_position_embeddings n_positions n_ctx max_target_positions model_max_length "
    "max_seq_len original_max_position_embeddings max_2d_position_embeddings context_length",
    VOCAB: "vocab_size unpadded_vocab_size vocab_size_per_layer_input decoder_vocab_size",
    0.3: "initializer_range init_std embed_init_std embedding_initializer_range "
    "initializer_factor alphas_initializer_range",
    0: "num_nextn_predict_layers additional_vocab_size",
}  # fmt: skip
SMALL = {name: value for value, names in _BY_NAME.items() for name in names.split()}
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")
KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types", "block_types")
_S, _F = "sliding_attention", "full_attention"
_WITHOUT_SPARSITY = {"activation_sparsity_pattern": [0.0] * 5, "intermediate_size": [48] * 5}
SHARED = {"num_hidden_layers": 5, "layer_types": [_S, _F, _S, _S, _F], "num_kv_shared_layers": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_MROPE = {**_ROPE, "mrope_section": [2, 1, 1]}
_WIDE_MROPE = {**_ROPE, "mrope_section": [3, 3, 2]}
_ALL_HEADS = {"num_key_value_heads": 4}
_UNSCALED = ("attention", "residual", "embedding")
_INDEXER = {"n_heads": 4, "kv_heads": 1, "head_dim": 8, "compress_ratio": 4, "budget": 8}
_SPARSE = {f"indexer_{name}": n for name, n in _INDEXER.items()}
_SHARED_ATTENTION = {
    **_ALL_HEADS, "attention_hidden_size": 64, "attention_head_dim": 16, "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
}  # fmt: skip
_SLIDES = {"num_hidden_layers": 4, "layer_types": [_F, _S] * 2, "mlp_layer_types": ["dense"] * 4}
# What a type asks for beyond the size of its fields.
# Fewer heads give many keys the same score, none, of which each layout chooses others.
_CHOOSES = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
_BLOCKS = {
    "layer_types": [_F, "minimax_m3_sparse"], "index_n_heads": 2, "index_block_size": 4,
    "index_topk_blocks": 3,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    **{
        kind: {**_ALL_HEADS, "num_experts_per_tok": 2}
        for kind in (
            "axk1",
            "bailing_hybrid",
            "deepseek_v2",
            "deepseek_v3",
            "glm4_moe_lite",
            "kimi_linear",
            "longcat_flash",
            "minicpm3",
            "sarvam_mla",
            "youtu",
        )
    },
    "chameleon": {"vocabulary_map": {"<image>": VOCAB - 1, "IMGIMGA": VOCAB - 2}},
    "cohere_compass": {
        "text_config": {"head_dim": 16, "num_hidden_layers": 2, "layer_types": [_F] * 2}
        | {"rope_parameters": {_F: _WIDE_MROPE}}
    },
    "cosmos3_edge": {"text_config": {"rope_parameters": _MROPE}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {
        **_CHOOSES,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "num_experts_per_tok": 2,
        "shared_experts_intermediate_size": 16,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "layer_types": ["indexed_attention"] * 2 + [_S, "indexed_attention"],
        **{f"swa_{name}": 2 for name in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{name}": 8 for name in ("qk_nope_head_dim", "v_head_dim")},
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 24,
        "swa_head_dim": 16,
    },
    "emu3": {
        "vocabulary_map": {"<image>": VOCAB - 1, "<|extra_200|>": VOCAB - 2}
        | {"<|visual token 000000|>": VOCAB - 3}
    },
    "ernie4_5_vl_moe": {"text_config": {"head_dim": 16, "rope_parameters": _WIDE_MROPE}},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3": {"mm_tokens_per_image": 16},
    "gemma3n_text": {**SHARED, **_WITHOUT_SPARSITY},
    "glm5_next": {
        "text_config": {**_ALL_HEADS, **_CHOOSES, "qk_rope_head_dim": 0, "index_kpool": 4}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "downsample_rate": "1/2",
        "text_config": {f"{what}_multiplier": 1.0 for what in _UNSCALED} | {"logits_scaling": 1.0},
    },
    "hunyuan_vl": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1] * 4}}},
    "inkling_mm_model": {"vision_config": {"n_layers": 5}},  # as many as it has scales at least
    "kimi_k25": {"text_config": _ALL_HEADS},
    "lfm2": {"layer_types": ["conv", _F]},
    "lfm2_moe": {"layer_types": ["conv", _F]},
    "lfm2_vl": {"text_config": {"layer_types": ["conv", _F]}},
    "llama4": {"text_config": {"attention_chunk_size": 16}},
    "llama4_text": {"attention_chunk_size": 16},  # whole pages of 4 bits
    "mamba2": {"num_heads": 8},
    "mistral4": {
        **_ALL_HEADS,
        "rope_parameters": {
            **_ROPE,
            "original_max_position_embeddings": 256,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "mistral_large4": {"text_config": {**_ALL_HEADS, **_CHOOSES}},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h_omni": {
        "video_temporal_patch_size": 2,
        "vision_config": {"video_temporal_patch_size": 2},
    },
    "paddleocr_vl": {"text_config": {"rope_parameters": _MROPE}},
    "qwen2_5_vl": {"text_config": {"rope_parameters": _MROPE}},
    "qwen2_vl": {"text_config": {"rope_parameters": _MROPE}},
    "qwen2_5_omni_thinker": {"text_config": {"rope_parameters": _MROPE}},
    "qwen3_omni_moe_thinker": {
        "text_config": {"rope_parameters": {**_MROPE, "mrope_interleaved": True}}
    },
    "qwen4_exp": {"text_config": _SPARSE},
    "step3p7": {
        "text_config": {**_SLIDES, "sliding_window": WINDOW, "num_sliding_attention_heads": 8}
        | {"rope_parameters": {_F: _ROPE, _S: _ROPE}}
    },
    "qwen3_vl": {"text_config": {"rope_parameters": {**_MROPE, "mrope_interleaved": True}}},
    **{
        kind: {"text_config": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}}}
        for kind in ("glm4v", "glm46v", "glm4v_moe", "glm_ocr", "glmga", "qwen3_5", "qwen3_5_moe")
    },
    "gpt_bigcode": {"num_key_value_heads": 1},
    "mpt": {"use_cache": True},
    "zaya": {"num_experts_per_tok": 1},
    "axk2": {**_ALL_HEADS, **_CHOOSES, "head_dim": 8, "qk_head_dim": 16},
    "deepseek_v32": {**_ALL_HEADS, **_CHOOSES, "num_experts_per_tok": 2},
    "glm_moe_dsa": {**_ALL_HEADS, **_CHOOSES, "num_experts_per_tok": 2},
    "hy_v4": _CHOOSES,
    "hy_v4_vl": {"text_config": {**_CHOOSES, "rope_parameters": _MROPE}},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"layer_types": [_F] * 2, "rope_parameters": {_F: _MROPE}},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
    | {"use_mamba_kernels": False},
    "minimax_m3_vl": {"text_config": _BLOCKS},
    "minimax_m3_vl_text": _BLOCKS,
    "qwen4_exp_text": _SPARSE,
    "xmod": {"default_language": "en_XX"},
    "zamba": {**_SHARED_ATTENTION, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "zamba2": {**_SHARED_ATTENTION, "n_mamba_heads": 8, "mamba_headdim": 8},
}


def fields_of(config: Any, own: dict[str, Any]) -> dict[str, Any]:
    """The fields of a small configuration of the same class."""
    own, inner = dict(own), getattr(type(config), "sub_configs", {})
    fields: dict[str, Any] = {}
    for name in inner:
        part = getattr(config, name, None)
        if part is not None:
            kind = {"model_type": part.model_type}
            fields[name] = kind | fields_of(part, own.pop(name, {}))
    given = config.to_dict()
    kinds = next((given[name] for name in KINDS if isinstance(given.get(name), list)), None)
    depth = 2 * len(set(kinds)) if kinds else 2
    for name, value in given.items():
        if name in inner or name in ("model_type", "id2label", "label2id"):
            continue
        if name in DEPTHS and value is not None:
            fields[name] = depth
        elif name in SMALL and _is_number(value):
            fields[name] = SMALL[name]
        elif name == "head_dim" and value is None:
            fields[name] = 8
        elif isinstance(value, list) and kinds and len(value) == len(kinds):
            several = {str(one): SMALL.get(name, one) if _is_number(one) else one for one in value}
            fields[name] = (list(several.values()) * depth)[:depth]
        elif name.endswith(("token_id", "token_index")) and _is_number(value) and value >= VOCAB:
            fields[name] = VOCAB - 1 - sum(map(ord, name)) % 16
        elif name in ("rope_parameters", "rope_scaling") and value is not None:
            fields[name] = value
    return {**fields, **own}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shrunk(kind: str, **own: Any) -> Any:
    """The configuration of a type, shrunk."""
    cls = CONFIG_MAPPING[kind]
    return cls(**fields_of(cls(), {**OWN.get(kind, {}), **own}))


def built(kind: str, sees: bool = False, **own: Any) -> PreTrainedModel:
    """A random model of a type, in evaluation mode, that never stops by itself.

    Args:
        sees: of its image-text class, where it has one for text alone as well.
    """
    config = shrunk(kind, **own)
    text = AutoModelForCausalLM if kind in CAUSAL else AutoModelForMultimodalLM
    auto = AutoModelForImageTextToText if sees or kind in IMAGE_TEXT.keys() - CAUSAL else text
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        # A matrix of zeros, as some begin, would hide what it is multiplied with.
        if not parameter.isfinite().all() or (parameter.dim() > 1 and not parameter.any()):
            torch.nn.init.normal_(parameter, 0, 0.1)
    options = model.generation_config
    options.eos_token_id, options.pad_token_id, options.bos_token_id = None, 0, 1
    options.forced_eos_token_id = options.begin_suppress_tokens = None
    if kind.endswith("_omni_thinker") or kind.endswith("_omni_moe_thinker"):
        model.config.vision_start_token_id = VOCAB - 20  # which the talker's configuration has
    return model
