"""How many drafts a row gets follows from how many of its last ones were right."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.batch.pace import LONGEST_REST, Pace


def widths(right, steps, most=8):
    """Drafts of each step, where `right` tells how many of so many are right."""
    pace, given = Pace(most), []
    for _ in range(steps):
        given.append(pace.next())
        if given[-1]:
            pace.learn(given[-1], right(given[-1]))
    return given


def test_a_row_whose_drafts_are_right_gets_as_many_as_there_may_be():
    assert widths(lambda drafted: drafted, 5) == [8] * 5


@pytest.mark.parametrize("right", [1, 2, 5])
def test_a_row_gets_one_draft_more_than_were_right(right):
    assert widths(lambda drafted: min(drafted, right), 4) == [8, *[right + 1] * 3]


def test_a_row_that_was_never_right_rests_longer_and_longer():
    given = widths(lambda drafted: 0, 60)
    asked = [step for step, drafts in enumerate(given) if drafts]
    assert given[0] == 8
    assert {given[step] for step in asked[1:]} == {1}
    rests = [later - step - 1 for step, later in pairwise(asked)]
    assert rests == [1, 3, 7, 15, 16]


def test_a_right_draft_ends_the_rests():
    pace = Pace(4)
    for _ in range(3):
        pace.learn(1, 0)
    for _ in range(7):
        assert pace.next() == 0
    assert pace.next() == 1
    pace.learn(1, 1)
    assert pace.next() == 3
    pace.learn(3, 0)
    assert [pace.next(), pace.next()] == [0, 1]


def test_a_row_that_is_paused_comes_back():
    pace = Pace(4)
    pace.pause()
    assert [pace.next() for _ in range(LONGEST_REST + 1)] == [0] * LONGEST_REST + [4]


@given(st.integers(1, 12), st.lists(st.floats(0, 1), max_size=60))
def test_a_row_never_gets_more_than_it_may_and_never_stops_for_good(most, shares):
    pace, since = Pace(most), 0
    for share in shares:
        drafts = pace.next()
        assert 0 <= drafts <= most
        since = 0 if drafts else since + 1
        assert since <= LONGEST_REST
        if drafts:
            pace.learn(drafts, round(share * drafts))
