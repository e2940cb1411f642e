"""Rows of 17 and more new tokens against the float64 twin: causal, windowed, behind a prefix."""

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels.triton import prefill
from tests.kernels.steps import step_of
from tests.kernels.triton_cases import FEATURES, HALF, OFTEN, with_half
from tests.kernels.truth import attend, check

# First chunks, chunks behind a past, around pages of 16, tiles of 32 tokens and of 32 queries.
CHUNKS = [(17, 17), (31, 31), (32, 32), (33, 33), (17, 48), (20, 51), (65, 96), (40, 200)]
SOME = [(17, 17), (20, 85), (35, 36)]
SHAPES = {
    "2 query heads a KV head": (CHUNKS, {}),
    "a query head a KV head, slots outermost": (
        [*SOME, (70, 71)],
        {"heads": 2, "layout": "slots outermost"},
    ),
    "3 query heads a KV head, D=80": (SOME, {"heads": 3, "groups": 1, "dim": 80}),
    "5, D=96, pages of 3": (SOME, {"heads": 5, "groups": 1, "dim": 96, "page": 3}),
    "7, D=128, pages of 32": (SOME, {"heads": 7, "groups": 1, "dim": 128, "page": 32}),
    "8, D=64, pages of 64": (SOME, {"heads": 16, "dim": 64, "page": 64}),
    "16, D=256, pages of 128": (SOME, {"heads": 16, "groups": 1, "dim": 256, "page": 128}),
    "32 on one KV head, pages of 1": (SOME, {"heads": 32, "groups": 1, "page": 1}),
    "128, as many as there may be": ([(17, 40)], {"heads": 128, "groups": 1}),
}


@pytest.mark.parametrize(("shape", "dtype"), with_half(SHAPES), ids=str)
def test_any_heads_pages_and_lengths_agree_with_the_twin(shape, dtype):
    rows, sizes = SHAPES[shape]
    check(step_of(rows, **sizes, dtype=dtype))


@pytest.mark.parametrize(("feature", "dtype"), with_half(FEATURES, *OFTEN), ids=str)
def test_every_way_to_make_scores_agrees_with_the_twin(feature, dtype):
    rows = [(17, 17), (40, 170), (65, 66), (24, 210)]
    check(step_of(rows, dtype=dtype, heads=3, groups=1, **FEATURES[feature]))


@pytest.mark.parametrize("window", [None, 64, 70])
@pytest.mark.parametrize("past", [0, 1, 30, 31, 32, 33, 63, 64, 95, 96, 97])
def test_masks_are_right_wherever_a_chunk_begins(past, window):
    check(step_of([(40, past + 40)], heads=2, groups=1, window=window))


@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"window": 9}], ids=str)
def test_queries_without_keys_give_zeros_and_no_sum_but_their_sink(options):
    """No keys at all, for the first 15 of 20 queries, and for whole tiles of queries."""
    check(step_of([(70, 2), (17, 0), (20, 5), (17, 30)], **options))


# The power in the softcap's tanh may be infinite: 1 - 2 / infinity is 1.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_great_scores_do_not_overflow(dtype):
    check(step_of([(40, 100)], dtype=dtype, scale=40.0))
    check(step_of([(40, 100)], dtype=dtype, scale=1e4, softcap=20.0))


TILES = sorted({(tuning.block_m, tuning.block_n) for tuning in prefill.TUNING.values()})


@pytest.mark.parametrize(("queries", "tokens"), TILES)
def test_tiles_of_every_size_that_ships_agree_with_the_twin(monkeypatch, queries, tokens):
    tuning = prefill.tuning
    changes = {"block_m": queries, "block_n": tokens}
    monkeypatch.setattr(prefill, "tuning", lambda *args: tuning(*args)._replace(**changes))
    check(step_of([(17, 150), (90, 91)], page=32, window=100))  # which is one to the first alone


# ------------------------------------------------------------------ laws


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("claimed", "longest"), [([17, 18], 400), ([17, 300], 70), ([100, 50, 17], 10_000)], ids=str
)
def test_bounds_of_the_host_never_change_a_bit(claimed, longest, window):
    step = step_of([(17, 70), (18, 18)], window=window)
    found = attend(step, num_new=claimed, max_kv=longest)
    assert all(map(torch.equal, found, attend(step)))
