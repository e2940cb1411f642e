"""The decode of Hopper against the float64 twin, in threads instead of warps."""

import math
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels.formats import Pages
from pagedkv.kernels.prefixes import Prefix
from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.triton import backend as paged
from pagedkv.kernels.triton import decode
from pagedkv.kernels.triton.geometry import Geometry, Target
from tests.effort import few
from tests.kernels import truth
from tests.kernels.correctness import same
from tests.kernels.steps import step_of
from tests.kernels.triton.gluon import emulator
from tests.kernels.truth import check

HOPPER = Target(0, 90, 227 << 10, 2)
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def hopper():
    return emulated()


def emulated():
    module = emulator.emulated("decode")
    module.target_of = lambda device: HOPPER
    return module


def attend(hopper, step, **known):
    """The whole way of rows of few new tokens, with its kernel on Hopper."""

    def chosen(_q, plan, rows, scoring, *_):
        assert hopper.serves(plan.geometry, scoring, HOPPER, rows)
        return hopper.paged_attention

    with mock.patch.object(decode, "_on_gluon", chosen):
        return truth.attend(step, **known)


# One query a row around tiles of 64 tokens and splits, several, rows without a token.
ROWS = {
    "one token": [(1, 1)],
    "a tile, and one more than a tile": [(1, 64), (1, 65)],
    "splits": [(1, 700), (1, 129), (1, 1030)],
    "several queries": [(4, 4), (2, 33), (8, 300), (1, 5)],
    "as many as there are, split": [(16, 400), (3, 90)],
    "rows without a token, or with fewer than are new": [(1, 0), (0, 40), (5, 2), (1, 70), (9, 0)],
}
SHAPES = {
    "4 query heads a KV head": {"heads": 8, "groups": 2, "dim": 128},
    "one": {"heads": 2, "groups": 2, "dim": 64, "page": 64},
    "7": {"heads": 7, "groups": 1, "dim": 128, "page": 48, "layout": "slots outermost"},
    "8, K and V side by side": {"heads": 16, "dim": 64, "layout": "K and V side by side"},
    "16, pages of 128": {"heads": 16, "groups": 1, "dim": 128, "page": 128},
    "float16": {"heads": 4, "groups": 4, "dim": 64, "dtype": torch.float16},
    "D=256, tiles of 32 tokens": {"heads": 8, "groups": 2, "dim": 256},
}
TERMS = {
    "sinks": {"sinks": True},
    "a softcap": {"softcap": 5.0},
    "a window": {"window": 70},
    "a window of one": {"window": 1},
    "all": {"window": 33, "softcap": 20.0, "sinks": True},
}


@pytest.mark.parametrize("shape", few(SHAPES, *list(SHAPES)[2::2]))
def test_heads_pages_and_layouts_agree_with_the_twin(hopper, shape):
    step = step_of([(1, 700), (1, 90)], **{"dtype": BF16} | SHAPES[shape])
    check(step, attend(hopper, step))


@pytest.mark.parametrize("rows", ROWS)
def test_lengths_agree_with_the_twin(hopper, rows):
    step = step_of(ROWS[rows], heads=8, groups=2, dim=64, dtype=BF16)
    check(step, attend(hopper, step))


@pytest.mark.parametrize("terms", few(TERMS, "a window of one", "all"))
def test_terms_of_scores_agree_with_the_twin(hopper, terms):
    rows = [(1, 500), (5, 300), *ROWS["rows without a token, or with fewer than are new"]]
    step = step_of(rows, heads=6, groups=2, dim=64, dtype=BF16, **TERMS[terms])
    check(step, attend(hopper, step))


def test_sinks_may_be_infinite_and_are_counted_once(hopper):
    step = step_of([(1, 700), (1, 30), (1, 0)], heads=4, groups=1, dim=64, dtype=BF16, sinks=True)
    step.options["sinks"].copy_(torch.tensor([-math.inf, math.inf, 1e30, -1e30]))
    out, lse = attend(hopper, step)
    assert (lse[:, 1] == math.inf).all()
    assert not out[:, 1].any()
    check(step, (out, lse))


