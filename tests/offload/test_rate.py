"""The cost of a copy to the host and back, as measured."""

import pytest

from pagedkv.offload.rate import Rate
from tests.contents import start
from tests.offload.hosted import TEXT, make


def test_copies_are_timed_and_tell_what_the_next_one_takes():
    cache = make()
    a, b = start(cache, TEXT), start(cache, TEXT[:4])
    assert cache.copy_seconds(a) is None
    without = make(host_tokens=0)
    assert without.copy_seconds(start(without, TEXT)) is None
    cache.offload(b)
    one_way = cache.copy_seconds(a)
    cache.clear_prefixes()
    cache.restore(b)
    assert 0 < cache.copy_seconds(b) < cache.copy_seconds(a)
    assert one_way > 0


def test_a_pace_follows_what_was_measured_last():
    pace = Rate()
    assert pace.seconds(1) is None
    pace.add(100, 1)
    assert pace.seconds(50) == pytest.approx(0.5)
    for _ in range(30):
        pace.add(100, 4)
    assert pace.seconds(50) == pytest.approx(2, rel=0.01)
    for _ in range(30):
        with pace(1e9):
            pass
    assert pace.seconds(1e9) < 1
