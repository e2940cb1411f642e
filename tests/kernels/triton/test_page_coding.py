"""K and V are coded as the twin codes them, bit for bit, whichever way they come into pages."""

import math

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels import reference
from pagedkv.kernels.formats import FORMATS, Pages
from pagedkv.kernels.torch.codes import decode, encode
from pagedkv.kernels.triton import backend as paged
from pagedkv.kernels.triton import launch
from tests.effort import few
from tests.kernels.steps import DEVICE
from tests.kernels.triton_cases import HALF, assert_same_bits, random_bits, with_half

N, S, LAYERS = 5, 4, 2
TOKENS = ("dense", "fp8", "int8", "int4_token")
PAIRS = {
    "int4": ("int4_channel", "int4_token"),
    "int4 and int8": ("int4_channel", "int8"),
    "fp8 and int4": ("fp8", "int4_token"),
    "dense and int4": ("dense", "int4_token"),
    "int4 and dense": ("int4_channel", "dense"),
}


def _aligned(scales):
    """Copies scales so that each layer's begin at a multiple of 16 bytes."""
    layers, groups = scales.shape
    padded = scales.new_zeros(layers, -(-groups // 4) * 4)
    return padded[:, :groups].copy_(scales)


def pool(format, dtype, groups=2, page=16, dim=32, staging=True, seed=0):
    """Pages of all layers, full of random bits; scales of fp8 are powers of two."""
    parts = FORMATS[format].per_word
    kind = dtype if format == "dense" else torch.int16
    random = torch.Generator().manual_seed(seed)

    def bits(*shape, like):
        if like == torch.int16:
            return torch.randint(-(2**15), 2**15, shape, generator=random, dtype=like).to(DEVICE)
        return random_bits(*shape, dtype=like, seed=seed)

    shape, scales = (LAYERS, *FORMATS[format].scales_shape(N, groups, page, dim)), None
    if FORMATS[format].static:
        scales = _aligned(2.0 ** torch.randint(-8, 3, shape, generator=random).to(DEVICE))
    elif format != "dense":
        scales = bits(*shape, like=torch.float16)
    data = bits(LAYERS, N, groups, page, dim // parts, like=kind)
    staged = bits(LAYERS, S, groups, page, dim, like=dtype) if staging else None
    return Pages(FORMATS[format], data, scales, staged)


def copied(pages):
    return Pages(pages.format, *(None if x is None else x.clone() for x in pages[1:]))


def layer(pages, index):
    return Pages(pages.format, *(None if x is None else x[index] for x in pages[1:]))


def assert_same(found, expected):
    for mine, twin in zip(found[1:], expected[1:], strict=True):
        assert (mine is None) == (twin is None)
        if mine is not None:
            assert_same_bits(mine, twin)


def texts(tokens, groups, dim, dtype):
    """K and V with channels and tokens of very different size, zeros, and tokens all alike."""
    random = torch.Generator().manual_seed(3)
    found = []
    for _ in "kv":
        x = torch.randn(tokens, groups, dim, generator=random)
        x *= 10.0 ** torch.randint(-3, 3, (dim,), generator=random)
        x[::7] *= 1000
        x[2::7] = 0
        x[3::7] = -1.5
        x[5::7] *= 1e-7
        found.append(x.to(dtype).to(DEVICE))
    return found


SIZES = {
    "one head, pages of 16": {"groups": 1},
    "3 heads, D=96, pages of 48": {"groups": 3, "dim": 96, "page": 48},
    "D=256, pages of 32": {"dim": 256, "page": 32},
}


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(
    ("size", "format"),
    [
        (size, format)
        for size in (*SIZES.values(), {"dim": 80, "page": 3})
        for format in TOKENS
        if format != "int4_token" or size.get("dim") != 80  # it takes multiples of 32
    ],
    ids=str,
)
def test_tokens_are_coded_into_their_slots_and_no_other_slot_changes(size, format, dtype):
    other = TOKENS[TOKENS.index(format) - 1]
    other = "int8" if other == "int4_token" and size.get("dim") == 80 else other
    k_pages, v_pages = (
        layer(pool(name, dtype, staging=False, seed=i, **size), 1)
        for i, name in enumerate((format, other))
    )
    twins = copied(k_pages), copied(v_pages)
    groups, page, dim = k_pages.data.shape[1], k_pages.data.shape[2], k_pages.head_dim
    k, v = texts(min(N * page, 21), groups, dim, dtype)
    slots = torch.randperm(N * page)[: len(k)].to(DEVICE)
    slots[::4] = -1
    slots[1:3] = torch.tensor([N * page - 1, 0])
    paged.write_kv(k, v, k_pages, v_pages, slots)
    reference.write_kv(k, v, *twins, slots)
    assert_same(k_pages, twins[0])
    assert_same(v_pages, twins[1])


@pytest.mark.parametrize("pair", PAIRS)
def test_where_there_are_staging_pages_only_their_slots_are_written(pair):
    pages = [layer(pool(name, torch.bfloat16), 0) for name in PAIRS[pair]]
    twins = [copied(x) for x in pages]
    k, v = texts(12, 2, 32, torch.bfloat16)
    slots = torch.tensor([N * 16, 3, -1, N * 16 + 40, 17, (N + S) * 16 - 1] * 2, device=DEVICE)
    slots[6:] += slots[6:].ge(N * 16) * -1
    slots[6] = N * 16 + 5
    paged.write_kv(k, v, *pages, slots)
    reference.write_kv(k, v, *twins, slots)
    for mine, twin in zip(pages, twins, strict=True):
        assert_same(mine, twin)


@pytest.mark.parametrize(("pair", "dtype"), with_half(PAIRS), ids=str)
@pytest.mark.parametrize("size", few(SIZES, *list(SIZES)[:1]))
def test_staging_pages_of_all_layers_are_coded_and_nothing_else_changes(size, pair, dtype):
    pages = [pool(name, dtype, **SIZES[size]) for name in PAIRS[pair]]
    for x in pages:
        _, _, groups, page, dim = x.staging.shape
        content, _ = texts(LAYERS * S * page, groups, dim, dtype)
        x.staging.copy_(content.view(LAYERS, S, page, groups, dim).transpose(2, 3))
    twins = [copied(x) for x in pages]
    source, target = (torch.tensor(ids, device=DEVICE) for ids in ([N + 3, N, N + 1], [4, 1, 2]))
    paged.encode_pages(*pages, source, target)
    reference.encode_pages(*twins, source, target)
    for mine, twin in zip(pages, twins, strict=True):
        assert_same(mine, twin)


@pytest.mark.parametrize(("pair", "dtype"), with_half(PAIRS), ids=str)
def test_pages_that_a_step_fills_are_coded_from_its_k_and_v(pair, dtype):
    pages = [layer(pool(name, dtype, dim=64), 1) for name in PAIRS[pair]]
    twins = [copied(x) for x in pages]
    k, v = texts(60, 2, 64, dtype)
    fused = torch.cat([k, k, v, v], 1)
    k, v = fused[:, 2:4], fused[:, 4:6]  # slices of one projection
    first, target = (torch.tensor(ids, device=DEVICE) for ids in ([44, 3, 19], [4, 0, 2]))
    paged.write_pages(k, v, *pages, first, target)
    reference.write_pages(k, v, *twins, first, target)
    for mine, twin in zip(pages, twins, strict=True):
        assert_same(mine, twin)


@pytest.mark.parametrize(("pair", "dtype"), with_half(PAIRS), ids=str)
def test_coded_pages_come_back(pair, dtype):
    pages = [pool(name, dtype, groups=3, dim=96) for name in PAIRS[pair]]
    for x in pages:  # scales as they are: finite
        if x.scales is not None and not x.format.static:
            x.scales.copy_(torch.randn(x.scales.shape))
        if x.format.static:
            x.data.bitwise_and_(0x3F3F)
    twins = [copied(x) for x in pages]
    source, target = (torch.tensor(ids, device=DEVICE) for ids in ([4, 0, 2], [N + 1, N + 3, N]))
    paged.decode_pages(*pages, source, target)
    reference.decode_pages(*twins, source, target)
    for mine, twin in zip(pages, twins, strict=True):
        assert_same(mine, twin)


def test_nothing_to_code_is_no_launch(monkeypatch):
    monkeypatch.setattr(launch.Launcher, "__call__", lambda *_: pytest.fail("launched"))
    pages = [pool(name, torch.float32) for name in PAIRS["int4"]]
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    paged.encode_pages(*pages, none, none)
    paged.decode_pages(*pages, none, none)
    paged.write_pages(*texts(4, 2, 32, torch.float32), *(layer(x, 0) for x in pages), none, none)


# ------------------------------------------------------------------ what coding keeps


@pytest.mark.parametrize("format", ["int8", "int4_token", "int4_channel"])
def test_an_element_is_off_by_half_a_step_at_most(format):
    x, _ = texts(32, 2, 64, torch.float32)
    x = x.clamp(-3e4, 3e4).transpose(0, 1)[None]  # [1, G, P, D], within float16
    words, scales = encode(x, FORMATS[format])
    found = decode(words, scales, FORMATS[format], torch.float64)
    step = scales.double() if format == "int8" else scales.double()[..., 0]
    step = step.unsqueeze(-2 if format == "int4_channel" else -1)
    # The step was rounded up or down by 2^-11 of it, or to a multiple of 2^-24.
    most = 127 if format == "int8" else 15
    allowed = step / 2 + most * torch.maximum(step * 2**-11, torch.tensor(2.0**-25))
    minimum = 0 if format == "int8" else x.abs().double() * 2**-11 + 2.0**-24
    assert ((found - x).abs() <= allowed + minimum + x.abs() * 1e-6).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_nan_does_not_become_a_number():
    k, v = texts(4, 2, 32, torch.float32)
    k[1, 0, 7] = v[2, 1, 9] = math.nan
    for format in ("int8", "int4_token"):
        pages = [layer(pool(format, torch.float32, staging=False), 0) for _ in "kv"]
        paged.write_kv(k, v, *pages, torch.arange(4, device=DEVICE))
        for x, token, head in ((pages[0], 1, 0), (pages[1], 2, 1)):
            page = reference.read_pages(x, torch.tensor([0], device=DEVICE), torch.float32)[0].cpu()
            assert page[head, token].isnan().all()
            assert not page[1 - head, :4].isnan().any()
