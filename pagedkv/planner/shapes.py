"""What a model weighs and computes: bytes of each layer and of what surrounds them.

From a checkpoint's headers, exactly; from a configuration alone by the model that transformers
builds of it without memory. A weight matrix counts at the width it is stored in, so packed
checkpoints count packed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from types import SimpleNamespace

from pagedkv.config import DTYPE_BYTES
from pagedkv.models import facts_of
from pagedkv.models.headers import STORED, loaded, weights_in
from pagedkv.models.model import Model
from pagedkv.models.names import SHORT, dtype_name
from pagedkv.models.packing import packing_of
from pagedkv.models.weights import Weight

from .experts import RoutedExperts
from .parts import is_matrix, parts_of
from .passes import channels_at_once

# Bits a weight takes; 4-bit formats keep a 16-bit scale for about 32 weights.
WEIGHT_BITS = {
    "float32": 32.0, "float16": 16.0, "bfloat16": 16.0, "float8": 8.0, "int8": 8.0, "int4": 4.5,
}  # fmt: skip


# Where weights in fewer bits come from: nobody rounds them here.
PACKED = "from a checkpoint such as ...-w4a16"


def packed_advice(dtype: object) -> str:
    """What to add to the refusal of a dtype that weights are only stored in; else nothing."""
    name = SHORT.get(str(dtype), str(dtype))
    return f"; weights in {name} come {PACKED}" if WEIGHT_BITS.get(name, 16) < 16 else ""


@dataclass(frozen=True)
class ModelShape:
    """What a plan needs to know of a model.

    Attributes:
        model: what is known of it.
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
        assumed: what nobody said of the model, in sentences.
        of: the model that this is one process's share of; None for a whole one.
    """

    model: Model = field(compare=False, repr=False)
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
    assumed: tuple[str, ...] = ()
    of: ModelShape | None = None

    @property
    def name(self) -> str:
        """The model's name, for people."""
        return self.model.name

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
        return channels_at_once(self.settings)

    @property
    def weights(self) -> int:
        """Bytes of everything."""
        return sum(self.layers) + self.embedding + self.head + self.rest


def shape_of(model: Model, weight_dtype: str | None = None, on_cpu: bool = False) -> ModelShape:
    """What a model weighs, by its checkpoint or by its configuration alone.

    Args:
        on_cpu: where it computes. There experts in mxfp4 are unpacked.

    Raises:
        UnsupportedModelError: pages cannot serve it, or nothing is known of its type.
        CheckpointError: the checkpoint lacks layers.
        ValueError: a configuration does not tell what counts.
    """
    c, checkpoint = model.settings, model.checkpoint
    unpacked = on_cpu and model.method == "mxfp4"
    quantised = bool(model.fields.get("quantization_config")) and not unpacked
    dtype, bits, assumed = _widths(model, weight_dtype, unpacked)
    wide = DTYPE_BYTES[dtype]
    by_headers = checkpoint is not None and (bits >= 16 or quantised)
    routed = (c.experts_per_token or 1) / (c.experts or 1)
    if checkpoint is not None:
        cast = None if quantised else dtype
        weights = weights_in(checkpoint, c.num_hidden_layers, c.experts, bits if bits < 16 else 4)
        sized = [
            (w, loaded(tensor, cast) if by_headers else _nbytes(w, bits, wide))
            for w, tensor in weights
            if model.sees or w.part != "tower"
        ]
        if not model.is_known:
            kind = c.model_type or "its type"
            assumed += (f"{kind} is none of transformers: its K and V are read as a llama's",)
    else:
        packing = None if unpacked or weight_dtype else packing_of(model.fields)
        skeleton = model.skeleton
        assumed += skeleton.assumed
        sized = [
            (w, _nbytes(w, packing.bits(w) if packing else bits, wide)) for w in skeleton.weights
        ]
    parts = parts_of(sized, c.num_hidden_layers, routed)
    packed = quantised or bits < 16
    return ModelShape(
        model=model,
        settings=c,
        dtype=dtype,
        layers=parts.layers,
        embedding=parts.embedding,
        head=parts.head,
        rest=parts.rest,
        tower=parts.tower if checkpoint or model.takes_images else 0,
        exact=by_headers,
        packed=packed,
        active=parts.active + c.hidden_size * c.vocab_size,
        experts=None if packed else _routed(c, parts.experts, on_cpu),
        unpacked=unpacked and bits >= 16,
        assumed=assumed,
    )


def _nbytes(weight: Weight, bits: float | None, wide: int) -> int:
    """Bytes of a weight whose matrices in layers take so many bits an element, if they do."""
    if bits is None or bits >= 16 or not is_matrix(weight):
        return weight.elements * wide
    return ceil(weight.elements * bits / 8)


def _routed(c: SimpleNamespace, layers: tuple[int, ...], on_cpu: bool) -> RoutedExperts | None:
    """The experts that can be read alone, if there are some."""
    if not any(layers) or not c.experts_per_token or facts_of(c.model_type).experts_with_layer:
        return None
    return RoutedExperts(layers, c.experts, c.experts_per_token, in_slots=not on_cpu)


def _widths(
    model: Model, weight_dtype: str | None, unpacked: bool
) -> tuple[str, float, tuple[str, ...]]:
    """The dtype a model computes in, the bits its layers' weights take, and what was assumed."""
    told = str(model.settings.dtype or "").removeprefix("torch.")
    checkpoint = model.checkpoint
    stored = [t.dtype for t in checkpoint.tensors.values()] if checkpoint else []
    found = told if told in DTYPE_BYTES else ""
    found = found or next((STORED[dtype] for dtype in stored if dtype in STORED), "")
    if weight_dtype is not None:
        name = dtype_name("weight_dtype", weight_dtype, WEIGHT_BITS)
        own = name if name in DTYPE_BYTES else found or "bfloat16"
        packed = (f"weights in {name}, {PACKED}",) if name not in DTYPE_BYTES else ()
        return own, WEIGHT_BITS[name], () if model.fields.get("quantization_config") else packed
    if told and not found:
        raise ValueError(
            f"weight_dtype: cannot tell what the model computes in: its configuration says dtype "
            f"{told!r}, expected one of {', '.join(DTYPE_BYTES)}; say which"
        )
    assumed = () if found else ("its configuration names no dtype: planned in float32",)
    bits = _bits_in_files(model) if checkpoint and not unpacked else 16.0
    return found or "float32", bits, assumed


def _bits_in_files(model: Model) -> float:
    """About how many bits a packed weight takes; 16 where none is packed."""
    try:
        packing = packing_of(model.fields)
    except ValueError:
        return 4.0  # of which the headers tell the bytes
    return packing.groups[0].bits if packing else 16.0
