"""Lists of work cover what queries see, each pair once, and are never longer than planned."""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from pagedkv.kernels.triton import decode, decode_tuning, prefill
from pagedkv.kernels.triton import work_list as work
from pagedkv.kernels.triton.geometry import NOT_THERE, Geometry
from pagedkv.kernels.triton.work_list import Bounds, Cut
from tests.effort import examples, sampled
from tests.kernels.steps import DEVICE
from tests.kernels.truth import poisoned_outputs


@dataclass
class Item:
    """A line of the list, by the names that work.py gives its fields."""

    row: int
    token: int
    count: int
    position: int
    begin: int
    end: int
    part: int
    partial: int


def lengths_of(rows):
    """`kv_lens` and `query_start_loc` of rows (new tokens, length)."""
    starts = torch.tensor([0, *(new for new, _ in rows)]).cumsum(0)
    lens = torch.tensor([length for _, length in rows], dtype=torch.int32, device=DEVICE)
    return lens, starts.int().to(DEVICE)


def items_of(made: work.Work) -> list[Item]:
    total = int(made.total[0])
    assert total <= len(made.items), "more items than were planned for"
    return [Item(*fields) for fields in made.items[:total].tolist()]


def assert_covers(rows, made, takes_part, max_new, window=None, skips=None):
    """Every visible pair of query and token is in one item; parts and their places do not clash.

    Args:
        takes_part: of a number of new tokens, whether such rows are listed.
        skips: of each row the leading tokens that are attended elsewhere, and in how many parts.
    """
    skips = skips or [(0, 0)] * len(rows)
    items, start = items_of(made), 0
    assert {item.row for item in items} == {i for i, (new, _) in enumerate(rows) if takes_part(new)}
    places = set()
    for index, ((new, length), (skip, shared)) in enumerate(zip(rows, skips, strict=True)):
        mine = [item for item in items if item.row == index]
        parts = int(made.parts[index])
        covered = []
        for item in mine:
            assert item.position == length - new + item.token - start
            assert shared <= item.part < parts
            for query in range(item.count):
                where = (item.partial + query, item.part)
                assert where not in places
                assert 0 <= where[0] < len(rows) * max_new
                places.add(where)
                at = item.position + query
                first = max(skip, 0 if window is None else at - window + 1)
                tokens = range(max(first, item.begin), min(at + 1, item.end))
                covered += [(item.token + query, token) for token in tokens]
            # Pages in front of the window may be gone, slots behind the text unwritten.
            if item.begin < item.end:
                assert item.begin >= max(0, item.position - (window or length) + 1)
                assert item.end <= item.position + item.count
        visible = {
            (start + query, token)
            for query in range(new)
            for token in range(skip, length - new + query + 1)
            if window is None or token > length - new + query - window
        }
        if not mine:
            assert parts == 0
        else:
            assert len(covered) == len(set(covered))
            assert set(covered) == visible
            # The merge reads each of the row's parts for each of its queries.
            tiles = {item.token for item in mine}
            wanted = {(token, part) for token in tiles for part in range(shared, parts)}
            assert {(item.token, item.part) for item in mine} == wanted
            assert [item.token for item in mine] == sorted((x.token for x in mine), reverse=True)
        start += new


news = st.one_of(st.integers(1, 16), st.integers(0, 1), st.integers(17, 80))
pasts = st.one_of(st.integers(0, 40), st.integers(0, 400), st.integers(-20, 0))
rows_of = st.lists(st.tuples(news, pasts), min_size=1, max_size=6)


@given(
    rows=rows_of,
    window=st.one_of(st.none(), st.integers(1, 70), st.integers(1, 500)),
    ratio=st.sampled_from([1, 2, 3, 5, 7, 8, 16, 32, 100]),
    slack=st.integers(0, 3),
)
@sampled
@settings(max_examples=examples(60, 12))
def test_the_items_of_a_step_cover_each_visible_pair_once(rows, window, ratio, slack):
    rows = [(new, max(0, new + past)) for new, past in rows]
    lens, starts = lengths_of(rows)
    geometry = Geometry(ratio, 1, 16, 16, *[NOT_THERE] * 3, torch.float32, 16)
    for module, fewest, most in ((decode, 1, 16), (prefill, 17, 2**30)):
        mine = [(new, length) for new, length in rows if fewest <= new <= most]
        if not mine:
            continue
        max_new = max(new for new, _ in mine) + slack
        bounds = Bounds(
            len(mine) + slack,
            sum(new for new, _ in mine) + slack,
            max_new,
            max(length for _, length in mine) + slack * 100,
        )
        with poisoned_outputs():
            plan = module.plan(lens, starts, geometry, bounds, window=window)
        assert_covers(rows, plan.work, lambda n, a=fewest, b=most: a <= n <= b, max_new, window)


