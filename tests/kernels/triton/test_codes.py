"""Words taken apart two at a time are what they are one by one, and what `formats.py` says."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from pagedkv.kernels.formats import FORMATS
from pagedkv.kernels.torch.codes import decode as decoded
from pagedkv.kernels.triton import codes, decode, prefill
from tests.effort import each_value
from tests.kernels.steps import DEVICE, EACH, coded, step_of
from tests.kernels.triton_cases import HALF
from tests.kernels.truth import check

EVERY = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).to(DEVICE)
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
KINDS = [(torch.float32, False), *product(HALF, [False, True])]  # dtype, and whether it is packed


@pytest.fixture(autouse=True)
def _assembly():
    if DEVICE == "cuda":
        yield
        return
    from tests.kernels.ptx import inline_assembly

    with inline_assembly():
        yield


@triton.jit
def _unpack(
    from_ptr, to_ptr, FORMAT: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    words = tl.load(from_ptr + tl.arange(0, WORDS))
    parts = codes.unpack(words, FORMAT, KIND, PACKED)
    for part in tl.static_range(len(parts)):
        at = to_ptr + part * WORDS + tl.arange(0, WORDS)
        tl.store(at, parts[part].to(tl.float32))


def unpacked(format, dtype, packed):
    parts = FORMATS[format].per_word
    found = torch.empty(parts, len(EVERY), device=DEVICE)
    _unpack[(1,)](EVERY, found, FORMATS[format], TYPES[dtype], packed, len(EVERY))
    return found


@pytest.mark.parametrize(("dtype", "packed"), KINDS, ids=str)
@pytest.mark.parametrize("name", [*FORMATS][1:])
def test_every_word_holds_what_the_format_says(name, packed, dtype):
    found, format = unpacked(name, dtype, packed), FORMATS[name]
    assert found.isfinite().all()  # whatever is multiplied by zero is zero
    each = {"head": (1, 1), "token": (len(EVERY),), "channel": (format.per_word,)}[format.scales]
    scales = torch.ones(*each, device=DEVICE)
    if format.pairs:
        scales, found = torch.stack([scales, 0 * scales], -1), found - 16
    if format.bias and dtype != torch.float32:
        found *= 2.0 ** ({torch.float16: 15, torch.bfloat16: 127}[dtype] - format.bias)
    known = decoded(EVERY[:, None], scales, format, torch.float32).T
    numbers = known.isfinite()  # codes of NaN are never written
    assert torch.equal(found[numbers], known[numbers])


@pytest.mark.parametrize(
    ("dtype", "pair"), each_value(HALF, [*EACH, ("int8", "int4_token")]), ids=str
)
def test_attention_over_them_agrees_with_the_truth(monkeypatch, dtype, pair):
    for module in (decode, prefill):
        tuning = module.tuning
        monkeypatch.setattr(
            module, "tuning", lambda *args, t=tuning: t(*args)._replace(packed=True)
        )
    step = step_of([(1, 130), (5, 33), (20, 55)], dtype=dtype, dim=64, page=32)
    check(coded(step, *pair))


@triton.jit
def _bits(from_ptr, to_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(to_ptr + at, codes._e4m3(tl.load(from_ptr + at)))


def test_bits_of_e4m3_are_those_that_torch_rounds_to():
    """Every number of e4m3, what lies between two, and what lies beside that: finds a wrong tie."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].sort().values
    halves = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(halves, torch.tensor(end)) for end in (-500.0, 500.0)]
    x = torch.cat([numbers, halves, *beside, EVERY.cpu().view(torch.float16).float()])
    x = x[x.abs() <= 448]
    x = torch.cat([x, x.new_zeros(2 ** (len(x) - 1).bit_length() - len(x))]).to(DEVICE)
    found = torch.empty(len(x), dtype=torch.int32, device=DEVICE)
    _bits[(1,)](x, found, len(x))
    assert torch.equal(found.cpu(), x.cpu().to(torch.float8_e4m3fn).view(torch.uint8).int())
