"""Device functions: codes, taken out of words where a product needs them, and made.

All that kernels know of codes is here; elsewhere they ask a `Format` what has scales. A word holds
elements of one token that lie a part of the head dim apart, so a part of a tile of words is a tile
of neighbouring elements. Codes become floats by their bits, because conversions are slow and take
one code at a time: 16, 128 or 1024 with an integer code at the right place in its mantissa is
exactly that power plus the code. Codes are exact in each dtype, so K is multiplied with queries in
the dtype of the queries, and nothing is rounded twice.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _part(words, PART: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """One part, in plain Triton."""
    if FORMAT.code == "e4m3":
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
    elif FORMAT.code == "signed":
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
        tl.static_assert(FORMAT.code == "ranged" and FORMAT.bits == 4)
        codes = words >> (4 * PART) & 0xF
        if dtype == tl.bfloat16:
            return (codes << 3 | 0x4180).to(tl.bfloat16, bitcast=True)
        elif dtype == tl.float16:
            return (codes << 6 | 0x4C00).to(tl.float16, bitcast=True)
        else:
            return (codes + 16).to(dtype)


@triton.jit
def unpack(words, FORMAT: tl.constexpr, dtype: tl.constexpr, PACKED: tl.constexpr):
    """The codes in a tile of words, by parts, as they come: see `excess` and `unit`.

    No code is NaN or infinite, whatever the words: what nobody wrote may be multiplied by zero.

    Args:
        PACKED: by instructions for two words at once, which the interpreter does not have.
    """
    if PACKED and dtype != tl.float32:
        return _packed(words, FORMAT, dtype)
    else:
        PARTS: tl.constexpr = FORMAT.per_word
        parts = tl.tuple([])
        for part in tl.static_range(PARTS):
            parts += (_part(words, part, FORMAT, dtype),)
        return parts


@triton.jit
def _packed(words, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """All parts, two words at a time: `lop3` 0xEA is (a & b) | c, 0x6A is (a & b) ^ c.

    bfloat16 is subtracted by fused multiply-adds: compute capability 8 has nothing else for two.
    """
    if FORMAT.code == "e4m3":
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                """{ .reg .b32 sign, rest;
                shl.b32 sign, $2, 8; and.b32 sign, sign, 0x80008000; shl.b32 rest, $2, 4;
                lop3.b32 $0, rest, 0x07F007F0, sign, 0xEA;
                and.b32 sign, $2, 0x80008000; shr.u32 rest, $2, 4;
                lop3.b32 $1, rest, 0x07F007F0, sign, 0xEA; }""",
                *("=&r,=r,r", [words], (tl.bfloat16,) * 2, True, 2),
            )
        else:
            return tl.inline_asm_elementwise(
                """{ .reg .b32 sign, rest;
                shl.b32 sign, $2, 8; and.b32 sign, sign, 0x80008000; shl.b32 rest, $2, 7;
                lop3.b32 $0, rest, 0x3F803F80, sign, 0xEA;
                and.b32 sign, $2, 0x80008000; shr.u32 rest, $2, 1;
                lop3.b32 $1, rest, 0x3F803F80, sign, 0xEA; }""",
                *("=&r,=r,r", [words], (tl.float16,) * 2, True, 2),
            )
    elif FORMAT.code == "signed":
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                """{ .reg .b32 high, low, power, minus; mov.b32 minus, 0xBF80BF80;
                lop3.b32 low, $2, 0x007F007F, 0x43004300, 0xEA;
                lop3.b32 power, $2, 0x00800080, 0x43804380, 0x6A;
                fma.rn.bf16x2 $0, power, minus, low;
                shr.u32 high, $2, 8;
                lop3.b32 low, high, 0x007F007F, 0x43004300, 0xEA;
                lop3.b32 power, high, 0x00800080, 0x43804380, 0x6A;
                fma.rn.bf16x2 $1, power, minus, low; }""",
                *("=&r,=r,r", [words], (tl.bfloat16,) * 2, True, 2),
            )
        else:
            return tl.inline_asm_elementwise(
                """{ .reg .b32 high, low, bias; mov.b32 bias, 0x64806480;
                lop3.b32 low, $2, 0x00FF00FF, 0x64006400, 0xEA;
                sub.f16x2 $0, low, bias;
                shr.u32 high, $2, 8;
                lop3.b32 low, high, 0x00FF00FF, 0x64006400, 0xEA;
                sub.f16x2 $1, low, bias; }""",
                *("=&r,=r,r", [words], (tl.float16,) * 2, True, 2),
            )
    else:
        tl.static_assert(FORMAT.code == "ranged" and FORMAT.bits == 4)
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                """{ .reg .b32 t;
                shl.b32 t, $4, 3; lop3.b32 $0, t, 0x00780078, 0x41804180, 0xEA;
                shr.u32 t, $4, 1; lop3.b32 $1, t, 0x00780078, 0x41804180, 0xEA;
                shr.u32 t, $4, 5; lop3.b32 $2, t, 0x00780078, 0x41804180, 0xEA;
                shr.u32 t, $4, 9; lop3.b32 $3, t, 0x00780078, 0x41804180, 0xEA; }""",
                *("=&r,=&r,=&r,=r,r", [words], (tl.bfloat16,) * 4, True, 2),
            )
        else:
            return tl.inline_asm_elementwise(
                """{ .reg .b32 t;
                shl.b32 t, $4, 6; lop3.b32 $0, t, 0x03C003C0, 0x4C004C00, 0xEA;
                shl.b32 t, $4, 2; lop3.b32 $1, t, 0x03C003C0, 0x4C004C00, 0xEA;
                shr.u32 t, $4, 2; lop3.b32 $2, t, 0x03C003C0, 0x4C004C00, 0xEA;
                shr.u32 t, $4, 6; lop3.b32 $3, t, 0x03C003C0, 0x4C004C00, 0xEA; }""",
                *("=&r,=&r,=&r,=r,r", [words], (tl.float16,) * 4, True, 2),
            )


@triton.jit
def by_channel(codes, pairs, PACKED: tl.constexpr):
    """Makes elements of codes, which are 16 too large, and their channels' steps and minima."""
    if PACKED and codes.dtype == tl.float16:
        step, least = tl.inline_asm_elementwise(
            """{ .reg .b32 less, t; mov.b32 less, 0xCC00CC00;
            prmt.b32 $0, $2, $3, 0x5410; prmt.b32 t, $2, $3, 0x7632;
            fma.rn.f16x2 $1, $0, less, t; }""",
            *("=&r,=r,r,r", [pairs], (tl.float16,) * 2, True, 2),
        )
        step = tl.broadcast_to(step[None, :], codes.shape)
        least = tl.broadcast_to(least[None, :], codes.shape)
        return tl.inline_asm_elementwise(
            *("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r"),
            *([codes, step, least], tl.float16, True, 2),
        )
    else:
        step, least = step_and_least(pairs)
        least -= 16 * step
        return (codes.to(tl.float32) * step[None, :] + least[None, :]).to(codes.dtype)


