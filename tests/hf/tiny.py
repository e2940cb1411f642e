"""Tiny random models, ragged batches, and the one way their results are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from pagedkv.hf.release import CACHE
from tests.effort import examples

VOCAB = 101
PAD = 0
WINDOW = 8
NEW = examples(10, 6)  # tokens of tests with many cases: a row begins a page, and may pass a window

# Weights this wide spread the logits over several units, so that few steps are close calls.
_COMMON = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_SHAPE = {
    **_COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_MHA = {**_SHAPE, "num_key_value_heads": 4}
_GPT2 = {**_COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
_SHARED = {
    "sliding_window": WINDOW,
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "layer_types": [*_HYBRID["layer_types"][:3], "sliding_attention", "full_attention"],
}
_GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
# Latent attention (MLA): `head_dim` is what some families call the rotated part.
_LATENT = {
    **_MHA, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}  # fmt: skip
_LATENT_EXPERTS = {
    **_LATENT, "num_hidden_layers": 3, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

# family: (configuration class, its fields)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SHAPE),
    "mistral": ("Mistral", {**_SHAPE, "sliding_window": WINDOW}),
    "qwen2": ("Qwen2", _SHAPE),
    "qwen2_window": (
        "Qwen2",
        {**_SHAPE, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {**_SHAPE, "head_dim": 16}),
    # A softcap this low bends every score; the usual 50 would not show in these models.
    "gemma2": (
        "Gemma2",
        {**_SHAPE, **_HYBRID, "num_hidden_layers": 4, "head_dim": 8, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("Gemma3Text", {**_SHAPE, **_HYBRID, "num_hidden_layers": 4, "head_dim": 8}),
    "phi3": ("Phi3", _SHAPE),
    "olmo2": ("Olmo2", _SHAPE),
    "gpt_neox": ("GPTNeoX", _MHA),
    "gpt2": ("GPT2", _GPT2),
    "opt": ("OPT", {**_MHA, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "mixtral": ("Mixtral", {**_SHAPE, "num_local_experts": 2}),
    "ministral": ("Ministral", {**_SHAPE, "head_dim": 8, "sliding_window": WINDOW}),
    "olmo3": ("Olmo3", {**_SHAPE, **_HYBRID, "num_hidden_layers": 4}),
    "stablelm": ("StableLm", _SHAPE),
    "starcoder2": ("Starcoder2", {**_SHAPE, "sliding_window": WINDOW}),
    "granite": ("Granite", _SHAPE),
    "cohere": ("Cohere", _SHAPE),
    "cohere2": ("Cohere2", {**_SHAPE, **_HYBRID, "num_hidden_layers": 4}),
    "glm4": ("Glm4", {**_SHAPE, "head_dim": 8}),
    "phi": ("Phi", _SHAPE),
    "smollm3": ("SmolLM3", {**_SHAPE, "no_rope_layers": [1, 0]}),
    "exaone4": ("Exaone4", {**_SHAPE, **_HYBRID, "num_hidden_layers": 4}),
    "nemotron": ("Nemotron", _SHAPE),
    "qwen3_moe": (
        "Qwen3Moe",
        {**_SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gpt_oss": (
        "GptOss",
        {**_SHAPE, **_HYBRID, **_EXPERTS, "num_hidden_layers": 4, "head_dim": 8}
        | {"rope_parameters": {**_YARN, "rope_theta": 10_000.0}},
    ),
    "gemma3n": (
        "Gemma3nText",
        {**_SHAPE, **_SHARED, "head_dim": 8, "laurel_rank": 8, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": VOCAB, "activation_sparsity_pattern": [0.0] * 5}
        | {"intermediate_size": [48] * 5},
    ),
    "gemma4": ("Gemma4Text", {**_SHAPE, **_SHARED, **_GEMMA4}),
    "deepseek_v2": ("DeepseekV2", {**_LATENT_EXPERTS, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", _LATENT_EXPERTS),
    "glm4_moe_lite": ("Glm4MoeLite", _LATENT_EXPERTS),
    "longcat_flash": (
        "LongcatFlash",
        {**_LATENT, "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 48}
        | {"expert_ffn_hidden_size": 16, "moe_topk": 2, "n_routed_experts": 4}
        | {"zero_expert_num": 2, "head_dim": 4},
    ),
    "minicpm3": ("MiniCPM3", _LATENT),
    "youtu": ("Youtu", _LATENT),
    "axk1": ("AXK1", _LATENT_EXPERTS),
    "mistral4": ("Mistral4", {**_LATENT_EXPERTS, "head_dim": 12, "qk_head_dim": 12}),
    "gemma4_one_shape": ("Gemma4Text", {**_SHAPE, **_SHARED, **_GEMMA4, "global_head_dim": 8}),
    # As the large ones: experts, fewer heads in full layers, their V another norm of what K is of.
    "gemma4_large": (
        "Gemma4Text",
        {**_SHAPE, **_SHARED, **_GEMMA4, "num_kv_shared_layers": 0, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4}
        | {"top_k_experts": 2, "moe_intermediate_size": 16, "hidden_size_per_layer_input": 0},
    ),
    "gemma4_unified": (
        "Gemma4UnifiedText",
        {**_SHAPE, **_SHARED, **_GEMMA4},
    ),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {**_SHAPE, **_HYBRID, "num_hidden_layers": 4, "head_dim": 12, "v_head_dim": 8}
        | {"num_key_value_heads": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16},
    ),
    "llama4": (
        "Llama4Text",
        {
            **_SHAPE,
            **_EXPERTS,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 2 * WINDOW,
            "no_rope_layers": [1, 0, 1, 0],
            "floor_scale": 6,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "interleave_moe_layer_step": 2,
        },
    ),
    "granite_swa": ("GraniteSWA", {**_SHAPE, **_HYBRID, "num_hidden_layers": 4}),
    "granitemoe_swa": (
        "GraniteMoeSWA",
        {**_SHAPE, **_HYBRID, **_EXPERTS, "num_hidden_layers": 4},
    ),
}
# What most others are made of: whole texts and windows, both in turn, a softcap, learned positions,
# experts, sinks, K and V projected in one, layers without positions, without K and V, chunks.
VARIED = ["llama", "mistral", "gemma3", "gemma2", "gpt2", "mixtral", "gpt_oss", "phi3", "smollm3"]
VARIED += ["gemma3n", "gemma4", "llama4"]
# Whose pages keep latents.
LATENT = [
    "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu", "axk1",
    "mistral4",
]  # fmt: skip
# Those with attention sinks: whose facts say so.
WITH_SINKS = ["gpt_oss", "granite_swa", "granitemoe_swa"]


def tiny(family: str = "llama", **fields: Any) -> PreTrainedModel:
    """A random model in evaluation mode that never stops by itself."""
    name, own = FAMILIES[family]
    return build(name, **{**own, **fields})


def build(name: str, head: str = "ForCausalLM", **fields: Any) -> PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(**fields)
    head = "LMHeadModel" if name == "GPT2" else head
    model = getattr(transformers, name.removesuffix("Text") + head)(config).eval()
    for parameter, values in model.named_parameters():
        if parameter.endswith(".sinks"):  # zeros, as some begin, would hide which is whose
            torch.nn.init.normal_(values, 1.0, 2.0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def prompts(*lengths: int) -> list[Tensor]:
    return [torch.randint(2, VOCAB, (n,)) for n in lengths]


def padded(rows: Sequence[Tensor], side: str = "left") -> dict[str, Tensor]:
    """Rows of ids as a batch: what a tokenizer returns."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(width - len(row), None) if side == "left" else slice(len(row))
        ids[i, place] = row
        mask[i, place] = 1
    return {"input_ids": ids, "attention_mask": mask}


