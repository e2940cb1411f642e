"""The codes of a format, as its words and scales hold them: made of elements, and elements of them.

The torch backend runs these functions and the Triton kernels are held against them; `formats.py`
says what words and scales mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkv.kernels.formats import Format

FP16_MAX = 65504.0


def encode(x: Tensor, format: Format, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes `[..., P, D]` in any float dtype; P tokens are a page where channels have scales.

    Args:
        scale: the static one, `[G, 1, 1]`.

    Returns:
        Words `[..., P, D / 2 or 4]` and scales: `[..., P]`, `[..., P, 2]` or `[..., D, 2]`; the
        scale given if it is static.
    """
    x = x.float()
    if format.code == "e4m3":
        assert scale is not None
        largest = format.largest
        codes = (x / scale).clamp(-largest, largest).to(torch.float8_e4m3fn)
        return _pack(codes.view(torch.uint8), format.bits), scale
    if format.code == "signed":
        most = 2 ** (format.bits - 1) - 1
        scales = (x.abs().amax(-1) / most).clamp(max=FP16_MAX).half()
        codes = (x / _divisor(scales).unsqueeze(-1)).round_().clamp_(-most, most)
        return _pack((codes + (most + 1)).to(torch.uint8), format.bits), scales
    axis, most = -2 if format.scales == "channel" else -1, 2**format.bits - 1
    scales = step_and_minimum(x, axis, most)
    step, least = scales.unbind(-1)
    codes = (x - least.float().unsqueeze(axis)) / _divisor(step).unsqueeze(axis)
    codes = codes.round_().clamp_(0, most)
    return _pack(codes.to(torch.uint8), format.bits), scales


def step_and_minimum(x: Tensor, axis: int, most: int = 15) -> Tensor:
    """Scales of codes 0 to `most` along an axis, in the place of which come the two numbers.

    Returns:
        `[..., 2]` float16.
    """
    least = x.amin(axis).float().clamp(-FP16_MAX, FP16_MAX).half()
    step = ((x.amax(axis).float() - least.float()) / most).clamp(0, FP16_MAX).half()
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
    words: Tensor, scales: Tensor, format: Format, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """The values `[..., P, D]` that `encode` made words and scales of, in `dtype`.

    Args:
        scales: as `encode` returns them.
        out: where to put them.
    """
    n, bits = format.per_word, format.bits
    width = words.shape[-1]
    if out is None:
        out = torch.empty(*words.shape[:-1], n * width, dtype=dtype, device=words.device)
    wide = scales.float()
    if format.code == "signed":
        # Flipping its highest bit turns a code + 128 into the code, as a signed byte.
        words = words ^ -0x7F80
    for i in range(n):
        part = slice(i * width, (i + 1) * width)
        values = out[..., part]
        if format.code == "signed":
            codes = words >> 8 if i else words << 8 >> 8  # whole words: bytes are taken one by one
            values.copy_(codes.float().mul_(wide.unsqueeze(-1)))
        elif format.code == "e4m3":
            values.copy_(_e4m3(words >> 8 if i else words).float().mul_(wide * 256))
        else:
            codes = (words >> (bits * i)) & (2**bits - 1)
            if format.scales == "token":
                step, least = wide.unsqueeze(-2).unbind(-1)  # [..., P, 1]
            else:
                step, least = wide[..., part, :].unsqueeze(-3).unbind(-1)  # [..., 1, part]
            values.copy_(torch.addcmul(least, codes.float(), step))
    return out


def _e4m3(codes: Tensor) -> Tensor:
    """The low bytes of words as float16, divided by 256: exponent and mantissa, moved in place."""
    values = ((codes & 0x7F) << 7 | (codes & 0x80) << 8).view(torch.float16)
    return values.masked_fill_((codes & 0x7F) == 0x7F, torch.nan)
