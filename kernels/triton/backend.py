"""The Triton backend: attention to pages where they lie.

Rows of few new tokens go through `decode.py`, the others through `prefill.py`; both write into one
output, so a mixed batch is two lists of work and no copies. Everything is checked before the first
launch; what a kernel cannot serve is refused, not done in another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedkv.kernels import prefixes
from pagedkv.kernels.formats import Pages, is_view_of_k
from pagedkv.kernels.prefixes import Ints, Prefix
from pagedkv.kernels.scoring import Scoring

from . import decode, prefill, shared_prefix, write
from . import page_mass as observe
from .checks import check_call as check_call
from .checks import check_lengths, check_supported
from .checks import check_pages as check_pages
from .copy import copy_pages as copy_pages
from .decode_tuning import MOST_QUERIES, Tuning, most_rows
from .geometry import Geometry
from .launch import target_of
from .page_coding import decode_pages as decode_pages
from .page_coding import encode_pages as encode_pages
from .page_coding import write_pages as write_pages
from .page_mass import page_mass as page_mass
from .select_pages import chosen_table as chosen_table
from .select_pages import lens_read as lens_read
from .work_list import Bounds


class Plan(NamedTuple):
    """One step's work for every layer of one head geometry and window."""

    decode: decode.Plan | None
    prefill: prefill.Plan | None
    geometry: Geometry


def plan(
    kv_lens: Tensor,
    query_start_loc: Tensor,
    q: Tensor,
    k_pages: Tensor | Pages,
    v_pages: Tensor | Pages | None = None,
    *,
    num_new: Sequence[int],
    max_kv: int,
    window: int | None = None,
    causal: bool = True,
    shared: shared_prefix.Plan | None = None,
) -> Plan:
    """Cuts a step; on the device, so that a replayed graph cuts anew.

    Args:
        q, k_pages, v_pages: as in `paged_attention`; only shapes, strides and formats count. V's
            pages are like K's unless given.
        num_new: new tokens of each row, known to the host; in a captured graph, of rows to come.
        max_kv: a bound of the rows' lengths.
        causal: if not, every query sees all tokens of its row; without a window.
        shared: work of prefixes that shall be attended once: `shared_prefix.plan` of the work of
            `cut_prefixes`.

    Raises:
        NotImplementedError: a head dim, dtype, number of heads or architecture without a kernel.
        ValueError: heads that do not divide, pages with strides that no kernel takes.
    """
    geometry = Geometry.of(q, k_pages, v_pages)
    check_supported(geometry, q.device)
    check_lengths(kv_lens, query_start_loc)
    if window is not None and shared is not None:
        raise ValueError(f"shared: expected none with a window, got a window of {window}")
    few = [new for new in num_new if 0 < new <= MOST_QUERIES]
    many = [new for new in num_new if new > MOST_QUERIES]
    lens = kv_lens, query_start_loc, geometry
    sees: dict[str, Any] = {"window": window, "causal": causal}
    return Plan(
        decode.plan(*lens, _bounds(few, max_kv), **sees, shared=shared) if few else None,
        prefill.plan(*lens, _bounds(many, max_kv), **sees) if many else None,
        geometry,
    )


def find_prefixes(
    num_new: Ints, kv_lens: Ints, page_table: Ints, page_size: int, token_bytes: int
) -> list[Prefix]:
    """Finds prefixes that are worth a launch of their own; see `prefixes.find_prefixes`.

    There are none if a row decodes several tokens: parts of rows would not lie side by side.
    """
    if ((num_new > 1) & (num_new <= MOST_QUERIES)).any():
        return []
    worth = shared_prefix.LAUNCH_WORTH_BYTES
    return prefixes.find_prefixes(num_new, kv_lens, page_table, page_size, token_bytes, worth)


