"""What a backend of attention does for a layer's call, and which one a cache uses.

The backend is chosen when a cache is made. After the choice nothing falls back: what a kernel
cannot serve is refused before anything is written.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pagedkv.kernels.scoring import Scoring
from pagedkv.step.metadata import StepMetadata


class Call(NamedTuple):
    """One layer's attention in an open step, its arguments checked.

    Attributes:
        q: `[T, H, D]`.
        k, v: `[T, G, D]`, the step's new tokens.
        group: the layer's.
        pages: K's and V's of the layer, as storage has them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    step: StepMetadata
    layer: int
    group: int
    pages: tuple[Any, Any]
    scoring: Scoring
    return_lse: bool


class Backend(Protocol):
    """The parts of a layer's call that differ by backend, in the order they are called."""

    def plan(self, call: Call) -> Any:
        """What is worked out once a step, for all layers of a kind."""

    def check(self, call: Call, plan: Any) -> None:
        """Raises where the backend has no kernel for the call; nothing is written yet."""

    def write(self, k: Tensor, v: Tensor, step: StepMetadata, layer: int) -> None:
        """Writes the step's K and V of one layer into its pages."""

    def attend(self, call: Call, plan: Any) -> tuple[Tensor, Tensor]:
        """`[T, H, D]` in the dtype of `q`; the log-sum-exp `[T, H]`, valid if asked for."""

    def page_mass(self, call: Call, lse: Tensor) -> Tensor:
        """`[B, columns]` float32, the weight each page got from the step's looked-at queries."""


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
        if device.type != "cuda" and not _interpreted():
            raise NotImplementedError(
                f"backend: there are no Triton kernels for {device}, use 'torch'"
            )
    return backend


def _interpreted() -> bool:
    from pagedkv.kernels.triton.launch import interpreting

    return interpreting()
