"""Rows of 1 to 16 new tokens against the float64 twin, in tiles and parts of every shape."""

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels.triton import decode, decode_tuning
from tests.effort import each_value, slow
from tests.kernels.steps import step_of
from tests.kernels.triton_cases import FEATURES, HALF, OFTEN, with_half
from tests.kernels.truth import attend, check


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    """Small texts are split and merged, on a card as well."""
    cut(monkeypatch, split=64, splits=4)


def cut(monkeypatch, **changes):
    tuning = decode.tuning
    monkeypatch.setattr(decode, "tuning", lambda *args: tuning(*args)._replace(**changes))


# Around pages of 16 and 32, tiles of 32 and 64, splits of 64, and more splits than there may be.
EDGES = [(1, n) for n in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 300)]
SOME = [(1, 1), (1, 70), (2, 33), (3, 3), (1, 135)]
SHAPES = {
    "a query head a KV head": (EDGES, {"heads": 2}),
    "3 query heads a KV head, D=80": (EDGES, {"heads": 3, "groups": 1, "dim": 80}),
    "5, D=96, pages of 3": (SOME, {"heads": 5, "groups": 1, "dim": 96, "page": 3}),
    "7, D=128, pages of 32": (SOME, {"heads": 7, "groups": 1, "dim": 128, "page": 32}),
    "8, D=64, pages of 64": (SOME, {"heads": 16, "dim": 64, "page": 64}),
    "16, D=256, pages of 128": (SOME, {"heads": 16, "groups": 1, "dim": 256, "page": 128}),
    "32 on one KV head, pages of 1": (SOME, {"heads": 32, "groups": 1, "page": 1}),
    "128, as many as there may be": ([(1, 70)], {"heads": 128, "groups": 1}),
    "3 heads on each of 3": (SOME, {"heads": 9, "groups": 3, "dim": 48}),
}  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype"), with_half(SHAPES), ids=str)
def test_any_heads_pages_and_lengths_agree_with_the_twin(shape, dtype):
    rows, sizes = SHAPES[shape]
    check(step_of(rows, **sizes, dtype=dtype))


# Steps of one token a row have kernels of their own.
SINGLE = [(1, 1), (1, 130), (1, 33), (1, 64), (1, 210), (1, 0)]
# More new tokens than the narrow windows are wide; lengths that end within a page and a tile.
MIXED = [(1, 130), (4, 4), (7, 37), (5, 97), (9, 210)]


@pytest.mark.parametrize(("feature", "dtype"), with_half(FEATURES, *OFTEN), ids=str)
def test_every_way_to_make_scores_agrees_with_the_twin(feature, dtype):
    for rows in (SINGLE, MIXED):
        check(step_of(rows, dtype=dtype, heads=3, groups=1, **FEATURES[feature]))


@pytest.mark.parametrize(("window", "dtype"), [(None, torch.float32), (11, torch.float16)], ids=str)
def test_rows_of_every_number_of_new_tokens_are_causal_within_the_step(window, dtype):
    rows = [(n, n + 9 * n % 80) for n in range(1, 17)]
    check(step_of(rows, heads=2, groups=1, window=window, dtype=dtype))


@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"window": 8}], ids=str)
def test_a_query_without_keys_gives_zeros_and_no_sum_but_its_sink(options):
    """No keys for one query, for the first three of five, and for none of a step."""
    for rows in (
        [(1, 0), (0, 0), (0, 40), (5, 2), (1, 70), (16, 0)],
        [(1, 0)] * 2,
        [(1, 0), (3, 0)],
    ):
        check(step_of(rows, **options))


