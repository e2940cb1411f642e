"""Encodes elements as words and scales of a format, and decodes them.

The torch backend runs these functions, and the Triton kernels are compared with them; `formats.py`
says what words and scales mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkv.kernels.formats import Format

FP16_MAX = 65504.0


def encode(x: Tensor, format: Format, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes `[..., P, D]` in any float dtype; P tokens are a page if channels have scales.

    Args:
        scale: the static scale, `[G, 1, 1]`.

    Returns:
        Words `[..., P, D / 2 or 4]` and scales: `[..., P]`, `[..., P, 2]` or `[..., D, 2]`; the
        given scale if it is static.
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
    """Returns the scales of codes 0 to `most`, step and minimum, over an axis, which is reduced.

    Returns:
        `[..., 2]` float16.
    """
    least = x.amin(axis).float().clamp(-FP16_MAX, FP16_MAX).half()
    step = ((x.amax(axis).float() - least.float()) / most).clamp(0, FP16_MAX).half()
    return torch.stack([step, least], -1)


def _divisor(scale: Tensor) -> Tensor:
    """Returns a scale's divisor: infinity for 0 (elements alike or tiny), which makes codes 0."""
    scale = scale.float()
    return scale.masked_fill(scale == 0, torch.inf)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Packs uint8 codes into words; a word has elements from each part of the last axis."""
    parts = codes.to(torch.int32).chunk(16 // bits, -1)
    words = parts[0].clone()
    for i, part in enumerate(parts[1:], 1):
        words |= part << (bits * i)
    return words.to(torch.int16)


def decode(
    words: Tensor, scales: Tensor, format: Format, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Decodes words and scales of `encode` to values `[..., P, D]`, in `dtype`.

    Args:
        scales: as `encode` returns them.
        out: tensor that takes the values; made unless given.
    """
    width = words.shape[-1]
    if out is None:
        shape = *words.shape[:-1], format.per_word * width
        out = torch.empty(shape, dtype=dtype, device=words.device)
    # Codes become float32 in the place of the values, and are scaled there: a temporary of words is
    # at most a quarter as wide as one of values.
    values = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    for i, part in enumerate(values.split(width, -1)):
        part.copy_(_codes(words, i, format))
    if format.pairs:
        axis = -2 if format.scales == "channel" else -1
        # Made contiguous, because torch scales numbers with a stride of two one by one.
        step, least = scales.movedim(-1, 0).contiguous().float()
        values.mul_(step.unsqueeze(axis)).add_(least.unsqueeze(axis))
    elif format.static:
        values.mul_(scales * 256)
    else:
        values.mul_(scales.float().unsqueeze(-1))
    return out if out is values else out.copy_(values)


def _codes(words: Tensor, i: int, format: Format) -> Tensor:
    """Returns codes of words' elements i, int16 or float16; e4m3 numbers are divided by 256."""
    if format.code == "ranged":
        return (words >> (format.bits * i)).bitwise_and_(2**format.bits - 1)
    # The byte is moved to the top, so that a shift extends its sign.
    top = words if i else words << 8
    if format.code == "signed":
        # Flipping its highest bit turns a code + 128 into the code, as a signed byte.
        return (top ^ -0x8000).bitwise_right_shift_(8)
    # Exponent and mantissa move to their places in a float16, of which 480 is e4m3's NaN.
    bits = (top >> 1).bitwise_and_(-0x4080)
    return bits.bitwise_or_((bits + 0x80).bitwise_and_(0x4000)).view(torch.float16)
