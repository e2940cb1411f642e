"""What a model weighs and computes: bytes of each layer and of what surrounds them.

From a checkpoint's headers, exactly; from a configuration alone by the shapes that decoders have in
common. A weight matrix counts at the width it is stored in, so packed checkpoints count packed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pagedkv.config import DTYPE_BYTES
from pagedkv.errors import CheckpointError, UnsupportedModelError
from pagedkv.layers import LayerKind, kv_shapes, layer_kinds, shared_layers
from pagedkv.layers.kinds import WINDOWED

from .checkpoint import Checkpoint, has_weights, read_config
from .headers import STORED, aligned, parts_of
from .mixers import GATED, mixer_weights
from .settings import (
    AT_ONCE,
    QKV_BIASES,
    TWO_MATRICES,
    attributes,
    dtype_name,
    settings_of,
)
from .towers import TEXT_ALONE, takes_images, tower_weights

# Bits a weight takes; 4-bit formats keep a 16-bit scale for about 32 weights.
WEIGHT_BITS = {
    "float32": 32.0, "float16": 16.0, "bfloat16": 16.0, "float8": 8.0, "int8": 8.0, "int4": 4.5,
}  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """What a plan needs to know of a model.

    Attributes:
        name: of the model, for people.
        settings: its decoder's configuration, by the names of a llama's.
        dtype: it computes in.
        layers: bytes of each layer, every tensor aligned.
        embedding: bytes of the token embedding.
        head: bytes of the output head; 0 if it is the embedding.
        rest: bytes of all else: norms, learned positions, a tower for images.
        tower: those of the tower, and of what joins it to the decoder.
        exact: read from headers, not computed from the configuration.
        packed: weights are stored in fewer bits than they are computed in.
        active: weights of all layers and the head that one token is multiplied with.
    """

    name: str
    settings: SimpleNamespace
    dtype: str
    layers: tuple[int, ...]
    embedding: int
    head: int
    rest: int
    tower: int
    exact: bool
    packed: bool
    active: int

    @property
    def head_bytes(self) -> int:
        """Bytes that are multiplied for logits, be they the embedding's."""
        return self.head or self.embedding

    @cached_property
    def widest_feed(self) -> int:
        """Channels a token has at once behind attention, in the layer where they are most."""
        return max(_at_once(self.settings, i) for i in range(len(self.layers)))

    @property
    def weights(self) -> int:
        """Bytes of everything."""
        return sum(self.layers) + self.embedding + self.head + self.rest


def read_model(model: Any, weight_dtype: str | None = None, images: bool = False) -> ModelShape:
    """The shape of a model given as a configuration (dict, object), a folder or a hub's id.

    Args:
        images: of the class that takes images, also where another one takes text alone.

    Raises:
        UnsupportedModelError: pages cannot serve it.
        CheckpointError: the folder is not what it has to be.
    """
    checkpoint = None
    if isinstance(model, str | Path):
        name, folder = str(model), _folder(model)
        config: Mapping[str, Any] = read_config(folder)
        checkpoint = _open(folder, downloaded=folder != Path(model))
    else:
        config = model if isinstance(model, Mapping) else attributes(model)
        name = str(config.get("_name_or_path") or config.get("model_type") or "model")
    settings = settings_of(dict(config))
    if images and not takes_images(config):
        raise UnsupportedModelError(f"model: {settings.model_type} is no model that takes images")
    settings.kinds = _kinds(settings)
    settings.shapes = kv_shapes(settings, layer_kinds(settings))
    dtype, bits = _widths(settings, weight_dtype, checkpoint)
    packed = _quantisation(settings) is not None
    sees = images or config.get("model_type") not in TEXT_ALONE
    if checkpoint:
        count, cast = settings.num_hidden_layers, None if packed else dtype
        layers, embedding, head, rest, tower = parts_of(checkpoint, count, cast, sees)
    else:
        layers, embedding, head, rest = _from_settings(settings, dtype, bits)
        tower = aligned(tower_weights(config) * DTYPE_BYTES[dtype]) if sees else 0
        rest += tower
    return ModelShape(
        name=name,
        settings=settings,
        dtype=dtype,
        layers=layers,
        embedding=embedding,
        head=head,
        rest=rest,
        tower=tower,
        exact=checkpoint is not None,
        packed=packed or bits < 16,
        active=sum(_active(settings, i) for i in range(settings.num_hidden_layers))
        + settings.hidden_size * settings.vocab_size,
    )


