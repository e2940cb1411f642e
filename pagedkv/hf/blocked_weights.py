"""Packed weights of a model on a CPU: its linear layers multiply with matrices packed before.

The model stays transformers' own. Layers, and norms (`norms.py`), have another `forward` only while
a step of ours computes, and only in its thread: all other code finds the model as it was. Its
weights stay where they are, so packing costs their size once more.

With 8 bits a weight, all weights but embeddings and head are rounded. So a model has only one kind
of packed weights at a time, and K and V computed with rounded ones have their own identity.
"""

from __future__ import annotations

import weakref
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagedkv.errors import UnsupportedModelError
from pagedkv.kernels.c import eight_bits
from pagedkv.kernels.c import packed_product as in_c
from pagedkv.kernels.torch import packed_product as in_torch
from pagedkv.models.skeleton import ends_of
from pagedkv.ranks import ranks_of
from pagedkv.storage.memory import available_memory

from .activations import is_plain
from .adapters import parts_of
from .model import text_config
from .norms import NormForward, norms_of
from .snapshot import SeenTensor, snapshot
from .swapped import StandIns, Swapped, is_its_own
from .telling import warn

if TYPE_CHECKING:
    from pagedkv.planner import MemoryPlan

Packed = in_c.Packed | eight_bits.Eight | Tensor  # by our own kernels, or by torch's operators
PackWeights = bool | Literal["auto", "int8"]
ROUNDED = b"int8, groups of 32"  # for `ModelIdentity`: what K and V are computed with

DYNAMIC = "torch.ao.nn.quantized.dynamic"

# By model, and by whether all its products are computed by our own kernels.
_SHARED: weakref.WeakKeyDictionary[
    PreTrainedModel, weakref.WeakValueDictionary[bool, PackedWeights]
] = weakref.WeakKeyDictionary()


def require_way(pack_weights: Any) -> None:
    """Raises ValueError if `pack_weights` is no valid value."""
    if pack_weights not in (True, False, "auto", "int8"):
        raise ValueError(
            f"pack_weights: expected True, False, 'auto' or 'int8', got {pack_weights!r}"
        )


def weights_for(
    model: PreTrainedModel, plan: MemoryPlan | None, taken: int
) -> PackedWeights | None:
    """Returns the packed weights of a model if they are possible and memory is free; else None.

    Args:
        plan: the memory plan, if there is one: weights are packed only if it has counted them.
        taken: bytes of the free memory that others will fill; half of the rest may be taken.
    """
    if model.device.type != "cpu" or ranks_of(model).size > 1 or _why_none(model):
        return None
    if any(kept.bits == 8 for kept in _kept(model)):  # without asking, weights stay exact
        return None
    layers = [part for part in model.modules() if _is_packable(part)]
    sizes = {id(layer.weight): layer.weight.nbytes for layer in layers}
    room = (available_memory(model.device) - taken) // 2
    fits = sum(sizes.values()) <= room if plan is None else "packed weights" in plan.device_bytes
    if not fits:
        return None
    try:
        return packed_weights(model)
    except (MemoryError, RuntimeError) as error:  # a limit of memory that could not be foreseen
        if isinstance(error, RuntimeError) and "alloc" not in str(error):  # torch's word for it
            raise
        warn(f"pack_weights: {type(model).__name__} runs unpacked: {error}")
        return None


def packed_weights(model: PreTrainedModel, bits: int = 16, by_c: bool = False) -> PackedWeights:
    """Returns the packed weights of a model, made at the first use and kept while they are used.

    Layers that cannot be packed are left out.

    Args:
        bits: 8 bits a weight, or 16 for weights that keep their dtype.
        by_c: compute all products by our own kernels, even where others are quicker.

    Raises:
        ValueError: an open generator has packed weights of other bits.
        UnsupportedModelError: its weights cannot have 8 bits here.
    """
    if bits == 8 and (reason := _why_none(model, bits)):
        name = type(model).__name__
        raise UnsupportedModelError(f"pack_weights: {name} cannot have 'int8': {reason}")
    for other in _kept(model):
        if other.bits != bits:
            ways = {8: "'int8'", 16: "True"}
            raise ValueError(
                f"pack_weights: expected {ways[other.bits]}, as an open generator of this model "
                f"has it, got {ways[bits]}; close that one first"
            )
    by_c = by_c and bool(in_c.why_not(model.dtype))
    kept = _SHARED.setdefault(model, weakref.WeakValueDictionary())
    if (found := kept.get(by_c)) is None:
        found = kept[by_c] = PackedWeights(model, bits, by_c)
    found.refresh()
    return found


