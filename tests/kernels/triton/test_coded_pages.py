"""Attention over coded pages, of every pair of formats, against the float64 truth about them."""

import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from pagedkv import CacheConfig, PagedKVCache, paged_attention
from pagedkv.kernels.formats import FORMATS, Pages
from pagedkv.kernels.prefixes import Prefix
from pagedkv.kernels.triton import backend as paged
from pagedkv.kernels.triton import checks, decode, launch
from tests.effort import each_value, few, slow
from tests.kernels.steps import DEVICE, EACH, LAYOUTS, MIXTURES, coded, step_of
from tests.kernels.triton_cases import misaligned, with_half
from tests.kernels.truth import attend, check


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    """Small texts are split and merged, on a card as well."""
    tuning = decode.tuning
    monkeypatch.setattr(decode, "tuning", lambda *args: tuning(*args)._replace(split=64, splits=4))


def named(value):
    return value if isinstance(value, str) else "/".join(value)


# Around pages of 16 and tiles of 32; drafts and chunks that begin, end and fill within pages.
SINGLE = [(1, 1), (1, 17), (1, 33), (1, 130), (1, 0)]
MIXED = [(7, 37), (16, 32), (5, 97), (17, 17), (40, 90)]


# Each format in both halves, with itself and beside another.
OFTEN = [*EACH, *MIXTURES[1::8]]


def every_pair():
    yield from with_half(map("/".join, OFTEN))
    rest = ("/".join(pair) for pair in MIXTURES if pair not in OFTEN)
    yield from slow(*itertools.product(rest, (torch.bfloat16, torch.float32)))


@pytest.mark.parametrize(("pair", "dtype"), [*every_pair()], ids=str)
def test_every_pair_of_formats_agrees_with_the_truth(pair, dtype):
    for rows in (SINGLE, MIXED):
        check(coded(step_of(rows, dtype=dtype, dim=32, heads=2), *pair.split("/")))


FEATURES = {
    "a window within a page": {"window": 5},
    "a window of a page and one": {"window": 17},
    "a window of several tiles": {"window": 70},
    "a softcap": {"softcap": 3.0},
    "slopes and a bias": {"alibi": True, "distances": 40},
    "all of it": {"window": 40, "sinks": True, "softcap": 5.0, "scale": 0.7},
}


# The rest are in "all of it", or windows that dense pages are read through as well.
APART = "a window within a page", "slopes and a bias", "all of it"
RARE = itertools.product((name for name in FEATURES if name not in APART), EACH)


@pytest.mark.parametrize(("feature", "pair"), each_value(APART, EACH) + slow(*RARE), ids=named)
def test_every_way_to_make_scores_agrees_with_the_truth(feature, pair):
    for rows in (SINGLE, MIXED):
        check(coded(step_of(rows, dim=32, heads=3, groups=1, **FEATURES[feature]), *pair))


WORDS = {
    "3 heads, D=96, pages of 48": {"heads": 3, "groups": 3, "dim": 96, "page": 48},
    "D=64, pages of 32, slots outermost": {"dim": 64, "page": 32, "layout": LAYOUTS[1]},
    "D=256, pages of 64": {"heads": 8, "groups": 1, "dim": 256, "page": 64},
    "D=128, pages of 128": {"heads": 2, "groups": 1, "dim": 128, "page": 128},
}
BYTES = {
    "D=16, pages of 1": {"dim": 16, "page": 1},
    "D=80, pages of 3": {"dim": 80, "page": 3, "heads": 3, "groups": 1},
    "D=144, pages of 16": {"dim": 144, "heads": 2, "groups": 1},
}
SIZES = each_value(WORDS, EACH) + each_value(BYTES, EACH[:2])


@pytest.mark.parametrize(("size", "pair"), SIZES, ids=named)
def test_heads_and_pages_of_any_size_agree_with_the_truth(size, pair):
    step = step_of([(1, 100), (5, 33), (20, 55)], **(WORDS | BYTES)[size])
    check(coded(step, *pair))


@pytest.mark.parametrize("pair", few([("dense", "dense"), *EACH[:2]], EACH[0]), ids="/".join)
def test_any_format_may_have_staging_pages(pair):
    for rows in (SINGLE, MIXED):
        check(coded(step_of(rows, dim=16, heads=2), *pair, staging=True))


@pytest.mark.parametrize(("heads", "rows"), [
    (2, [(1, 48), (1, 64), (1, 32)]),  # the page being written ends with the text
    (8, [(16, 40), (12, 30), (16, 32)]),  # later tiles of queries begin behind it
])  # fmt: skip
def test_every_page_that_is_being_written_is_found(heads, rows):
    check(coded(step_of(rows, heads=heads, groups=1, dim=32), *EACH[2]))


@pytest.mark.parametrize("pair", EACH, ids="/".join)
def test_a_prefix_that_is_read_once_is_attended_by_each_row(pair):
    step = coded(step_of([(1, 130 + n) for n in range(5)], dim=32, shared=8), *pair)
    check(step, attend(step, prefixes=[Prefix(slice(0, 5), 8)]))


