"""The instructions that take two words apart at once do what the plain form does, for every word.

They run on cards only. Here their few operations are carried out by numpy: what the text of the
instructions says is held against the interpreter's result of the plain form.
"""

import ast
import inspect
import re
import textwrap

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from pagedkv.kernels import codes

WORDS = np.arange(1 << 16, dtype=np.uint32)
OTHERS = WORDS[::-1].copy()  # in the upper half of each register
DTYPES = {"bfloat16": tl.bfloat16, "float16": tl.float16}
PARTS = {"fp8": 2, "int8": 2, "int4_token": 4}


def texts() -> dict[tuple[str, str], str]:
    """The assembly of each format and dtype, in the order of the source."""
    source = textwrap.dedent(inspect.getsource(codes._packed.fn))
    found = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and ".reg" in str(node.value)
    ]
    found.sort(key=source.index)
    return dict(zip([(f, d) for f in PARTS for d in DTYPES], found, strict=True))


def lop3(a, b, c, table):
    result = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            bits = [x if i >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
            result |= bits[0] & bits[1] & bits[2]
    return result


def halves(x, dtype):
    """Both numbers of each register: `[2, n]` float64."""
    parts = np.stack([x & 0xFFFF, x >> 16]).astype(np.uint16)
    numbers = torch.from_numpy(parts.view(np.int16).copy()).view(getattr(torch, dtype))
    return numbers.double().numpy()


def joined(numbers, dtype):
    rounded = torch.from_numpy(numbers).to(getattr(torch, dtype))
    parts = rounded.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return parts[0] | parts[1] << 16


def run(text, count, dtype):
    """What the outputs hold after the instructions, for all words."""
    registers = {f"${count}": WORDS | OTHERS << 16}

    def value(name):
        if name in registers:
            return registers[name]
        return np.full_like(WORDS, int(name, 0))

    for line in re.sub(r"[{}]|\.reg [^;]*;", "", text).split(";"):
        if not (line := line.strip()):
            continue
        name, _, rest = line.partition(" ")
        to, *args = (part.strip() for part in rest.split(","))
        a, *more = map(value, args)
        if name == "mov.b32":
            result = a
        elif name == "and.b32":
            result = a & more[0]
        elif name == "shl.b32":
            result = a << more[0]
        elif name == "shr.u32":
            result = a >> more[0]
        elif name == "lop3.b32":
            result = lop3(a, *more[:2], int(args[3], 0))
        elif name == "sub.f16x2":
            result = joined(halves(a, "float16") - halves(more[0], "float16"), "float16")
        elif name == "fma.rn.bf16x2":
            b, c = (halves(x, "bfloat16") for x in more)
            result = joined(halves(a, "bfloat16") * b + c, "bfloat16")
        else:
            raise NotImplementedError(name)
        registers[to] = result
    return [halves(registers[f"${i}"], dtype) for i in range(count)]


@triton.jit
def _unpack(words_ptr, out_ptr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    offs = tl.arange(0, 1024)
    at = tl.program_id(0) * 1024 + offs
    parts = codes.unpack(tl.load(words_ptr + at), FORMAT, DTYPE, False)
    for i in tl.static_range(len(parts)):
        tl.store(out_ptr + i * 65536 + at, parts[i].to(tl.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PARTS)
def test_instructions_for_two_words_do_what_the_plain_form_does(name, dtype):
    words = torch.from_numpy(WORDS.astype(np.uint16).view(np.int16).copy())
    plain = torch.zeros(PARTS[name], 1 << 16)
    _unpack[(64,)](words, plain, name, DTYPES[dtype])
    assert plain.isfinite().all()
    for expected, both in zip(plain, run(texts()[name, dtype], PARTS[name], dtype), strict=True):
        low, high = (torch.from_numpy(x).float() for x in both)
        assert torch.equal(low, expected)
        assert torch.equal(high, expected.flip(0))
