"""The two calls a layer makes: write the new K and V, attend over pages.

Checks what callers can get wrong, then hands over to the backend chosen for the cache. After that
choice nothing falls back. To torch.compile the attention call is one operator that it does not look
into.
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .errors import GradModeError
from .kernels import cascade, gather
from .kernels.buckets import Bucket, cut_step, scratch_elements
from .kernels.mass import page_mass
from .metadata import StepMetadata, open_steps
from .storage import Storage


def write_kv(k: Tensor, v: Tensor, step: StepMetadata, layer: int) -> None:
    """Writes the step's K and V of one layer into its pages, in place.

    Where they go depends on committed lengths only, so a layer may be written again.

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
    _write(k, v, step, layer)


def _write(k: Tensor, v: Tensor, step: StepMetadata, layer: int) -> None:
    group = step.group_of(layer)
    storage: Storage = step.storage
    pages = storage.layer(layer)
    storage.calibrate(layer, k, v)
    if direct := step.direct(group):
        storage.kernels.write_pages(k, v, *pages, *direct)
    if storage.backend == "triton":  # which leaves out slots of -1 itself
        storage.kernels.write_kv(k, v, *pages, step.slots(group))
        return
    slots, tokens = step.written(group)
    if tokens is not None:
        k, v = k[tokens], v[tokens]
    gather.write_kv(k, v, *pages, slots)


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


@torch.library.custom_op("pagedkv::paged_attention", mutates_args=())
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
    """Checks, writes and attends; the second tensor means nothing unless asked for."""
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
    if step.storage.backend == "triton":
        result = _attend_by_triton(q, k, v, step, layer, scale, softcap, sinks)
    else:
        _write(k, v, step, layer)
        result = _attend_by_torch(q, k, v, step, layer, scale, softcap, sinks, return_lse)
    if step.queries is not None:
        _observe(q, result[1], step, layer, scale, softcap, sinks)
    return result


def _observe(
    q: Tensor,
    lse: Tensor,
    step: StepMetadata,
    layer: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Tells who collects statistics how much attention each page got; K of the step is written."""
    assert step.queries is not None
    group = step.group_of(layer)
    if step.config.groups[group].window is not None:
        return
    k_pages, table = step.storage.layer(layer)[0], step.page_table(group)
    queries, mass = step.queries, None
    if looking := _looking(step, group, q.shape[1]):
        queries, mass = looking.left, step.storage.kernels.page_mass(looking, lse)
    if mass is None or queries.any():
        rows = step.num_new, step.kv_lens_of(group), queries
        rest = page_mass(q, k_pages, table, *rows, scale=scale, softcap=softcap, sinks=sinks)
        mass = rest if mass is None else mass + rest
    step.observer.see(step, layer, mass)


def _looking(step: StepMetadata, group: int, num_heads: int) -> Any:
    """What the attention kernels note down for `_observe`; None where they do not look.

    Not at what was chosen to be read: mass is of all pages of a row.
    """
    storage: Storage = step.storage
    if step.queries is None or storage.backend != "triton":
        return None
    columns, read = step.page_table(group).shape[1], step.config.pages_read
    if step.config.groups[group].window is not None or 0 < read < columns:
        return None

    def look() -> Any:
        rows = step.num_new, step.kv_lens_of(group), step.queries
        return storage.kernels.look(
            *rows, columns, num_heads, step.config.page_size, storage.device
        )

    return step.memo(("looking", group, num_heads), look)


def _attend_by_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: StepMetadata,
    layer: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    group = step.group_of(layer)
    storage: Storage = step.storage
    kernels, window = storage.kernels, step.config.groups[group].window
    k_pages, v_pages = storage.layer(layer)
    lens, starts = step.kv_lens(group), step.query_start_loc
    read, size = step.config.pages_read, step.config.page_size
    choosing = window is None and 0 < read < step.page_table(group).shape[1]
    looking = _looking(step, group, q.shape[1])

    def plan() -> Any:
        shared = step.shared.get(group)
        if not step.bounded and looking is None and (work := shared_work(step, group, q.shape[1])):
            shared = kernels.shared_prefix.plan(work, q.device)
        slots = kernels.lens_read(lens, starts, size, read) if choosing else lens
        return kernels.plan(
            *(slots, starts, q, k_pages, v_pages),
            num_new=step.num_new.tolist(),
            max_kv=int(step.kv_lens_of(group).max()),
            window=window,
            shared=shared,
        )

    made = step.memo(("plan", group, q.shape[1]), plan)
    tensors = q, k_pages, v_pages, step.page_table(group), lens, starts
    kernels.check_call(*tensors, made.geometry, softcap, sinks)
    _write(k, v, step, layer)
    chosen = None
    if choosing:
        decoding = bool((step.num_new == 1).all())
        bounds, lasting = storage.bounds.of(layer), (size, read, decoding)
        chosen = kernels.chosen_table(q, bounds, step.page_table(group), lens, starts, *lasting)
    scoring = kernels.Scoring(scale, window, softcap, sinks)
    return kernels.attend(*tensors, made, scoring, chosen, looking)


def shared_work(step: StepMetadata, group: int, num_heads: int) -> Any:
    """What rows of a layer group begin with in common, as work for Triton kernels on the host.

    None where that is nothing, or too little to pay.
    """
    storage: Storage = step.storage
    members, kernels = step.config.groups[group], storage.kernels
    if members.window is not None or len(step.num_new) < 2 or step.config.pages_read:
        return None
    k_pages, _ = storage.layer(members.layers[0])
    page_size = step.config.page_size
    token_bytes = step.config.bytes_per_page(group) // (page_size * len(members.layers))
    pages = step.page_table_host(group)
    new, kv_lens = step.num_new, step.kv_lens_of(group)
    prefixes = kernels.find_prefixes(new, kv_lens, pages, page_size, token_bytes)
    if not prefixes:
        return None
    return kernels.cut_prefixes(prefixes, new.tolist(), num_heads, k_pages, storage.dtype)


def _attend_by_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: StepMetadata,
    layer: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    group = step.group_of(layer)
    storage: Storage = step.storage
    config = step.config
    window = config.groups[group].window
    elements = config.num_kv_heads * config.head_dim
    # Parts are merged by sums that only the plain call on a CPU gives.
    plain = softcap is None and sinks is None and not return_lse
    read = 0 if window is not None else config.pages_read
    cut = q.device.type == "cpu" and window is None and plain and not read
    exact = config.formats == ("dense", "dense")

    def plan() -> tuple[list[Bucket], int]:
        shape = step.num_new, step.kv_lens_of(group)
        token_bytes = 2 * elements * storage.dtype.itemsize
        prefixes = []
        if cut:
            pages = step.page_table_host(group)
            prefixes = cascade.find_prefixes(*shape, pages, config.page_size, token_bytes)
        buckets = cut_step(*shape, config.page_size, window, token_bytes, prefixes, exact, read)
        return buckets, scratch_elements(buckets, elements, config.page_size)

    buckets, needed = step.memo(("buckets", group, cut), plan)
    return gather.paged_attention(
        *(q, k, v, *storage.layer(layer), step.page_table(group), buckets),
        storage.scratch(needed),
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        return_lse=return_lse,
        bounds=storage.bounds.of(layer) if read else None,
    )


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
