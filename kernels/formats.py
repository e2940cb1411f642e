"""How K and V are kept in fewer bits: encode and decode, in plain torch.

The torch backend runs these functions and the Triton kernels are held against them. A page tensor
of a format consists of words and scales. Words are int16 and hold several elements of one token,
split over its head dim, so that unpacking a row of words gives contiguous runs of elements:

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
from typing import NamedTuple

import torch
from torch import Tensor

E4M3_MAX = 448.0
FP16_MAX = 65504.0
PER_WORD = {"fp8": 2, "int8": 2, "int4_token": 4, "int4_channel": 4}


class Pages(NamedTuple):
    """K or V pages of one layer.

    Attributes:
        format: `dense`, or a key of `PER_WORD`.
        data: `[N, G, P, D]` in the dtype of the model if dense, else words `[N, G, P, D / 2 or 4]`.
        scales: see the table above; None if dense.
        staging: `[S, G, P, D]` in the dtype of the model: pages N to N + S - 1; None without any.
    """

    format: str
    data: Tensor
    scales: Tensor | None = None
    staging: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(N + S, G, P, D)`: that of the values, for ids of both kinds of pages."""
        pages, heads, size, width = self.data.shape
        if self.staging is not None:
            pages += self.staging.shape[0]
        return pages, heads, size, width * PER_WORD.get(self.format, 1)

    def head(self, index: int) -> Pages:
        """One KV head of one layer's pages, as if there were no other."""
        one = slice(index, index + 1)
        staging = None if self.staging is None else self.staging[:, one]
        scales = self.scales
        if scales is not None:
            scales = scales[one] if self.format == "fp8" else scales[:, one]
        return Pages(self.format, self.data[:, one], scales, staging)

    @classmethod
    def of(cls, pages: Tensor | Pages) -> Pages:
        """As they are, or dense ones without staging pages."""
        return pages if isinstance(pages, Pages) else cls("dense", pages)

    def each(self, change: Callable[[Tensor], Tensor]) -> Pages:
        """With every tensor changed alike."""
        scales, staging = (None if x is None else change(x) for x in self[2:])
        return Pages(self.format, change(self.data), scales, staging)

    @property
    def head_dim(self) -> int:
        return self.shape[3]


def encode(x: Tensor, format: str, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes `[..., P, D]` in any float dtype; P tokens are a page for `int4_channel`.

    Args:
        scale: of `fp8`, `[G, 1, 1]`.

    Returns:
        Words `[..., P, D / 2 or 4]` and scales: `[..., P]`, `[..., P, 2]` or `[..., D, 2]`; for
        `fp8` the scale given.
    """
    x = x.float()
    if format == "fp8":
        assert scale is not None
        codes = (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return _pack(codes.view(torch.uint8), 8), scale
    if format == "int8":
        scales = (x.abs().amax(-1) / 127).clamp(max=FP16_MAX).half()
        codes = (x / _divisor(scales).unsqueeze(-1)).round_().clamp_(-127, 127)
        return _pack((codes + 128).to(torch.uint8), 8), scales
    axis = -2 if format == "int4_channel" else -1
    scales = step_and_minimum(x, axis)
    step, least = scales.unbind(-1)
    codes = (x - least.float().unsqueeze(axis)) / _divisor(step).unsqueeze(axis)
    codes = codes.round_().clamp_(0, 15)
    return _pack(codes.to(torch.uint8), 4), scales


def step_and_minimum(x: Tensor, axis: int) -> Tensor:
    """Scales of 4 bits along an axis, in the place of which come the two: `[..., 2]` float16."""
    least = x.amin(axis).float().clamp(-FP16_MAX, FP16_MAX).half()
    step = ((x.amax(axis).float() - least.float()) / 15).clamp(0, FP16_MAX).half()
    return torch.stack([step, least], -1)


def _divisor(scale: Tensor) -> Tensor:
    """A scale of 0 (all elements are alike, or too small) makes codes of 0, not NaN."""
    scale = scale.float()
    return scale.masked_fill(scale == 0, torch.inf)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Words of uint8 codes, split over the last axis."""
    parts = codes.to(torch.int32).chunk(16 // bits, -1)
    words = parts[0].clone()
    for i, part in enumerate(parts[1:], 1):
        words |= part << (bits * i)
    return words.to(torch.int16)


def decode(
    words: Tensor, scales: Tensor, format: str, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """The values `[..., P, D]` that `encode` made words and scales of, in `dtype`.

    Args:
        scales: as `encode` returns them.
        out: where to put them.
    """
    n = PER_WORD[format]
    width = words.shape[-1]
    if out is None:
        out = torch.empty(*words.shape[:-1], n * width, dtype=dtype, device=words.device)
    wide = scales.float()
    if format == "int8":
        # Flipping its highest bit turns a code + 128 into the code, as a signed byte.
        words = words ^ -0x7F80
    for i in range(n):
        part = slice(i * width, (i + 1) * width)
        values = out[..., part]
        if format == "int8":
            codes = words >> 8 if i else words << 8 >> 8  # whole words: bytes are taken one by one
            values.copy_(codes.float().mul_(wide.unsqueeze(-1)))
        elif format == "fp8":
            values.copy_(_e4m3(words >> 8 if i else words).float().mul_(wide * 256))
        else:
            codes = (words >> (4 * i)) & 0xF
            if format == "int4_token":
                step, least = wide.unsqueeze(-2).unbind(-1)  # [..., P, 1]
            else:
                step, least = wide[..., part, :].unsqueeze(-3).unbind(-1)  # [..., 1, part]
            values.copy_(torch.addcmul(least, codes.float(), step))
    return out


def _e4m3(codes: Tensor) -> Tensor:
    """The low bytes of words as float16, divided by 256: exponent and mantissa, moved in place."""
    values = ((codes & 0x7F) << 7 | (codes & 0x80) << 8).view(torch.float16)
    return values.masked_fill_((codes & 0x7F) == 0x7F, torch.nan)
