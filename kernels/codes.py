"""Device functions: words of several codes, taken apart where a product needs them, and made.

Words of `formats.py` hold elements of one token that lie a part of the head dim apart, so a part
of a tile of words is a tile of neighbouring elements. Integer codes become floats by their bits,
not by conversions, which are slow and one at a time: a code in the mantissa of 2^7 (bfloat16) or
of 2^10 (float16) is that power and the code, exactly. Codes are exact in any of the dtypes, so K
is multiplied with queries in theirs and nothing is rounded twice.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unpack(words, PART: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Part of the codes in a tile of words, less what they are biased by; of fp8 see `fp8_unit`.

    No code is NaN or infinite, whatever the words: what nobody wrote may be multiplied by zero.
    """
    if FORMAT == "fp8":
        # Sign, exponent and mantissa in their places, under the exponent's smaller bias.
        codes = words >> (8 * PART)
        if dtype == tl.bfloat16:
            return ((codes & 0x7F) << 4 | (codes & 0x80) << 8).to(tl.bfloat16, bitcast=True)
        elif dtype == tl.float16:
            return ((codes & 0x7F) << 7 | (codes & 0x80) << 8).to(tl.float16, bitcast=True)
        else:
            codes = codes.to(tl.int32)
            bits = (codes & 0x7F) << 20 | (codes & 0x80) << 24
            return bits.to(tl.float32, bitcast=True) * 2.0**120
    elif FORMAT == "int8":
        codes = words >> (8 * PART)
        if dtype == tl.bfloat16:
            # Eight bits do not fit the mantissa: the highest says which power is taken away.
            low = (codes & 0x7F | 0x4300).to(tl.bfloat16, bitcast=True)
            return low - (codes & 0x80 ^ 0x4380).to(tl.bfloat16, bitcast=True)
        elif dtype == tl.float16:
            return (codes & 0xFF | 0x6400).to(tl.float16, bitcast=True) - 1152.0
        else:
            return ((codes & 0xFF) - 128).to(dtype)
    else:
        codes = words >> (4 * PART) & 0xF
        if dtype == tl.bfloat16:
            return (codes | 0x4300).to(tl.bfloat16, bitcast=True) - 128.0
        elif dtype == tl.float16:
            return (codes | 0x6400).to(tl.float16, bitcast=True) - 1024.0
        else:
            return codes.to(dtype)


@triton.jit
def fp8_unit(dtype: tl.constexpr):
    """What an unpacked fp8 code must be multiplied by: its exponent has the bias of `dtype`."""
    if dtype == tl.float16:
        return 2.0**8
    elif dtype == tl.bfloat16:
        return 2.0**120
    else:
        return 1.0


@triton.jit
def step_and_least(pairs):
    """The two float16 numbers of a 4-bit scale, read as one int32, in float32."""
    step = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    least = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return step.to(tl.float32), least.to(tl.float32)


@triton.jit
def _rounded(x, low: tl.constexpr, high: tl.constexpr):
    """The nearest integer from `low` to `high`, the even one of two; as int32."""
    x = tl.minimum(tl.maximum(x, low), high)
    return ((x + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23, whose last bit is one


@triton.jit
def _divisor(scale):
    """A scale of 0 makes codes of 0."""
    return tl.where(scale == 0, float("inf"), scale)


@triton.jit
def _largest(x, AXIS: tl.constexpr):
    """The largest along an axis, NaN if one is."""
    unknown = tl.max((x != x).to(tl.int32), AXIS)
    return tl.where(unknown > 0, float("nan"), tl.max(tl.where(x == x, x, float("-inf")), AXIS))


@triton.jit
def _step(least, most):
    """Float16 minimum and step of codes from `least` to `most`, as `formats.encode` rounds them."""
    least = tl.minimum(tl.maximum(least, -65504.0), 65504.0).to(tl.float16)
    step = tl.div_rn(most - least.to(tl.float32), 15.0)
    step = tl.maximum(step, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(step, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16), least


@triton.jit
def encode_tokens(parts, WIDTH: tl.constexpr, FORMAT: tl.constexpr, scale):
    """Words and scales of rows, each a token; twin of `formats.encode`.

    Args:
        parts: `[ROWS, BLOCK]` each, in any float dtype, zeros beyond `WIDTH`.
        scale: of `fp8`.

    Returns:
        Words `[ROWS, BLOCK]`, and float16 scales `[ROWS]`: one, or steps and minima.
    """
    PARTS: tl.constexpr = len(parts)
    real = (tl.arange(0, parts[0].shape[1]) < WIDTH)[None, :]
    least = tl.zeros(parts[0].shape[:1], tl.float16)
    if FORMAT == "int8":
        most = tl.abs(parts[0].to(tl.float32))
        for part in tl.static_range(1, PARTS):
            x = tl.abs(parts[part].to(tl.float32))
            most = tl.maximum(most, x, propagate_nan=tl.PropagateNan.ALL)
        scale = tl.div_rn(_largest(most, 1), 127.0)
        scale = tl.minimum(scale, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    elif FORMAT == "int4_token":
        most = parts[0].to(tl.float32)
        low = most
        for part in tl.static_range(1, PARTS):
            x = parts[part].to(tl.float32)
            most = tl.maximum(most, x, propagate_nan=tl.PropagateNan.ALL)
            low = tl.minimum(low, x)
        most = _largest(tl.where(real, most, float("-inf")), 1)
        scale, least = _step(tl.min(tl.where(real, low, float("inf")), 1), most)
    else:
        tl.static_assert(FORMAT == "fp8")
    words = tl.zeros(parts[0].shape, tl.int32)
    for part in tl.static_range(PARTS):
        x = parts[part].to(tl.float32)
        if FORMAT == "fp8":
            x = tl.minimum(tl.maximum(tl.div_rn(x, scale), -448.0), 448.0)
            codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        elif FORMAT == "int8":
            by = _divisor(scale.to(tl.float32))[:, None]
            codes = _rounded(tl.div_rn(x, tl.broadcast_to(by, x.shape)), -127.0, 127.0) + 128
        else:
            by = _divisor(scale.to(tl.float32))[:, None]
            x = x - least.to(tl.float32)[:, None]
            codes = _rounded(tl.div_rn(x, tl.broadcast_to(by, x.shape)), 0.0, 15.0)
        words |= codes << (16 // PARTS * part)
    return words.to(tl.int16), scale, least


@triton.jit
def encode_channels(x, inside):
    """Codes, steps and minima of the columns of `[ROWS, BLOCK]`, of the rows that are `inside`."""
    x = x.to(tl.float32)
    most = _largest(tl.where(inside[:, None], x, float("-inf")), 0)
    step, least = _step(tl.min(tl.where(inside[:, None], x, float("inf")), 0), most)
    by = tl.broadcast_to(_divisor(step.to(tl.float32))[None, :], x.shape)
    codes = _rounded(tl.div_rn(x - least.to(tl.float32)[None, :], by), 0.0, 15.0)
    return codes, step, least