def cut_prefixes(
    prefixes: Sequence[Prefix],
    num_new: Sequence[int],
    num_heads: int,
    k_pages: Tensor | Pages,
    dtype: torch.dtype | None = None,
) -> shared_prefix.Work:
    """Returns the work of prefixes, still on the host.

    Args:
        dtype: the queries' dtype; by default that of dense pages.
    """
    geometry, most, tune = _sharing(num_heads, k_pages, dtype)
    queries = max(1, most // geometry.heads(most))
    return shared_prefix.cut(prefixes, num_new, geometry.page, tune.cut(geometry, queries))


def room_for_prefixes(
    rows: int,
    max_kv: int,
    num_heads: int,
    k_pages: Tensor | Pages,
    dtype: torch.dtype | None = None,
) -> shared_prefix.Plan:
    """Returns buffers for the work of prefixes, where a captured graph of `rows` rows finds it."""
    geometry, _, tune = _sharing(num_heads, k_pages, dtype)
    parts = tune.cut(geometry, 1).parts(max_kv)
    return shared_prefix.room(rows, parts, Pages.of(k_pages).data.device)


def _sharing(
    num_heads: int, k_pages: Tensor | Pages, dtype: torch.dtype | None
) -> tuple[Geometry, int, Tuning]:
    """Returns how prefixes are attended: geometry, rows of a product, tuning."""
    data = Pages.of(k_pages).data
    q = torch.empty(0, num_heads, 0, dtype=dtype or data.dtype, device="meta")
    geometry, target = Geometry.of(q, k_pages), target_of(data.device)
    most = most_rows(target, geometry)
    return geometry, most, decode.tuning(target, geometry, most)


def watch(
    num_new: Ints,
    kv_lens: Ints,
    queries: Ints,
    columns: int,
    num_heads: int,
    page_size: int,
    device: torch.device,
) -> observe.Plan | None:
    """Plans what a call notes down for `page_mass`; None if no row of few new tokens is watched.

    Args:
        num_new, kv_lens, queries: as in `page_mass.page_mass`.
        columns: of the page table.
    """
    left = np.where(num_new > MOST_QUERIES, queries, 0)
    if (left == queries).all():
        return None
    return observe.plan(num_new, kv_lens, queries, left, columns, num_heads, page_size, device)


def _bounds(num_new: list[int], max_kv: int) -> Bounds:
    return Bounds(len(num_new), sum(num_new), max(num_new), max_kv)


def paged_attention(
    q: Tensor,
    k_pages: Tensor | Pages,
    v_pages: Tensor | Pages,
    page_table: Tensor,
    kv_lens: Tensor,
    query_start_loc: Tensor,
    plan: Plan,
    *,
    watched: observe.Plan | None = None,
    **terms: Any,
) -> tuple[Tensor, Tensor]:
    """Attention as in `reference.paged_attention`, after K and V of the step were written.

    Args:
        plan: from `plan`, the same for every layer of a kind.
        terms: of the scores, as in `Scoring`.
        watched: from `watch`; `page_mass` makes mass of it and the log-sum-exp.

    Raises:
        See `checks.check_call`.
    """
    tensors = q, k_pages, v_pages, page_table, kv_lens, query_start_loc
    scoring = Scoring(**terms)
    check_call(*tensors, plan.geometry, scoring)
    return attend(*tensors, plan, scoring, watched=watched)


def attend(
    q: Tensor,
    k_pages: Tensor | Pages,
    v_pages: Tensor | Pages,
    page_table: Tensor,
    kv_lens: Tensor,
    query_start_loc: Tensor,
    plan: Plan,
    scoring: Scoring,
    chosen: Tensor | None = None,
    watched: observe.Plan | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attends as `paged_attention` does, without its checks.

    Args:
        chosen: `[B, G, columns]`, tables that rows of few new tokens read instead.
        watched: from `watch`; not with a window, chosen tables or prefixes.
        out, lse: where the results go, contiguous and aligned; made unless given.
    """
    tokens, heads, _ = q.shape
    if out is None:
        out = torch.empty((tokens, heads, plan.geometry.v_dim), dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    pages = q, Pages.of(k_pages), Pages.of(v_pages)
    if plan.decode is not None:
        table = page_table if chosen is None else chosen
        rows = table, query_start_loc, plan.decode
        decode.paged_attention(*pages, *rows, scoring, out, lse, watched)
    if plan.prefill is not None:
        prefill.paged_attention(*pages, page_table, plan.prefill, scoring, out, lse)
    return out, lse


def write_kv(
    k: Tensor, v: Tensor, k_pages: Tensor | Pages, v_pages: Tensor | Pages, slots: Tensor
) -> None:
    """Twin of `reference.write_kv`; if V's pages are a view of K's, V is not looked at.

    Raises:
        ValueError: K or V is a view of the pages, or not aligned.
    """
    pools = {_base(x) for one in (k_pages, v_pages) for x in Pages.of(one) if torch.is_tensor(x)}
    # Pages in two storages are no view, so most calls need not look further.
    latent = len(pools) == 1 and is_view_of_k(k_pages, v_pages)
    for name, tensor in (("k", k), ("v", k if latent else v)):
        if _base(tensor) in pools:
            raise ValueError(f"{name}: expected memory of its own, got a view of the pages")
    write.write_kv(k, None if latent else v, k_pages, v_pages, slots)


def _base(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
