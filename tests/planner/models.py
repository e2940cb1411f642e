"""Configurations of models as they are published."""

import json

from pagedkv.models.model import Model
from pagedkv.planner.model_shape import shape_of

GIB = 1 << 30


def llama(hidden, feed, layers, heads, kv_heads, vocab, longest=8192, **fields):
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": feed,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": longest,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **fields,
    }


LLAMA_70B = llama(8192, 28672, 80, 64, 8, 128256)
LLAMA_8B = llama(4096, 14336, 32, 32, 8, 128256)
LLAMA_7B = llama(4096, 11008, 32, 32, 32, 32000, 4096, dtype="float16")
QWEN_14B = llama(5120, 13824, 48, 40, 8, 152064, 32768, model_type="qwen2")
SMOL = llama(576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True, dtype="float32")
MIXTRAL = llama(
    4096, 14336, 32, 32, 8, 32000, 32768,
    model_type="mixtral", num_local_experts=8, num_experts_per_tok=2,
)  # fmt: skip
GEMMA_27B = llama(
    4608, 36864, 46, 32, 16, 256000,
    model_type="gemma2", head_dim=128, sliding_window=4096, tie_word_embeddings=None,
)  # fmt: skip
MODELS = {
    "llama-70b": LLAMA_70B, "llama-8b": LLAMA_8B, "llama-7b": LLAMA_7B, "qwen-14b": QWEN_14B,
    "smol": SMOL, "mixtral": MIXTRAL, "gemma-27b": GEMMA_27B,
}  # fmt: skip


def read_model(model, weight_dtype=None, images=False, on_cpu=False):
    """Returns the sizes of a model, in whichever way it is given."""
    return shape_of(Model.of(model, images), weight_dtype, on_cpu)


def save(folder, config, dtype="BF16", extra=None):
    """A checkpoint of zeros with the tensors of a llama; sparse, so of any size."""
    h, feed, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = h // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        "self_attn.q_proj.weight": [h, h],
        "self_attn.k_proj.weight": [kv, h],
        "self_attn.v_proj.weight": [kv, h],
        "self_attn.o_proj.weight": [h, h],
        "mlp.gate_proj.weight": [feed, h],
        "mlp.up_proj.weight": [feed, h],
        "mlp.down_proj.weight": [h, feed],
        "input_layernorm.weight": [h],
        "post_attention_layernorm.weight": [h],
    }
    shapes = {"model.embed_tokens.weight": [vocab, h], "model.norm.weight": [h]}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = [vocab, h]
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes |= extra or {}
    width, header, at = {"BF16": 2, "F32": 4, "U8": 1}[dtype], {}, 0
    for name, shape in shapes.items():
        size = width
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    (folder / "config.json").write_text(json.dumps(config))
