"""Attention over a caller's own pages: a page table, lengths, and tensors of pages.

It uses the kernels of `paged_attention`, without a cache, a step or layers. `own_plan.py` has the
plan that the calls of a step share, `own_checks.py` checks tensors, and `own_backends.py` calls the
kernels.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from pagedkv.config.checks import require_bool
from pagedkv.kernels.formats import is_view_of_k
from pagedkv.kernels.scoring import LOG2E, NO_WINDOW, Scoring

from .checks import checked_terms, is_front, require_word
from .own_backends import BACKENDS, OwnCall
from .own_checks import as_packed, as_paged, check_apart, check_buffer, check_pair
from .own_plan import AttentionPlan, require_whole


def write_pages(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan
) -> None:
    """Writes new K and V into the caller's own pages, in place, at `plan.slot_mapping`.

    Args:
        k, v: `[T, G, D]`, or `[B, S, G, D]` if each row has S of them. D of V may be less.
        k_pages, v_pages: as in `attend_pages`. If `v_pages` are the first columns of `k_pages`, `v`
            must be a view of `k`, and only K is written.

    Raises:
        ValueError, TypeError, GradModeError: as for `attend_pages`, or two tokens have the same
            place in memory; nothing is written then.

    Examples:
        >>> import torch
        >>> from pagedkv import AttentionPlan, write_pages
        >>> k_pages, v_pages = torch.zeros(2, 9, 16, 2, 32)
        >>> plan = AttentionPlan(torch.tensor([[4, 7]]), torch.tensor([20]), page_size=16)
        >>> k, v = torch.randn(2, 1, 2, 32)
        >>> write_pages(k, v, k_pages, v_pages, plan)
        >>> torch.equal(k_pages[7, 3], k[0])
        True
    """
    k, v = as_packed("k", k, plan), as_packed("v", v, plan)
    k_seen, v_seen = as_paged("k_pages", k_pages, k, plan), as_paged("v_pages", v_pages, k, plan)
    check_pair(k_seen, v_seen)
    for name, new, pages in (("k", k, k_seen), ("v", v, v_seen)):
        expected = plan.num_tokens, pages.shape[1], pages.shape[3]
        if new.shape != expected:
            raise ValueError(
                f"{name}: expected shape [T, G, D] = {list(expected)}, got {list(new.shape)}"
            )
        if new.dtype != pages.dtype:
            raise TypeError(
                f"{name}: expected the dtype of k_pages, {pages.dtype}, got {new.dtype}"
            )
    latent = is_view_of_k(k_seen, v_seen)
    if latent and not is_front(v, k):
        raise ValueError("v: expected a view of k, its first columns, as v_pages are of k_pages")
    check_apart(k_seen, v_seen, plan, latent)
    plan.check_slots(k_seen.shape[0])
    slots = plan.slot_mapping
    if not plan.num_tokens:
        return
    memory = {x.untyped_storage().data_ptr() for x in (k_seen, v_seen)}
    if any(x.untyped_storage().data_ptr() in memory for x in (k, v)):  # slots are read and written
        k, v = k.clone(), v.clone()
        v = k[..., : v.shape[2]] if latent else v
    if plan.backend == "triton":
        from pagedkv.kernels.triton import backend as kernels

        kernels.write_kv(k, v, k_seen, v_seen, slots)
        return
    # Torch would refuse V when K is written.
    for name, pages in (("k_pages", k_seen), ("v_pages", v_seen)):
        if pages.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{name}: expected to be written in torch.inference_mode(), in which they were made"
            )
    from pagedkv.kernels.torch import backend as plain

    kept = plan.once("kept", lambda: None if bool((slots >= 0).all()) else slots >= 0)
    if kept is not None:
        k, v, slots = k[kept], v[kept], slots[kept]
        v = k[..., : v.shape[2]] if latent else v
    plain.write_kv(k, v, k_seen, v_seen, slots)


@overload
def attend_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = ...,
    causal: bool = ...,
    window_left: int = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    distance_bias: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    lse_base: Literal["e", "2"] = ...,
    out: Tensor | None = ...,
    lse: Tensor | None = ...,
) -> Tensor: ...


@overload
def attend_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = ...,
    causal: bool = ...,
    window_left: int = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    distance_bias: Tensor | None = ...,
    return_lse: Literal[True],
    lse_base: Literal["e", "2"] = ...,
    out: Tensor | None = ...,
    lse: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


def attend_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    distance_bias: Tensor | None = None,
    return_lse: bool = False,
    lse_base: Literal["e", "2"] = "e",
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attends over the caller's own pages, which have the new K and V (see `write_pages`).

    Pages are read where they are, by their strides; a layout that would need a copy is refused. A
    query that sees no token gives zeros, and a log-sum-exp of minus infinity, or of its sink.

    Args:
        q: `[T, H, D]` float32, float16 or bfloat16, or `[B, S, H, D]` if each row has S queries;
            H a multiple of G, and query heads `h * H / G ...` share KV head h.
        k_pages: `[N, page_size, G, D]`, or `[N, G, page_size, D]` if the plan's layout is HND; of
            the dtype of `q`, with a contiguous last axis.
        v_pages: the same; D may be less. It may be the first columns of K (latents).
        scale: factor of the scores; default `D ** -0.5`.
        causal: whether a query sees no token behind its own; the queries are the last tokens of
            their row. If not, each sees its whole row, as cross-attention does.
        window_left: tokens before its own that a query sees; -1 for all. Only if causal.
        softcap: scores become `softcap * tanh(score / softcap)`; None or 0 for none.
        sinks: `[H]`, a score per head that takes its share of the weights and has no value.
        alibi_slopes, distance_bias: as in `paged_attention`, with T = B x S. Only if causal.
        return_lse: also return the log-sum-exp of the scores, the sink's included.
        lse_base: base of the logarithm: `"e"` as in FlashAttention, `"2"` as in FlashInfer.
        out: contiguous buffer for the output; made unless given.
        lse: contiguous float32 buffer for the log-sum-exp; written if it is given.

    Returns:
        `[T, H, D]` or `[B, S, H, D]` in the dtype of `q`, D that of V; with `return_lse` also
        `[T, H]` or `[B, S, H]` float32.

    Raises:
        NotImplementedError: the backend has no kernel for heads, dtype or terms.
        ValueError, TypeError: a shape, stride, device or dtype does not fit; on a CPU also if a
            page does not exist.
        GradModeError: a tensor requires gradients, or has a tangent of forward mode.

    Examples:
        >>> import torch
        >>> from pagedkv import AttentionPlan, attend_pages, write_pages
        >>> k_pages, v_pages = torch.zeros(2, 9, 16, 2, 32)  # 9 pages of 16 tokens, 2 KV heads
        >>> table, lens = torch.tensor([[4, 7], [2, 0]]), torch.tensor([20, 3])
        >>> plan = AttentionPlan(table, lens, page_size=16)
        >>> k, v = torch.randn(2, 2, 2, 32)
        >>> write_pages(k, v, k_pages, v_pages, plan)
        >>> attend_pages(torch.randn(2, 4, 32), k_pages, v_pages, plan).shape
        torch.Size([2, 4, 32])
    """
    packed = as_packed("q", q, plan)
    k, v = as_paged("k_pages", k_pages, packed, plan), as_paged("v_pages", v_pages, packed, plan)
    check_pair(k, v)
    if packed.shape[1] % k.shape[1] or not packed.shape[1] or packed.shape[2] != k.shape[3]:
        raise ValueError(
            f"q: expected [T, H, D] with H a multiple of {k.shape[1]} and D {k.shape[3]}, got "
            f"{list(packed.shape)}"
        )
    require_word("lse_base", lse_base, ("e", "2"))
    for name, flag in (("causal", causal), ("return_lse", return_lse)):
        require_bool(name, flag)
    window_left = require_whole("window_left", window_left, -1)
    window = None if window_left == -1 else min(window_left + 1, NO_WINDOW)
    causal = causal or int(plan.num_new.max(initial=0)) <= 1  # a last token sees all there is
    if not causal and window is not None:
        raise NotImplementedError(
            f"window_left: expected -1 where causal is False, got {window_left}"
        )
    tensors = sinks, alibi_slopes, distance_bias
    scoring = Scoring(packed.shape[2] ** -0.5 if scale is None else scale, None, softcap, *tensors)
    scoring = checked_terms(scoring, packed, window)
    if scoring.is_biased and not causal:
        raise NotImplementedError(
            "alibi_slopes, distance_bias: expected None where causal is False"
        )
    shape = *q.shape[:-1], v.shape[3]
    plan.check_pages(k.shape[0], window)
    into = (
        check_buffer("out", out, shape, q.dtype, plan),
        check_buffer("lse", lse, shape[:-1], None, plan),
    )
    asked = return_lse or lse is not None
    call = OwnCall(packed, k, v, plan, scoring, causal, asked, *into)
    found, sums = BACKENDS[plan.backend](call)
    if asked and lse_base == "2":
        sums.mul_(LOG2E)
    return (found.view(shape), sums.view(shape[:-1])) if return_lse else found.view(shape)
