"""The two calls that a layer makes: write the new K and V, attend over pages.

`checks.py` refuses mistakes of callers, `backend.py` gives the backend that does the rest. For
torch.compile the attention call is one opaque operator.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.config.checks import require_bool
from pagedkv.kernels.scoring import Scoring
from pagedkv.step.metadata import StepMetadata, open_steps
from pagedkv.storage import Storage

from .backend import backend_of
from .call import Call
from .checks import check_kv, checked, require_step, require_tensor
from .chosen import chosen_of
from .narrowed import among_all
from .observe import observe


def write_kv(k: Tensor, v: Tensor, step: StepMetadata, layer: int) -> None:
    """Writes the step's K and V of one layer into its pages, in place.

    Their slots depend only on committed lengths: layers may write in any order, and a layer that
    writes again writes to the same slots. For that, name it in the argument `layers` of `commit`.

    Args:
        k: `[T, G, D]` in the cache's dtype and on its device, T the step's new tokens in order.
        v: the same; the layer's group has D of K and V. If V is a part of K, a view of `k`.

    Raises:
        ClosedStepError: the step was committed or aborted.
        ValueError, TypeError: a shape, device or dtype differs from the cache's.
        GradModeError: `k` or `v` require gradients, or have tangents of forward mode.

    Examples:
        >>> import torch
        >>> from pagedkv import CacheConfig, PagedKVCache, write_kv
        >>> config = CacheConfig(1, num_kv_heads=2, head_dim=16, dtype="float32", max_tokens=64)
        >>> cache = PagedKVCache(config, device="cpu")
        >>> q, k, v = torch.randn(3, 8, 16).split([4, 2, 2], dim=1)
        >>> with cache.step([cache.add()], num_new=3) as step:
        ...     write_kv(k, v, step, layer=0)
    """
    if torch.compiler.is_compiling():
        # A compiler would drop a call without a result as dead code; paged_attention also writes.
        raise NotImplementedError("write_kv: expected to be called outside of compiled code")
    require_step(step, layer)
    step = step.at(layer)
    check_kv(k, v, step, layer)
    backend_of(step).write(k, v, step, layer)
    step.wrote.append(layer)


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
    alibi_slopes: Tensor | None = ...,
    distance_bias: Tensor | None = ...,
    indices: Tensor | None = ...,
    tree: Tensor | None = ...,
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
    alibi_slopes: Tensor | None = ...,
    distance_bias: Tensor | None = ...,
    indices: Tensor | None = ...,
    tree: Tensor | None = ...,
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
    alibi_slopes: Tensor | None = None,
    distance_bias: Tensor | None = None,
    indices: Tensor | None = None,
    tree: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Writes the step's K and V of one layer, then attends causally over each sequence's pages.

    The window is that of the layer's group. Positions count tokens of the text, so pages that a
    window dropped do not shift them.

    Args:
        q: `[T, H, D]`, H a multiple of G; query heads `h * H / G ...` share KV head h.
        k: `[T, G, D]`, as in `write_kv`.
        v: the same, as in `write_kv`.
        scale: factor of the scores; default `D ** -0.5`.
        softcap: scores become `softcap * tanh(score / softcap)`; None or 0 for none.
        sinks: `[H]`, a score per head that takes its share of the weights and has no value; like
            other terms in float32, float16 or bfloat16.
        alibi_slopes: `[H]`; the score of a token d tokens in front of its query becomes `score -
            slope * d`, after scale and softcap (ALiBi).
        distance_bias: `[T, H, n]`; the score of such a token becomes `score + bias[query, head, d]`
            if d is less than n. Give one table for all queries as `table.expand(T, -1, -1)`.
        indices: `[T, n]` int32 or int64, the places in its text of the tokens that each query
            reads, each once and in any order (sparse attention). Places below 0 and behind the
            query are ignored; a query with no other places reads itself. `[T, G, n]` has the
            places for each KV head separately, without `sinks`. Only for dense pages of layers
            without a window, in a cache without a policy.
        tree: `[T]` int64 from `tree_of`, bits that say which new tokens of its row a query sees:
            bit d is for the token d places in front of it. It sees all tokens 63 or more places in
            front. Only for layers without a window and without a bias by distance, in a cache
            without a policy and whose queries read all pages.
        return_lse: also return the natural log-sum-exp of the scores, the sink's included.

    Returns:
        `[T, H, D]` in the dtype of `q`, D that of `v`; with `return_lse` also `[T, H]` float32.

    Raises:
        NotImplementedError: the Triton backend has no kernel for this many query heads a KV head,
            compiled code has `indices` or a `tree`, or there is a `tree` in a layer whose queries
            do not see their whole text.
        ClosedStepError: the step was committed or aborted.
        ValueError, TypeError: a shape, device or dtype differs from the cache's, or there is a bias
            by distance and the cache has a policy or does not read all pages.
        GradModeError: `q`, `k`, `v` or a term requires gradients, or has a tangent of forward mode.

    Examples:
        >>> import torch
        >>> from pagedkv import CacheConfig, PagedKVCache, paged_attention
        >>> config = CacheConfig(1, num_kv_heads=2, head_dim=16, dtype="float32", max_tokens=64)
        >>> cache = PagedKVCache(config, device="cpu")
        >>> q, k, v = torch.randn(3, 8, 16).split([4, 2, 2], dim=1)
        >>> with cache.step([cache.add()], num_new=3) as step:
        ...     out = paged_attention(q, k, v, step, layer=0)
        >>> out.shape
        torch.Size([3, 4, 16])
    """
    if torch.compiler.is_compiling():
        for name, term in (("indices", indices), ("tree", tree)):
            if term is not None:
                raise NotImplementedError(f"{name}: expected None in compiled code")
        terms = scale, softcap, sinks, alibi_slopes, distance_bias
        out, lse = _operator(q, k, v, step.handle, layer, *terms)
    else:
        require_step(step, layer)
        require_bool("return_lse", return_lse)
        for name, new in (("k", k), ("v", v)):  # a `Call` without them only reads
            require_tensor(name, new)
        scoring = _terms(q, scale, softcap, sinks, alibi_slopes, distance_bias, tree)
        call = Call(q, k, v, step.at(layer), layer, scoring, return_lse)
        out, lse = _attend(call, step) if indices is None else _attend_chosen(call, indices)
    return (out, lse) if return_lse else out


