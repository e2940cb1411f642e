"""The walks find faults that are planted: the pages', the states' and those of a prefix store."""

import pytest

from tests.effort import few
from tests.planted import MOST, PLANTED, found_after


@pytest.mark.parametrize("name", few(PLANTED, "salt_ignored", "other_state"))
def test_a_planted_fault_is_found(name):
    assert found_after(name) is not None, f"not within {MOST} operations"
