"""Compares a model's parameters with the tensors of a checkpoint, and names what does not fit."""

from __future__ import annotations

from typing import Any

from pagedkv.errors import CheckpointMismatch
from pagedkv.models.checkpoint import Checkpoint

NAMED = 8  # tensors that a message spells out


def require_covered(
    checkpoint: Checkpoint,
    model: Any,
    missing: Any,
    unexpected: Any,
    wrong: list[str],
    advice: str = "",
) -> None:
    """Raises CheckpointMismatch if a tensor or parameter is missing, unexpected or wrong."""
    if not (missing or unexpected or wrong):
        return
    parts = [
        f"{what}: {spelled_out(names)}"
        for what, names in (
            ("parameters without a tensor", sorted(missing)),
            ("tensors without a parameter", sorted(unexpected)),
            ("mismatched", wrong),
        )
        if names
    ]
    what = "; ".join(parts) + advice
    raise CheckpointMismatch(
        f"{checkpoint.folder} is no checkpoint of {type(model).__name__}: {what}",
        missing=tuple(sorted(missing)),
        unexpected=tuple(sorted(unexpected)),
        mismatched=tuple(wrong),
    )


def spelled_out(names: list[str]) -> str:
    """Spells out the first names of a list, and says how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