# Families for which tests show that a row has the same bits in any batch. Others may have further
# operations that round by place, as torch's sigmoid does at the end of a tensor.
SAME_BITS = {
    *("cohere", "gemma2", "gemma3_text", "gpt_neox", "granite", "llama", "mistral", "olmo2"),
    *("phi", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2"),
}


def why_rows_differ(model: PreTrainedModel) -> str | None:
    """Returns why products of a row may depend on other rows despite C; None if they do not."""
    if reason := in_c.why_not(torch.float32):
        return reason
    if model.dtype not in (torch.float32, torch.bfloat16):
        return f"expected float32 or bfloat16, got {str(model.dtype).removeprefix('torch.')}"
    if reason := _why_none(model):
        return reason
    for path, part in model.named_modules():
        own = [x for x in part.parameters(recurse=False) if x.dim() > 1]
        if own and not _is_packable(part) and not isinstance(part, nn.Embedding):
            return f"{path} is a {type(part).__name__}, which torch multiplies"
    if (family := text_config(model).model_type) not in SAME_BITS:
        return f"no test holds the same bits for {family}"
    if not any(map(is_plain, model.modules())):
        return "its activation is no module of torch or transformers"
    return None


def _kept(model: PreTrainedModel) -> list[PackedWeights]:
    """The packed weights that open generators of a model have."""
    return list(_SHARED.get(model, {}).values())


class PackedWeights(StandIns):
    """The layers of a model whose weights are packed."""

    def __init__(self, model: PreTrainedModel, bits: int = 16, by_c: bool = False) -> None:
        super().__init__()
        self.model, self.bits, self.by_c = model, bits, by_c
        self._forwards: dict[nn.Linear, PackedForward] = {}
        self._norms: dict[nn.Module, NormForward] = {}
        self._warned = False

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights; tied layers count once."""
        sizes = {id(one.packed): one.packed.nbytes for one in self._forwards.values()}
        return sum(sizes.values())

    def refresh(self) -> None:
        """Packs weights that are new or have changed since they were packed; see `snapshot.py`.

        Other threads may be in the middle of a step. So the forwards of unchanged weights stay in
        place meanwhile; otherwise a step would be computed partly with and partly without them.
        """
        with self._lock:
            before = self._sites
            try:
                self._pack()
            finally:
                kept = {*map(id, self._sites)}
                self._take_back([forward for forward in before if id(forward) not in kept])
                if self._threads:
                    self._put_in()

    def _pack(self) -> None:
        now = snapshot(self.model)
        packed: dict[int, Packed] = {}  # by weight: several layers may share one
        before, self._forwards = self._forwards, {}
        parts = [] if _why_none(self.model, self.bits) else list(parts_of(self.model))
        # Rounding the embedding or the head would cost most.
        ends = ends_of(self.model) if self.bits == 8 else ()
        whole = {id(getattr(end, "weight", None)) for end in ends}
        for path, layer, of_adapter in parts:
            if of_adapter or not _is_packable(layer):
                continue
            assert isinstance(layer, nn.Linear)
            seen, forward = now[f"{path}.weight"], before.pop(layer, None)
            if forward is None or not forward.seen.is_same(seen):
                forward = None  # frees its bytes before new ones are taken
                made = packed.get(id(layer.weight))
                if made is None:
                    exact = self.bits != 8 or id(layer.weight) in whole
                    made = pack(layer.weight, self.by_c) if exact else pack_rounded(layer.weight)
                forward = PackedForward(layer, seen, made, self._threads)
            packed[id(layer.weight)] = forward.packed
            self._forwards[layer] = forward
        weights = {part: now.get(f"{path}.weight") for path, part, other in parts if not other}
        self._norms = norms_of(weights, self._norms, self._threads)
        self._sites = list(chain(self._forwards.values(), self._norms.values()))

    def warn(self) -> None:
        """Warns, once, if no layer is packed."""
        reason = _why_none(self.model, self.bits)
        if reason and not self._warned:
            name = type(self.model).__name__
            warn(f"pack_weights: {name} runs unpacked: {reason}")
        self._warned = bool(reason)


def _why_none(model: PreTrainedModel, bits: int = 16) -> str | None:
    """Returns why no layer is packed; None if some are."""
    if any(part._compiled_call_impl is not None for part in model.modules()):
        return "it is compiled"
    if model.device.type != "cpu":
        return f"it is on {model.device.type}, and packing is for a CPU"
    if reason := (eight_bits.why_not if bits == 8 else why_not)(model.dtype):
        return reason
    if getattr(model, "hf_quantizer", None) is not None:
        return "its weights are quantised"  # some are unpacked in the middle of its first step
    if any(parameter.is_meta for parameter in model.parameters()):
        return "its layers are streamed"
    if not any(map(_is_packable, model.modules())):
        return "it has no plain linear layers"
    return None


def warn_of_dynamic_quantization(model: PreTrainedModel) -> None:
    """Warns of products in which the tokens of a step share a scale."""
    if any(type(part).__module__.startswith(DYNAMIC) for part in model.modules()):
        warn(
            "model: `quantize_dynamic` has one scale for all tokens of a step, so rows depend on "
            "one another, and loses much (SmolLM2-135M: a KL divergence of 1.3 from float32)"
        )


class PackedForward(Swapped):
    """The forward of a linear layer."""

    module: nn.Linear

    def __init__(
        self, layer: nn.Linear, seen: SeenTensor, packed: Packed, threads: list[int]
    ) -> None:
        super().__init__(layer, seen, threads)
        self.packed = packed

    def __call__(self, input: Tensor) -> Tensor:
        """`nn.Linear.forward`."""
        if other := self.other():
            return other(input)
        if not self.serves(input) or not _has_bias_for(self.module, self.weight):
            return nn.Linear.forward(self.module, input)
        return product(input, self.packed, self.module._parameters["bias"])


def pack_rounded(weight: Tensor) -> Packed:
    """Packs a matrix with 8 bits a weight if its shape and values allow it, else exactly."""
    return eight_bits.pack(weight) if eight_bits.holds(weight) else pack(weight)


def pack(weight: Tensor, by_c: bool = False) -> Packed:
    """Packs a matrix for the best kernels of its dtype, or, `by_c`, for our own."""
    by_torch = in_c.why_not(weight.dtype) and not by_c
    return in_torch.pack(weight) if by_torch else in_c.pack(weight)


def product(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """`functional.linear`, by the kernels that have packed the matrix."""
    if isinstance(packed, in_c.Packed):
        return in_c.product(x, packed, bias)
    if isinstance(packed, eight_bits.Eight):
        return eight_bits.product(x, packed, bias)
    return in_torch.product(x, packed, bias)


def why_not(dtype: torch.dtype) -> str | None:
    """Returns why matrices of a dtype cannot be packed here; None if they can."""
    return in_torch.why_not(dtype) if in_c.why_not(dtype) else None


def _is_packable(layer: nn.Module) -> bool:
    """Whether a layer is a plain `nn.Linear` whose weights no other code changes."""
    if type(layer) is not nn.Linear or not is_its_own(layer):
        return False
    weight = layer._parameters.get("weight")
    return (
        type(weight) is nn.Parameter
        and weight.is_cpu
        and weight.is_contiguous()
        and weight.numel() > 0
        and not weight.is_inference()
        and why_not(weight.dtype) is None
        and weight.dim() == 2
        and _has_bias_for(layer, weight)
    )


def _has_bias_for(layer: nn.Linear, weight: Tensor) -> bool:
    """Whether there is no bias, or one that kernels can read; a pruned layer has another kind."""
    if "bias" not in layer._parameters:
        return False
    bias = layer._parameters["bias"]
    return bias is None or (
        type(bias) is nn.Parameter
        and bias.is_cpu
        and bias.dtype == weight.dtype
        and bias.shape == weight.shape[:1]
    )
