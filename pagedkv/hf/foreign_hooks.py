"""Forward hooks of others: they see packed rows, and may take them for a batch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

# Packages whose hooks know what they do, or do the same to every token.
KNOWN = {"pagedkv", "torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed"}
KNOWN |= {"compressed_tensors"}


def foreign_hook(model: PreTrainedModel) -> str | None:
    """The first module of a decoder that has such a hook, and the hook; None without one."""
    for path, module in _on_packed_rows(model):
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not _is_known(hook):
                home, name = _origin(hook)
                return f"{path or type(model).__name__} has the forward hook {home}.{name}"
    return None


def hooks_of(model: nn.Module) -> frozenset[int]:
    """The numbers of all forward hooks of others, by which K and V may differ.

    Torch gives no number twice, so that a hook that was removed and registered again has another.
    """
    return frozenset(
        number
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for number, hook in hooks.copy().items()  # another thread may begin a forward
        if not _is_known(hook)
    )


def _on_packed_rows(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model but for towers, which see images."""
    inside = {*model.get_decoder().modules()}
    for path, module in model.named_modules():
        if module in inside or not path or module is model.get_output_embeddings():
            yield path, module


def _is_known(hook: Any) -> bool:
    return _origin(hook)[0].partition(".")[0] in KNOWN


def _origin(hook: Any) -> tuple[str, str]:
    """The module that a hook was written in, and its name there."""
    while isinstance(hook, partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return str(named.__module__), named.__qualname__