def test_a_sink_of_minus_infinity_is_no_sink_and_a_great_one_takes_all():
    step = step_of([(1, 130), (2, 9)], sinks=True)
    plain = step_of([(1, 130), (2, 9)])
    step.options["sinks"][:] = torch.tensor([-torch.inf, 100.0, -torch.inf, torch.inf])
    out, lse = attend(step)
    check(step, (out, lse))
    assert not out[:, 3].any()
    assert lse[:, 3].isposinf().all()
    for mine, without in zip((out, lse), attend(plain), strict=True):
        assert torch.equal(mine[:, [0, 2]], without[:, [0, 2]])
    assert (out[:, 1].abs() < 1e-30).all()
    assert (lse[:, 1] == 100).all()
    step.options["sinks"][0] = torch.nan
    assert all(x[:, 0].isnan().all() and not x[:, 1:].isnan().any() for x in attend(step))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_sinks_may_have_the_dtype_of_the_model(dtype):
    step = step_of(SOME, sinks=True, dtype=dtype)
    step.options["sinks"] = step.options["sinks"].to(dtype)
    check(step)


# The power in the softcap's tanh may be infinite: 1 - 2 / infinity is 1.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_great_scores_do_not_overflow_whatever_part_they_are_in(dtype):
    step = step_of([(1, 150), (2, 150)], dtype=dtype, scale=40.0)
    check(step)
    check(step_of([(1, 150), (2, 150)], dtype=dtype, scale=1e4, softcap=20.0))


TILES = sorted({tuning.block_n for sizes in decode_tuning.TUNING.values() for tuning in sizes})


@pytest.mark.parametrize("tokens", TILES)
def test_tiles_of_every_length_that_ships_agree_with_the_twin(monkeypatch, tokens):
    cut(monkeypatch, block_n=tokens)
    check(step_of([(1, 150), (4, 33), (16, 90)], page=32, window=70, sinks=True))


# ------------------------------------------------------------------ laws


@pytest.mark.parametrize("window", [*slow(None), 75])
def test_however_many_parts_a_row_is_cut_into_the_result_is_right(monkeypatch, window):
    step = step_of([(1, 200), (3, 70), (1, 31), (2, 1)], window=window, sinks=True)
    for split, splits in ((2**20, 1), (32, 2), (32, 3), (32, 7), (32, 16)):
        cut(monkeypatch, split=split, splits=splits)
        check(step)


@pytest.mark.parametrize("rows", [[(1, 700)], [(1, 1100), (2, 530), (1, 40), (1, 0)]], ids=len)
def test_more_parts_than_are_merged_at_once_agree_with_the_twin(monkeypatch, rows):
    cut(monkeypatch, split=16, splits=128, block_n=16, longest=0)
    check(step_of(rows, heads=2, groups=1, sinks=True))


def test_parts_are_weighed_by_what_they_hold(monkeypatch):
    """Scores grow along the text, so that each part outweighs those before it."""
    cut(monkeypatch, split=32, splits=8)
    step = step_of([(1, 200)], heads=1, groups=1)
    step.q[:] = 1.0
    ids = step.table[0, :13].tolist()
    for number, page in enumerate(ids):
        step.k_pages[page] = torch.where(step.k_pages[page].isnan(), torch.nan, number / 8)
    check(step)


# Of each class: the host's numbers are other bounds of the same launch configuration.
BOUNDS = [
    ([1, 1, 1], [1, 1, 1], 400),
    ([1, 2, 3], [8, 8, 8], 135),
    ([3, 1, 8], [8, 1, 8, 5, 2], 10_000),
]


@pytest.mark.parametrize(("window", "bounds"), each_value([None, 20], BOUNDS), ids=str)
def test_bounds_of_the_host_never_change_a_bit(bounds, window):
    new, claimed, longest = bounds
    step = step_of([(n, length) for n, length in zip(new, (70, 20, 135), strict=True)],
                   window=window)  # fmt: skip
    expected = attend(step)
    for num_new, max_kv in ((claimed, 135), (new, longest), (claimed, longest)):
        for found, known in zip(attend(step, num_new=num_new, max_kv=max_kv), expected):
            assert torch.equal(found, known)


def test_wider_tiles_of_queries_change_no_more_than_rounding():
    for new in ((1, 3, 2), (1, 1, 1)):
        step = step_of([(n, length) for n, length in zip(new, (70, 20, 135), strict=True)])
        check(step, attend(step, num_new=[16, 2, 2]))