def test_queries_that_see_their_whole_row_agree_with_the_twin(hopper):
    step = step_of([(5, 300), (16, 16), (2, 90)], heads=8, groups=2, dim=64, dtype=BF16)
    object.__setattr__(step, "causal", False)
    check(step, attend(hopper, step))


def test_a_row_alone_is_the_row_in_a_batch_bit_for_bit(hopper):
    step = step_of([(1, 700), (1, 1), (1, 0), (1, 129)], heads=8, groups=2, dim=64, dtype=BF16)
    out, lse = attend(hopper, step)
    for index, tokens in enumerate(step.tokens):
        alone = attend(hopper, step.row(index))
        same(f"row {index} alone", (out[tokens], alone[0]), (lse[tokens], alone[1]))


def test_programs_leave_the_counters_of_their_turns_as_they_found_them(hopper):
    step = step_of([(1, 700), (1, 90)], heads=8, groups=2, dim=64, dtype=BF16)
    tensors = step.q, step.k_pages, step.v_pages, step.table, step.kv_lens, step.starts
    plan = paged.plan(*tensors[4:], *tensors[:3], num_new=step.num_new, max_kv=step.max_kv)
    with mock.patch.object(decode, "_on_gluon", return_value=hopper.paged_attention):
        first = paged.attend(*tensors, plan, Scoring(**step.options))
        assert plan.decode.work.total.tolist()[1:] == [0, 0]
        same("again", *zip(first, paged.attend(*tensors, plan, Scoring(**step.options))))


def test_a_prefix_that_rows_share_is_attended_once(hopper):
    rows = [(1, 128 + n) for n in (1, 2, 33, 64, 100)] + [(1, 133)]
    step = step_of(rows, heads=8, groups=2, dim=64, dtype=BF16, shared=8)
    check(step, attend(hopper, step, prefixes=[Prefix(slice(0, 5), 8)]))


def test_kv_heads_may_read_tables_of_their_own(hopper):
    step = step_of([(1, 300), (1, 70)], heads=4, groups=2, dim=64, dtype=BF16)
    both = torch.stack([step.table, step.table], 1)
    plan = paged.plan(
        *(step.kv_lens, step.starts, step.q, step.k_pages, step.v_pages),
        num_new=step.num_new,
        max_kv=step.max_kv,
    )
    tensors = step.q, step.k_pages, step.v_pages, step.table, step.kv_lens, step.starts
    with mock.patch.object(decode, "_on_gluon", return_value=hopper.paged_attention):
        scoring = Scoring(**step.options)
        check(step, paged.attend(*tensors, plan, scoring, both))
        both[1, 1] = both[0, 1]  # the second head of a row of 70 tokens reads another's
        out, _ = paged.attend(*tensors, plan, scoring, both)
    k, v = (pages[step.table[0, :5].long(), 1].flatten(0, 1)[:70] for pages in tensors[1:3])
    scores = step.q[1, 2:].double() @ k.double().T * scoring.scale
    torch.testing.assert_close(
        out[1, 2:].double(), scores.softmax(-1) @ v.double(), rtol=2e-2, atol=1e-2
    )


def test_slots_that_nobody_wrote_have_to_be_blanked(hopper, monkeypatch):
    step = step_of([(1, 300)], heads=4, dim=64, dtype=BF16)
    monkeypatch.setitem(hopper.attend.__globals__, "blank", lambda *_: None)
    out, _ = attend(hopper, step)
    assert out.isnan().any()


