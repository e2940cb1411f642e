"""What a model weighs and computes: bytes of each layer and of what surrounds them.

From a checkpoint's headers, exactly; from a configuration alone by `formula.py`. A weight matrix
counts at the width it is stored in, so packed checkpoints count packed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pagedkv.config import DTYPE_BYTES
from pagedkv.errors import CheckpointError, UnsupportedModelError
from pagedkv.models import LayerKind, facts_of, kv_shapes, layer_kinds, shared_layers
from pagedkv.models.kinds import WINDOWED
from pagedkv.models.names import SHORT, attributes, dtype_name, settings_of

from .checkpoint import Checkpoint, has_weights, read_config
from .experts import RoutedExperts
from .formula import active_weights, by_formula, channels_at_once
from .headers import STORED, aligned, is_mxfp4, parts_of
from .towers import takes_images, tower_weights

# Bits a weight takes; 4-bit formats keep a 16-bit scale for about 32 weights.
WEIGHT_BITS = {
    "float32": 32.0, "float16": 16.0, "bfloat16": 16.0, "float8": 8.0, "int8": 8.0, "int4": 4.5,
}  # fmt: skip


# Where weights in fewer bits come from: nobody rounds them here.
PACKED = "from a checkpoint such as ...-w4a16 (docs/streaming.md)"


def packed_advice(dtype: object) -> str:
    """What to add to the refusal of a dtype that weights are only stored in; else nothing."""
    name = SHORT.get(str(dtype), str(dtype))
    return f"; weights in {name} come {PACKED}" if WEIGHT_BITS.get(name, 16) < 16 else ""


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
        unpacked: weights that are so in the files, but not in memory.
        active: weights of all layers and the head that one token is multiplied with.
        experts: those that can be read alone; None without, and in packed ones.
        of: the model that this is one process's share of; None for a whole one.
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
    experts: RoutedExperts | None = None
    unpacked: bool = False
    of: ModelShape | None = None

    @property
    def head_bytes(self) -> int:
        """Bytes that are multiplied for logits, be they the embedding's."""
        return self.head or self.embedding

    def layer(self, index: int, expert_slots: int) -> int:
        """Bytes of a layer that come with it: all, or all but its experts if these come alone."""
        apart = self.experts.layers[index] if self.experts and expert_slots else 0
        return self.layers[index] - apart

    @cached_property
    def widest_feed(self) -> int:
        """Channels a token has at once behind attention, in the layer where they are most."""
        return max(channels_at_once(self.settings, i) for i in range(len(self.layers)))

    @property
    def weights(self) -> int:
        """Bytes of everything."""
        return sum(self.layers) + self.embedding + self.head + self.rest


def read_model(
    model: Any, weight_dtype: str | None = None, images: bool = False, on_cpu: bool = False
) -> ModelShape:
    """The shape of a model given as a configuration (dict, object), a folder or a hub's id.

    Args:
        on_cpu: where it computes. There experts in mxfp4 are unpacked.
        images: of the class that takes images, also where another one takes text alone.

    Raises:
        UnsupportedModelError: pages cannot serve it.
        CheckpointError: the folder is not what it has to be.
    """
    checkpoint = None
    if isinstance(model, str | Path):
        folder = _folder(model)
        name = _short_name(folder) if folder == Path(model) else str(model)
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
    if not any(settings.shapes):
        raise UnsupportedModelError(
            f"model: {settings.model_type} cannot use pages: none of its layers has K and V of its "
            "own"
        )
    unpacked = on_cpu and is_mxfp4(config)
    if unpacked:
        settings.quantization_config = None
    dtype, bits = _widths(settings, weight_dtype, checkpoint)
    packed = _quantisation(settings) is not None
    sees = images or not facts_of(config.get("model_type")).text_alone
    assumed = bits < 16 and not packed  # a checkpoint in fewer bits than this one's
    if checkpoint and not assumed:
        count, cast = settings.num_hidden_layers, None if packed else dtype
        parts = parts_of(checkpoint, count, settings.experts, cast, sees)
    else:
        parts = by_formula(settings, dtype, bits)
        tower = aligned(tower_weights(config) * DTYPE_BYTES[dtype]) if sees else 0
        parts = replace(parts, rest=parts.rest + tower, tower=tower)
    return ModelShape(
        name=name,
        settings=settings,
        dtype=dtype,
        layers=parts.layers,
        embedding=parts.embedding,
        head=parts.head,
        rest=parts.rest,
        tower=parts.tower,
        exact=checkpoint is not None and not assumed,
        packed=packed or bits < 16,
        active=sum(active_weights(settings, i) for i in range(settings.num_hidden_layers))
        + settings.hidden_size * settings.vocab_size,
        experts=None if packed or bits < 16 else _routed(settings, parts.experts, on_cpu),
        unpacked=unpacked and bits >= 16,
    )


def _routed(c: SimpleNamespace, layers: tuple[int, ...], on_cpu: bool) -> RoutedExperts | None:
    """The experts that can be read alone, if there are some."""
    if not any(layers) or not c.experts_per_token or facts_of(c.model_type).experts_with_layer:
        return None
    return RoutedExperts(layers, c.experts, c.experts_per_token, in_slots=not on_cpu)


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


def _short_name(folder: Path) -> str:
    """The last part of a path; of one in the hub's cache the id."""
    cached = re.search(r"models--(.+?)/snapshots/", f"{folder}/")
    return cached[1].replace("--", "/") if cached else folder.name or folder.resolve().name


def _open(folder: Path, downloaded: bool) -> Checkpoint | None:
    try:
        return Checkpoint.open(folder) if has_weights(folder) else None
    except CheckpointError:
        if downloaded:
            return None  # a hub's cache may have some of the shards
        raise
