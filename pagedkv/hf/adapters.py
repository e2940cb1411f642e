"""PEFT's adapters: the model inside of them, which of them act, and which tensors are theirs.

Nothing of PEFT is imported: its layers are recognised by their properties.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pagedkv.errors import UnsupportedModelError

# Under these names a layer with adapters keeps the layer that was in its place before.
WRAPPED = ("base_layer", "original_module", "token_adapter")
NO_ADAPTER = "__base__"  # what PEFT calls a row that has none
# PEFT's own wrappers whose forward only calls the model's.
PLAIN_FORWARDS = ("BaseTuner", "AdaLoraModel")


class ModelPart(NamedTuple):
    """A module of a model.

    Attributes:
        path: the module's name in the model without adapters; in the name of a module that belongs
            to an adapter, "+" stands before the adapter's own part. A layer in a layer of PEFT, as
            for two parameters of one module, has one "+" more.
        module: the module.
        of_adapter: whether the module's tensors belong to adapters.
    """

    path: str
    module: nn.Module
    of_adapter: bool


def without_adapters(model: Any) -> Any:
    """Returns the transformers model in a PEFT model, adapters included; other models unchanged.

    Raises:
        UnsupportedModelError: its adapters act outside of that model's layers.
    """
    base = getattr(model, "get_base_model", None)
    if not callable(base):
        return model
    reason = _why_not(model)
    if reason:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot use paged attention: {reason}. Use transformers' own "
            "cache for it."
        )
    return base()


def _why_not(model: Any) -> str | None:
    for config in getattr(model, "peft_config", {}).values():
        kind = getattr(config, "peft_type", None)
        kind = str(getattr(kind, "value", kind))
        if getattr(config, "is_prompt_learning", False):
            return f"its {kind} adapter puts virtual tokens before the prompt"
        if getattr(config, "alora_invocation_tokens", None) is not None:
            return f"its {kind} adapter acts from some token of each prompt on (aLoRA)"
        forward = getattr(type(model.base_model), "forward", None)
        if getattr(forward, "__qualname__", "").split(".")[0] not in PLAIN_FORWARDS:
            return f"its {kind} adapter has a forward of its own around the model's"
    return None


def without_adapter(layer: nn.Module) -> nn.Module:
    """Returns the layer that adapters were put around."""
    for name in WRAPPED:
        inner = layer._modules.get(name)
        if inner is not None:
            return without_adapter(inner)
    return layer


# ------------------------------------------------------------------ what is in a model


@cache
def _holds_adapters(kind: type) -> bool:
    """Whether modules of a class are PEFT's layers; in transformers' models these are methods."""
    names = "active_adapters", "disable_adapters"
    return all(isinstance(getattr(kind, name, None), property) for name in names)


def parts_of(model: nn.Module, adapters: bool = True) -> Iterator[ModelPart]:
    """Yields every module of a model that is not empty, once.

    Args:
        adapters: include the modules in which PEFT's layers keep their adapters' tensors.
    """
    seen = set()
    layers: Counter[str] = Counter()  # PEFT's around one module
    left = [ModelPart("", model, False)]
    while left:
        part = left.pop()
        path, module, inside = part
        if id(module) in seen:
            continue
        seen.add(id(module))
        kind: Any = type(module)
        holds = _holds_adapters(kind)
        layers[path] += holds
        own = path + "+" * layers[path]
        yield ModelPart(own, module, True) if holds else part
        for name, child in module._modules.items():
            if child is None or not (child._modules or child._parameters or child._buffers):
                continue
            if not holds:
                left.append(ModelPart(f"{path}.{name}", child, inside))
            elif name in WRAPPED:
                left.append(ModelPart(path, child, inside))
            elif adapters:
                left.append(ModelPart(own + name, child, True))


def parametrized_in(model: nn.Module) -> set[int]:
    """Returns the `id()` of parameters that have adapters themselves (`target_parameters`).

    PEFT parametrizes them in every forward, which torch counts as writes.
    """
    found = set()
    for _, layer, of_adapter in parts_of(model, adapters=False) if "peft" in sys.modules else ():
        name = getattr(layer, "parameter_name", None)
        if of_adapter and isinstance(name, str):
            found.add(id(without_adapter(layer)._parameters.get(name)))
    return found


class Held(NamedTuple):
    """A tensor of a model.

    Attributes:
        of_adapter: whether it belongs to adapters.
        computed: whether it is a buffer that is not saved.
    """

    name: str
    tensor: Tensor
    of_adapter: bool
    computed: bool


def tensors_of(model: nn.Module) -> Iterator[Held]:
    """Yields every parameter and buffer of a model, and the tensors inside of wrappers."""
    for path, module, of_adapter in parts_of(model):
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    computed = name in module._non_persistent_buffers_set
                    for part, inner in _plain(f"{path}.{name}", tensor):
                        yield Held(part, inner, of_adapter, computed)


def _plain(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields a tensor, and the tensors inside it if it is a wrapper (quantised, distributed)."""
    yield name, tensor
    if is_traceable_wrapper_subclass(tensor):
        for part in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, part)
            if isinstance(inner, Tensor):  # a mesh of devices is none
                yield from _plain(f"{name}.{part}", inner)


