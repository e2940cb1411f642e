"""Whole pages of all layers move, bit for bit, and nothing else does."""

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels import reference
from pagedkv.kernels.triton import backend as paged
from pagedkv.kernels.triton import launch
from tests.kernels.steps import DEVICE
from tests.kernels.triton_cases import HALF, assert_same_bits, random_bits


def storage(layout, layers, count, groups, page, dim, dtype=torch.float32, seed=0):
    """Pages `[L, N, G, P, D]` of random bits."""
    shape = (layers, count, groups, page, dim)
    if layout == "slots outermost":
        shape = (layers, count, page, groups, dim)
    pages = random_bits(*shape, dtype=dtype, seed=seed)
    return pages.transpose(2, 3) if layout == "slots outermost" else pages


def ids(*numbers):
    return torch.tensor(numbers, device=DEVICE)


LAYOUTS = ("heads outermost", "slots outermost")
# Pages of less than a program's 2048 elements, of just as many, of several programs and a rest.
SIZES = {
    "small": (3, 9, 2, 4, 16),
    "one program": (2, 9, 2, 16, 64),
    "a rest": (2, 9, 3, 16, 80),
    "one head": (1, 9, 1, 32, 128),
    "one slot": (2, 9, 5, 1, 16),
}


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_pages_move_within_a_storage_and_no_other_page_changes(size, layout, dtype):
    pages, twin = (storage(layout, *SIZES[size], dtype) for _ in range(2))
    source, target = ids(3, 0, 8), ids(7, 2, 1)
    paged.copy_pages(pages, source, target)
    reference.copy_pages(twin, source, target)
    assert_same_bits(pages, twin)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_move_to_a_storage_of_another_size_and_leave_their_own_as_it_was(layout):
    pages = storage(layout, 3, 5, 2, 16, 80)
    before = pages.clone()
    into, twin = (storage(layout, 3, 11, 2, 16, 80, seed=1) for _ in range(2))
    paged.copy_pages(pages, ids(4, 0), ids(10, 1), into)
    reference.copy_pages(pages, ids(4, 0), ids(10, 1), twin)
    assert_same_bits(into, twin)
    assert_same_bits(pages, before)


def test_some_layers_of_a_storage_may_be_copied():
    pages, twin = (storage(LAYOUTS[0], 4, 6, 2, 4, 16) for _ in range(2))
    paged.copy_pages(pages[1:3], ids(0, 1), ids(5, 3))
    reference.copy_pages(twin[1:3], ids(0, 1), ids(5, 3))
    assert_same_bits(pages, twin)


def test_layers_may_lie_apart_with_anything_between_them():
    """As they do in pools that grow on a card."""
    wide, twin = (random_bits(3, 1000, dtype=torch.bfloat16, seed=2) for _ in range(2))
    pages, expected = (x[:, :896].unflatten(1, (7, 2, 4, 16)) for x in (wide, twin))
    paged.check_pages(pages[1])
    paged.copy_pages(pages, ids(0, 6), ids(5, 3))
    reference.copy_pages(expected, ids(0, 6), ids(5, 3))
    assert_same_bits(wide, twin)


@pytest.mark.parametrize("number", [torch.int32, torch.int64], ids=str)
def test_page_ids_may_be_numbers_of_either_size(number):
    pages, twin = (storage(LAYOUTS[0], 1, 6, 2, 4, 16) for _ in range(2))
    paged.copy_pages(pages, ids(0, 1).to(number), ids(5, 3).to(number))
    reference.copy_pages(twin, ids(0, 1), ids(5, 3))
    assert_same_bits(pages, twin)


def test_no_pages_are_no_work():
    pages, twin = (storage(LAYOUTS[0], 2, 6, 2, 4, 16) for _ in range(2))
    paged.copy_pages(pages, ids().long(), ids().long())
    assert_same_bits(pages, twin)


def test_pages_beyond_2_to_the_31_elements_are_reached_in_every_layer():
    size = 16 * 64
    count = 2**31 // size + 70_000
    pages = torch.empty(2, count, 1, 16, 64, dtype=torch.float16, device=DEVICE)  # never touched
    far, middle = count - 1, count - 69_000
    for layer in range(2):
        pages[layer, 5] = layer + 1
        pages[layer, far] = layer + 3
    paged.copy_pages(pages, ids(5, far), ids(middle, 6))
    for layer in range(2):
        assert (pages[layer, middle] == layer + 1).all()
        assert (pages[layer, 6] == layer + 3).all()


def interleaved(pages):
    """K and V side by side in a page: a page of K is not followed by the next."""
    return torch.stack([pages, pages], 2)[:, :, 0]


REFUSED = {
    "pages with gaps": (lambda x: (interleaved(x), None), "pages: .*contiguous"),
    "every other slot": (lambda x: (x[..., ::2, :], None), "pages: .*contiguous"),
    "a storage with gaps": (lambda x: (x, interleaved(x)), "into: .*contiguous"),
    "another order": (
        lambda x: (x, storage("slots outermost", *x.shape)), "into: .*order of `pages`"),
    "fewer layers": (lambda x: (x, x[:1].clone()), "into: .*L, N, G, P, D"),
    "other pages": (lambda x: (x, storage(LAYOUTS[0], 2, 9, 4, 2, 16)), "into: .*L, N, G, P, D"),
    "misaligned": (
        lambda x: (torch.cat([x.flatten(), x.flatten()])[1 : x.numel() + 1].view(x.shape), None),
        "pages: .*multiple of 16 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_storages_that_do_not_fit_are_refused_before_anything_moves(case, monkeypatch):
    change, message = REFUSED[case]
    pages = storage(LAYOUTS[0], 2, 9, 2, 4, 16)
    pages, into = change(pages)
    before = [None if x is None else x.clone() for x in (pages, into)]
    monkeypatch.setattr(launch.Launcher, "__call__", lambda *_: pytest.fail("launched"))
    with pytest.raises(ValueError, match=message):
        paged.copy_pages(pages, ids(0), ids(1), into)
    for found, expected in zip((pages, into), before, strict=True):
        if found is not None:
            assert_same_bits(found.contiguous(), expected.contiguous())


def test_ids_and_pages_that_do_not_fit_each_other_are_refused(monkeypatch):
    pages = storage(LAYOUTS[0], 2, 9, 2, 4, 16)
    monkeypatch.setattr(launch.Launcher, "__call__", lambda *_: pytest.fail("launched"))
    with pytest.raises(TypeError, match=r"^into: expected torch.float32, got torch.float16"):
        paged.copy_pages(pages, ids(0), ids(1), pages.half())
    for target in (ids(1, 2), ids(1).int()):
        with pytest.raises(ValueError, match=r"^target: expected ids like `source`"):
            paged.copy_pages(pages, ids(0), target)
