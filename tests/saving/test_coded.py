"""Pages in fewer bits are saved as they are, and their scales with them."""

import pytest
import torch

from pagedkv import PagedKVCache, write_kv
from pagedkv.errors import WrongShapeError
from tests.cases import one_group, two_groups
from tests.contents import advance, start
from tests.saving.saved import TEXT, contents, make

FORMATS = ["fp8", "int8", "int4", ("dense", "int4"), ("int8", "fp8"), ("int4", "fp8")]
LONG = TEXT * 9


def coded(kv_format, **fields):
    groups = two_groups(40).groups
    shape = {"num_layers": 3, "groups": groups, "head_dim": 32, "max_tokens": 320}
    return one_group(**{**shape, "page_size": 16, "kv_format": kv_format, **fields})


def assert_alike(cache: PagedKVCache, seq: int, other: PagedKVCache, copy: int) -> None:
    for layer in range(3):
        for x, y in zip(cache.gather(seq, layer), other.gather(copy, layer), strict=True):
            assert torch.equal(x, y[len(y) - len(x) :])


@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
@pytest.mark.parametrize("cut", [3, 16, 40, 100, 105])
def test_coded_pages_are_loaded_as_they_are(kv_format, cut, tmp_path):
    cache, other = make(coded(kv_format, rollback=96)), make(coded(kv_format, rollback=96))
    seq = start(cache, LONG[:105])
    cache.truncate(seq, cut)  # within a page that is coded as a whole, or at its end
    cache.save(seq, tmp_path / "x")
    copy = other.load(tmp_path / "x")
    other.check()
    assert_alike(cache, seq, other, copy)
    for each, text in ((cache, seq), (other, copy)):
        advance(each, {text: LONG[: cut + 20]})
        each.check()
    assert_alike(cache, seq, other, copy)
    assert other.length(other.add(LONG)) == cut + 20


@pytest.mark.parametrize("page_size", [48, 32])  # 32 is the head dim as well
@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
def test_pages_coded_token_by_token_change_their_size_and_others_are_refused(
    kv_format, page_size, tmp_path
):
    cache, other = make(coded(kv_format)), make(coded(kv_format, page_size=page_size))
    seq = start(cache, LONG[:33])
    cache.save(seq, tmp_path / "x")
    if "int4" in kv_format:
        with pytest.raises(WrongShapeError, match=f"cannot become pages of {page_size}: int4"):
            other.load(tmp_path / "x")
    else:
        assert_alike(cache, seq, other, other.load(tmp_path / "x"))
    other.check()


def test_fp8_is_loaded_beside_pages_of_another_scale(tmp_path):
    cache, other = make(coded("fp8")), make(coded("fp8"))
    seq, large = start(cache, LONG), other.add([1])
    with other.step([large]) as step:
        for layer in range(3):
            k = torch.full((1, 2, 32), 900.0)
            write_kv(k, k, step, layer)
    cache.save(seq, tmp_path / "x")
    copy = other.load(tmp_path / "x")
    for layer in range(3):
        for x, y in zip(cache.gather(seq, layer), other.gather(copy, layer), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=8 * 2.0**-10)  # the finest step of both


def test_fp8_beyond_the_range_of_scales_that_are_set_is_refused(tmp_path):
    cache, other = make(coded("fp8")), make(coded("fp8"))
    seq = cache.add()
    with cache.step([seq], num_new=3) as step:
        for layer in range(3):
            k = torch.full((3, 2, 32), 900.0)
            write_kv(k, k, step, layer)
    cache.save(seq, tmp_path / "x")
    before = start(other, TEXT), other.stats()
    with pytest.raises(WrongShapeError, match="fp8: some values of K are too large for the scales"):
        other.load(tmp_path / "x")
    assert other.stats() == before[1]
    other.check()
    empty = make(coded("fp8"))
    assert_alike(cache, seq, empty, empty.load(tmp_path / "x"))


def write_all(cache: PagedKVCache, seq: int, value: float) -> None:
    with cache.step([seq], num_new=3) as step:
        for layer in range(cache.config.num_layers):
            k = torch.full((3, 2, 32), value)
            write_kv(k, k, step, layer)


def test_a_file_of_zeros_sets_no_scale_of_fp8_and_takes_that_of_another(tmp_path):
    cache, empty, large = (make(coded("fp8")) for _ in range(3))
    seq, other = cache.add(), large.add()
    write_all(cache, seq, 0.0)
    cache.save(seq, tmp_path / "x")
    write_all(large, other, 900.0)
    for into, value in ((empty, 1e-3), (large, 800.0)):
        copy = into.load(tmp_path / "x")
        write_all(into, copy, value)
        for x in contents(into, copy):
            assert not x[:-3].any()
            torch.testing.assert_close(x[-3:], torch.full_like(x[-3:], value), rtol=2**-4, atol=0)


@pytest.mark.parametrize("config", [one_group, two_groups])
def test_a_refused_file_sets_no_scale_of_fp8(config, tmp_path):
    sizes = {"head_dim": 32, "kv_format": "fp8"}
    cache, other = make(config(**sizes)), make(config(**sizes))
    seq, small = cache.add(), other.add()
    write_all(cache, seq, 900.0)
    cache.save(seq, tmp_path / "x")
    with other.step([small], num_new=1) as step:  # scales of the last layer's first V head alone
        for layer in range(other.config.num_layers):
            k, v = torch.zeros(2, 1, 2, 32)
            v[:, 0] = 1e-3 * (layer == 1)
            write_kv(k, v, step, layer)
    with pytest.raises(WrongShapeError, match="fp8: some values of V are too large"):
        other.load(tmp_path / "x")
    seq = other.add()
    write_all(other, seq, 1e-3)
    for x in contents(other, seq):
        torch.testing.assert_close(x, torch.full_like(x, 1e-3), rtol=2**-4, atol=0)


def test_a_cache_that_holds_zeros_takes_the_scales_of_a_file(tmp_path):
    cache, other = make(coded("fp8")), make(coded("fp8"))
    seq = cache.add()
    write_all(cache, seq, 1e-3)
    cache.save(seq, tmp_path / "x")
    write_all(other, other.add(), 0.0)
    assert_alike(cache, seq, other, other.load(tmp_path / "x"))


def test_another_format_is_refused_by_name(tmp_path):
    cache = make(coded("int8"))
    cache.save(start(cache, TEXT), tmp_path / "x")
    with pytest.raises(WrongShapeError, match=r"expected kv_format ..fp8., .fp8.., got ..int8"):
        make(coded("fp8")).load(tmp_path / "x")
