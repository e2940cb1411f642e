"""Checks what the Triton kernels serve and rely on, before the first launch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pagedkv.kernels.formats import KV_FORMATS, Format, Pages
from pagedkv.kernels.scoring import Scoring

from .geometry import NOT_THERE, Geometry, Layout
from .launch import ALIGNMENT, check_aligned, in_units, target_of
from .tile import WIDEST

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (*range(16, WIDEST.value + 1, 16), 512)
MOST_LATENT = 576  # columns of K, if V is a view of some
OLDEST = 80  # compute capability 8.0: asynchronous copies, bfloat16
MOST_ON_AMD = 128  # columns, so that tiles fit into 64 KB; coded pages need PTX
FEW_ROWS = 32  # most rows of a product if products of 64 rows may not be added up
K_FORMATS, V_FORMATS = zip(*KV_FORMATS.values())


@functools.cache
def check_supported(geometry: Geometry, device: torch.device) -> None:
    """Raises for heads and pages that no kernel serves, naming the nearest that one does."""
    if geometry.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise NotImplementedError(
            f"dtype: expected one of {names}, got {geometry.dtype}; bfloat16 is the nearest"
        )
    _check_dims(geometry)
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
    for name, layout in (("k_pages", geometry.k), ("v_pages", geometry.v)):
        _check_layout(name, layout, geometry)
    target = target_of(device)
    if geometry.chained and not target.chains and geometry.ratio > FEW_ROWS:
        raise NotImplementedError(
            f"q: expected at most {FEW_ROWS} query heads a KV head with coded keys on compute "
            f"capability 10.x, got {geometry.ratio}; backend='torch' runs there"
        )
    arch = target.arch
    if isinstance(arch, str):
        dense = geometry.k.format.dense and geometry.v.format.dense
        if not dense or geometry.head_dim > MOST_ON_AMD or geometry.dtype == torch.float32:
            raise NotImplementedError(
                f"device: {arch} has kernels for dense pages of 16 bits and head dims up to "
                f"{MOST_ON_AMD} alone; backend='torch' runs there"
            )
    elif 0 < arch < OLDEST:
        raise NotImplementedError(
            f"device: {device} has compute capability {arch / 10}, the oldest with kernels is "
            f"{OLDEST / 10}; backend='torch' runs there"
        )


def _check_dims(geometry: Geometry) -> None:
    """Raises for columns of K and V that no kernel takes."""
    dim, v_dim, rest = geometry.head_dim, geometry.v_dim, geometry.rest
    for name, columns in (("head_dim", dim - rest), ("v_pages' head dim", v_dim)):
        if columns not in HEAD_DIMS:
            nearest = min(HEAD_DIMS, key=lambda each: (abs(each - columns), -each))
            raise NotImplementedError(
                f"{name}: expected a multiple of 16 up to {WIDEST.value}, or {HEAD_DIMS[-1]}, got "
                f"{columns}; {nearest} is the nearest"
            )
    if v_dim > dim:
        raise NotImplementedError(
            f"v_pages: expected at most the head dim of k_pages, {dim}, got {v_dim}"
        )
    if rest and (rest % 16 or dim > MOST_LATENT):
        raise NotImplementedError(
            f"k_pages: expected a multiple of 16 columns up to {MOST_LATENT} where v_pages are a "
            f"view of them, got {dim}, and {v_dim} of V"
        )
    dense = geometry.k.format.dense and geometry.v.format.dense
    if (v_dim != dim or geometry.wide) and not (dense and geometry.staging == NOT_THERE):
        raise NotImplementedError(
            f"kv_format: expected dense pages of head dims {dim} of K and {v_dim} of V, got "
            f"{geometry.k.format.name} and {geometry.v.format.name}; coded ones have one head dim "
            f"up to {WIDEST.value}"
        )


def _check_layout(name: str, layout: Layout, geometry: Geometry) -> None:
    """Raises for a format that has no kernel, or does not fit heads and pages."""
    format, formats = layout.format, K_FORMATS if name == "k_pages" else V_FORMATS
    if format not in formats:
        names = ", ".join(each.name for each in formats)
        raise NotImplementedError(f"{name}: expected a format of {names}, got {format.name}")
    if geometry.head_dim % format.dim_unit:
        raise NotImplementedError(
            f"{name}: expected a head dim that is a multiple of {format.dim_unit} for "
            f"{format.kv_format}, got {geometry.head_dim}; int8 has kernels for it"
        )
    if format.staged and geometry.page % 16:
        raise NotImplementedError(
            f"{name}: expected a page size that is a multiple of 16 for {format.kv_format}, got "
            f"{geometry.page}; int8 has kernels for it"
        )
    if format.scales == "channel" and geometry.staging == NOT_THERE:
        raise ValueError(f"{name}: expected staging pages for tokens of unfinished pages")
    unit, what = (16, "elements") if format.dense else (8, "words")
    layouts = [(layout, unit, what), (geometry.staging, 16, "elements of staging pages")]
    for (_, *strides), unit, what in layouts:
        if any(stride % unit for stride in strides):
            raise ValueError(
                f"{name}: expected strides that are multiples of {unit} {what}, got "
                f"{tuple(strides)}"
            )
        if geometry.num_kv_heads * strides[1] >= 2**31:
            raise ValueError(
                f"{name}: expected heads within 2**31 {what}, got strides {tuple(strides)}"
            )


def check_pages(
    k_pages: Tensor | Pages,
    v_pages: Tensor | Pages | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Raises for pages that no kernel serves.

    Args:
        v_pages: like K's unless given.
        dtype: the queries' dtype; by default that of dense pages.

    Raises:
        NotImplementedError: a head dim, dtype, format or device without a kernel.
        ValueError: pages whose strides no kernel takes.
    """
    data = Pages.of(k_pages).data
    q = torch.empty(0, data.shape[1], 0, dtype=dtype or data.dtype, device="meta")
    check_supported(Geometry.of(q, k_pages, v_pages), data.device)
    for pages in (Pages.of(each) for each in (k_pages, v_pages) if each is not None):
        if pages.scales is not None and pages.scales.data_ptr() % ALIGNMENT:
            raise NotImplementedError(
                f"page_size: expected a multiple of 8 with {pages.format.kv_format}, got "
                f"{pages.data.shape[2]}: scales of some layers would not begin at a multiple of "
                f"{ALIGNMENT} bytes; backend='torch' takes any"
            )


