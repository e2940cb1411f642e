"""Models with adapters of PEFT."""

from __future__ import annotations

from typing import Any

import peft
from torch import nn


def adapted(model: nn.Module) -> Any:
    """A model with the adapter "one" in its layers, which acts."""
    return peft.get_peft_model(model, lora(), adapter_name="one").eval()


def add(model: Any, name: str) -> None:
    """Adds an adapter, which does not act yet."""
    model.add_adapter(name, lora())
    model.eval()


def lora(**fields: Any) -> Any:
    own = {"r": 2, "lora_alpha": 8, "init_lora_weights": False}
    own["target_modules"] = ["k_proj", "v_proj"]
    return peft.LoraConfig(task_type="CAUSAL_LM", **{**own, **fields})
