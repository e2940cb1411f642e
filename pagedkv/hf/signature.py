"""The parameters of a model's forward: its own, and those that it passes on."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

POSITION = 7  # given for a token that is tried; a model that counts by itself begins at 0


def parameters_of(model: Any) -> set[str]:
    """Names a forward's parameters; if it takes any keywords, also those of its parents."""
    kind = model if isinstance(model, type) else type(model)
    inherited = [vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)]
    found: set[str] = set()
    for forward in (model.forward, *inherited):
        own = inspect.signature(forward).parameters
        found |= own.keys()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values()):
            break
    return found


def takes_positions(model: Any, device: torch.device) -> bool:
    """Whether a model uses the positions that it is given.

    A model that may pass them on unnamed is run on a token up to its decoder: do they arrive?
    """
    if "position_ids" in inspect.signature(model.forward).parameters:
        return True
    if "position_ids" not in parameters_of(model) or model.base_model is model:
        return False
    reached: list[Any] = []

    def stop(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        reached.append(kwargs.get("position_ids"))
        raise StopForward

    hook = model.base_model.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    try:
        with torch.no_grad(), suppress(Exception):
            model(input_ids=token, position_ids=token + POSITION)
    finally:
        hook.remove()
    return any(isinstance(one, Tensor) and bool((one == POSITION).all()) for one in reached)


class StopForward(Exception):
    """Ends a forward that has shown what it was run for."""
