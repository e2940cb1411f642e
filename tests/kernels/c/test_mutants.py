"""Faults that are planted in the C sources are found by steps such as those of `test_attend.py`."""

import platform
import shutil

import pytest
import torch

from pagedkv.kernels.c import backend, eight_bits, packed_product, rms_norm, select_pages
from pagedkv.kernels.c import library as module
from tests.kernels.c.calls import (
    KINDS,
    attend,
    capped_high,
    check_choice,
    check_eight_bits,
    check_norms,
    check_numbers,
    check_pairs,
    check_products,
    differs,
)
from tests.kernels.c.test_attend import test_pages_that_are_chosen_are_read_and_no_others
from tests.kernels.c.test_packed_product import (
    LOST,
    test_one_weight_that_16_bits_do_not_hold_keeps_all_at_32,
)
from tests.kernels.shapes import DTYPES, Shape
from tests.kernels.steps import coded
from tests.kernels.truth import check

needs_compiler = pytest.mark.skipif(bool(module.missing()), reason="there is no library")

MUTANTS = {
    "a query sees the next token": ("tiles.h", "= (int32_t)at;", "= (int32_t)at + 1;"),
    "a window is one wider": ("tiles.h", "at - call->window + 1 : 0", "at - call->window : 0"),
    "a page's later slots": ("attend.c", "slot = (begin + done) % size", "slot = done % size"),
    "another head's pages": ("attend.c", "[column], task->group, slot", "[column], 0, slot"),
    "a staging page for another": ("attend.c", "(page - x->count) * x->staging_page", "page * 0"),
    "codes of int8 are moved": ("attend.c", "(from[i] >> 8) - 128", "(from[i] >> 8) - 127"),
    "scales of the next token": ("attend.c", "from_half(scales[slot + t])", "from_half(scales[t])"),
    "minima are left out": ("attend.c", "& 15) * by[o] + least[o]", "& 15) * by[o]"),
    "e4m3 of another bias": ("attend.c", "<< 24, 120, 0x07", "<< 24, 121, 0x07"),
    "old sums keep their scale": (
        "tiles.h",
        "fused(all(s->total[r]), by,",
        "fused(all(s->total[r]), all(1.0f),",
    ),
    "old sums of lanes keep theirs": (
        "tiles.h",
        "w * LANES), by, scores",
        "w * LANES), all(1.0f), scores",
    ),
    "parts are not scaled": (
        "attend.c",
        "vf by = exponential(least - choose",
        "vf by = exponential(choose",
    ),
    "the last part is left out": (
        "attend.c",
        "part < task->parts; part++) {",
        "part + 1 < task->parts; part++) {",
    ),
    "a part of other tokens in a prompt": ("tasks.h", "t % PART == 0 &&", "t % PART == 16 &&"),
    "blocks begin where a tile does": (
        "tasks.h",
        "t = task->begin / BLOCK * BLOCK;",
        "t = task->begin;",
    ),
    "few rows sum in another order": (
        "tiles.h",
        "fused(all(q[r * width + d]), k, sums[r])",
        "q[r * width + d] * k + sums[r]",
    ),
    "sinks are left out": ("attend.c", "expf(sink - level)", "0.0f"),
    "slopes rise": ("tiles.h", "fused(-slope,", "fused(slope,"),
    "a slope of the first row": ("tiles.h", "all(s->slopes[row])", "all(s->slopes[0])"),
    "a bias of the first row": ("tiles.h", "s->bias[row + (abreast ? i : 0)]", "s->bias[row]"),
    "a bias reaches too far": ("tiles.h", "< call->distances;", "<= call->distances;"),
    "a cap is left out": ("attend.c", "return call->softcap ?", "return 0 ?"),
    "tanh loses digits near 0": ("attend.c", "choose((x < all(0.625f))", "choose((x < all(-9.0f))"),
    "tokens of other lanes": ("vectors.h", "x[2 * i + 1], 1);", "x[2 * i + 1], 0);"),
    "two inputs change places": ("products.c", "a & -0x10000 : a << 16", "a << 16 : a & -0x10000"),
    "the last input is left out": ("products.c", "if (k < inputs)", "if (k < 0)"),
    "an input of another row": ("products.c", "all(x[r * inputs]);", "all(x[0]);"),
    "a pair of another row": ("products.c", "x + r * inputs, 2 * there", "x, 2 * there"),
    "an input behind the last": ("products.c", "at, 1, first, second", "at, 2, first, second"),
    "steps of another type": ("products.c", "2 * size_of(type) * WIDE;", "8 * WIDE;"),
    "the first panel for all": (
        "products.c",
        "by->panels + index * panel_bytes(by)",
        "by->panels",
    ),
    "a float that lost a bit": ("products.c", "(bits | next) & 0xffff", "bits & 0xffff"),
    "a half that lost a bit": ("products.c", "lost |= (vi)of_halves(out) ^ bits;", ""),
    "bfloats are cut, not rounded": ("vectors.h", "(bits + 0x7fff + (bits >> 16 & 1))", "bits"),
    "a bias of the first panel": ("products.c", "bias[output + i]", "bias[i]"),
    "a row alone in another order": (
        "products.c",
        "first[r] = fused(each, a, first[r]);",
        "first[r] = count > 1 ? fused(each, a, first[r]) : first[r] + each * a;",
    ),
    "the last row is left out": ("products.c", "row < rows->rows;", "row + 1 < rows->rows;"),
    "a mean of more numbers": ("rms_norm.c", "total / (float)width", "total / (float)(width + 1)"),
    "weights are not added to": ("rms_norm.c", "(weight + by->added)", "weight"),
    "a norm rounds once": ("rms_norm.c", "by->rounds ? rounded(x, type) : x", "x"),
    "a norm rounds twice": ("rms_norm.c", "by->rounds ? rounded(x, type) : x", "rounded(x, type)"),
    "the end of a row is left out": (
        "rms_norm.c",
        "memcpy(padded, at, count * size_of(type));",
        "",
    ),
    "a chosen page for the next": ("attend.c", "? n : chosen[n];", "? n : n;"),
    "a step counts once": ("select_pages.h", "? 15 * q : 0", "? q : 0"),
    "the first head for all": (
        "select_pages.h",
        "(group * ratio + r) * width",
        "(group * ratio) * width",
    ),
    "a part in another place": (
        "select_pages.h",
        "columns + c + j] =",
        "columns + c - begin + j] =",
    ),
    "the newest page alone is read": ("select_pages.h", "NEWEST = 2,", "NEWEST = 1,"),
    "the last ones of equal scores": ("select_pages.h", "equal-- > 0", "equal-- < 1"),
    "codes keep what was added": ("eight_bits.c", "into->begin = -128 *", "into->begin = -127 *"),
    "scales of the next group": ("eight_bits.c", "of_halves(at)", "of_halves(at + BLOCK)"),
    "another row's scale": ("eight_bits.c", "scales * x[r * groups + g]", "scales * x[g]"),
    "a row is cut, not rounded": ("eight_bits.c", "_mm512_cvtps_epi32", "_mm512_cvttps_epi32"),
    "the first half of a group": ("eight_bits.c", "k < GROUP;", "k < GROUP / 2;"),
    "the last group is left out": ("eight_bits.c", "g < groups;", "g + (groups > 1) < groups;"),
    "the first bias for all": ("eight_bits.c", "bias[output + i]", "bias[i]"),
}


