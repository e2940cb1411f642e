"""What layers weigh by the shapes that decoders have in common, of a configuration alone."""

from __future__ import annotations

from math import ceil
from types import SimpleNamespace

from pagedkv.config import DTYPE_BYTES
from pagedkv.models import facts_of

from .headers import Parts, aligned
from .mixers import mixer_weights

# Attention whose output has a gate, which the matrix of q computes as well.
GATED = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
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
QKV_BIASES = {"qwen2", "qwen2_moe", "gpt2", "gpt_neox", "opt", "phi", "starcoder2", "gpt_bigcode"}


def by_formula(c: SimpleNamespace, dtype: str, bits: float) -> Parts:
    """Bytes of each layer, of embedding, head and the rest, by formula; there is no tower in it."""
    wide = DTYPE_BYTES[dtype]
    h = c.hidden_size
    layers, experts = [], []
    for layer in range(c.num_hidden_layers):
        parts, small = parts_of_layer(c, layer)
        matrices = [elements for part in parts.values() for elements in part]
        nbytes = [ceil(elements * bits / 8) for elements in matrices]
        layers.append(sum(map(aligned, [*nbytes, small * wide])))
        routed = parts.get("experts", [])
        experts.append(sum(aligned(ceil(elements * bits / 8)) for elements in routed))
    embedding = c.vocab_size * (getattr(c, "word_embed_proj_dim", None) or h) * wide
    positions = 0
    if c.model_type in ("gpt2", "gpt_bigcode", "opt") and c.max_position_embeddings:
        positions = (c.max_position_embeddings + 2 * (c.model_type == "opt")) * h
    by_layer = (getattr(c, "hidden_size_per_layer_input", None) or 0) * c.num_hidden_layers
    if by_layer:  # a second embedding, whose rows have a part for each layer
        positions += ((c.vocab_size_per_layer_input or 0) + h) * by_layer
    rest = aligned((h + positions) * wide)
    tied = getattr(c, "tie_word_embeddings", None)
    head = 0 if (c.model_type in TIED if tied is None else tied) else aligned(embedding)
    return Parts(tuple(layers), tuple(experts), aligned(embedding), head, rest, tower=0)


def parts_of_layer(c: SimpleNamespace, layer: int) -> tuple[dict[str, list[int]], int]:
    """Elements of each matrix of a layer, by its part; and those of all else together."""
    parts, small = _mixing(c, layer)
    return parts | _feed_forward(c, layer), small


def _mixing(c: SimpleNamespace, layer: int) -> tuple[dict[str, list[int]], int]:
    """The matrices of attention, of a mixer with a state, or of both, by part."""
    kind, h = c.kinds[layer], c.hidden_size
    parts: dict[str, list[int]] = {}
    small = 2 * h
    if kind.keeps in ("attention", "both"):
        parts, small = _attention(c, layer)
    parts["side"] = [2 * h * low for low in _side_paths(c)]
    if c.model_type == "longcat_flash":  # two attentions, and two feed-forwards beside the experts
        parts = {name: 2 * matrices for name, matrices in parts.items()}
        parts["beside experts"] = [h * c.intermediate_size] * 6
    if kind.state is not None:
        parts["mixer"], rest = mixer_weights(c)
        small += rest
    return parts, small


def _side_paths(c: SimpleNamespace) -> list[int]:
    """Widths of what Gemma 3n and 4 add to a layer: a part of its own embedding, a low rank."""
    names = "hidden_size_per_layer_input", "laurel_rank"
    return [width for name in names if (width := getattr(c, name, None))]


def _attention(c: SimpleNamespace, layer: int) -> tuple[dict[str, list[int]], int]:
    """Elements of q, k, v and o, and of biases and norms together."""
    h, heads = c.hidden_size, c.num_attention_heads
    if getattr(c, "kv_lora_rank", None):
        return _latent_attention(c)
    kind = c.kinds[layer]
    if kind.attention is None:  # it attends to what another layer keeps, and is as wide
        alike = [
            k.attention for k in c.kinds if k.attention is not None and k.window == kind.window
        ]
        dim = c.shapes[max(alike, default=-1)].head_dim
        return {"attention": [2 * h * heads * dim]}, 2 * h
    shape = c.shapes[kind.attention]
    q, v = heads * shape.head_dim, heads * shape.v_head_dim
    kept = shape.num_kv_heads * shape.head_dim, shape.num_kv_heads * shape.v_head_dim
    biased = c.model_type in QKV_BIASES or getattr(c, "attention_bias", False)
    gate = h * q if c.model_type in GATED else 0
    matrices = [h * q + gate, *(h * width for width in kept), v * h]
    return {"attention": matrices}, 2 * h + (q + sum(kept) if biased else 0)


