"""Packed checkpoints of random models: of compressed-tensors, in fp8, and experts in mxfp4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.stream.models import make

# Sizes in blocks of 32 elements; of more experts than a token needs.
MXFP4 = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 8, "head_dim": 16}

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


def save_mxfp4(folder: Path, **fields: Any) -> Path:
    """Saves a gpt_oss of random bytes and scales, in names and shapes of OpenAI's checkpoints."""
    model = make("gpt_oss", **MXFP4, **fields).to(torch.bfloat16)
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    random, tensors = torch.Generator().manual_seed(0), {}
    for name, tensor in load_file(file).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inside, out = tensor.shape
            blocks = experts, out, inside // 32, 16
            options = {"dtype": torch.uint8, "generator": random}
            tensors[f"{name}_blocks"] = torch.randint(0, 256, blocks, **options)
            tensors[f"{name}_scales"] = torch.randint(120, 126, blocks[:3], **options)
        else:
            tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_fp8(folder: Path, model: PreTrainedModel, method: str, block: list[int] | None) -> Path:
    """Saves it with the weights of its layers in e4m3, by a scale for each block or weight.

    Experts are in four bits, two elements in a byte, as DeepSeek's V4 has them.
    """
    model.to(torch.bfloat16).save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = {}
    for name, tensor in load_file(file).items():
        tensors[name] = tensor
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = tensor.shape
        scales = [rows // block[0], columns // block[1]] if block else []
        if ".experts." in name:
            scales = [rows, columns // 32]
            tensor = torch.zeros(rows, columns // 2, dtype=torch.int8)
        else:
            tensor = tensor.to(torch.float8_e4m3fn)
        dtype = torch.uint8 if method == "mxfp8" else torch.float32
        tensors |= {name: tensor, f"{name}_scale_inv": torch.ones(scales, dtype=dtype)}
        if block is None:
            tensors[name.removesuffix("weight") + "activation_scale"] = torch.ones([])
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": method,
        "weight_block_size": block,
        "activation_scheme": "dynamic" if block else "static",
        "expert_dtype": "fp4",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