# ------------------------------------------------------------------ which adapters act


def acting(model: nn.Module, by_row: Sequence[str] | None = None) -> list[Any]:
    """Lists each layer in which adapters act: its path, the active and the merged adapters.

    If rows differ in their adapters, the adapter of each row comes last.

    Args:
        by_row: the adapter of each row in a call that PEFT's wrapper is about to make; by default
            the one that its layers were told.
    """
    found: list[Any] = []
    for path, layer, of_adapter in parts_of(model, adapters=False) if "peft" in sys.modules else ():
        if not of_adapter:
            continue
        rows = _by_row(layer) if by_row is None else list(by_row)
        used: Any = layer.active_adapters if rows is None else sorted({*rows} - {NO_ADAPTER})
        used = () if layer.disable_adapters else used
        own = [(name, parts, _scales(layer, name)) for name in used if (parts := _has(layer, name))]
        merged = list(getattr(layer, "merged_adapters", None) or ())
        if own or merged:
            mixed = [rows] if len({*(rows or ())}) > 1 else []
            found.append((path, own, merged, *mixed))
    return found


def of_rows(model: nn.Module) -> list[str]:
    """Returns the adapter of each row of the call under way; none if the call names no rows'."""
    for _, layer, of_adapter in parts_of(model, adapters=False) if "peft" in sys.modules else ():
        if of_adapter and (rows := _by_row(layer)) is not None:
            return rows
    return []


def _by_row(layer: nn.Module) -> list[str] | None:
    """Returns the adapter of each row, as PEFT tells its layers in calls with `adapter_names`."""
    for hook in layer._forward_pre_hooks.values():
        names = getattr(hook, "keywords", {}).get("adapter_names")
        if names is not None:
            return list(names)
    return None


def _has(layer: nn.Module, adapter: str) -> list[str]:
    """Returns the parts of a layer in which an adapter has modules or tensors."""
    return [
        name
        for name, part in layer._modules.items()
        if part is not None
        and (adapter in part._modules or adapter in part._parameters or adapter in part._buffers)
        and name not in WRAPPED
    ]


def _scales(layer: nn.Module, adapter: str) -> list[Any]:
    """Returns the numbers by which an adapter is scaled in a layer."""
    return [
        (name, float(values[adapter]))
        for name, values in vars(layer).items()
        if name.endswith("scaling") and isinstance(values, dict) and adapter in values
    ]


def state_of(model: nn.Module, by_row: Sequence[str] | None = None) -> bytes:
    """Returns a digest of which adapters act, and how; no bytes if none does."""
    found = acting(model, by_row)
    return sha256(repr(found).encode()).digest() if found else b""


def salted(state: bytes, salt: bytes) -> bytes:
    """Returns the salt of prefixes computed under a caller's salt and a state of the adapters."""
    if not state:
        return salt
    return sha256(len(state).to_bytes(8, "little") + state + salt).digest()
