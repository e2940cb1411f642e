"""The soak of `tests/soak.py`, for a moment: that it runs, and that it looks at what it says."""

import time

import pytest

from tests import soak


@pytest.mark.slow
def test_jobs_of_all_kinds_leave_nothing_behind():
    said = []
    soak.soak(20, 7, said.append)
    assert "jobs: " in said[0]
    assert "resident" in said[1]


@pytest.mark.slow
def test_what_grows_is_seen(monkeypatch):
    held = []

    def keeps(run):
        held.append(b"x" * (64 << 20))  # more than the C library keeps of what was freed
        time.sleep(0.5)

    monkeypatch.setattr(soak.Soak, "one", keeps)
    monkeypatch.setattr(soak, "SLACK", 32 << 20)
    with pytest.raises(AssertionError, match="resident memory grew"):
        soak.soak(8, 0, held.append)
