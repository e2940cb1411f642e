"""Checks that the layers that had to write K and V in a step did so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

from pagedkv.errors import LayerWritesError


def as_layers(layers: Iterable[Any] | None, num_layers: int) -> list[int] | None:
    """Returns the layers that a caller names, ascending, each once; None stays None."""
    if layers is None:
        return None
    expected = f"layers: expected some of 0..{num_layers - 1}, got"
    try:
        named = list(layers)
        found = sorted({index(layer) for layer in named})
    except TypeError:
        raise TypeError(f"{expected} {layers!r:.200}") from None
    if any(isinstance(layer, bool) for layer in named):  # a mask, whose True would be layer 1
        raise TypeError(f"{expected} {layers!r:.200}")
    if strange := [layer for layer in found if not 0 <= layer < num_layers]:
        raise ValueError(f"{expected} {strange}")
    return found


def require_written(wrote: Sequence[int], num_layers: int, layers: Sequence[int] | None) -> bool:
    """Whether all layers of a model wrote in a step.

    Args:
        wrote: a layer's number for each time that the layer wrote.
        layers: the layers that had to write, once or more often; None: every layer, once.

    Raises:
        LayerWritesError: other layers wrote than had to.
    """
    every = list(range(num_layers))
    if layers is None:
        if wrote == every or sorted(wrote) == every:
            return True
        expected = every
    else:
        expected = list(layers)
    missing = [layer for layer in expected if layer not in wrote]
    strange = sorted(set(wrote) - set(expected))
    often = [] if layers is not None else [layer for layer in every if wrote.count(layer) > 1]
    found = []
    if missing:
        found.append(f"{_named(missing)} wrote nothing")
    if often:
        found.append(f"{_named(often)} wrote more than once")
    if strange:
        found.append(f"{_named(strange)} wrote and stand not in `layers`")
    if not found:
        return expected == every
    if missing and often:
        advice = "is `layer` of paged_attention the same for several layers of the model?"
    else:
        advice = "if that is meant, name the layers that write: commit(step, layers=...)"
    raise LayerWritesError(f"step: {', '.join(found)}; {advice}")


def _named(layers: Sequence[int]) -> str:
    """Returns ascending layers in words; a run of layers is named by its ends."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return f"layer{'s' * (len(layers) > 1)} " + ", ".join("..".join(map(str, run)) for run in runs)
