"""Warnings that point at the caller's line, however deep within a call they arise."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

# Between a caller and us: libraries that call us back, and what Python wraps calls in.
BETWEEN = {"pagedkv", "torch", "transformers", "peft", "accelerate", "contextlib", "functools"}


def warn(message: str) -> None:
    """A `UserWarning` of the innermost line that is neither ours nor of a library between."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and _package_of(frame) in BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
