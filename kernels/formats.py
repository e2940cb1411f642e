"""The formats of K and V, as data for all code that holds, counts, moves or reads pages.

A format is one `Format`; a user chooses a pair of them in `KV_FORMATS`. The arithmetic is
elsewhere: `torch/codes.py` and `triton/codes.py` make codes of elements, and elements of codes.
Nothing here imports torch or Triton, so that configurations and plans can use it.

A page tensor of a format consists of words and scales. Words are int16 and hold several elements
of one token, split over its head dim, so that unpacking a row of words gives contiguous runs of
elements:

| format          | word c holds elements (lowest bits first) | scales, of each layer          |
|-----------------|-------------------------------------------|--------------------------------|
| `fp8`           | c, c + D/2 (e4m3 bits)                    | float32 `[G]`, static          |
| `int8`          | c, c + D/2 (code + 128)                   | float16 `[N, G, P]`            |
| `int4_token`    | c, c + D/4, c + D/2, c + 3D/4             | float16 `[N, G, P, 2]`         |
| `int4_channel`  | the same                                  | float16 `[N, G, D, 2]`         |

The two numbers of a 4-bit scale are the step and the minimum: x = step * code + minimum, codes 0
to 15. `int8` is x = scale * code, codes -127 to 127; `fp8` is x = scale * e4m3. Scales are rounded
before codes are chosen, so the error of an element is at most half a step and its rounding.

4-bit K is coded per channel over a whole page, because keys have channels of very different size;
4-bit V per token. Both need pages that are complete, so pages still being written, and the first
page of a text, are *staging pages*: they keep the dtype of the model in a tensor of their own, and
their ids follow those of the coded pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

WORD_BITS = 16


@dataclass(frozen=True, eq=False)  # equal if the same object: hashed at every launch
class Format:
    """How K, or V, is kept.

    Triton's caches find a kernel by all fields of its formats, because it is compiled for them.

    Attributes:
        name: what pages, kernels and errors call it.
        kv_format: the key of `KV_FORMATS` whose pair has it.
        code: what codes are: `e4m3` numbers; `signed`, x = scale * code; `ranged`, x = step * code
            + minimum; empty for elements in the dtype of the model.
        bits: bits of a code; 0 without codes.
        scales: what has a scale of its own: each `head`, for good (*static*), each `token`, or each
            `channel` of a page, which is then coded as a whole; empty without scales.
        staged: pages that are not complete are staging pages.
        bias: the bias of exponents, if codes are floats.
        largest: the largest number that a code can be; 0 if scales make all numbers fit.
        no_number: a word of codes that are NaN; 0 if every code is a number.
    """

    name: str
    kv_format: str
    code: str = ""
    bits: int = 0
    scales: str = ""
    staged: bool = False
    bias: int = 0
    largest: float = 0.0
    no_number: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (self.name,)

    @property
    def dense(self) -> bool:
        """Whether elements are in the dtype of the model."""
        return not self.code

    @property
    def static(self) -> bool:
        """Whether scales belong to no page."""
        return self.scales == "head"

    @property
    def pairs(self) -> bool:
        """Whether a scale is two numbers, a step and a minimum."""
        return self.code == "ranged"

    @property
    def per_word(self) -> int:
        """Elements of a word; 1 if dense, because elements then take the place of words."""
        return 1 if self.dense else WORD_BITS // self.bits

    @property
    def dim_unit(self) -> int:
        """The unit of head dims: a row of words is then a multiple of 16 bytes."""
        return 8 * self.per_word

    @property
    def says_bounds(self) -> bool:
        """Whether scales are the bounds of a page's channels as `select_pages.py` reads them."""
        return self.scales == "channel" and self.pairs and self.bits == 4

    def scales_shape(
        self, pages: int, heads: int, page_size: int, head_dim: int
    ) -> tuple[int, ...]:
        """Shape of a layer's scales, which are float32 if static, else float16."""
        if self.static:
            return (heads,)
        each = page_size if self.scales == "token" else head_dim
        return (pages, heads, each, 2) if self.pairs else (pages, heads, each)

    def nbytes(self, page_size: int, head_dim: int, itemsize: int) -> int:
        """Bytes of a page and head, with the scales that belong to a page.

        Args:
            itemsize: bytes of an element in the dtype of the model.
        """
        if self.dense:
            return page_size * head_dim * itemsize
        numbers = 0 if self.static else prod(self.scales_shape(1, 1, page_size, head_dim))
        return page_size * head_dim * self.bits // 8 + 2 * numbers


DENSE = Format("dense", "dense")
FP8 = Format("fp8", "fp8", "e4m3", 8, "head", bias=7, largest=448.0, no_number=0x7F7F)
INT8 = Format("int8", "int8", "signed", 8, "token")
INT4_TOKEN = Format("int4_token", "int4", "ranged", 4, "token", staged=True)
INT4_CHANNEL = Format("int4_channel", "int4", "ranged", 4, "channel", staged=True)

# The values that `kv_format` may have, and the formats of K and of V that each means.
KV_FORMATS = {
    "dense": (DENSE, DENSE),
    "fp8": (FP8, FP8),
    "int8": (INT8, INT8),
    "int4": (INT4_CHANNEL, INT4_TOKEN),
}
FORMATS = {half.name: half for pair in KV_FORMATS.values() for half in pair}


def _named(name: str) -> Format:
    return FORMATS[name]


class Pages(NamedTuple):
    """K or V pages of one layer.

    Attributes:
        data: `[N, G, P, D]` in the dtype of the model if dense, else words `[N, G, P, D / 2 or 4]`.
        scales: see the table above; None if dense.
        staging: `[S, G, P, D]` in the dtype of the model: pages N to N + S - 1; None without any.
    """

    format: Format
    data: Tensor
    scales: Tensor | None = None
    staging: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(N + S, G, P, D)`: that of the values, for ids of both kinds of pages."""
        pages, heads, size, width = self.data.shape
        if self.staging is not None:
            pages += self.staging.shape[0]
        return pages, heads, size, width * self.format.per_word

    def head(self, index: int) -> Pages:
        """One KV head of one layer's pages, as if there were no other."""
        one = slice(index, index + 1)
        staging = None if self.staging is None else self.staging[:, one]
        scales = self.scales
        if scales is not None:
            scales = scales[one] if self.format.static else scales[:, one]
        return Pages(self.format, self.data[:, one], scales, staging)

    @classmethod
    def of(cls, pages: Tensor | Pages) -> Pages:
        """Takes pages as they are, and a tensor as dense pages without staging pages."""
        return pages if isinstance(pages, Pages) else cls(DENSE, pages)

    def each(self, change: Callable[[Tensor], Tensor]) -> Pages:
        """Returns pages with every tensor changed by one function."""
        scales, staging = (None if x is None else change(x) for x in self[2:])
        return Pages(self.format, change(self.data), scales, staging)

    @property
    def head_dim(self) -> int:
        return self.shape[3]


def is_view_of_k(k_pages: Tensor | Pages, v_pages: Tensor | Pages) -> bool:
    """Whether V's pages are the first columns of K's, and so kept, written and read with them."""
    k, v = Pages.of(k_pages), Pages.of(v_pages)
    return (
        k.format.dense
        and v.format.dense
        and k.data.data_ptr() == v.data.data_ptr()
        and k.data.stride() == v.data.stride()
        and k.data.shape[:3] == v.data.shape[:3]
        and k.data.shape[3] >= v.data.shape[3]
    )