# What the lines that order warps are there for: without one the emulator, or the twin, tells.
MUTANTS = {
    "no fence behind the queries": (
        "decode",
        "        fence_async_shared()\n        row, own",
        "        row, own",
    ),
    "queries, and an item, that other warps have not seen yet": (
        "decode",
        "    barrier()\n    mbarrier.arrive(empty.index(place), count=1)\n",
        "    mbarrier.arrive(empty.index(place), count=1)\n",
    ),
    "queries of the item before": (
        "decode",
        "        q = _load_queries(queries, items_ptr, index, end_at, LAYOUT, SIZES)\n\n",
        "",
    ),
    "an item that is told before it is stored": (
        "decode",
        "        barrier()\n        mbarrier.arrive(full.index(place), count=1)\n",
        "        mbarrier.arrive(full.index(place), count=1)\n",
    ),
    "an item that is read again": (
        "decode",
        "mbarrier.wait(full.index(place), number // TOLD % 2)",
        "mbarrier.wait(full.index(place), number // TOLD % 2 ^ 1)",
    ),
    "a place of items that is not given back": (
        "decode",
        "    barrier()\n    mbarrier.arrive(empty.index(place), count=1)\n",
        "    barrier()\n",
    ),
    "a place of V given away before its product was waited for": (
        "attend",
        "        acc = warpgroup_mma_wait(0, deps=[acc])\n        barrier()\n"
        "        mbarrier.arrive(v_empty.index(before), count=1)\n",
        "        mbarrier.arrive(v_empty.index(before), count=1)\n        barrier()\n"
        "        acc = warpgroup_mma_wait(0, deps=[acc])\n",
    ),
    "another phase": ("pages", "// SIZES.stages % 2 ^ 1", "// SIZES.stages % 2"),
    "a place that nobody waits for to be empty": (
        "pages",
        "        mbarrier.wait(k_empty.index(place), phase)\n",
        "",
    ),
    "one arrival too many to be empty": (
        "pages",
        "mbarrier.init(v_empty.index(place), count=READERS)",
        "mbarrier.init(v_empty.index(place), count=READERS + 1)",
    ),
}


@pytest.mark.parametrize("mutant", few(MUTANTS, *list(MUTANTS)[::4]))
def test_a_line_that_orders_warps_is_missed(mutant, tmp_path):
    # More tiles of a program than its ring has places.
    step = step_of([(1, 700), (1, 500)], heads=4, groups=2, dim=128, dtype=BF16)
    with (
        emulator.mutated(*MUTANTS[mutant], tmp_path / "gluon"),
        pytest.raises((AssertionError, TimeoutError)),
    ):
        check(step, attend(emulated(), step))


def test_what_has_no_kernel_is_not_served(hopper):
    def serves(target=HOPPER, rows=16, **sizes):
        names = ("window", "sinks", "softcap", "alibi", "tree")
        options = {name: sizes.pop(name) for name in names if name in sizes}
        step = step_of([(1, 17)], **{"dim": 64, "dtype": BF16} | sizes, **options)
        pages = Pages.of(step.k_pages), Pages.of(step.v_pages)
        geometry = Geometry.of(step.q, *pages)
        return hopper.serves(geometry, Scoring(**step.options), target, rows)

    assert serves()
    assert serves(rows=64, window=100, softcap=30.0, sinks=True)
    assert serves(dim=256, page=48)
    assert not serves(HOPPER._replace(arch=100))
    assert not serves(rows=128)
    assert not serves(dim=80)
    assert not serves(page=8)
    assert not serves(dtype=torch.float32)
    assert not serves(alibi=True)
    assert not serves(tree=True)


def test_rows_that_are_watched_are_left_to_triton(monkeypatch):
    step = step_of([(1, 300)], heads=4, dim=64, dtype=BF16)
    geometry = Geometry.of(step.q, step.k_pages, step.v_pages)
    plan = decode.plan(step.kv_lens, step.starts, geometry, paged.Bounds(1, 1, 1, 300))
    rest = step.q, plan, plan.block_m, Scoring(**step.options), HOPPER, 1
    monkeypatch.setattr(decode, "is_on", lambda *_: False)
    assert decode._on_gluon(*rest, None) is None
    monkeypatch.setattr(decode, "is_on", lambda *_: True)
    assert decode._on_gluon(*rest, None) is not None
    assert decode._on_gluon(*rest, object()) is None