def check_lengths(kv_lens: Tensor, query_start_loc: Tensor) -> None:
    """Raises for lengths that the kernel which cuts a step cannot read."""
    rows = kv_lens.numel()
    _check_ints("kv_lens", kv_lens, (rows,))
    _check_ints("query_start_loc", query_start_loc, (rows + 1,))


def check_call(
    q: Tensor,
    k_pages: Tensor | Pages,
    v_pages: Tensor | Pages,
    page_table: Tensor,
    kv_lens: Tensor,
    query_start_loc: Tensor,
    geometry: Geometry,
    scoring: Scoring,
) -> None:
    """Checks what kernels rely on and a caller can get wrong.

    Args:
        geometry: the geometry that the step was planned for.

    Raises:
        NotImplementedError: a term of the scores that kernels do not compute well.
        ValueError, TypeError: tensors that do not fit together, or are not aligned.
    """
    k, v = Pages.of(k_pages), Pages.of(v_pages)
    found = Geometry.of(q, k, v)
    if found != geometry:
        if found._replace(v=geometry.v, v_dim=geometry.v_dim, rest=geometry.rest) == geometry:
            raise ValueError(
                f"v_pages: expected strides of a {geometry.v}, {_of_v(geometry)}, got a {found.v}, "
                f"{_of_v(found)}"
            )
        raise ValueError(f"plan: expected one for {found}, got one for {geometry}")
    scoring.check_served(q)
    in_units("q", q)
    tables = page_table, kv_lens, query_start_loc
    # A quick check first: the check that explains would cost each layer's call 10 us.
    if _are_fine(q, k, v, geometry.v_dim) and _tables_are_fine(q, *tables) and not scoring.tensors:
        return
    _check_pages(q, k, v)
    _check_tables(q, *tables, dict(scoring.tensors))


def _of_v(geometry: Geometry) -> str:
    what = "a view of k_pages" if geometry.rest else "pages of their own"
    return f"{what} with {geometry.v_dim} columns"


