"""Refuses mistakes of a layer's caller in shapes, dtypes, devices and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedkv.errors import GradModeError
from pagedkv.kernels.like import has_tangent
from pagedkv.kernels.scoring import Scoring
from pagedkv.step.metadata import StepMetadata

from .call import Call


def checked(call: Call) -> Call:
    """Checks a call and returns it with the window of the layer's group, for a backend."""
    q, k, v, step, layer, scoring, _ = call
    group = step.group_of(layer)
    _check_q(q, step, group)
    if k is not None and v is not None:
        check_kv(k, v, step, layer)
    sight = step.config.groups[group]
    if scoring.tree is not None:
        _require_whole(step, layer, sight.window)
    scoring = checked_terms(scoring, q, None if sight.chunked else sight.window)
    if scoring.is_biased:
        _require_places(call, sight.window)
    return call._replace(scoring=scoring)


def checked_terms(scoring: Scoring, q: Tensor, window: int | None) -> Scoring:
    """Returns the checked terms of queries that see a window; see `Scoring.checked`."""
    for name, term in zip(scoring._fields, scoring):
        if isinstance(term, Tensor):
            check_grad(name, term)
    return scoring.checked(q, window)


def _require_places(call: Call, window: int | None) -> None:
    """Raises if pages do not tell how far in front of a query a token is."""
    names = ", ".join(name for name, _ in call.scoring.tensors if name != "sinks")
    config = call.step.config
    if window is None and config.policy is not None:
        raise ValueError(
            f"{names}: expected a cache without a policy, which gives up tokens in between, got "
            f"retention={config.retention!r}"
        )
    if call.reads:
        raise ValueError(
            f"{names}: expected a cache that reads all pages, got read_tokens="
            f"{config.read_tokens}; pages are chosen by keys alone"
        )


def _require_whole(step: StepMetadata, layer: int, window: int | None) -> None:
    """Raises for a tree in a layer whose queries do not see their whole texts."""
    config = step.config
    chosen = None if not config.read_tokens else f"read_tokens={config.read_tokens}"
    kept = None if config.policy is None else f"retention={config.retention!r}"
    sees = f"a window of {window} in layer {layer}" if window is not None else chosen or kept
    if sees is not None:
        raise NotImplementedError(f"tree: expected layers that see all of a text, got {sees}")


def require_step(step: Any, layer: Any = 0) -> None:
    """Raises unless these are an open step of a cache, and a whole number."""
    if not isinstance(step, StepMetadata):
        raise TypeError(f"step: expected what `prepare` returned, got {type(step).__name__}")
    if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)):
        raise TypeError(f"layer: expected an int, got {type(layer).__name__}")
    step.require_open()


def require_word(name: str, value: Any, words: Sequence[str]) -> None:
    """Raises ValueError unless a value is one of some words."""
    if value not in words:
        *others, last = map(repr, words)
        raise ValueError(f"{name}: expected {', '.join(others)} or {last}, got {value!r}")


def require_tensor(name: str, tensor: Any) -> None:
    """Raises TypeError unless this is a plain dense tensor."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        got = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name}: expected a dense tensor, got {got}")


def check_kv(k: Tensor, v: Tensor, step: StepMetadata, layer: int) -> None:
    """Raises unless K and V fit the pages of a layer and this step."""
    shape = step.config.shapes[step.group_of(layer)]
    for name, tensor, dim in (("k", k, shape.head_dim), ("v", v, shape.v_head_dim)):
        require_tensor(name, tensor)
        expected = step.num_tokens, shape.num_kv_heads, dim
        if tensor.shape != expected:
            raise ValueError(
                f"{name}: expected shape [T, G, D] = {list(expected)}, got {list(tensor.shape)}"
            )
        _check_kind(name, tensor, step)
    if shape.v_is_k and not is_front(v, k):
        raise ValueError(f"v: expected a view of k, k[..., :{shape.v_head_dim}], as pages keep it")


def is_front(v: Tensor, k: Tensor) -> bool:
    """Whether V is a view of the first elements of each head of K."""
    steps = zip(v.shape, v.stride(), k.stride())  # an axis of one element has any stride
    return v.data_ptr() == k.data_ptr() and all(n == 1 or a == b for n, a, b in steps)


def _check_q(q: Tensor, step: StepMetadata, group: int) -> None:
    tokens, (heads, dim, *_) = step.num_tokens, step.config.shapes[group]
    if q.ndim != 3 or q.shape[0] != tokens or q.shape[2] != dim:
        raise ValueError(f"q: expected shape [T, H, D] = [{tokens}, H, {dim}], got {list(q.shape)}")
    if q.shape[1] % heads or not q.shape[1]:
        raise ValueError(f"q: expected a multiple of {heads} heads, got {q.shape[1]}")
    _check_kind("q", q, step)


def _check_kind(name: str, tensor: Tensor, step: StepMetadata) -> None:
    if tensor.dtype != step.storage.dtype:
        raise TypeError(f"{name}: expected dtype {step.storage.dtype}, got {tensor.dtype}")
    if tensor.device != step.storage.device:
        raise ValueError(f"{name}: expected device {step.storage.device}, got {tensor.device}")
    check_grad(name, tensor)


def check_grad(name: str, tensor: Tensor) -> None:
    """Raises for a tensor whose derivatives torch records, backward or forward."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise GradModeError(
            f"{name}: requires gradients, which pages do not keep; run under torch.no_grad()"
        )
    if has_tangent(tensor):
        raise GradModeError(
            f"{name}: has a tangent of forward mode, which pages do not keep; detach() drops it"
        )
