"""Forward hooks of other packages: they see packed rows, and may take them for a batch."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import nn
from torch.nn.modules import module as every_module
from transformers import PreTrainedModel

from .foreign_code import KNOWN, on_packed_rows, origin_of


def foreign_hook(model: PreTrainedModel) -> str | None:
    """Names the first module of a decoder that has a foreign hook, and the hook; None without."""
    of_modules = ((path or type(model).__name__, own) for path, own in on_packed_rows(model))
    for path, module in chain([("every module", None)], of_modules):
        for _, hook in _forward_hooks(module):
            if not _is_known(hook):
                home, name = origin_of(hook)
                return f"{path} has the forward hook {home}.{name}"
    return None


def hooks_of(model: nn.Module) -> frozenset[int]:
    """Returns the numbers of all foreign forward hooks, which may change K and V.

    Torch gives no number twice, so a hook that was removed and registered again has another one.
    """
    return frozenset(
        number
        for module in chain([None], model.modules())
        for number, hook in _forward_hooks(module)
        if not _is_known(hook)
    )


def _forward_hooks(module: nn.Module | None) -> list[tuple[int, Any]]:
    """Returns a module's forward hooks by number; of None the hooks of every module."""
    if module is None:
        before, behind = every_module._global_forward_pre_hooks, every_module._global_forward_hooks
    else:
        before, behind = module._forward_pre_hooks, module._forward_hooks
    return [*before.copy().items(), *behind.copy().items()]  # another thread may begin a forward


def _is_known(hook: Any) -> bool:
    return origin_of(hook)[0].partition(".")[0] in KNOWN
