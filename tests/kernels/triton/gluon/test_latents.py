"""Hopper's decode over latents against the float64 twin, in threads instead of warps."""

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels.formats import Pages
from pagedkv.kernels.prefixes import Prefix
from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.triton import merge_parts, shared_prefix
from pagedkv.kernels.triton.decode_tuning import MOST_QUERIES
from pagedkv.kernels.triton.geometry import Geometry, Target
from pagedkv.kernels.triton.work_list import Bounds, Cut, Work, cut_rows
from tests.effort import few
from tests.kernels.steps import step_of
from tests.kernels.triton.gluon import emulator
from tests.kernels.truth import check, poisoned_outputs

HOPPER = Target(0, 90, 227 << 10, 2)
# Splits of at least 128 tokens, at most 3 of them.
CUT = Cut(1, MOST_QUERIES, 1, 128, 3, 64, 1024, 3)


@pytest.fixture(scope="module")
def hopper():
    module = emulator.emulated("latents")
    module.target_of = lambda device: HOPPER
    return module


def latents(rows, heads=40, page=16, dtype=torch.bfloat16, **options):
    sizes = {"groups": 1, "dim": 576, "v_dim": 512, "latent": True}
    return step_of(rows, heads=heads, page=page, dtype=dtype, **sizes | options)


def attend(hopper, step, cut=CUT, prefix=0):
    """As `decode.paged_attention`; the rows' first pages, so many, are attended once."""
    scoring = Scoring(**step.options)
    pages = Pages.of(step.k_pages), Pages.of(step.v_pages)
    geometry = Geometry.of(step.q, *pages)
    heads = geometry.heads(64)
    assert hopper.serves(step.q, geometry, heads, scoring, HOPPER)
    bounds = Bounds(len(step.rows), len(step.q), max(step.num_new), step.max_kv)
    most, shared = cut.parts(step.max_kv), None
    if prefix:
        prefixes = [Prefix(slice(0, len(step.rows)), prefix)]
        front = shared_prefix.cut(prefixes, step.num_new, step.page, cut)
        shared = shared_prefix.plan(front, step.q.device)
    with poisoned_outputs():
        work = cut_rows(
            *(step.kv_lens, step.starts, cut, cut.tiles(bounds) * most),
            max_new=bounds.max_new,
            window=scoring.window,
            skips=None if shared is None else shared.skips,
        )
        parts = most + (0 if shared is None else shared.parts)
        out = torch.empty(*step.q.shape[:2], 512, dtype=step.q.dtype)
        lse = torch.empty(step.q.shape[:2])
        room = len(step.rows) * bounds.max_new, parts, geometry.num_heads
        partial, sums = torch.empty(*room, 512), torch.empty(room)
        lists = [work]
        if shared is not None:
            lists.append(Work(shared.items, shared.total, work.parts))
        for one in lists:
            given = step.q, *pages, step.table, one, geometry, scoring
            hopper.paged_attention(heads, *given, (out, lse, partial, sums))
        tensors = step.starts, work.parts, partial, sums, out, lse
        merge_parts.merge_parts(*tensors, bounds.max_new)
    return out, lse


# Around tiles of 64 tokens and splits of 128; rows of several queries, and without keys.
ROWS = {
    "a token": [(1, 1)],
    "a tile": [(1, 64)],
    "one more than a tile": [(1, 65)],
    "one more than two": [(1, 129)],
    "three parts": [(1, 700)],
    "several queries": [(3, 70), (1, 300), (2, 200)],
    "no keys": [(1, 0), (0, 0), (2, 1), (1, 30)],
}
SHAPES = {
    "128 heads, pages of 64": {"heads": 128, "page": 64},
    "64 heads, pages of 48": {"heads": 64, "page": 48},
    "67 heads, of which a tile has 34": {"heads": 67, "page": 32},
    "float16": {"dtype": torch.float16},
    "slots outermost": {"layout": "slots outermost"},
    "several KV heads, slots outermost": {"heads": 80, "groups": 2, "layout": "slots outermost"},
    "a window": {"window": 100},
}


@pytest.mark.parametrize("rows", few(ROWS, *list(ROWS)[2::2]))
def test_lengths_agree_with_the_twin(hopper, rows):
    step = latents(ROWS[rows])
    check(step, attend(hopper, step))


@pytest.mark.parametrize("shape", few(SHAPES, *list(SHAPES)[1::2]))
def test_heads_pages_and_layouts_agree_with_the_twin(hopper, shape):
    step = latents([(1, 200), (1, 33)], **SHAPES[shape])
    check(step, attend(hopper, step))


def test_a_prefix_that_rows_share_ends_within_a_tile(hopper):
    step = latents([(1, 150), (1, 97), (1, 300)], page=48, shared=2)
    check(step, attend(hopper, step, prefix=2))


def test_queries_may_be_a_slice_of_wider_ones(hopper):
    step = latents([(1, 130), (1, 20)], heads=67)
    wide = torch.full((2, 70, 576), math.nan, dtype=step.q.dtype)
    wide[:, 3:] = step.q
    step = replace(step, q=wide[:, 3:])
    check(step, attend(hopper, step))


