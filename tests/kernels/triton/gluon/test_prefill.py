"""The prefill of Hopper against the float64 twin, in threads instead of warps."""

import math

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels.formats import Pages
from pagedkv.kernels.scoring import NO_WINDOW, Scoring
from pagedkv.kernels.triton import prefill
from pagedkv.kernels.triton.geometry import Geometry, Target
from pagedkv.kernels.triton.work_list import Bounds, Cut, cut_rows
from tests.effort import few
from tests.kernels.steps import step_of
from tests.kernels.triton.gluon import emulator
from tests.kernels.truth import attend as plain
from tests.kernels.truth import check, poisoned_outputs

HOPPER = Target(0, 90, 227 << 10, 2)


@pytest.fixture(scope="module")
def hopper():
    module = emulator.emulated("prefill")
    module.target_of = lambda device: HOPPER
    return module


def attend(hopper, step):
    scoring = Scoring(**step.options)
    k_pages, v_pages = Pages.of(step.k_pages), Pages.of(step.v_pages)
    geometry = Geometry.of(step.q, k_pages, v_pages)
    assert hopper.serves(geometry, scoring, HOPPER)
    new = [new for new in step.num_new if new > 16]
    bounds = Bounds(len(new), sum(new), max(new), step.max_kv)
    cut = Cut(17, NO_WINDOW, 128 // geometry.ratio, NO_WINDOW, 1, 1)
    with poisoned_outputs():
        work = cut_rows(
            *(step.kv_lens, step.starts, cut, cut.tiles(bounds)),
            max_new=bounds.max_new,
            window=scoring.window,
        )
        out, lse = torch.empty(step.q.shape, dtype=step.q.dtype), torch.empty(step.q.shape[:2])
        given = step.q, k_pages, v_pages, step.table, work
        hopper.paged_attention(*given, geometry, scoring, out, lse)
    return out, lse


# First chunks, chunks behind a past, around tiles of 128 tokens, several rows at once.
ROWS = {
    "one short chunk": [(17, 17)],
    "a chunk of a tile": [(128, 128)],
    "one more than a tile": [(129, 129)],
    "behind two tiles": [(40, 300)],
    "at the end of a tile": [(20, 384)],
    "rows with fewer tokens than are new, or none": [(30, 10), (20, 0), (17, 40), (18, 1)],
    "several rows, and others between them": [(17, 30), (1, 40), (70, 200), (0, 0), (33, 257)],
}
SHAPES = {
    "2 query heads a KV head": {"heads": 4, "groups": 2, "dim": 64},
    "a query head a KV head, D=128": {"heads": 2, "groups": 2, "dim": 128},
    "7, which leave rows of a tile empty": {"heads": 7, "groups": 1, "dim": 128, "page": 32},
    "slots outermost, pages of 48": {"dim": 64, "page": 48, "layout": "slots outermost"},
    "K and V side by side, pages of 64": {"dim": 64, "page": 64, "layout": "K and V side by side"},
    "pages of 256": {"dim": 128, "page": 256},
    "float16": {"dim": 64, "dtype": torch.float16},
    "D=256, tiles of 64 tokens": {"heads": 4, "groups": 2, "dim": 256},
}
TERMS = {
    "sinks": {"sinks": True},
    "a softcap": {"softcap": 5.0},
    "all, D=256": {"window": 33, "softcap": 20.0, "sinks": True, "dim": 256},
}


@pytest.mark.parametrize("shape", few(SHAPES, *list(SHAPES)[2::2]))
def test_heads_pages_and_layouts_agree_with_the_twin(hopper, shape):
    step = step_of(ROWS["behind two tiles"], **{"dtype": torch.bfloat16} | SHAPES[shape])
    check(step, attend(hopper, step))


@pytest.mark.parametrize("terms", TERMS)
def test_terms_of_scores_agree_with_the_twin(hopper, terms):
    """Rows without a token see their sinks alone."""
    rows = [(40, 300), *ROWS["rows with fewer tokens than are new, or none"]]
    step = step_of(rows, heads=6, groups=2, **{"dim": 64, "dtype": torch.bfloat16} | TERMS[terms])
    check(step, attend(hopper, step))


def test_sinks_may_be_infinite(hopper):
    step = step_of(
        [(40, 300), (20, 0)], heads=4, groups=1, dim=64, dtype=torch.bfloat16, sinks=True
    )
    step.options["sinks"].copy_(torch.tensor([-math.inf, math.inf, 1e30, -1e30]))
    out, lse = attend(hopper, step)
    assert (lse[:, 1] == math.inf).all()
    assert not out[:, 1].any()
    check(step, (out, lse))


@pytest.mark.parametrize("rows", ROWS)
def test_lengths_agree_with_the_twin(hopper, rows):
    step = step_of(ROWS[rows], dim=64, dtype=torch.bfloat16)
    out, lse = attend(hopper, step)
    for new, tokens in zip(step.num_new, step.tokens):
        if 0 < new <= 16:  # another kernel's
            assert out[tokens].isnan().all()
            alone = step.row(step.num_new.index(new))
            out[tokens], lse[tokens] = plain(alone)
    check(step, (out, lse))


@pytest.mark.parametrize("window", few([1, 17, 127, 128, 129, 200, 500], 17, 129))
def test_windows_agree_with_the_twin(hopper, window):
    step = step_of([(40, 300), (130, 260)], dim=64, dtype=torch.bfloat16, window=window)
    check(step, attend(hopper, step))


def test_one_program_after_another_goes_on_where_the_ring_stands(hopper):
    """Items of an odd number of tiles: the next one begins in the middle of a ring."""
    step = step_of([(100, 300), (100, 500), (100, 130)], heads=8, dim=128, dtype=torch.bfloat16)
    check(step, attend(hopper, step))


def test_slots_that_nobody_wrote_have_to_be_blanked(hopper, monkeypatch):
    step = step_of([(40, 300)], dim=64, dtype=torch.bfloat16)
    monkeypatch.setitem(hopper.attend.__globals__, "blank", lambda *_: None)
    out, _ = attend(hopper, step)
    assert out.isnan().any()


# What every line that orders warps is there for: without it the emulator, or the twin, tells.
MUTANTS = {
    "a place of V given away before its product was waited for": (
        "attend",
        "        acc = warpgroup_mma_wait(0, deps=[acc])\n        barrier()\n"
        "        mbarrier.arrive(v_empty.index(before), count=1)\n",
        "        mbarrier.arrive(v_empty.index(before), count=1)\n        barrier()\n"
        "        acc = warpgroup_mma_wait(0, deps=[acc])\n",
    ),
    "a place of V that is not given back": (
        "attend",
        "        mbarrier.arrive(v_empty.index(before), count=1)\n",
        "",
    ),
    "V that is not waited for": (
        "attend",
        "        mbarrier.wait(v_full.index(before), (count - 1) // SIZES.stages % 2)\n",
        "",
    ),
    "another phase": ("pages", "// SIZES.stages % 2 ^ 1", "// SIZES.stages % 2"),
    "no fence behind the queries": (
        "prefill",
        "        fence_async_shared()\n        barrier()\n        shares",
        "        barrier()\n        shares",
    ),
    "a place of K that other warps may still read": (
        "attend",
        "        barrier()\n        mbarrier.arrive(k_empty.index(place), count=1)\n",
        "        mbarrier.arrive(k_empty.index(place), count=1)\n",
    ),
    "queries that other warps have not stored yet": (
        "prefill",
        "        fence_async_shared()\n        barrier()\n        shares",
        "        fence_async_shared()\n        shares",
    ),
    "sums that other warps have not stored yet": (
        "prefill",
        "        barrier()\n        to = (at * SIZES.num_heads",
        "        to = (at * SIZES.num_heads",
    ),
    "half of the bytes announced": (
        "pages",
        "mbarrier.expect(full, BYTES)",
        "mbarrier.expect(full, BYTES // 2)",
    ),
}


@pytest.mark.parametrize("mutant", few(MUTANTS, *list(MUTANTS)[::4]))
def test_a_line_that_orders_warps_is_missed(mutant, tmp_path):
    step = step_of([(40, 700)], heads=2, groups=1, dim=128, dtype=torch.bfloat16)
    with emulator.mutated(*MUTANTS[mutant], tmp_path / "gluon"):
        module = emulator.emulated("prefill")
        module.target_of = lambda device: HOPPER
        with pytest.raises((AssertionError, TimeoutError)):
            check(step, attend(module, step))


@pytest.mark.parametrize("causal", [True, False])
def test_queries_that_see_behind_a_rows_end_are_left_to_triton(causal, monkeypatch):
    """It takes a token for seen that stands before its query, and would read beyond the row."""
    step = step_of([(40, 300)], heads=2, groups=1, dim=64, dtype=torch.bfloat16)
    geometry = Geometry.of(step.q, step.k_pages, step.v_pages)
    monkeypatch.setattr(prefill, "is_on", lambda *_: True)
    lens, bounds = (step.kv_lens, step.starts), Bounds(1, 40, 40, 300)
    plan = prefill.plan(*lens, geometry, bounds, causal=causal)
    plan = plan._replace(tuning=plan.tuning._replace(block_m=128))
    found = prefill._on_gluon(plan, Scoring(**step.options), HOPPER)
    assert (found is not None) is causal


def test_what_has_no_kernel_is_not_served(hopper):
    def serves(target=HOPPER, **sizes):
        options = {
            name: sizes.pop(name) for name in ("window", "sinks", "softcap") if name in sizes
        }
        step = step_of([(17, 17)], **{"dim": 64, "dtype": torch.bfloat16} | sizes, **options)
        pages = Pages.of(step.k_pages), Pages.of(step.v_pages)
        return hopper.serves(Geometry.of(step.q, *pages), Scoring(**step.options), target)

    assert serves()
    assert serves(window=100)
    assert serves(page=48)
    assert serves(dim=256, softcap=30.0, sinks=True)
    assert not serves(HOPPER._replace(arch=100))
    assert not serves(dim=80)
    assert not serves(page=8)
    assert not serves(dtype=torch.float32)
    assert not serves(scale=-1.0)
