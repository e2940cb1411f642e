"""Warnings that point at the caller's line, however deep within a call they arise."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

# Packages between a caller and us: libraries that call us back, and Python's wrappers of calls.
BETWEEN = {"pagedkv", "torch", "transformers", "peft", "accelerate", "contextlib", "functools"}


def warn(message: str) -> None:
    """Warns at the innermost line that belongs neither to us nor to a package between."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