def all_steps():
    terms = {"window": 9, "softcap": 0.7, "sinks": True}
    yield Shape(3, 2, 64, 16, DTYPES[0]).step([(1, 2300), (3, 40), (1, 17), (9, 30)], "cpu")
    yield Shape(2, 2, 80, 3, DTYPES[1], terms).step([(1, 40), (17, 40), (1, 5)], "cpu")
    yield Shape(2, 1, 16, 16, DTYPES[0]).step([(20, 1100)], "cpu")
    terms = {"alibi": True, "distances": 9}
    yield Shape(3, 2, 16, 16, DTYPES[0], terms).step([(1, 40), (2, 5), (17, 40)], "cpu")
    for pair in (("fp8", "int8"), ("int4_channel", "int4_token")):
        yield coded(Shape(2, 2, 32, 32, DTYPES[0]).step([(1, 70), (20, 70)], "cpu"), *pair)


def try_attention():
    for step in all_steps():
        check(step, attend(step))
        assert not differs(step)
        if not step.options["softcap"]:
            assert capped_high(step)


def try_choice():
    for dtype in DTYPES:
        check_choice(dtype, 4, 2, 32)
    test_pages_that_are_chosen_are_read_and_no_others()


def try_products():
    for kept in KINDS:
        check_products(kept)
    check_pairs()
    for dtype in KINDS[:2]:
        check_numbers(dtype)
    for value in LOST:
        test_one_weight_that_16_bits_do_not_hold_keeps_all_at_32(value)


def try_norms():
    for dtype in rms_norm.TYPES:
        check_norms(dtype)


def try_all():
    try_attention()
    try_choice()


TRIED = {
    "products.c": try_products,
    "vectors.h": try_products,
    "rms_norm.c": try_norms,
    "select_pages.h": try_choice,
    "attend.c": try_all,
    "eight_bits.c": check_eight_bits,
}


def use(monkeypatch, folder):
    """Compiles the sources anew and has them called."""
    monkeypatch.setenv("PAGEDKV_CACHE", str(folder))
    found = module.library.__wrapped__()
    for caller in (backend, eight_bits, packed_product, rms_norm, select_pages):
        monkeypatch.setattr(caller, "library", lambda: found)
    return found


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_fault_is_found(mutant, tmp_path, monkeypatch):
    name, old, new = MUTANTS[mutant]
    for source in module.SOURCES:
        shutil.copy(source, tmp_path)
    text = (tmp_path / name).read_text()
    assert text.count(old) == 1, "the place of this fault is gone"
    if name == "eight_bits.c" and (reason := eight_bits.why_not(torch.float32)):
        pytest.skip(reason)
    (tmp_path / name).write_text(text.replace(old, new))
    monkeypatch.setattr(module, "SOURCES", [tmp_path / x.name for x in module.SOURCES])
    use(monkeypatch, tmp_path)
    with pytest.raises(AssertionError):
        TRIED.get(name, try_attention)()


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.parametrize(("flag", "lanes"), [("-mno-avx", 4), ("-mno-avx512f", 8)])
def test_processors_with_narrower_vectors_agree(flag, lanes, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", " ".join([*module._compiler(), flag]))
    assert use(monkeypatch, tmp_path).panel_width() in (2 * lanes, 8)
    try_all()
    try_products()
    try_norms()