def test_a_row_in_a_batch_is_the_row_alone(hopper):
    step = latents([(1, 300), (1, 700), (1, 40)])
    out, lse = attend(hopper, step)
    for row, tokens in enumerate(step.tokens):
        alone = attend(hopper, step.row(row))
        assert torch.equal(alone[0], out[tokens])
        assert torch.equal(alone[1], lse[tokens])


def test_slots_that_nobody_wrote_have_to_be_blanked(hopper, monkeypatch):
    step = latents([(1, 100)])
    monkeypatch.setitem(hopper.attend_left.__globals__, "blank", lambda *_: None)
    out, _ = attend(hopper, step)
    assert out.isnan().any()


# As in `test_prefill.py`. The group that sums the right half may be as late as it likes.
MUTANTS = {
    "no fence behind weights that the other group multiplies": (
        "attend_latents",
        "    fades.store(fade)\n    fence_async_shared()\n",
        "    fades.store(fade)\n",
    ),
    "weights that other warps have not stored yet": (
        "attend_latents",
        "    barrier()\n    mbarrier.arrive(full, count=1)\n",
        "    mbarrier.arrive(full, count=1)\n",
    ),
    "weights of the next tile over those that are still multiplied": (
        "attend_latents",
        "    mbarrier.wait(empty, shown % 2 ^ 1)\n",
        "",
    ),
    "weights that are read before they are there": (
        "attend_latents",
        "            mbarrier.wait(full, shown % 2)\n            fade",
        "            mbarrier.wait(full, shown % 2 ^ 1)\n            fade",
    ),
    "the right half given away before its product was waited for": (
        "attend_latents",
        "            acc = warpgroup_mma_wait(0, deps=[acc])\n            barrier()\n"
        "            mbarrier.arrive(empty, count=1)\n"
        "            mbarrier.arrive(right_empty.index(place), count=1)\n",
        "            mbarrier.arrive(right_empty.index(place), count=1)\n"
        "            acc = warpgroup_mma_wait(0, deps=[acc])\n            barrier()\n"
        "            mbarrier.arrive(empty, count=1)\n",
    ),
    "the left half given away before its product was waited for": (
        "attend_latents",
        "            acc, operand = warpgroup_mma_wait(3, deps=[acc, operand])\n"
        "            barrier()\n"
        "            mbarrier.arrive(left_empty.index(place), count=1)\n",
        "            mbarrier.arrive(left_empty.index(place), count=1)\n"
        "            acc, operand = warpgroup_mma_wait(3, deps=[acc, operand])\n",
    ),
    "sums that are used while they are made": (
        "attend_latents",
        "warpgroup_mma_wait(3, deps=[acc, operand])",
        "warpgroup_mma_wait(4, deps=[acc, operand])",
    ),
    "a half that is not waited for": (
        "attend_latents",
        "    mbarrier.wait(left_full.index(place), phase)\n",
        "",
    ),
    "columns behind V that are not given back": (
        "attend_latents",
        "            mbarrier.arrive(rest_empty.index(count % SIZES.stages), count=1)\n"
        "            count += 1\n",
        "            count += 1\n",
    ),
    "a last factor that is not given back": (
        "attend_latents",
        "        factor = fades.load(O_ROWS)\n        barrier()\n"
        "        mbarrier.arrive(empty, count=1)\n",
        "        factor = fades.load(O_ROWS)\n        barrier()\n",
    ),
    "queries that are not waited for": (
        "attend_latents",
        "        mbarrier.wait(q_full, index // gl.num_programs(0) % 2)\n",
        "",
    ),
    "queries of the next share over those that are still multiplied": (
        "attend_latents",
        "    mbarrier.wait(empty, shares % 2 ^ 1)\n",
        "",
    ),
    "queries that are not given back": (
        "attend_latents",
        "        mbarrier.arrive(q_empty, count=1)  # behind the barrier of the last scores\n",
        "",
    ),
}


@pytest.mark.parametrize("mutant", few(MUTANTS, *list(MUTANTS)[::4]))
def test_a_line_that_orders_warps_is_missed(mutant, tmp_path):
    step = latents([(1, 700)])
    with emulator.mutated(*MUTANTS[mutant], tmp_path / "gluon", slow="attend_right"):
        module = emulator.emulated("latents")
        module.target_of = lambda device: HOPPER
        with pytest.raises((AssertionError, TimeoutError)):
            check(step, attend(module, step))


def test_what_has_no_kernel_is_not_served(hopper):
    def serves(target=HOPPER, rows=64, **sizes):
        step = latents([(1, 17)], **sizes)
        pages = Pages.of(step.k_pages), Pages.of(step.v_pages)
        geometry = Geometry.of(step.q, *pages)
        return hopper.serves(
            step.q, geometry, geometry.heads(rows), Scoring(**step.options), target
        )

    assert serves()
    assert serves(heads=128, page=48, window=100)
    assert not serves(HOPPER._replace(arch=100))
    assert not serves(heads=32)
    assert not serves(rows=32)
    assert not serves(page=8)
    assert not serves(dtype=torch.float32)
    assert not serves(dim=288, v_dim=256)
    assert not serves(latent=False)
    assert not serves(sinks=True)
    assert not serves(softcap=20.0)
    assert not serves(alibi=True)
    assert not serves(scale=-1.0)
