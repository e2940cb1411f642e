"""The interpreter computes what torch does, and refuses what a GPU would do in silence."""

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from tests.kernels import interpreter  # noqa: E402

if torch.cuda.is_available():
    pytest.skip("kernels are compiled here, see tests/conftest.py", allow_module_level=True)

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
NARROW = [torch.bfloat16, *FLOAT8]


@triton.jit
def convert(source, target, size: tl.constexpr):
    i = tl.arange(0, size)
    tl.store(target + i, tl.load(source + i).to(target.dtype.element_ty))


def converted(source, dtype):
    target = torch.empty(source.shape, dtype=dtype)
    convert[(1,)](source, target, source.numel())
    return target


def assert_same_numbers(found, expected):
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def every_number(dtype):
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def floats_around(dtype):
    """Random bits, and what lies on, between and next to the numbers of `dtype`: all its ties."""
    bits = torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int32)
    bits[::8] %= 2**23  # subnormal
    if dtype == torch.bfloat16:
        bits[1024:] = bits[1024:] & ~0xFFFF | 0x8000
        bits[2048:3072] -= 1
        bits[3072:] += 1
        return bits.view(torch.float32)
    numbers = every_number(dtype).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = [middles.nextafter(torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    special = torch.cat([numbers, middles, *near])
    return torch.cat([special, bits.view(torch.float32)])[:4096]


@pytest.mark.parametrize("dtype", NARROW)
def test_a_conversion_from_float32_rounds_as_torch_does(dtype):
    values = floats_around(dtype)
    # A card saturates where it converts to float8.
    limit = torch.finfo(dtype).max if dtype in FLOAT8 else torch.inf
    assert_same_numbers(converted(values, dtype), values.clamp(-limit, limit).to(dtype))


@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_each_of_the_256_codes_of_float8_is_decoded(dtype, target):
    codes = every_number(dtype)
    assert_same_numbers(converted(codes, target), codes.to(target))


def test_each_of_the_65536_codes_of_bfloat16_is_decoded():
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    assert_same_numbers(converted(codes, torch.float32), codes.float())


def test_integers_become_bfloat16_and_back():
    values = torch.arange(-128, 128, dtype=torch.int32)
    assert torch.equal(converted(converted(values, torch.bfloat16), torch.int32), values)


@triton.jit
def calculate(a, b, out, size: tl.constexpr):
    i = tl.arange(0, size)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, x + y)
    tl.store(out + size + i, x - y)
    tl.store(out + 2 * size + i, x * y)
    tl.store(out + 3 * size + i, x / y)
    tl.store(out + 4 * size + i, tl.maximum(x, y))
    tl.store(out + 5 * size + i, tl.where(x < y, x, tl.abs(y)))
    tl.store(out + 6 * size + i, 2.0 * x)
    tl.store(out + 7 * size + i, x + tl.full([size], 1.5, x.dtype))
    tl.store(out + 8 * size + i, -x)
    tl.store(out + 9 * size + i, tl.load(a + i, mask=i < 3, other=0.75))
    tl.store(out + 10 * size + i, tl.fma(x, y, x))


def test_arithmetic_in_bfloat16_agrees_with_torch():
    x, y = torch.randn(2, 1024).bfloat16()
    out = torch.empty(11, 1024, dtype=torch.bfloat16)
    calculate[(1,)](x, y, out, 1024)
    loaded = torch.where(torch.arange(1024) < 3, x, 0.75)
    expected = [x + y, x - y, x * y, x / y, torch.maximum(x, y), torch.where(x < y, x, y.abs())]
    fused = (x.float() * y.float() + x.float()).bfloat16()
    assert_same_numbers(out, torch.stack([*expected, 2 * x, x + 1.5, -x, loaded, fused]))


@triton.jit
def multiply(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + n[:, None] * K + k[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(x, y.T))


@pytest.mark.parametrize("dtype", [*NARROW, torch.float16, torch.float32])
def test_a_product_of_tiles_is_exact_on_small_integers(dtype):
    # Up to 8 in size, and so exact in every type; sums of 64 products are exact in float32.
    a, b = (torch.randint(-8, 9, (n, 64)).to(dtype) for n in (16, 32))
    out = torch.empty(16, 32)
    multiply[(1,)](a, b, out, 16, 32, 64)
    assert torch.equal(out, a.float() @ b.float().T)


@triton.jit
def first(a, b):
    return a * 0.5 + b


@triton.jit
def reduce_rows(a, out, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(a + m[:, None] * N + n[None, :])
    tl.store(out + m, tl.sum(x, 1))
    tl.store(out + M + m, tl.max(x, 1))
    tl.store(out + 2 * M + m, tl.min(x, 1))
    tl.store(out + 3 * M + m, tl.argmax(x, 1).to(tl.float32))
    tl.store(out + 4 * M + m, tl.sum(tl.cumsum(x, 1), 1))
    tl.store(out + 5 * M + m, tl.reduce(x, 1, first))


def test_reductions_of_bfloat16_agree_with_torch():
    # All sums below stay integers up to 256, or halves of them: exact in bfloat16.
    x = torch.stack([torch.randperm(8) - 4 for _ in range(4)]).bfloat16()
    out = torch.empty(6, 4, dtype=torch.bfloat16)
    reduce_rows[(1,)](x, out, 4, 8)
    wide = x.float()
    folded = wide[:, 0]
    for column in wide.T[1:]:
        folded = folded * 0.5 + column
    by_hand = [wide.sum(1), wide.amax(1), wide.amin(1), wide.argmax(1), wide.cumsum(1).sum(1)]
    assert_same_numbers(out, torch.stack([*by_hand, folded]).bfloat16())


@triton.jit
def copy(source, target, count, size: tl.constexpr):
    i = tl.arange(0, size)
    tl.store(target + i, tl.load(source + i, mask=i < count), mask=i < count)


def test_lanes_that_a_mask_switches_off_may_lie_anywhere():
    source, target = torch.randn(10), torch.zeros(10)
    copy[(1,)](source, target, 10, 16)
    assert torch.equal(source, target)


def test_a_load_past_the_end_is_an_index_error():
    with pytest.raises(IndexError, match=r"load in program \(0, 0, 0\): 2 of 12 active addresses"):
        copy[(1,)](torch.zeros(10), torch.zeros(16), 12, 16)


def test_a_store_past_the_end_is_an_index_error_and_writes_nothing():
    target = torch.zeros(16)
    with pytest.raises(IndexError, match=r"store in program .* 2 of 12 active addresses"):
        copy[(1,)](torch.ones(16), target[:10], 12, 16)
    assert not target.any()


def test_a_view_counts_as_the_bytes_it_reaches_and_more_must_be_said():
    pool = torch.arange(32.0)
    view, target = pool.view(4, 8)[1:3, ::2], torch.empty(16)  # elements 8 to 22
    copy[(1,)](view, target, 15, 16)
    assert torch.equal(target[:15], pool[8:23])
    with pytest.raises(IndexError, match="1 of 16"):
        copy[(1,)](view, target, 16, 16)
    with interpreter.reachable(pool):
        copy[(1,)](view, target, 16, 16)
    assert torch.equal(target, pool[8:24])
    with pytest.raises(IndexError):
        copy[(1,)](view, target, 16, 16)


def test_an_element_half_outside_is_outside():
    six_bytes = torch.zeros(8, dtype=torch.int8)[:6]
    with pytest.raises(IndexError, match="1 of 2"):
        copy[(1,)](triton.reinterpret(six_bytes, tl.float32), torch.zeros(2), 2, 2)


def test_tensors_of_earlier_launches_are_out_of_reach():
    pool = torch.zeros(8)
    copy[(1,)](pool, torch.zeros(8), 8, 8)
    with pytest.raises(IndexError, match="8 of 8"):
        copy[(1,)](pool[:0], torch.zeros(8), 8, 8)


@triton.jit
def load_at(source, offset):
    return tl.load(source + offset)


@triton.jit
def fetch(source, target, offset):
    tl.store(target, load_at(source, offset))


@pytest.mark.parametrize("offset", [-1, 4, 2**40, -(2**40), 2**61])
def test_a_wrong_offset_in_a_called_function_is_an_index_error(offset):
    with pytest.raises(IndexError, match="1 of 1"):
        fetch[(1,)](torch.zeros(4), torch.zeros(1), offset)


@triton.jit
def count(counters, at, swap: tl.constexpr):
    if swap:
        tl.atomic_cas(counters + at, 0, 1)
    else:
        tl.atomic_add(counters + at, 1)


@pytest.mark.parametrize("swap", [True, False])
def test_an_atomic_past_the_end_is_an_index_error(swap):
    counters = torch.zeros(8, dtype=torch.int32)
    count[(1,)](counters[:4], 3, swap)
    with pytest.raises(IndexError, match="atomic"):
        count[(1,)](counters[:4], 4, swap)
    assert counters.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


@triton.jit
def copy_block(source, target, rows):
    made = tl.make_tensor_descriptor(target, [rows, 16], [16, 1], [8, 16])
    made.store([4, 0], source.load([4, 0]))


def test_a_descriptor_reaches_its_tensor_and_its_shape_is_not_believed():
    source, target = torch.randn(8, 16), torch.zeros(8, 16)
    given = TensorDescriptor.from_tensor(source, [8, 16])
    copy_block[(1,)](given, target, 8)
    assert torch.equal(target[4:], source[4:])
    with pytest.raises(IndexError, match=r"store .* 64 of 128"):
        copy_block[(1,)](given, target, 12)


@triton.jit
def copy_page(pool, target, page, stride):
    tl.store(target, tl.load(pool + page * stride))


@triton.jit
def copy_page_wide(pool, target, page, stride):
    tl.store(target, tl.load(pool + page.to(tl.int64) * stride))


def test_an_offset_that_overflows_32_bits_is_an_error_and_64_bits_reach_it():
    resource = pytest.importorskip("resource")
    pool = torch.empty(2**31 + 1, dtype=torch.int8)  # never touched, but for its last page
    pool[-1] = 7
    target = torch.zeros(1, dtype=torch.int8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(AssertionError, match="int32 overflow"):
        copy_page[(1,)](pool, target, 2**15, 2**16)
    copy_page_wide[(1,)](pool, target, 2**15, 2**16)
    assert target.item() == 7
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2**20, "the pool was copied"  # a GiB, in KiB


@triton.jit
def loop(bounds, target):
    total = 0
    for i in range(tl.load(bounds), tl.load(bounds + 1)):
        total += i
    for i in tl.range(tl.load(bounds), tl.load(bounds + 1)):
        total += i
    tl.store(target, total)


def test_a_loop_may_run_between_loaded_bounds():
    target = torch.zeros(1, dtype=torch.int32)
    loop[(1,)](torch.tensor([3, 7]), target)
    assert target.item() == 2 * (3 + 4 + 5 + 6)


@triton.jit
def fail(condition):
    tl.device_assert(condition > 0, "not positive")


def test_a_failed_assertion_of_a_kernel_is_raised():
    fail[(1,)](1)
    with pytest.raises(AssertionError, match="not positive"):
        fail[(1,)](0)


def test_uninstalling_leaves_the_interpreter_as_it_came():
    pool = torch.zeros(8)
    interpreter.uninstall()
    try:
        copy[(1,)](pool[:4], torch.zeros(8), 8, 8)  # not checked
    finally:
        interpreter.install()
        interpreter.install()
    with pytest.raises(IndexError):
        copy[(1,)](pool[:4], torch.zeros(8), 8, 8)