@pytest.mark.parametrize("pair", EACH, ids="/".join)
def test_a_row_is_the_same_whatever_rows_are_beside_it(pair):
    step = coded(step_of([(1, 100), (1, 33), (40, 70)], dim=32), *pair)
    out, lse = attend(step)
    for index, new in enumerate(step.num_new):
        tokens = slice(*step.starts[index : index + 2].tolist())
        alone = attend(step.row(index), num_new=[new])
        assert torch.equal(out[tokens], alone[0])
        assert torch.equal(lse[tokens], alone[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_queries_and_scales_of_every_size_meet_without_overflow(dtype):
    """The exponents of fp8 are taken as they lie, far from where they count."""
    step = coded(step_of([(1, 70), (18, 40)], dim=32, dtype=dtype), "fp8", "fp8")
    for by in (2.0**-20, 2.0**20):
        small = replace(step, q=step.q * by, options={**step.options, "scale": 0.1 / by})
        check(small)
        k_pages = step.k_pages._replace(scales=step.k_pages.scales * by)
        check(replace(step, k_pages=k_pages, options={**step.options, "scale": 0.1 / by}))


# ------------------------------------------------------------------ refusals


def pages(format, page=16, dim=32, staging=True):
    words = torch.zeros(3, 2, page, dim // FORMATS[format].per_word, dtype=torch.int16)
    staged = torch.zeros(2, 2, page, dim, device=DEVICE) if staging else None
    return Pages(FORMATS[format], words.to(DEVICE), None, staged)


REFUSED = {
    "int4 of 48 channels": ("int4_channel", {"dim": 48}, "^k_pages: .*multiple of 32.*48; int8"),
    "int4 on pages of 24": ("int4_channel", {"page": 24}, "^k_pages: .*multiple of 16.*24; int8"),
    "K by token": ("int4_token", {}, "^k_pages: expected a format of .*got int4_token"),
    "int8 of 40 channels": ("int8", {"dim": 40}, "^head_dim: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_format_that_does_not_fit_is_refused_by_name(case):
    format, sizes, message = REFUSED[case]
    with pytest.raises(NotImplementedError, match=message):
        checks.check_pages(pages(format, **sizes), pages("int8", **sizes), torch.float32)


def test_v_by_channel_and_k_by_channel_without_staging_pages_are_refused():
    with pytest.raises(NotImplementedError, match=r"^v_pages: .*got int4_channel"):
        checks.check_pages(pages("int8"), pages("int4_channel"), torch.float32)
    bare = pages("int4_channel", staging=False)
    with pytest.raises(ValueError, match=r"^k_pages: expected staging pages"):
        checks.check_pages(bare, pages("int8", staging=False), torch.float32)


def half(step, name, **changes):
    return replace(step, **{name: getattr(step, name)._replace(**changes)})


WRONG = {
    "scales of another shape": (
        lambda s: half(s, "k_pages", scales=s.k_pages.scales[:-1]),
        ValueError, r"^k_pages.scales: expected shape"),
    "scales in float32": (
        lambda s: half(s, "v_pages", scales=s.v_pages.scales.float()),
        TypeError, r"^v_pages.scales: expected scales of int4_token, torch.float16"),
    "scales with gaps": (
        lambda s: half(s, "k_pages", scales=s.k_pages.scales.repeat(1, 1, 1, 2)[..., :2]),
        ValueError, r"^k_pages.scales: expected to be contiguous"),
    "no scales": (
        lambda s: half(s, "v_pages", scales=None), ValueError, "^v_pages: expected scales"),
    "words of another size": (
        lambda s: half(s, "k_pages", data=s.k_pages.data.int()),
        TypeError, "^k_pages: expected words, torch.int16"),
    "fewer V pages": (
        lambda s: half(s, "v_pages", data=s.v_pages.data[:-1]),
        ValueError, "^v_pages: expected shape"),
    "staging pages of V in another order": (
        lambda s: half(s, "v_pages", staging=s.v_pages.staging.transpose(1, 2).contiguous()
                       .transpose(1, 2)),
        ValueError, r"^v_pages.staging: expected the strides"),
    "staging pages of K alone": (
        lambda s: half(s, "v_pages", staging=None), ValueError, "^v_pages: expected staging"),
    "staging pages of another dtype": (
        lambda s: half(s, "k_pages", staging=s.k_pages.staging.half()),
        TypeError, r"^k_pages.staging: expected the dtype of q"),
    "misaligned words": (
        lambda s: half(s, "k_pages", data=misaligned(s.k_pages.data)),
        ValueError, "^k_pages: .*16 bytes"),
    "misaligned scales": (
        lambda s: half(s, "v_pages", scales=misaligned(s.v_pages.scales)),
        ValueError, "^v_pages.scales: .*16 bytes"),
    "another format": (
        lambda s: half(s, "v_pages", format=FORMATS["int8"]),
        ValueError, "^v_pages: expected strides"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_pages_that_do_not_fit_are_refused_before_any_kernel_runs(case, monkeypatch):
    change, error, message = WRONG[case]
    step = coded(step_of([(1, 40)], dim=32), *EACH[2])
    plan = paged.plan(
        *(step.kv_lens, step.starts, step.q, step.k_pages, step.v_pages), num_new=[1], max_kv=40
    )
    monkeypatch.setattr(launch.Launcher, "__call__", lambda *_: pytest.fail("launched"))
    bad = change(step)
    with pytest.raises(error, match=message):
        paged.paged_attention(
            *(bad.q, bad.k_pages, bad.v_pages, bad.table, bad.kv_lens, bad.starts, plan),
            **bad.options,
        )


def test_heads_of_fp8_without_a_scale_hold_zeros_and_not_nan():
    config = CacheConfig(1, 2, 32, "float32", kv_format="fp8", max_tokens=64, page_size=16)
    cache = PagedKVCache(config, device=DEVICE, backend="triton")
    zeros = torch.zeros(20, 2, 32, device=DEVICE)
    with cache.step([cache.add()], num_new=20) as step:
        out = paged_attention(torch.ones(20, 4, 32, device=DEVICE), zeros, zeros, step, 0)
    assert torch.equal(out, torch.zeros_like(out))