# The host plans each step anew, so a compiler must not capture this operator in a CUDA graph.
_TAGS = (torch.Tag.cudagraph_unsafe,)


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
    alibi_slopes: Tensor | None = None,
    distance_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`paged_attention` in the open step of the cache with this handle.

    The pages are no argument, so that a compiler need not know that they change. This is safe: only
    the call that writes a layer's tokens reads its pages in this step. If they were mutated
    arguments, the compiler would clone the whole pool at each call.
    """
    step = open_steps[handle]
    step.require_open()
    terms = _terms(q, scale, softcap, sinks, alibi_slopes, distance_bias)
    return _attend(Call(q, k, v, step.at(layer), layer, terms, return_lse=True), step)


@_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:2], v.shape[2])
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


def attend_again(
    q: Tensor,
    step: StepMetadata,
    layer: int,
    *,
    num_queries: Ints | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    distance_bias: Tensor | None = None,
    indices: Tensor | None = None,
) -> Tensor:
    """Attends over the pages of a layer that has written in this step, and writes nothing.

    For layers without K and V of their own, which attend to K and V of another layer, and for some
    rows of a layer whose other rows attend differently. Its attention does not count in statistics
    of pages.

    Args:
        q: `[T, H, D]`; with `num_queries`, T is their sum.
        layer: the layer that has written.
        num_queries: `[B]`, for how many of its last new tokens each row has queries; default for
            all.
        scale, softcap, sinks, alibi_slopes, distance_bias: as in `paged_attention`.
        indices: as in `paged_attention`; only without `num_queries`.

    Returns:
        `[T, H, D]` in the dtype of `q`, D that of V.

    Raises:
        ValueError: the layer has not written, or `num_queries` does not fit the step.
        NotImplementedError, ClosedStepError, TypeError, GradModeError: as for `paged_attention`.

    Examples:
        >>> import torch
        >>> from pagedkv import CacheConfig, PagedKVCache, attend_again, write_kv
        >>> config = CacheConfig(1, num_kv_heads=2, head_dim=16, dtype="float32", max_tokens=64)
        >>> cache = PagedKVCache(config, device="cpu")
        >>> q, k, v = torch.randn(3, 8, 16).split([4, 2, 2], dim=1)
        >>> with cache.step([cache.add()], num_new=3) as step:
        ...     write_kv(k, v, step, layer=0)
        ...     out = attend_again(q, step, layer=0)
        >>> out.shape
        torch.Size([3, 4, 16])
    """
    if torch.compiler.is_compiling():
        # A compiler does not know that this call has to follow the call that writes.
        raise NotImplementedError("attend_again: expected to be called outside of compiled code")
    require_step(step, layer)
    if layer not in step.wrote:
        raise ValueError(f"layer: expected one that has written in this step, got {layer!r}")
    whole = step = step.at(layer)
    step = step if num_queries is None else step.narrowed(num_queries)
    terms = _terms(q, scale, softcap, sinks, alibi_slopes, distance_bias)
    call = Call(q, None, None, step, layer, terms)
    if indices is not None:
        if num_queries is not None:
            raise ValueError("num_queries: expected None beside indices")
        return _attend_chosen(call, indices)[0]
    call, places = among_all(checked(call), whole)
    if step.config.groups[call.group].chunked:
        call = _in_chunks(call)
    backend = backend_of(step)
    plan = backend.plan(call)
    backend.check(call, plan)
    out = backend.attend(call, plan)[0]
    return out if places is None else out[places]


def _attend(call: Call, whole: StepMetadata) -> tuple[Tensor, Tensor]:
    """Checks, plans, writes, attends and observes a call.

    Args:
        whole: the step that `prepare` returned; the call has its part on the layer's device.

    Returns:
        The output, and the log-sum-exp, which is undefined unless the call asks for it.
    """
    step, layer = call.step, call.layer
    backend = backend_of(step)
    found = backend.again(call)
    if found is not None:
        step.wrote.append(layer)
        return found
    call = checked(call)
    group = step.config.groups[call.group]
    seen = _in_chunks(call) if group.chunked else call
    plan = backend.plan(seen)
    backend.check(seen, plan)
    if group.chunked:
        assert call.k is not None
        assert call.v is not None
        backend.write(call.k, call.v, step, layer)
        out, lse = backend.attend(seen, plan)
    else:
        out, lse = backend.write_and_attend(call, plan)
    step.wrote.append(layer)
    if step.queries is not None and group.window is None:
        observe(whole, layer, backend.page_mass(call, lse))
    return out, lse


def _attend_chosen(call: Call, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Writes K and V if given, and attends to the tokens with these places in their texts."""
    call = checked(call)
    require_tensor("indices", indices)
    out, lse = backend_of(call.step).attend_chosen(call, chosen_of(call, indices))
    if call.k is not None:
        call.step.wrote.append(call.layer)
    tokens, heads, _ = call.q.shape  # if KV heads choose apart, each was a query
    out = out.view(tokens, heads, -1)
    return out, lse.view(tokens, heads) if call.return_lse else lse


