"""Packed weights that a module unpacks while it computes, and that are packed otherwise.

compressed-tensors unpacks a whole model before its first pass. A model that streams never has all
weights at once, so each module unpacks its own for the time of its forward. If layers were unpacked
when they arrive, the ring would need slots of the unpacked size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


def unpack_in_forward(model: PreTrainedModel) -> None:
    """Makes packed modules of compressed-tensors unpack their weights as they compute."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is None or not hasattr(model, "ct_decompress_hook"):
        return
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationStatus

    quantizer.compressor.remove_decompression_hook(model)
    for module in model.modules():
        if getattr(module, "quantization_status", None) is not QuantizationStatus.COMPRESSED:
            continue
        scheme: Any = module.quantization_scheme
        compressor = BaseCompressor.get_value_from_registry(scheme.format.value)
        module.forward = _unpacking(module, module.forward, compressor.decompress, scheme)


def _unpacking(
    module: nn.Module,
    forward: Callable[..., Any],
    unpack: Callable[[dict[str, Tensor], Any], dict[str, Tensor]],
    scheme: Any,
) -> Callable[..., Any]:
    def unpacked(*args: Any, **kwargs: Any) -> Any:
        packed = module._parameters, module._buffers
        there = {**packed[0], **packed[1]}
        made = unpack({name: t.data for name, t in there.items() if t is not None}, scheme)
        module._parameters = dict.fromkeys(n for n, tensor in there.items() if tensor is None)
        module._parameters |= {name: nn.Parameter(t, False) for name, t in made.items()}
        module._buffers = {}
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters, module._buffers = packed

    return unpacked
