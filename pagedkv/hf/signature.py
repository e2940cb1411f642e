"""The parameters of a model's forward: its own, and those that it passes on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


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