def _are_fine(q: Tensor, k: Pages, v: Pages, v_dim: int) -> bool:
    """Whether `_check_pages` would find nothing wrong; it takes less time."""
    pages, heads, size, _ = k.data.shape
    dtype, device = q.dtype, q.device
    addresses = q.data_ptr()
    for one, dim in ((k, q.shape[2]), (v, v_dim)):
        data, scales, staging = one[1:]
        dense = one.format.dense
        if not (
            data.shape == (pages, heads, size, dim // one.format.per_word)
            and data.dtype is (dtype if dense else torch.int16)
            and data.stride(3) == 1
            and data.device == device
            and (scales is None) is dense
            and (staging is None) is (k.staging is None)
        ):
            return False
        addresses |= data.data_ptr()
        if scales is not None:
            shape = one.format.scales_shape(pages, heads, size, dim)
            kind = _scales_dtype(one.format)
            if not (
                scales.shape == shape
                and scales.dtype is kind
                and scales.is_contiguous()
                and scales.device == device
            ):
                return False
            addresses |= scales.data_ptr()
        if staging is not None:
            assert k.staging is not None
            if not (
                staging.shape == k.staging.shape
                and staging.shape[1:] == (heads, size, dim)
                and staging.shape[0]
                and staging.stride() == k.staging.stride()
                and staging.stride(3) == 1
                and staging.dtype is dtype
                and staging.device == device
            ):
                return False
            addresses |= staging.data_ptr()
    return not addresses % 16


def _scales_dtype(format: Format) -> torch.dtype:
    return torch.float32 if format.static else torch.float16


def _tables_are_fine(
    q: Tensor, page_table: Tensor, kv_lens: Tensor, query_start_loc: Tensor
) -> bool:
    """Whether `_check_tables` would find nothing wrong; it takes less time."""
    rows = kv_lens.shape[0]
    return bool(
        page_table.dtype is kv_lens.dtype is query_start_loc.dtype is torch.int32
        and page_table.ndim == 2
        and page_table.shape[0] == rows
        and query_start_loc.shape == (rows + 1,)
        and page_table.stride(1) == kv_lens.stride(0) == query_start_loc.stride(0) == 1
        and not (page_table.data_ptr() | kv_lens.data_ptr() | query_start_loc.data_ptr()) % 16
        and q.device == page_table.device == kv_lens.device == query_start_loc.device
    )


def _check_pages(q: Tensor, k: Pages, v: Pages) -> None:
    """Raises for pages that do not fit each other, or the queries."""
    dim = q.shape[2]
    if dim != k.head_dim:
        raise ValueError(f"q: expected the head dim of k_pages, {k.head_dim}, got {dim}")
    pages, heads, size, _ = k.data.shape
    for name, one in (("k_pages", k), ("v_pages", v)):
        dense, dim = one.format.dense, one.head_dim
        _check_tensor(
            *(name, one.data, (pages, heads, size, dim // one.format.per_word)),
            *(q.dtype if dense else torch.int16, "the dtype of q" if dense else "words", q.device),
        )
        if (one.scales is None) is not dense:
            raise ValueError(f"{name}: expected scales of coded pages and of no others")
        if one.scales is not None:
            shape = one.format.scales_shape(pages, heads, size, dim)
            where, what = f"{name}.scales", f"scales of {one.format.name}"
            _check_tensor(where, one.scales, shape, _scales_dtype(one.format), what, q.device)
            if not one.scales.is_contiguous():
                raise ValueError(f"{where}: expected to be contiguous, got {one.scales.stride()}")
        if (one.staging is None) is not (k.staging is None):
            raise ValueError("v_pages: expected staging pages where k_pages has some, only there")
        if one.staging is not None:
            assert k.staging is not None
            shape = max(1, k.staging.shape[0]), heads, size, dim
            where = f"{name}.staging"
            _check_tensor(where, one.staging, shape, q.dtype, "the dtype of q", q.device)
            if one.staging.stride() != k.staging.stride():
                raise ValueError(
                    f"{where}: expected the strides of k_pages.staging, {k.staging.stride()}, got "
                    f"{one.staging.stride()}"
                )
    check_aligned(q=q)


def _check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    what: str,
    device: torch.device,
) -> None:
    """Raises for page tensors of another shape, dtype or device."""
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: expected {what}, {dtype}, got {tensor.dtype}")
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected a contiguous last axis, got strides {tensor.stride()}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected the device of q, {device}, got {tensor.device}")
    check_aligned(**{name: tensor})


def _check_tables(
    q: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    query_start_loc: Tensor,
    terms: dict[str, Tensor],
) -> None:
    """Raises for tables, and tensors among the terms of scores, that the kernels cannot read."""
    check_lengths(kv_lens, query_start_loc)
    _check_ints("page_table", page_table, (kv_lens.numel(), page_table.shape[-1]))
    named = {"page_table": page_table, "kv_lens": kv_lens, "query_start_loc": query_start_loc}
    named |= terms
    for name, tensor in named.items():
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected the device of q, {q.device}, got {tensor.device}")
    check_aligned(**named)


def _check_ints(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name}: expected int32, got {tensor.dtype}")
    if tensor.shape != shape or (tensor.numel() and tensor.stride(-1) != 1):
        raise ValueError(
            f"{name}: expected shape {list(shape)}, contiguous along its last axis, got "
            f"{list(tensor.shape)} with strides {tensor.stride()}"
        )