def _kinds(c: SimpleNamespace) -> list[LayerKind]:
    """The kind of each layer; those that attend to the K and V of others keep nothing."""
    kinds = layer_kinds(c)
    shared = (
        [
            LayerKind("attention", c.sliding_window if name in WINDOWED else None)
            for name in c.layer_types[len(kinds) :]
        ]
        if shared_layers(c)
        else []
    )
    return kinds + shared


def _widths(
    c: SimpleNamespace, weight_dtype: str | None, checkpoint: Checkpoint | None
) -> tuple[str, float]:
    """The dtype a model computes in, and the bits its layers' weights take."""
    found = str(c.dtype or "").removeprefix("torch.")
    if found not in DTYPE_BYTES:
        stored = [t.dtype for t in checkpoint.tensors.values()] if checkpoint else []
        found = next((STORED[dtype] for dtype in stored if dtype in STORED), "float32")
    if weight_dtype is not None:
        name = dtype_name("weight_dtype", weight_dtype, WEIGHT_BITS)
        return (name if name in DTYPE_BYTES else found), WEIGHT_BITS[name]
    return found, _quantisation(c) or WEIGHT_BITS[found]


def _quantisation(c: SimpleNamespace) -> float | None:
    """Bits of a weight in a quantised checkpoint, scales included; None if it is not one."""
    found = getattr(c, "quantization_config", None)
    if not found:
        return None
    found = found if isinstance(found, Mapping) else attributes(found)
    method = str(found.get("quant_method", ""))
    group: Mapping[str, Any] = next(iter((found.get("config_groups") or {}).values()), {})
    bits = found.get("bits") or (group.get("weights") or {}).get("num_bits")
    if not bits:
        four = found.get("load_in_4bit") or "fp4" in method or "4" in str(found.get("quant_type"))
        bits = 4 if four else 8
    return bits + 0.5 if bits < 8 else float(bits)


def _from_settings(
    c: SimpleNamespace, dtype: str, bits: float
) -> tuple[tuple[int, ...], int, int, int]:
    """Bytes of each layer, of embedding, head and the rest, by formula."""
    wide = DTYPE_BYTES[dtype]
    h = c.hidden_size
    layers = []
    for layer in range(c.num_hidden_layers):
        mixed, small = _mixing(c, layer)
        matrices = [*mixed, *_feed_forward(c, layer)]
        nbytes = [ceil(elements * bits / 8) for elements in matrices]
        layers.append(sum(map(aligned, [*nbytes, small * wide])))
    embedding = c.vocab_size * (getattr(c, "word_embed_proj_dim", None) or h) * wide
    positions = 0
    if c.model_type in ("gpt2", "gpt_bigcode", "opt") and c.max_position_embeddings:
        positions = (c.max_position_embeddings + 2 * (c.model_type == "opt")) * h
    by_layer = (getattr(c, "hidden_size_per_layer_input", None) or 0) * c.num_hidden_layers
    if by_layer:  # a second embedding, whose rows have a part for each layer
        positions += ((c.vocab_size_per_layer_input or 0) + h) * by_layer
    rest = aligned((h + positions) * wide)
    head = 0 if c.tied else aligned(embedding)
    return tuple(layers), aligned(embedding), head, rest


def _mixing(c: SimpleNamespace, layer: int) -> tuple[list[int], int]:
    """Elements of the matrices of attention, of a mixer with a state, or both; and of all else."""
    kind, h = c.kinds[layer], c.hidden_size
    small = 2 * h
    matrices: list[int] = []
    if kind.keeps in ("attention", "both"):
        matrices, small = _attention(c, layer)
    matrices += [2 * h * low for low in _side_paths(c)]
    if c.model_type == "longcat_flash":  # two attentions, and two feed-forwards beside the experts
        matrices = [*2 * matrices, *[h * c.intermediate_size] * 6]
    if kind.state is not None:
        mixer, rest = mixer_weights(c)
        matrices, small = [*matrices, *mixer], small + rest
    return matrices, small


