"""What the Triton kernels serve, and everything they rely on, checked before the first launch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .launch import Geometry, check_aligned, in_units, target_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = range(16, 257, 16)
OLDEST = 80  # compute capability 8.0: asynchronous copies, bfloat16
SOFTCAPS = (1e-3, 1e3)  # beyond, tanh by exponentials has too few digits


@functools.cache
def check_supported(geometry: Geometry, device: torch.device) -> None:
    """Raises for heads and pages that no kernel serves, naming the nearest that one does."""
    if geometry.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise NotImplementedError(
            f"dtype: expected one of {names}, got {geometry.dtype}; bfloat16 is the nearest"
        )
    if geometry.head_dim not in HEAD_DIMS:
        nearest = min(HEAD_DIMS, key=lambda dim: (abs(dim - geometry.head_dim), -dim))
        raise NotImplementedError(
            f"head_dim: expected a multiple of 16 up to 256, got {geometry.head_dim}; "
            f"{nearest} is the nearest"
        )
    if geometry.num_heads % geometry.num_kv_heads:
        raise ValueError(
            f"q: expected a multiple of {geometry.num_kv_heads} heads, got {geometry.num_heads}"
        )
    most = geometry.most_ratio
    if geometry.ratio > most:
        raise NotImplementedError(
            f"q: expected at most {most} query heads a KV head of head dim {geometry.head_dim} in "
            f"{geometry.dtype}, got {geometry.ratio}"
        )
    strides = geometry.stride_n, geometry.stride_g, geometry.stride_p
    if any(stride % 16 for stride in strides):
        raise ValueError(
            f"k_pages: expected strides that are multiples of 16 elements, got {strides}"
        )
    if geometry.num_kv_heads * geometry.stride_g >= 2**31:
        raise ValueError(f"k_pages: expected heads within 2**31 elements, got strides {strides}")
    arch = target_of(device).arch
    if 0 < arch < OLDEST:
        raise NotImplementedError(
            f"device: {device} has compute capability {arch / 10}, the oldest with kernels is "
            f"{OLDEST / 10}; backend='torch' runs there"
        )


def check_pages(pages: Tensor, _: Tensor | None = None) -> None:
    """Raises NotImplementedError for K and V pages `[N, G, P, D]` that no kernel serves."""
    check_supported(Geometry.of(pages[:, :, 0], pages), pages.device)


def check_lengths(kv_lens: Tensor, query_start_loc: Tensor) -> None:
    """Raises for lengths that the kernel which cuts a step cannot read."""
    rows = kv_lens.numel()
    _check_ints("kv_lens", kv_lens, (rows,))
    _check_ints("query_start_loc", query_start_loc, (rows + 1,))


def check_call(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    query_start_loc: Tensor,
    geometry: Geometry,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Checks what kernels rely on and a caller can get wrong.

    Args:
        geometry: that the step was planned for.

    Raises:
        NotImplementedError: a softcap that the kernels' tanh is not good for.
        ValueError, TypeError: tensors that do not fit together, or are not aligned.
    """
    if Geometry.of(q, k_pages) != geometry:
        raise ValueError(
            f"plan: expected one for {Geometry.of(q, k_pages)}, got one for {geometry}"
        )
    if softcap is not None and not SOFTCAPS[0] <= softcap <= SOFTCAPS[1]:
        raise NotImplementedError(
            f"softcap: expected {SOFTCAPS[0]} to {SOFTCAPS[1]}, got {softcap}; backend='torch' "
            "takes any"
        )
    in_units("q", q)
    tables = page_table, kv_lens, query_start_loc
    if not _is_fine(q, k_pages, v_pages, *tables) or sinks is not None:
        _check(q, k_pages, v_pages, *tables, sinks)


def _is_fine(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    query_start_loc: Tensor,
) -> bool:
    """What `_check` finds out in words, in one go: a layer's call should not cost 10 us of that."""
    rows, strides = kv_lens.shape[0], k_pages.stride()
    return bool(
        k_pages.shape == v_pages.shape
        and q.shape[2] == k_pages.shape[3]
        and strides == v_pages.stride()
        and k_pages.dtype is v_pages.dtype is q.dtype
        and page_table.dtype is kv_lens.dtype is query_start_loc.dtype is torch.int32
        and page_table.ndim == 2
        and page_table.shape[0] == rows
        and query_start_loc.shape == (rows + 1,)
        and page_table.stride(1) == kv_lens.stride(0) == query_start_loc.stride(0) == 1
        and strides[3] == 1
        and not (q.data_ptr() | k_pages.data_ptr() | v_pages.data_ptr()) % 16
        and not (page_table.data_ptr() | kv_lens.data_ptr() | query_start_loc.data_ptr()) % 16
        and q.device == k_pages.device == v_pages.device == page_table.device
        and q.device == kv_lens.device == query_start_loc.device
    )


def _check(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    query_start_loc: Tensor,
    sinks: Tensor | None,
) -> None:
    """Raises for what the kernels rely on and a caller can get wrong."""
    if k_pages.shape != v_pages.shape or k_pages.stride() != v_pages.stride():
        raise ValueError(
            "v_pages: expected the shape and strides of k_pages, "
            f"{list(k_pages.shape)} and {k_pages.stride()}, got {list(v_pages.shape)} and "
            f"{v_pages.stride()}"
        )
    if q.shape[2] != k_pages.shape[3]:
        raise ValueError(
            f"q: expected the head dim of k_pages, {k_pages.shape[3]}, got {q.shape[2]}"
        )
    if k_pages.dtype != q.dtype or v_pages.dtype != q.dtype:
        raise TypeError(
            f"k_pages, v_pages: expected the dtype of q, {q.dtype}, got {k_pages.dtype} and "
            f"{v_pages.dtype}"
        )
    if k_pages.stride(3) != 1:
        raise ValueError(
            f"k_pages: expected a contiguous last axis, got strides {k_pages.stride()}"
        )
    check_lengths(kv_lens, query_start_loc)
    _check_ints("page_table", page_table, (kv_lens.numel(), page_table.shape[-1]))
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.stride(0) != 1):
        raise ValueError(
            f"sinks: expected a contiguous [H] = [{q.shape[1]}], got {list(sinks.shape)} with "
            f"strides {sinks.stride()}"
        )
    named = {"k_pages": k_pages, "v_pages": v_pages, "page_table": page_table}
    named |= {"kv_lens": kv_lens, "query_start_loc": query_start_loc}
    if sinks is not None:
        named["sinks"] = sinks
    for name, tensor in named.items():
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected the device of q, {q.device}, got {tensor.device}")
    check_aligned(q=q, **named)


def _check_ints(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name}: expected int32, got {tensor.dtype}")
    if tensor.shape != shape or (tensor.numel() and tensor.stride(-1) != 1):
        raise ValueError(
            f"{name}: expected shape {list(shape)}, contiguous along its last axis, got "
            f"{list(tensor.shape)} with strides {tensor.stride()}"
        )
