"""Writes coded pages in C: the twin of the torch kernels' file of this name.

`write.h` explains how. Torch copies and decodes pages.
"""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from pagedkv.kernels.formats import Pages

from .library import library
from .pages import CPages, address_of, in_c, side_by_side


class Write(Structure):
    """The arguments of a write, as `Write` in write.h."""

    _fields_ = [
        ("pages", CPages),
        *((name, c_void_p) for name in ("x", "from", "to")),
        *((name, c_int64) for name in ("unit", "token", "head", "count", "groups", "page_size")),
        *((name, c_int32) for name in ("whole", "threads")),
    ]


def write_kv(k: Tensor, v: Tensor, k_pages: Pages, v_pages: Pages, slots: Tensor) -> None:
    """Twin of `reference.write_kv`, for slots that are all >= 0."""
    _run(*(of_step(*half, None, slots, whole=False) for half in ((k, k_pages), (v, v_pages))))


def write_pages(
    k: Tensor, v: Tensor, k_pages: Pages, v_pages: Pages, first_token: Tensor, target: Tensor
) -> None:
    """Twin of `reference.write_pages`."""
    halves = (k, k_pages), (v, v_pages)
    _run(*(of_step(*half, first_token, target, whole=True) for half in halves))


def encode_pages(k_pages: Pages, v_pages: Pages, source: Tensor, target: Tensor) -> None:
    """Twin of `reference.encode_pages`."""
    source = source - k_pages.data.shape[1]
    writes = []
    for layer in range(k_pages.data.shape[0]):
        for pages in (k_pages, v_pages):
            one = pages.each(lambda x: x[layer])  # noqa: B023
            assert one.staging is not None
            page, head, token, _ = one.staging.stride()
            writes.append(_write(one.staging, one, (page, token, head), source, target, True))
    _run(*writes)


def of_step(x: Tensor, pages: Pages, source: Tensor | None, target: Tensor, whole: bool) -> Write:
    """Describes a write of new tokens `[T, G, D]`."""
    x = side_by_side(x)
    token, head, _ = x.stride()
    return _write(x, pages, (token, token, head), source, target, whole)


def _write(
    x: Tensor,
    pages: Pages,
    steps: tuple[int, int, int],
    source: Tensor | None,
    target: Tensor,
    whole: bool,
) -> Write:
    """Describes a write from `x` into pages of one layer.

    Args:
        steps: elements of `x` from one source, one token, one head to the next.
        source: `[n]` int64; None for 0, 1, 2 and so on.
        target: `[n]` int64, ids of pages if they are written whole, else slots.
    """
    source = source if source is None else source.contiguous()
    target = target.contiguous()
    write = Write(
        in_c(pages, x.dtype),
        *map(address_of, (x, source, target)),
        *(*steps, len(target), *pages.data.shape[1:3], whole, torch.get_num_threads()),
    )
    write.kept = x, source, target  # kept alive, because C reads them
    return write


def _run(*writes: Write) -> None:
    library().write_pages((Write * len(writes))(*writes), c_int64(len(writes)))