def _in_chunks(call: Call) -> Call:
    """Returns a checked call over the pages of chunks; K and V of the step are written before."""
    return call._replace(k=None, v=None, step=call.step.in_chunks(call.group))


def _terms(
    q: Tensor, scale: float | None, softcap: float | None, *tensors: Tensor | None
) -> Scoring:
    require_tensor("q", q)
    if q.ndim != 3 or not q.shape[2]:
        raise ValueError(f"q: expected shape [T, H, D], got {list(q.shape)}")
    return Scoring(q.shape[-1] ** -0.5 if scale is None else scale, None, softcap, *tensors)


def gather_kv(step: StepMetadata, layer: int) -> list[tuple[Tensor, Tensor]]:
    """Copies K and V of every sequence of an open step in one layer, with the new tokens.

    Returns:
        For each sequence K and V, `[held, G, D]`; with a window only of the last tokens.
    """
    step, group, size = step.at(layer), step.group_of(layer), step.config.page_size
    storage: Storage = step.storage
    table = step.page_table(group).cpu().numpy().astype("int64")
    held = []
    for pages, length in zip(table, step.kv_lens_of(group).tolist()):
        used = pages[: -(-length // size)]
        first = int((used < 0).sum())
        held.append(storage.read(layer, used[first:], length - first * size))
    return held
