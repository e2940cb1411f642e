"""Models with adapters: PEFT's own, and small ones that look like PEFT's where it is missing."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

TARGETS = ["k_proj", "v_proj"]


class LowRank(nn.Module):
    """A layer with adapters, of which some act, with the properties that PEFT's has."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self._active: list[str] = []
        self._off = False
        self.merged_adapters: list[str] = []

    active_adapters = property(lambda self: self._active)
    disable_adapters = property(lambda self: self._off)

    def add(self, name: str) -> None:
        base = self.base_layer
        self.lora_A[name] = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B[name] = nn.Linear(2, base.out_features, bias=False)
        self.scaling[name] = 4.0

    def delta(self, name: str) -> torch.Tensor:
        return self.scaling[name] * self.lora_B[name].weight @ self.lora_A[name].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(x)
        for name in self._active:
            if name in self.lora_A and not self._off and name not in self.merged_adapters:
                out = out + x @ self.delta(name).T
        return out


class BaseTuner(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)


class LooksLikePeft(nn.Module):
    """Stands for the result of `get_peft_model`, as far as it concerns us."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        for layer in model.model.layers:
            for target in TARGETS:
                base = getattr(layer.self_attn, target)
                setattr(layer.self_attn, target, LowRank(base))
        self.base_model = BaseTuner(model)
        self.peft_config: dict[str, Any] = {}
        self.add_adapter(name)
        self.set_adapter(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model").model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    @property
    def layers(self) -> list[LowRank]:
        return [module for module in self.modules() if isinstance(module, LowRank)]

    def get_base_model(self) -> nn.Module:
        return self.base_model.model

    def add_adapter(self, name: str) -> None:
        self.peft_config[name] = types.SimpleNamespace(peft_type="LORA")
        for layer in self.layers:
            layer.add(name)

    def delete_adapter(self, name: str) -> None:
        for layer in self.layers:
            del layer.lora_A[name], layer.lora_B[name], layer.scaling[name]

    def set_adapter(self, name: str) -> None:
        for layer in self.layers:
            layer._active = [name]

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        for layer in self.layers:
            layer._off = True
        yield
        for layer in self.layers:
            layer._off = False

    @torch.no_grad()
    def merge_adapter(self, names: list[str]) -> None:
        for layer in self.layers:
            for name in names:
                layer.base_layer.weight.data = layer.base_layer.weight.data + layer.delta(name)
                layer.merged_adapters.append(name)

    def generate(self, **options: Any) -> Any:
        return self.base_model.model.generate(**options)


def adapted(kind: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model with the adapter "one" in its layers, which acts."""
    if kind == "PEFT":
        import peft

        return peft.get_peft_model(model, lora(), adapter_name="one").eval()
    if "peft" not in sys.modules:
        monkeypatch.setitem(sys.modules, "peft", types.ModuleType("peft"))
    return LooksLikePeft(model, "one")


def add(model: Any, name: str) -> None:
    """Another adapter, which does not act yet."""
    if isinstance(model, LooksLikePeft):
        model.add_adapter(name)
    else:
        model.add_adapter(name, lora())
        model.eval()


def lora(**fields: Any) -> Any:
    import peft

    own = {"r": 2, "lora_alpha": 8, "target_modules": TARGETS, "init_lora_weights": False}
    return peft.LoraConfig(task_type="CAUSAL_LM", **{**own, **fields})
