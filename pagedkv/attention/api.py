"""The two calls a layer makes: write the new K and V, attend over pages.

Checks what callers can get wrong, then hands over (`backends.py`). To torch.compile the attention
call is one operator that it does not look into.
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

from pagedkv.errors import GradModeError
from pagedkv.step.metadata import StepMetadata, open_steps
from pagedkv.storage import Storage

from .backends import attend, write


def write_kv(k: Tensor, v: Tensor, step: StepMetadata, layer: int) -> None:
    """Writes the step's K and V of one layer into its pages, in place.

    Where they go depends on committed lengths only: layers come in any order, and one that is
    written again (which `commit` wants to be told: `layers`) is written in the same place.

    Args:
        k, v: `[T, G, D]` in the cache's dtype and on its device, T the step's new tokens in order.

    Raises:
        ClosedStepError: the step was committed or aborted.
        ValueError, TypeError: shape, device or dtype is not the cache's.
        GradModeError: `k` or `v` require gradients.
    """
    if torch.compiler.is_compiling():
        # Without a result a compiler takes it for dead code; paged_attention writes as well.
        raise NotImplementedError("write_kv: expected to be called outside of compiled code")
    step.require_open()
    _check_kv(k, v, step)
    write(k, v, step, layer)


@overload
def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: StepMetadata,
    layer: int,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: StepMetadata,
    layer: int,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: StepMetadata,
    layer: int,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Writes the step's K and V of one layer, then attends causally over each sequence's pages.

    A window is the layer group's; positions are counted in the text, so what a window dropped is
    not missed.

    Args:
        q: `[T, H, D]`, H a multiple of G; query heads `h * H / G ...` share KV head h.
        k, v: `[T, G, D]`.
        scale: factor of the scores; default `D ** -0.5`.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sinks: `[H]`, a score per head that takes its share of the weights and has no value.
        return_lse: also return the natural log-sum-exp of the scores, the sink's included.

    Returns:
        `[T, H, D]` in the dtype of `q`; with `return_lse` also `[T, H]` float32.

    Raises:
        NotImplementedError: the Triton backend has no kernel for this many query heads a KV head.
        See `write_kv` for the rest.
    """
    if torch.compiler.is_compiling():
        out, lse = _operator(q, k, v, step.handle, layer, scale, softcap, sinks)
    else:
        out, lse = _attend(q, k, v, step, layer, scale, softcap, sinks, return_lse)
    return (out, lse) if return_lse else out


# What a step plans on the host is new in each: a compiler that captures CUDA graphs leaves it out.
_TAGS = getattr(torch.Tag, "cudagraph_unsafe", ())


@torch.library.custom_op("pagedkv::paged_attention", mutates_args=(), tags=_TAGS)
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: int,
    layer: int,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`paged_attention` in the open step of the cache with this handle.

    The pages are no argument, so that a compiler neither copies them nor knows that they change:
    what a layer writes is read by that call alone.
    """
    return _attend(q, k, v, open_steps[handle], layer, scale, softcap, sinks, True)


@_operator.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: StepMetadata,
    layer: int,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Checks the call and hands it over: see `backends.attend`."""
    step.require_open()
    _check_q(q, step)
    _check_kv(k, v, step)
    scale = step.config.head_dim**-0.5 if scale is None else _number("scale", scale)
    if softcap is not None:
        softcap = _number("softcap", softcap)
        if not 0 < softcap < math.inf:
            raise ValueError(f"softcap: expected a positive number, got {softcap}")
    if sinks is not None:
        _check_sinks(sinks, q)
    return attend(q, k, v, step, layer, scale, softcap, sinks, return_lse)


def gather_kv(step: StepMetadata, layer: int) -> list[tuple[Tensor, Tensor]]:
    """Copies of what every sequence of an open step holds in one layer, new tokens included.

    Returns:
        Per sequence K and V `[held, G, D]`; with a window the last tokens only.
    """
    group, size = step.group_of(layer), step.config.page_size
    storage: Storage = step.storage
    table = step.page_table(group).cpu().numpy().astype("int64")
    held = []
    for pages, length in zip(table, step.kv_lens_of(group).tolist()):
        used = pages[: -(-length // size)]
        first = int((used < 0).sum())
        held.append(storage.read(layer, used[first:], length - first * size))
    return held


def _check_kv(k: Tensor, v: Tensor, step: StepMetadata) -> None:
    expected = (step.num_tokens, step.config.num_kv_heads, step.config.head_dim)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape != expected:
            raise ValueError(
                f"{name}: expected shape [T, G, D] = {list(expected)}, got {list(tensor.shape)}"
            )
        _check_kind(name, tensor, step)


def _check_q(q: Tensor, step: StepMetadata) -> None:
    tokens, heads, dim = step.num_tokens, step.config.num_kv_heads, step.config.head_dim
    if q.ndim != 3 or q.shape[0] != tokens or q.shape[2] != dim:
        raise ValueError(f"q: expected shape [T, H, D] = [{tokens}, H, {dim}], got {list(q.shape)}")
    if q.shape[1] % heads or not q.shape[1]:
        raise ValueError(f"q: expected a multiple of {heads} heads, got {q.shape[1]}")
    _check_kind("q", q, step)


def _check_sinks(sinks: Tensor, q: Tensor) -> None:
    if sinks.shape != q.shape[1:2] or not sinks.is_floating_point():
        raise ValueError(
            f"sinks: expected a float tensor of shape [H] = [{q.shape[1]}], got "
            f"{sinks.dtype} {list(sinks.shape)}"
        )
    if sinks.device != q.device:
        raise ValueError(f"sinks: expected device {q.device}, got {sinks.device}")
    _check_grad("sinks", sinks)


def _check_kind(name: str, tensor: Tensor, step: StepMetadata) -> None:
    if tensor.dtype != step.storage.dtype:
        raise TypeError(f"{name}: expected dtype {step.storage.dtype}, got {tensor.dtype}")
    if tensor.device != step.storage.device:
        raise ValueError(f"{name}: expected device {step.storage.device}, got {tensor.device}")
    _check_grad(name, tensor)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}") from None


def _check_grad(name: str, tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise GradModeError(
            f"{name}: requires gradients, which pages do not keep; run under torch.no_grad()"
        )
