"""Counts the bytes of a model's weights, and finds the dtype in which it computes.

Headers of files give exact bytes. For a configuration alone, transformers builds the model without
memory, and its weights are counted. A weight matrix counts at the width it is stored in, so packed
checkpoints count packed.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

from .facts import facts_of
from .groups import DTYPE_BYTES
from .headers import STORED, loaded, weights_in
from .model import Model
from .names import SHORT, dtype_name
from .packing import is_unpacked, packing_of
from .weights import Weight

# Bits of a weight by dtype; 4-bit formats keep a 16-bit scale for about 32 weights.
WEIGHT_BITS = {
    "float32": 32.0, "float16": 16.0, "bfloat16": 16.0, "float8": 8.0, "int8": 8.0, "int4": 4.5,
}  # fmt: skip
# Where weights in fewer bits come from: none are rounded here.
PACKED = "from a checkpoint such as ...-w4a16"


def packed_advice(dtype: object) -> str:
    """Returns advice for a dtype in which weights are only stored; empty for any other."""
    name = SHORT.get(str(dtype), str(dtype))
    return f"; weights in {name} come {PACKED}" if WEIGHT_BITS.get(name, 16) < 16 else ""


class Weighed(NamedTuple):
    """The weights of a model.

    Attributes:
        weights: each weight with its bytes.
        dtype: the dtype in which the model computes.
        exact: whether bytes were read from headers, not computed from the configuration.
        packed: whether weights are stored in fewer bits than they are computed in.
        unpacked: whether weights are packed in the files, but not in memory.
        assumed: sentences on what was assumed of the model, because nothing says it.
    """

    weights: list[tuple[Weight, int]]
    dtype: str
    exact: bool
    packed: bool
    unpacked: bool
    assumed: tuple[str, ...]


def weighed(model: Model, weight_dtype: str | None, on_cpu: bool) -> Weighed:
    """Returns the weights of a model that pages can serve.

    Args:
        weight_dtype: the dtype that weights are cast to, or assumed to be packed in.
        on_cpu: whether it computes on a CPU, for which some packed weights are unpacked.

    Raises:
        UnsupportedModelError: nothing is known of its type.
        CheckpointError: the checkpoint lacks layers.
        ValueError: its configuration lacks a value that is needed.
    """
    c, checkpoint = model.settings, model.checkpoint
    unpacked = is_unpacked(model.fields, on_cpu)
    quantised = bool(model.fields.get("quantization_config")) and not unpacked
    dtype, bits, assumed = _widths(model, weight_dtype, unpacked)
    wide = DTYPE_BYTES[dtype]
    exact = checkpoint is not None and (bits >= 16 or quantised)
    if checkpoint is not None:
        cast = None if quantised else dtype
        width = bits if bits < 16 else 4
        found = weights_in(checkpoint, c.num_hidden_layers, c.experts, width, _sharing(c))
        weights = [
            (w, loaded(tensor, cast, unpacked) if exact else _nbytes(w, bits, wide))
            for w, tensor in found
            if model.sees or w.part != "tower"
        ]
        if not model.is_known:
            kind = c.model_type or "its type"
            assumed += (f"{kind} is none of transformers: its K and V are read as a llama's",)
    else:
        packing = None if unpacked or weight_dtype else packing_of(model.fields)
        assumed += model.skeleton.assumed
        weights = [
            (w, _nbytes(w, packing.bits(w) if packing else bits, wide))
            for w in model.skeleton.weights
        ]
    packed, in_files = quantised or bits < 16, unpacked and bits >= 16
    return Weighed(weights, dtype, exact, packed, in_files, assumed)


def _sharing(c: Any) -> list[list[int]]:
    """For each block that layers share, these layers."""
    if not facts_of(c.model_type).shares_block:
        return []
    users = [i for i, kind in enumerate(c.kinds) if kind.attention is not None]
    blocks = getattr(c, "num_mem_blocks", None) or 1
    return [users[first::blocks] for first in range(blocks)]


def _nbytes(weight: Weight, bits: float | None, wide: int) -> int:
    """Returns the bytes of a weight, which takes `bits` an element if it is a packed matrix."""
    if bits is None or bits >= 16 or not is_matrix(weight):
        return weight.elements * wide
    return ceil(weight.elements * bits / 8)


def is_matrix(weight: Weight) -> bool:
    """Whether a layer multiplies tokens with a weight; other weights are norms, biases, kernels."""
    module = weight.name.rpartition(".")[0].rpartition(".")[2]
    matrix = len(weight.shape) == 2 and "norm" not in module  # a norm of heads may have two axes
    return bool(weight.layers) and (matrix or weight.is_expert)


def _widths(
    model: Model, weight_dtype: str | None, unpacked: bool
) -> tuple[str, float, tuple[str, ...]]:
    """Returns the dtype a model computes in, the bits of its layers' weights, and assumptions."""
    checkpoint = model.checkpoint
    told = model.settings.dtype or (checkpoint and checkpoint.indexed_dtype)
    told = str(told or "").removeprefix("torch.")
    stored = [t.dtype for t in checkpoint.as_loaded] if checkpoint else []
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
    """Returns about how many bits a packed weight takes; 16 if none is packed."""
    try:
        packing = packing_of(model.fields)
    except ValueError:
        return 4.0  # a guess: the headers tell the bytes
    return packing.groups[0].bits if packing else 16.0
