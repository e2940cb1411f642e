"""Chooses the backend of attention when a cache is made; later calls never change it."""

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch

from pagedkv.step.metadata import StepMetadata

from .call import Backend
from .checks import require_word

BACKENDS = ("auto", "c", "torch", "triton")


def backend_of(step: StepMetadata) -> Backend:
    """Returns the backend of the cache that opened a step."""
    return _named(step.backend)


@functools.cache
def _named(name: str) -> Backend:
    if name == "torch":
        from . import on_torch

        return on_torch
    if name == "c":
        from . import on_c

        return on_c
    from . import on_triton

    return on_triton


def choose_backend(backend: str, device: torch.device) -> str:
    """Resolves `auto`: Triton on CUDA, C on a processor, and torch if these are missing.

    Raises:
        NotImplementedError: this machine or device does not have the backend asked for.
    """
    require_word("backend", backend, BACKENDS)
    wanted = backend
    if backend == "auto":
        on_card = device.type == "cuda" and not torch.version.hip
        wanted = "triton" if on_card else "c" if device.type == "cpu" else "torch"
    reason = _lacking(wanted, device)
    if not reason:
        return wanted
    if backend == "auto":
        warnings.warn(f"{reason}: attention gathers pages first", stacklevel=3)
        return "torch"
    raise NotImplementedError(f"backend: {reason}, use 'torch'")


def _lacking(backend: str, device: torch.device) -> str:
    """Says why a device lacks a backend; empty if it has it."""
    if backend == "c":
        if device.type != "cpu":
            return f"there are no C kernels for {device}"
        from pagedkv.kernels.c.library import missing

        return missing()
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if device.type != "cuda" and not _without_card():
            return f"there are no Triton kernels for {device}"
    return ""


def _without_card() -> bool:
    """Whether kernels are interpreted, or recorded for a card that is not there."""
    from pagedkv.kernels.triton.card import is_absent
    from pagedkv.kernels.triton.launch import interpreting

    return interpreting() or is_absent()
