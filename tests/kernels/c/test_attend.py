"""The C kernel against the float64 twin, on pools full of NaN; and the laws that hold to the bit.

What these cases alone find: faults of `attend.c` in what it decodes, masks, sums and merges. The
other backends are tried by the same steps.
"""

import ctypes
import math
import mmap
from dataclasses import replace

import numpy as np
import pytest
import torch

from pagedkv.kernels.c.library import missing
from tests.effort import few
from tests.kernels.c.calls import attend, capped_high, differs
from tests.kernels.shapes import DTYPES, FULL, SMALL, Shape, shapes, wide
from tests.kernels.steps import EACH, LAYOUTS, MIXTURES, coded, step_of
from tests.kernels.truth import check

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a library")

SHAPES = [*shapes(), *wide("cuda")]
LATENT = Shape(40, 1, 48, 16, DTYPES[0], v_dim=32, latent=True)


@pytest.mark.parametrize("shape", few([*SHAPES, LATENT], SHAPES[0], SHAPES[13], LATENT), ids=str)
@pytest.mark.parametrize("rows", FULL)
def test_every_shape_agrees_with_the_truth_and_each_row_is_what_it_is_alone(shape, rows):
    step = shape.step(FULL[rows], "cpu")
    check(step, attend(step))
    assert not differs(step)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", [*EACH, *MIXTURES], ids="/".join)
def test_every_pair_of_formats_agrees_with_the_truth(pair, dtype):
    for rows, dim in ((SMALL["mixed"], 32), (SMALL["verify"], 96), (FULL["decode"][::4], 64)):
        step = coded(
            step_of(rows, heads=6, dim=dim, dtype=dtype, layout=LAYOUTS[1], device="cpu"), *pair
        )
        check(step, attend(step))
        assert not differs(step)


@pytest.mark.parametrize("window", [None, 700])
def test_parts_are_one_softmax_and_the_same_in_one_task_and_in_several(window):
    shape = Shape(3, 2, 64, 16, DTYPES[0], {"window": window})
    step = shape.step([(1, 5000), (2, 1025), (1, 1024), (70, 2000)], "cpu")
    check(step, attend(step))
    assert not differs(step)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_query_sees_its_ancestors_alone_among_new_tokens(dtype):
    """Tiles of few rows and of many, parts, a value that is infinite for some rows, coded pages."""
    rows = [(2, 1025), (5, 21), (16, 130), (9, 9), (40, 70), (1, 30)]
    step = step_of(rows, heads=6, dim=64, dtype=dtype, tree=True, device="cpu")
    check(step, attend(step))
    assert step.tree is not None
    plain = replace(step, options=step.options | {"tree": None})
    chain = replace(step, options=step.options | {"tree": torch.full_like(step.tree, -1)})
    assert all(torch.equal(x, y) for x, y in zip(attend(plain), attend(chain)))
    for pair in EACH:
        check(one := coded(step_of(rows, dim=32, dtype=dtype, tree=True), *pair), attend(one))
    out, _ = attend(step)
    page, slot = divmod(int(step.slots[2 + 5 + 3]), 16)  # the fourth of the third row
    step.v_pages[page, :, slot] = math.inf
    sees = step.tree[7:23] >> torch.arange(-3, 13).clamp(0) & 1 == 1
    sees &= torch.arange(16) >= 3
    found = attend(step)[0]
    assert not found[7:23][sees].isfinite().any()
    found[7:23][sees] = out[7:23][sees]
    assert torch.equal(found, out)