def _side_paths(c: SimpleNamespace) -> list[int]:
    """Widths of what Gemma 3n and 4 add to a layer: a part of its own embedding, a low rank."""
    names = "hidden_size_per_layer_input", "laurel_rank"
    return [width for name in names if (width := getattr(c, name, None))]


def _attention(c: SimpleNamespace, layer: int) -> tuple[list[int], int]:
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
        return [2 * h * heads * dim], 2 * h
    shape = c.shapes[kind.attention]
    q, v = heads * shape.head_dim, heads * shape.v_head_dim
    kept = shape.num_kv_heads * shape.head_dim, shape.num_kv_heads * shape.v_head_dim
    biased = c.model_type in QKV_BIASES or getattr(c, "attention_bias", False)
    gate = h * q if c.model_type in GATED else 0
    matrices = [h * q + gate, *(h * width for width in kept), v * h]
    return matrices, 2 * h + (q + sum(kept) if biased else 0)


def _latent_attention(c: SimpleNamespace) -> tuple[list[int], int]:
    """The same of latent attention: what makes queries, latents, K and V of these, and o."""
    h, heads, rank = c.hidden_size, c.num_attention_heads, c.kv_lora_rank
    q, low = heads * c.head_dim, getattr(c, "q_lora_rank", None)
    queries = [h * low, low * q] if low else [h * q]
    expanded = heads * (c.qk_nope_head_dim + c.v_head_dim)
    made = [h * (rank + c.qk_rope_head_dim), rank * expanded]
    return [*queries, *made, heads * c.v_head_dim * h], 2 * h + rank + (low or 0)


def _feed_forward(c: SimpleNamespace, layer: int) -> list[int]:
    """Elements of the matrices behind attention: dense, or router, experts and shared experts."""
    h = c.hidden_size
    matrices = 2 if c.model_type in TWO_MATRICES else 3
    if _is_apart(c, layer):
        return []
    if not _has_experts(c, layer):
        dense = _dense_size(c, layer)
        if c.model_type == "granitemoehybrid":
            dense = _shared_size(c)
        return [h * dense] * matrices
    expert = _expert_size(c)
    return [h * c.experts, *[c.experts * h * expert] * matrices, *[h * _shared_size(c)] * matrices]


def _active(c: SimpleNamespace, layer: int) -> int:
    """Weights of one layer that a token is multiplied with."""
    matrices = 2 if c.model_type in TWO_MATRICES else 3
    return sum(_mixing(c, layer)[0]) + matrices * c.hidden_size * _feed_size(c, layer)


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


def _at_once(c: SimpleNamespace, layer: int) -> int:
    """Channels of gate, up and product; in experts also of what goes in, comes out and is added."""
    h = c.hidden_size
    if not _has_experts(c, layer):
        return AT_ONCE.get(c.model_type, 3) * _dense_size(c, layer)
    expert = max(AT_ONCE.get(c.model_type, 4) * _expert_size(c) + h, 4 * h)
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


def _folder(model: str | Path) -> Path:
    """The folder itself, or the one in the hub's cache that has this model's configuration."""
    folder = Path(model)
    looks_local = isinstance(model, Path) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model)
    if folder.exists() or looks_local or folder.suffix == ".gguf":
        return folder
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    except ImportError as error:
        raise ImportError(
            "a model's id needs huggingface_hub: pip install 'pagedkv[hf]'"
        ) from error
    found = try_to_load_from_cache(str(model), "config.json")
    if isinstance(found, str):
        return Path(found).parent
    try:
        return Path(hf_hub_download(str(model), "config.json")).parent
    except Exception as error:  # of many kinds: no network, no such model, no access
        raise ValueError(
            f"model: expected a folder or an id on the hub, got {model!r}: {error}"
        ) from error


def _open(folder: Path, downloaded: bool) -> Checkpoint | None:
    try:
        return Checkpoint.open(folder) if has_weights(folder) else None
    except CheckpointError:
        if downloaded:
            return None  # a hub's cache may have some of the shards
        raise
