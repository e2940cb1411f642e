"""The parameters of a model's forward: its own, and those that it passes on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

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
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    given = {"input_ids": token, "position_ids": token + POSITION}
    with torch.no_grad(), suppress(Exception):
        reached = arguments_of(model.base_model, partial(model, **given))
        one = None if reached is None else reached.get("position_ids")
        return isinstance(one, Tensor) and bool((one == POSITION).all())
    return False


class _Reached(Exception):
    """A model has called its decoder."""


def arguments_of(
    decoder: nn.Module,
    run: Callable[[], object],
    is_asked: Callable[[dict[str, Any]], bool] = lambda _: True,
) -> dict[str, Any] | None:
    """Runs a model up to the call of its decoder; returns that call's arguments, None without one.

    Args:
        is_asked: whether a call with these arguments is the one; others go on.
    """
    found: list[dict[str, Any]] = []

    def stop(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        if is_asked(kwargs):
            found.append(kwargs)
            raise _Reached

    hook = decoder.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        run()
    except Exception:  # ours, or what a model on the way makes of it
        if not found:
            raise
    finally:
        hook.remove()
    return found[0] if found else None


def is_transformers_own(model: nn.Module) -> bool:
    """Whether all models within a model are of classes that transformers has."""
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return all(
        type(part).__module__.partition(".")[0] in ("transformers", "pagedkv") for part in parts
    )


@torch.no_grad()
def positions_matter(model: Any, device: torch.device) -> bool:
    """Whether a model computes other logits where the second of two tokens is further away."""
    ids, near = torch.arange(2, device=device)[None], torch.arange(2, device=device)[None]
    try:
        logits = [
            model(input_ids=ids, position_ids=places, use_cache=False).logits
            for places in (near, near * POSITION)
        ]
    except Exception:  # of any kind: its first step will say what is wrong
        return True
    return not torch.equal(*logits)