def test_pages_that_are_chosen_are_read_and_no_others():
    step = step_of([(1, 100), (1, 70), (1, 41)], heads=4, groups=2, dim=32, device="cpu")
    columns = torch.tensor([[[0, 2, 6], [0, 4, 6]], [[0, 3, 4]] * 2, [[-1, 0, 0]] * 2]).int()
    wanted = torch.empty(2, 4, 32, dtype=torch.float64)
    for row in range(2):
        k, v = (step.contents(row, x, torch.float64) for x in (step.k_pages, step.v_pages))
        for group, chosen in enumerate(columns[row].tolist()):
            seen = [t for c in chosen for t in range(16 * c, 16 * c + 16) if t < len(k)]
            heads = slice(2 * group, 2 * group + 2)
            scores = step.q[row, heads].double() @ k[seen, group].T * step.options["scale"]
            wanted[row, heads] = scores.softmax(-1) @ v[seen, group]
            for column in set(range(-(-len(k) // 16))) - set(chosen):
                step.k_pages[step.ids[row, column], group] = math.nan
    out, _ = attend(step, chosen=columns)
    torch.testing.assert_close(out[:2].double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(out[2], attend(step.row(2))[0][0])


def test_a_cap_far_above_all_scores_changes_nothing():
    assert capped_high(Shape(3, 2, 64, 16, DTYPES[0]).step([(1, 300), (12, 40)], "cpu"))


@pytest.mark.parametrize("rows", [[(1, 40)], [(9, 40)]], ids=str)
def test_a_scale_that_makes_scores_infinite_leaves_what_is_capped_finite(rows):
    """Queries that are scaled first would be infinite themselves, and their products NaN."""
    step = Shape(3, 1, 64, 16, DTYPES[0]).step(rows, "cpu")
    step = replace(step, q=100 * step.q, options=step.options | {"scale": 1e38, "softcap": 5.0})
    check(step, attend(step))


@pytest.mark.parametrize("rows", [[(1, 40)], [(9, 40)], [(1, 2000)]], ids=str)
@pytest.mark.parametrize("what", ["a query", "a key", "a value"])
def test_what_is_no_number_comes_out_as_none(what, rows):
    """A model that overflows has to show it."""
    step = Shape(3, 1, 32, 16, DTYPES[0]).step(rows, "cpu")
    into = {
        "a query": step.q,
        "a key": step.k_pages[step.ids[0, 0]],
        "a value": step.v_pages[step.ids[0, 0]],
    }
    into[what].fill_(math.nan)
    assert attend(step)[0].isnan().all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(threads):
    step = Shape(3, 2, 64, 16, DTYPES[0]).step([(1, 3000), (40, 90), (1, 17)], "cpu")
    before = torch.get_num_threads()
    one = attend(step)
    torch.set_num_threads(threads)
    try:
        for mine, other in zip(attend(step), one):
            assert torch.equal(mine, other)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("new", [1, 9])
def test_nothing_behind_a_pool_is_read(new, dtype):
    """The last page ends where memory begins that nobody may read."""
    shape = (3, 16, 2, 72)  # whole vectors go beyond 72 elements
    step = step_of([(new, 48)], heads=4, groups=2, dim=72, dtype=dtype, device="cpu", pages=3)
    pools = [step.k_pages, step.v_pages]
    walled = [_before_a_wall(shape, dtype).transpose(1, 2).copy_(x) for x in pools]
    for mine, other in zip(
        attend(replace(step, k_pages=walled[0], v_pages=walled[1])), attend(step)
    ):
        assert torch.equal(mine, other)


def _before_a_wall(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, room + mmap.PAGESIZE), np.uint8)
    wall = ctypes.c_void_p(memory.ctypes.data + room)
    assert ctypes.CDLL(None).mprotect(wall, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return torch.from_numpy(memory[room - size : room]).view(dtype).view(shape)


def test_zeros_for_subnormal_numbers_change_no_code():
    """Scales of small values are subnormal halves, which a process may have floats not be."""
    step = step_of([(1, 40), (9, 20)], heads=4, groups=2, dim=32, device="cpu")
    for pages in (step.k_pages, step.v_pages):
        pages.mul_(1e-3)
    for pair in EACH:
        one = coded(step, *pair)
        expected = attend(one)
        torch.set_flush_denormal(True)
        try:
            for mine, other in zip(attend(one), expected):
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=0)
        finally:
            torch.set_flush_denormal(False)


def test_halves_are_rounded_to_the_nearest():
    """A token that sees itself alone gives its value, in the dtype of the output."""
    values = torch.cat(
        [torch.logspace(-9, 5, 4000), torch.tensor([65519.0, 65520.0, 1e9, math.inf])]
    )
    values = torch.cat([values, -values]).view(1, -1)
    for dtype in (torch.float16, torch.bfloat16):
        step = step_of([(1, 1)], heads=1, groups=1, dim=16, v_dim=values.shape[1], device="cpu")
        v = step.v_pages.to(dtype)
        v[step.ids[0, 0], 0, 0] = values.to(dtype)
        narrow = replace(step, q=step.q.to(dtype), k_pages=step.k_pages.to(dtype), v_pages=v)
        assert torch.equal(attend(narrow)[0].view(1, -1), values.to(dtype))
