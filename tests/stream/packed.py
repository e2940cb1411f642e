"""Checkpoints of compressed-tensors, as llm-compressor writes them, of random models."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

# Schemes by name, and the form their weights are saved in.
SCHEMES = {
    "W4A16": "pack-quantized",
    "W8A16": "pack-quantized",
    "W8A8": "int-quantized",
    "FP8_DYNAMIC": "float-quantized",
}


def save_packed(model: PreTrainedModel, folder: Path, scheme: str) -> Path:
    """Saves it with the weights of its layers rounded to the scheme, by a scale for each group."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    how = preset_name_to_scheme(scheme, ["Linear"])
    if how.weights.group_size:
        how.weights.group_size = 32
    config = QuantizationConfig(
        config_groups={"group_0": how}, ignore=["lm_head"], format=SCHEMES[scheme]
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            weights = module.quantization_scheme.weights
            scale, zero = calculate_qparams(*_bounds(module.weight.detach(), weights), weights)
            module.weight_scale.data.copy_(scale)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor.from_pretrained_model(model, SCHEMES[scheme])
    compressor.compress_model(model)
    model.save_pretrained(folder, max_shard_size="20KB")
    compressor.update_config(folder)
    return folder


def _bounds(weight: Tensor, how) -> tuple[Tensor, Tensor]:
    """The least and the largest weight of each group, or of each row."""
    parts = weight.unflatten(1, (-1, how.group_size or weight.shape[1]))
    return parts.amin(-1), parts.amax(-1)
