"""Kernels are compiled for these: a device, the shape of heads, and the layout of pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from pagedkv.kernels.formats import DENSE, Format, Pages, is_view_of_k

from .tile import WIDEST

QUERY_BYTES = 32 << 10  # of a tile: a third of a consumer card's shared memory
MOST_RATIO = 128  # query heads a KV head


class Target(NamedTuple):
    """The device that kernels are tuned for, and the sizes that fixed grids depend on.

    Attributes:
        device: its number; -1 for the interpreter.
        arch: compute capability, 90 for 9.0; 0 for the interpreter; a name, "gfx942", for AMD's.
        shared: bytes of shared memory that a block can have.
        processors: streaming multiprocessors.
    """

    device: int
    arch: int | str
    shared: int
    processors: int

    @property
    def roomy(self) -> bool:
        """More shared memory than consumer cards have (99 KiB a block)."""
        return self.shared > 128 << 10

    @property
    def chains(self) -> bool:
        """Whether products of 64 rows may be added up: Triton compiles that wrongly for 10.x.

        There the tensor memory holds such sums (triton#10821, up to 3.8); fewer rows use none.
        """
        return self.arch not in range(100, 110)


class Layout(NamedTuple):
    """Where the slots of K or of V pages lie; strides in elements, or in words."""

    format: Format
    stride_n: int
    stride_g: int
    stride_p: int

    @classmethod
    def of(cls, format: Format, data: Tensor) -> Layout:
        return cls(format, *data.stride()[:3])


@dataclass(frozen=True)
class Half:
    """Pages, or staging pages, of K or V, as kernels are compiled for them: a constexpr argument.

    No tuple, because Triton from 3.8 on gives kernels a tuple of its own, without our properties.

    Attributes:
        stride_n, stride_g, stride_p: as in `Layout`.
        dim: columns of a head, without `rest`.
        rest: columns of K behind those that V is a view of, which make a part of their own; or 0.
    """

    format: Format
    stride_n: int
    stride_g: int
    stride_p: int
    dim: int
    rest: int = 0

    @classmethod
    def of(cls, format: Format, data: Tensor, dim: int, rest: int = 0) -> Half:
        """Reads the strides off pages, of a layer or of all."""
        stride_n, stride_g, stride_p, _ = data.stride()[-4:]
        return cls(format, stride_n, stride_g, stride_p, dim, rest)

    @property
    def parts(self) -> int:
        """The number of parts of the head dim in an unpacked tile; `rest` is one more."""
        return self.format.per_word * -(-self.dim // WIDEST.value)  # only dense pages are wider

    @property
    def width(self) -> int:
        """Columns of a part."""
        return self.dim // self.parts

    @property
    def block(self) -> int:
        """Columns of a part, padded: a product takes 16 elements and more."""
        return max(16, triton.next_power_of_2(self.width))


NOT_THERE = Layout(DENSE, 0, 0, 0)


class Geometry(NamedTuple):
    """Heads and pages, as kernels are compiled for them.

    Attributes:
        head_dim, v_dim: columns of K, and of V.
        staging: of K and of V alike; `NOT_THERE` without any.
        dtype: of queries, and of pages that are not coded.
        rest: columns of K behind those that V is a view of; 0 if V is pages of its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page: int
    k: Layout
    v: Layout
    staging: Layout
    dtype: torch.dtype
    v_dim: int
    rest: int = 0

    @classmethod
    def of(
        cls, q: Tensor, k_pages: Tensor | Pages, v_pages: Tensor | Pages | None = None
    ) -> Geometry:
        """Reads the geometry off queries `[T, H, D]` and pages; V's are like K's unless given."""
        k = Pages.of(k_pages)
        v = k if v_pages is None else Pages.of(v_pages)
        staging = NOT_THERE if k.staging is None else Layout.of(DENSE, k.staging)
        _, kv_heads, page, width = k.data.shape
        dim, v_dim = width * k.format.per_word, v.data.shape[3] * v.format.per_word
        rest = dim - v_dim if v_dim < dim and is_view_of_k(k, v) else 0
        layouts = Layout.of(k.format, k.data), Layout.of(v.format, v.data), staging
        return cls(q.shape[1], kv_heads, dim, page, *layouts, q.dtype, v_dim, rest)

    @property
    def ratio(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def bits(self) -> int:
        """The fewest bits of an element of K or V."""
        return 16 // max(self.k.format.per_word, self.v.format.per_word)

    @property
    def chained(self) -> bool:
        """Whether a score of a narrow head is added up from several products of tensor cores."""
        return self.k.format.per_word > 1 and self.dtype.itemsize == 2

    @property
    def padded(self) -> int:
        """The head dim that tuning tables know it by."""
        return max(64, triton.next_power_of_2(self.head_dim))

    @property
    def wide(self) -> bool:
        """Whether the query heads of a KV head may fall into several tiles."""
        return self.head_dim > WIDEST.value

    @property
    def most_ratio(self) -> int:
        """The most query heads a KV head that are served; rows of one product if it is not wide."""
        if self.wide:
            return MOST_RATIO
        row = triton.next_power_of_2(self.head_dim) * self.dtype.itemsize
        return min(MOST_RATIO, QUERY_BYTES // row)

    def heads(self, rows: int) -> int:
        """Returns query heads of a KV head in a tile of `rows` rows: equal shares of them."""
        return -(-self.ratio // -(-self.ratio // rows)) if self.wide else self.ratio

    def block_n(self, most: int) -> int:
        """Returns tokens a tile, at most `most`; none spans pages whose K has scales of its own."""
        return min(most, self.page & -self.page) if self.k.format.scales == "channel" else most

    def staging_n(self, block_n: int) -> int:
        """Tokens a tile of staging pages: within one page, because there are one or two of them."""
        return min(block_n, 16, self.page & -self.page)

    def static(self) -> dict[str, Any]:
        """The constexpr arguments that attention kernels take of it."""
        return {
            "NUM_HEADS": self.num_heads,
            "NUM_KV_HEADS": self.num_kv_heads,
            "PAGE": self.page,
            "K": Half(*self.k, self.head_dim - self.rest, self.rest),
            "V": Half(*self.v, self.v_dim),
            "STAGING": Half(*self.staging, self.v_dim),
        }


def pointers(k: Pages, v: Pages) -> tuple[Tensor | None, ...]:
    """The tensors of both, in the order in which attention kernels take them."""
    return k.data, v.data, k.scales, v.scales, k.staging, v.staging
