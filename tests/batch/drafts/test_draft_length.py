"""How many drafts a row gets follows from how many of its last ones were right."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.batch.drafts.draft_length import EVERY, WORTH, DraftLength


def widths(right, steps, most=8):
    """Drafts of each step, where `right` tells how many of so many are right."""
    length, given = DraftLength(most), []
    for _ in range(steps):
        given.append(length.next())
        if given[-1]:
            length.learn(given[-1], right(given[-1]))
    return given


def test_a_row_whose_drafts_are_right_gets_as_many_as_there_may_be():
    assert widths(lambda drafted: drafted, 50) == [8] * 50


@pytest.mark.parametrize(("chance", "least", "most"), [(0.9, 7, 8), (0.7, 3, 5), (0.5, 1, 3)])
def test_a_row_gets_as_many_as_are_likely_to_be_right(chance, least, most):
    drawn = random.Random(1)

    def right(drafted):
        return next((i for i in range(drafted) if drawn.random() > chance), drafted)

    given = widths(right, 400)[20:]
    assert least <= sum(given) / len(given) <= most
    assert given.count(0) < len(given) / 5


def test_a_row_that_was_never_right_is_tried_seldom():
    given = widths(lambda drafted: 0, 100)
    assert given[0] == 8
    tries = [step for step, drafts in enumerate(given) if drafts]
    assert len(tries) < 10
    assert {given[step] for step in tries[1:]} == {1}
    assert tries[-1] - tries[-2] == EVERY


def test_a_text_that_has_become_easy_gets_more_again():
    length = DraftLength(4)
    for _ in range(10):
        length.learn(4, 0)
    given = []
    for _ in range(100):
        given.append(length.next())
        if given[-1]:
            length.learn(given[-1], given[-1])
    assert given[: EVERY - 1] == [0] * (EVERY - 1)
    assert given[-1] == 4


def test_what_stands_behind_a_wrong_draft_says_nothing():
    one, other = DraftLength(8), DraftLength(8)
    for _ in range(5):
        one.learn(8, 1)
        other.learn(2, 1)
    assert one.next() == other.next() == 2


@pytest.mark.parametrize(("chance", "first"), [(1.0, 4), (0.8, 4), (WORTH, 1), (0.1, 0), (0, 0)])
def test_a_row_begins_with_what_others_had(chance, first):
    assert DraftLength(4, chance).next() == first


def test_a_row_that_is_paused_comes_back():
    length = DraftLength(4)
    length.pause()
    assert [length.next() for _ in range(EVERY + 1)] == [0] * EVERY + [4]


@given(st.integers(1, 12), st.floats(0, 1), st.lists(st.floats(0, 1), max_size=60))
def test_a_row_never_gets_more_than_it_may_and_never_stops_for_good(most, chance, shares):
    length, since = DraftLength(most, chance), 0
    for share in shares:
        drafts = length.next()
        assert 0 <= drafts <= most
        since = 0 if drafts else since + 1
        assert since < EVERY
        if drafts:
            length.learn(drafts, round(share * drafts))
