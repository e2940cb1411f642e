"""A model's identity, so that its K and V are never taken for those of other weights."""

from __future__ import annotations

import json
from hashlib import sha256

import torch
from transformers import PreTrainedModel

SAMPLES = 64  # elements of each parameter: what training changes, it changes everywhere


def fingerprint_of(model: PreTrainedModel) -> bytes:
    """A digest of a model's parameters and rotary embedding, 32 bytes.

    The same for a checkpoint in every process, on any device, and in float32 as in bfloat16. Some
    elements of each parameter stand for all: it tells models apart, not forgeries. Of a model whose
    weights are elsewhere, because they are streamed, nothing is known: no bytes.
    """
    parameters = dict(model.named_parameters())
    if any(parameter.is_meta for parameter in parameters.values()):
        return b""
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None)
    shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
    digest = sha256(json.dumps([rope, shapes], sort_keys=True, default=str).encode())
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in parameters.values():
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLES)
        samples.setdefault(flat.device, []).append(flat[::step][:SAMPLES].to(torch.bfloat16))
    for each in samples.values():
        digest.update(torch.cat(each).view(torch.int16).cpu().numpy().tobytes())
    return digest.digest()
