"""Models that pages do not serve, each with the reason it is refused for."""

import re

import transformers
from transformers import PreTrainedModel

SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 1}
INTERFACE = "does not go through transformers' attention interface"


# model: its fields, and the reason it is refused for
UNSUPPORTED = {
    "T5ForConditionalGeneration": (
        {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        "encoder-decoder",
    ),
    "BartForConditionalGeneration": (
        {"vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
        "encoder-decoder",
    ),
    "CpmAntForCausalLM": (
        {**SMALL, "vocab_size": 101, "dim_head": 8, "dim_ff": 48, "prompt_types": 1}
        | {"prompt_length": 2, "segment_types": 1},
        INTERFACE,
    ),
    "OpenAIGPTLMHeadModel": (
        {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4},
        "takes no cache",
    ),
    "DeepseekV4ForCausalLM": (
        {**SMALL, **EXPERTS, "num_key_value_heads": 1, "head_dim": 16, "qk_rope_head_dim": 8}
        | {"q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "n_routed_experts": 2}
        | {"index_n_heads": 2, "index_head_dim": 8},
        "compressed",
    ),
    "MambaForCausalLM": (
        {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
        "attention",
    ),
    "GraniteMoeHybridForCausalLM": (
        {**WIDE, **MAMBA, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"layer_types": ["mamba", "mamba"]},
        "no layer has K and V",
    ),
    "MiniMaxForCausalLM": (
        {**WIDE, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
        | {"layer_types": ["linear_attention", "full_attention"]},
        "states of minimax",
    ),
    "RecurrentGemmaForCausalLM": (
        {**SMALL, "num_hidden_layers": 3, "intermediate_size": 48, "lru_width": 32}
        | {"attention_window_size": 16},
        "recurrent|kind",
    ),
}


def unsupported(name: str) -> PreTrainedModel:
    kind = re.sub("(ForCausalLM|ForConditionalGeneration|LMHeadModel)$", "", name)
    config = getattr(transformers, kind + "Config")
    return getattr(transformers, name)(config(**UNSUPPORTED[name][0])).eval()
