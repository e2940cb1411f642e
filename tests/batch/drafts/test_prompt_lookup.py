"""Guesses by lookup are what a plain search through the text finds, however the text grew."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.batch.drafts.prompt_lookup import LONGEST, PromptLookup, draft

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def searched(text: list[int], most: int) -> list[int]:
    """Searches place by place: the longest agreement first, then the latest place."""
    for size in range(min(LONGEST, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                going_on = list(text)
                for i in range(most):
                    going_on.append(going_on[end + i])
                return going_on[len(text) :]
    return []


def drafted(text: list[int], most: int) -> list[int]:
    return draft(np.array(text, np.int32), most).tolist()


@given(TEXT, st.integers(0, 12))
def test_a_draft_is_what_a_plain_search_finds(text, most):
    assert drafted(text, most) == searched(text, most)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([7], []),
        ([7, 8, 9], []),
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2]),
        # Two places agree in three tokens: the later one is taken.
        ([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),
        # A later place that agrees in one token only is not.
        ([1, 2, 3, 8, 3, 9, 1, 2, 3], [8, 3, 9, 1]),
        # A cycle goes on.
        ([5, 6, 5, 6, 5], [6, 5, 6, 5]),
        ([4, 4], [4, 4, 4, 4]),
    ],
)
def test_the_latest_of_the_longest_agreements_counts(text, expected):
    assert drafted(text, 4) == expected


@given(TEXT, st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=6), st.integers(0, 8))
def test_a_text_that_grows_is_looked_up_like_one_that_stood_there(prompt, pieces, most):
    ids = np.array(prompt, np.int32)
    lookup, tokens = PromptLookup(ids), []
    for piece in pieces:
        tokens += piece
        assert lookup.draft(tokens, most).tolist() == searched(prompt + tokens, most)
    assert ids.tolist() == prompt


def test_a_draft_is_a_copy():
    lookup = PromptLookup(np.array([1, 2, 3, 1, 2], np.int32))
    lookup.draft([], 2)[:] = 9
    assert lookup.draft([], 2).tolist() == [3, 1]