@triton.jit
def raised(q):
    """Queries, by parts, as float16 between -2 and 2, and the power of two of each row."""
    peak = tl.max(tl.abs(q[0].to(tl.float32)), 1)
    for part in tl.static_range(1, len(q)):
        peak = tl.maximum(peak, tl.max(tl.abs(q[part].to(tl.float32)), 1))
    bits = tl.maximum(peak, 2.0**-100).to(tl.int32, bitcast=True) & 0x7F800000
    power = bits.to(tl.float32, bitcast=True)
    found = tl.tuple([])
    for part in tl.static_range(len(q)):
        found += ((q[part].to(tl.float32) * (1.0 / power)[:, None]).to(tl.float16),)
    return found, power


@triton.jit
def excess(FORMAT: tl.constexpr):
    """How much larger unpacked codes are."""
    return 16 if FORMAT.code == "ranged" else 0


@triton.jit
def unit(FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Returns the factor of an unpacked code: its exponent has the bias of `dtype`."""
    if FORMAT.bias == 0:
        return 1.0
    elif dtype == tl.float16:
        return 2.0 ** (15 - FORMAT.bias)
    elif dtype == tl.bfloat16:
        return 2.0 ** (127 - FORMAT.bias)
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
def _e4m3(x):
    """The bits of the nearest e4m3 number, the even one of two, of float32 from -448 to 448.

    By arithmetic: where two conversions of the hardware share a register, the ptxas of CUDA 12.8
    takes one byte of every second word from another variable.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # A normal number keeps three bits of its fraction, and its exponent another bias.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 numbers are multiples of 2^-9, the last bit of what 2^14 is added to.
    tiny = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(size < 0x3C800000, tiny, normal) | ((bits >> 24) & 0x80)


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
    """Float16 minimum and step of codes from `least` to `most`, as `encode` rounds them."""
    least = tl.minimum(tl.maximum(least, -65504.0), 65504.0).to(tl.float16)
    step = tl.div_rn(most - least.to(tl.float32), 15.0)
    step = tl.maximum(step, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(step, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16), least


@triton.jit
def encode_tokens(parts, WIDTH: tl.constexpr, FORMAT: tl.constexpr, scale):
    """Words and scales of rows, each a token; twin of `encode`.

    Args:
        parts: `[ROWS, BLOCK]` each, in any float dtype, zeros beyond `WIDTH`.
        scale: the static one.

    Returns:
        Words `[ROWS, BLOCK]`, and float16 scales `[ROWS]`: one, or steps and minima.
    """
    PARTS: tl.constexpr = len(parts)
    real = (tl.arange(0, parts[0].shape[1]) < WIDTH)[None, :]
    least = tl.zeros(parts[0].shape[:1], tl.float16)
    if FORMAT.code == "signed":
        most = tl.abs(parts[0].to(tl.float32))
        for part in tl.static_range(1, PARTS):
            x = tl.abs(parts[part].to(tl.float32))
            most = tl.maximum(most, x, propagate_nan=tl.PropagateNan.ALL)
        scale = tl.div_rn(_largest(most, 1), 127.0)
        scale = tl.minimum(scale, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    elif FORMAT.code == "ranged":
        most = parts[0].to(tl.float32)
        low = most
        for part in tl.static_range(1, PARTS):
            x = parts[part].to(tl.float32)
            most = tl.maximum(most, x, propagate_nan=tl.PropagateNan.ALL)
            low = tl.minimum(low, x)
        most = _largest(tl.where(real, most, float("-inf")), 1)
        scale, least = _step(tl.min(tl.where(real, low, float("inf")), 1), most)
    else:
        tl.static_assert(FORMAT.code == "e4m3")
    words = tl.zeros(parts[0].shape, tl.int32)
    for part in tl.static_range(PARTS):
        x = parts[part].to(tl.float32)
        if FORMAT.code == "e4m3":
            x = tl.minimum(tl.maximum(tl.div_rn(x, scale), -448.0), 448.0)
            codes = _e4m3(x)
        elif FORMAT.code == "signed":
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
    """4-bit codes, steps and minima of columns of `[ROWS, BLOCK]`, of rows that are `inside`."""
    x = x.to(tl.float32)
    most = _largest(tl.where(inside[:, None], x, float("-inf")), 0)
    step, least = _step(tl.min(tl.where(inside[:, None], x, float("inf")), 0), most)
    by = tl.broadcast_to(_divisor(step.to(tl.float32))[None, :], x.shape)
    codes = _rounded(tl.div_rn(x - least.to(tl.float32)[None, :], by), 0.0, 15.0)
    return codes, step, least
