"""Device functions: words of several codes, taken apart where a product needs them, and put together.

Words of `formats.py` hold elements of one token that lie a part of the head dim apart, so a part of
a tile of words is a tile of neighbouring elements. Integer codes become floats by their bits, not by
conversions, which are slow and one at a time: a code in the mantissa of 2^7 (bfloat16) or of 2^10
(float16) is that power and the code, exactly. Codes are exact in any of the dtypes, so K is
multiplied with queries in theirs and nothing is rounded twice.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unpack(words, PART: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Part of the codes in a tile of words, less what they are biased by; of fp8 see `fp8_unit`.

    No code is NaN or infinite, whatever the words: what nobody wrote may be multiplied by zero.
    """
    if FORMAT == "int4_token" or FORMAT == "int4_channel":
        codes = words >> (4 * PART) & 0xF
        if dtype == tl.bfloat16:
            return (codes | 0x4300).to(tl.bfloat16, bitcast=True) - 128.0
        elif dtype == tl.float16:
            return (codes | 0x6400).to(tl.float16, bitcast=True) - 1024.0
        else:
            return codes.to(dtype)
    codes = words >> (8 * PART)
    if FORMAT == "int8":
        if dtype == tl.bfloat16:
            # Eight bits do not fit the mantissa: the highest says which power is taken away.
            low = (codes & 0x7F | 0x4300).to(tl.bfloat16, bitcast=True)
            return low - (codes & 0x80 ^ 0x4380).to(tl.bfloat16, bitcast=True)
        elif dtype == tl.float16:
            return (codes & 0xFF | 0x6400).to(tl.float16, bitcast=True) - 1152.0
        else:
            return ((codes & 0xFF) - 128).to(dtype)
    else:
        tl.static_assert(FORMAT == "fp8")
        # Sign, exponent and mantissa in their places, under the exponent's smaller bias.
        if dtype == tl.bfloat16:
            return ((codes & 0x7F) << 4 | (codes & 0x80) << 8).to(tl.bfloat16, bitcast=True)
        elif dtype == tl.float16:
            return ((codes & 0x7F) << 7 | (codes & 0x80) << 8).to(tl.float16, bitcast=True)
        else:
            codes = codes.to(tl.int32)
            bits = (codes & 0x7F) << 20 | (codes & 0x80) << 24
            return bits.to(tl.float32, bitcast=True) * 2.0**120


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