def attention_of(model: PreTrainedModel) -> str:
    return model.config.get_text_config(decoder=True)._attn_implementation


def named(cache: Any) -> dict[str, Any]:
    """A cache by the name that the installed transformers takes it under."""
    return {CACHE: cache}


def dense(model: PreTrainedModel) -> DynamicCache:
    """The cache `generate` would make, windows included."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def generate(model: PreTrainedModel, batch: dict[str, Tensor], cache: Any = None, **options: Any):
    """Runs `generate` under the cache's own attention or the model's; returns logits as well."""
    options = {"max_new_tokens": 10, "do_sample": False, **options}
    if cache is not None:
        options |= named(cache)
    return model.generate(
        **batch, **options, return_dict_in_generate=True, output_logits=True, output_scores=True
    )


# Two correct attentions in float32 add in different orders. Over the 30 layers of SmolLM2 their
# logits differ by 3e-5 at most; a lead smaller than this may fall either way.
CLOSE_CALL = 1e-4


def assert_same_tokens(actual: Any, expected: Any) -> None:
    """Two results of `generate` hold the same tokens, close calls aside.

    A row may differ from a step on where the two best logits (for beams: the scores of the two
    results) lie within `CLOSE_CALL`; what follows such a step is another text and not compared.
    """
    a, e = actual.sequences, expected.sequences
    assert a.shape == e.shape, f"{list(a.shape)} tokens, expected {list(e.shape)}"
    rows = (a != e).any(1).nonzero().flatten().tolist()
    for row in rows:
        scores = getattr(expected, "sequences_scores", None)
        if scores is not None:
            lead = float((actual.sequences_scores[row] - scores[row]).abs())
            where = "the beams' scores"
        else:
            step = int((a[row] != e[row]).nonzero()[0]) - (a.shape[1] - len(expected.logits))
            assert step >= 0, f"row {row}: the prompts differ"
            best = expected.logits[step][row].topk(2).values
            lead, where = float(best[0] - best[1]), f"the two best logits of step {step}"
        assert lead < CLOSE_CALL, (
            f"row {row}: {a[row].tolist()}, expected {e[row].tolist()}; "
            f"{where} differ by {lead:.1e}, which is no close call"
        )


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Logits (or gradients) that two correct computations in float32 may give."""
    # A logit is the end of sums over at most 64 channels and 64 keys per layer, of which there are
    # at most 4; each addition rounds by eps relative to the largest term.
    additions = 4 * (64 + 64)
    allowed = additions * torch.finfo(torch.float32).eps * float(expected.abs().max())
    worst = float((actual.double() - expected.double()).abs().max())
    assert worst <= allowed, f"they differ by {worst:.1e}, at most {allowed:.1e} is rounding"