def _latent_attention(c: SimpleNamespace) -> tuple[dict[str, list[int]], int]:
    """The matrices of latent attention: those that make latents, then queries, K, V and o."""
    h, heads, rank = c.hidden_size, c.num_attention_heads, c.kv_lora_rank
    q, low = heads * c.head_dim, getattr(c, "q_lora_rank", None)
    expanded = heads * (c.qk_nope_head_dim + c.v_head_dim)
    parts = {
        "latents": [h * (rank + c.qk_rope_head_dim)] + ([h * low] if low else []),
        "attention": [(low or h) * q, rank * expanded, heads * c.v_head_dim * h],
    }
    return parts, 2 * h + rank + (low or 0)


def _feed_forward(c: SimpleNamespace, layer: int) -> dict[str, list[int]]:
    """Elements of the matrices behind attention: dense, or router, experts and shared experts."""
    h = c.hidden_size
    matrices = 2 if c.model_type in TWO_MATRICES else 3
    if _is_apart(c, layer):
        return {}
    if not _has_experts(c, layer):
        dense = _dense_size(c, layer)
        if c.model_type == "granitemoehybrid":
            dense = _shared_size(c)
        return {"feed": [h * dense] * matrices}
    return {
        "router": [h * c.experts],
        "experts": [c.experts * h * _expert_size(c)] * matrices,
        "shared": [h * _shared_size(c)] * matrices,
    }


def active_weights(c: SimpleNamespace, layer: int) -> int:
    """Weights of one layer that a token is multiplied with."""
    matrices = 2 if c.model_type in TWO_MATRICES else 3
    mixing = sum(map(sum, _mixing(c, layer)[0].values()))
    return mixing + matrices * c.hidden_size * _feed_size(c, layer)


def _is_apart(c: SimpleNamespace, layer: int) -> bool:
    """Whether what stands behind attention elsewhere is a layer of its own, and this is none."""
    apart = any(kind.keeps == "none" for kind in c.kinds)
    return apart and c.kinds[layer].keeps != "none"


def _feed_size(c: SimpleNamespace, layer: int) -> int:
    """Channels behind attention that a token takes."""
    if _is_apart(c, layer):
        return 0
    if not _has_experts(c, layer):
        return _dense_size(c, layer)
    return _expert_size(c) * (c.experts_per_token or 1) + _shared_size(c)


def channels_at_once(c: SimpleNamespace, layer: int) -> int:
    """Channels of gate, up and product; in experts also of what goes in, comes out and is added."""
    h = c.hidden_size
    if not _has_experts(c, layer):
        return (facts_of(c.model_type).at_once or 3) * _dense_size(c, layer)
    expert = max((facts_of(c.model_type).at_once or 4) * _expert_size(c) + h, 4 * h)
    return (c.experts_per_token or 1) * expert + 3 * _shared_size(c)


def _dense_size(c: SimpleNamespace, layer: int) -> int:
    """Channels without experts; in some Gemma 4 twice as many where K and V are another layer's."""
    wide = getattr(c, "use_double_wide_mlp", False) and c.kinds[layer].attention is None
    return c.intermediate_size * (2 if wide else 1)


def _has_experts(c: SimpleNamespace, layer: int) -> bool:
    if not c.experts or getattr(c, "is_moe", None) is False:
        return False
    if c.kinds[layer].keeps == "none":
        return c.layer_types[layer] == "moe"
    if layer in (getattr(c, "mlp_only_layers", None) or ()):
        return False
    kinds = getattr(c, "mlp_layer_types", None)
    if kinds is not None:
        return kinds[layer] == "sparse"
    if isinstance(sparse := getattr(c, "moe_layer_freq", None), (list, tuple)):
        return bool(sparse[layer])
    if period := getattr(c, "expert_layer_period", None):
        return layer % period == c.expert_layer_offset
    every = getattr(c, "decoder_sparse_step", None) or 1
    return layer >= (c.first_sparse or 0) and (layer + 1) % every == 0


def _expert_size(c: SimpleNamespace) -> int:
    return getattr(c, "moe_intermediate_size", None) or c.intermediate_size


def _shared_size(c: SimpleNamespace) -> int:
    """Channels of the experts that every token takes."""
    size = getattr(c, "shared_expert_intermediate_size", None)
    return size or (c.shared_experts or 0) * _expert_size(c)