@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 4)), min_size=1, max_size=5),
    block=st.sampled_from([16, 32]),
)
@settings(max_examples=15)
def test_what_is_attended_elsewhere_is_left_out_and_its_parts_come_first(rows, block):
    skips = [(length // block * block if parts else 0, parts) for length, parts in rows]
    rows = [(1, length + 1) for length, _ in rows]
    cut = Cut(1, 16, 8, 64, 4, block)
    made = work.cut_rows(
        *lengths_of(rows),
        cut,
        100,
        max_new=1,
        skips=torch.tensor(skips, dtype=torch.int32, device=DEVICE),
    )
    assert_covers(rows, made, lambda n: True, 1, skips=skips)


def test_rows_are_counted_past_the_first_128_of_them():
    lengths = random.Random(0)
    rows = [(lengths.choice((0, 1, 3, 20)), lengths.randrange(20, 150)) for _ in range(140)]
    cut = Cut(1, 16, 2, 64, 4, 32)
    made = work.cut_rows(*lengths_of(rows), cut, 2000, max_new=3)
    assert_covers(rows, made, lambda n: 1 <= n <= 16, 3)
    assert [item.row for item in items_of(made)] == sorted(item.row for item in items_of(made))


def test_a_row_may_have_more_items_than_are_written_at_once():
    rows = [(150, 190), (3, 3), (99, 99)]
    made = work.cut_rows(*lengths_of(rows), Cut(17, 2**30, 2, 2**30, 1, 1), 125, max_new=150)
    assert_covers(rows, made, lambda n: n > 16, 150)
    assert int(made.total[0]) == 125


@pytest.mark.parametrize("window", [None, 50])
def test_where_a_row_is_cut_depends_on_its_own_lengths_alone(window):
    cut = Cut(1, 16, 2, 64, 4, 32)

    def shape_of(rows, index):
        made = work.cut_rows(*lengths_of(rows), cut, 100, max_new=16, window=window)
        return [(x.count, x.position, x.begin, x.end, x.part)
                for x in items_of(made) if x.row == index]  # fmt: skip

    row = (5, 170)
    alone = shape_of([row], 0)
    assert alone == shape_of([(1, 9), row], 1)
    assert alone == shape_of([(16, 300), (0, 4), row, (1, 1)], 2)


def test_long_texts_are_split_evenly_and_short_ones_are_not():
    cut = Cut(1, 16, 8, 64, 4, 32)
    for length, parts in ((1, 1), (64, 1), (65, 2), (129, 3), (200, 4), (257, 3), (1000, 4)):
        made = work.cut_rows(*lengths_of([(1, length)]), cut, 10, max_new=1)
        *whole, last = sorted(item.end - item.begin for item in items_of(made))[::-1]
        assert len(whole) + 1 == parts
        assert len(set(whole)) <= 1
        assert all(size % 32 == 0 and size >= max(64, last) for size in whole)


CUTS = {
    "as shipped": Cut(1, 16, 8, 128, 32, 64, 1024),
    "few splits, long texts": Cut(1, 16, 8, 32, 20, 16, 64),
    "tiles longer than a step of the rule": Cut(1, 16, 8, 32, 64, 48, 64),
    "of one length": Cut(1, 16, 8, 64, 40, 16),
    "long from the start": Cut(1, 16, 8, 96, 64, 32, 64),
    "short rows whole": Cut(1, 16, 8, 64, 20, 32, 64, 8, 200),
}


@pytest.mark.parametrize("name", CUTS)
def test_host_and_device_cut_rows_of_any_length_alike(name):
    cut = CUTS[name]
    # Where the rule changes: one split, a sixteenth of the row, the longest, too many of these.
    ends = {cut.split, 16 * cut.split, 16 * cut.longest, cut.splits * cut.longest}
    edges = [end + off for end in ends for off in (-cut.block, -1, 0, 1, cut.block)]
    draw = random.Random(0)
    lengths = sorted({max(1, n) for n in [*edges, *(draw.randrange(1, 60_000) for _ in range(20))]})
    most = [cut.parts(length) for length in lengths]
    made = work.cut_rows(
        *lengths_of([(1, length) for length in lengths]), cut, sum(most), max_new=1
    )
    assert most == sorted(most)
    items = items_of(made)
    for row, (length, bound) in enumerate(zip(lengths, most, strict=True)):
        parts, size = cut.into(length)
        mine = sorted((item.begin, item.end) for item in items if item.row == row)
        assert mine == [(i * size, min(length, (i + 1) * size)) for i in range(parts)]
        assert size % cut.block == 0
        assert parts == int(made.parts[row]) <= bound <= cut.splits


def test_splits_grow_with_their_row_and_stay_many():
    cut = CUTS["as shipped"]
    sizes = {length: cut.into(length) for length in (100, 1024, 2048, 4096, 16384, 32768, 131072)}
    assert sizes == {
        100: (1, 128),
        1024: (8, 128),
        2048: (16, 128),
        4096: (16, 256),
        16384: (16, 1024),
        32768: (32, 1024),
        131072: (32, 4096),
    }


@pytest.mark.parametrize(
    ("kv_heads", "splits"), [(1, 128), (2, 128), (4, 64), (7, 36), (8, 32), (64, 32)]
)
def test_rows_of_few_kv_heads_may_be_cut_into_more_splits(kv_heads, splits):
    geometry = Geometry(2 * kv_heads, kv_heads, 64, 16, *[NOT_THERE] * 3, torch.bfloat16, 64)
    tuning = decode_tuning.Tuning(64, 4, 3, 3)
    assert tuning.cut(geometry, 1).splits == splits
    assert tuning._replace(splits=5).cut(geometry, 1).splits == 5


def test_a_bound_of_items_that_is_too_small_is_noticed_here():
    """The checks above rely on it: a store behind the list is an error of the interpreter."""
    if DEVICE != "cpu":
        pytest.skip("a card would write there")
    with pytest.raises(IndexError):
        work.cut_rows(*lengths_of([(1, 200)]), Cut(1, 16, 8, 64, 4, 32), 3, max_new=1)
