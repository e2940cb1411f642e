"""Chooses the backend of attention when a cache is made; nothing falls back to another later."""

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch

from pagedkv.step.metadata import StepMetadata

from .call import Backend


def backend_of(step: StepMetadata) -> Backend:
    """The backend of the cache that opened a step."""
    return _named(step.backend)


@functools.cache
def _named(name: str) -> Backend:
    if name == "torch":
        from . import on_torch

        return on_torch
    from . import on_triton

    return on_triton


def choose_backend(backend: str, device: torch.device) -> str:
    """Resolves `auto`: Triton on CUDA where it is installed, else torch.

    Raises:
        NotImplementedError: Triton kernels are asked for on a device without them.
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend: expected 'auto', 'torch' or 'triton', got {backend!r}")
    installed = importlib.util.find_spec("triton") is not None
    if backend == "auto":
        if device.type != "cuda" or torch.version.hip:
            return "torch"
        if not installed:
            warnings.warn("triton is not installed: attention gathers pages first", stacklevel=3)
            return "torch"
        return "triton"
    if backend == "triton":
        if not installed:
            raise NotImplementedError("backend: triton is not installed, use 'torch'")
        if device.type != "cuda" and not _without_card():
            raise NotImplementedError(
                f"backend: there are no Triton kernels for {device}, use 'torch'"
            )
    return backend


def _without_card() -> bool:
    """Whether kernels are interpreted, or noted down for a card that is not there."""
    from pagedkv.kernels.triton.card import is_absent
    from pagedkv.kernels.triton.launch import interpreting

    return interpreting() or is_absent()
