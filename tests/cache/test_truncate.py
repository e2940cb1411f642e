"""A sequence that is cut goes on differently, and its other owners as they were."""

import pytest

from tests.cache.small import P, ids, make
from tests.contents import advance, assert_contents, start


@pytest.mark.parametrize("n", range(11))
def test_truncate_to_any_length_and_go_on_differently(n):
    cache, text = make(), ids(10)
    a = start(cache, text)
    cache.truncate(a, n)
    cache.check()
    assert_contents(cache, a, text[:n])
    assert cache.stats().live == -(-n // P)
    other = text[:n] + ids(6, seed=1)
    advance(cache, {a: other})
    cache.check()
    assert_contents(cache, a, other)
    for prompt in ([*text, 5], [*other, 5]):
        b = cache.add(prompt)
        assert_contents(cache, b, prompt[: cache.length(b)])
    assert cache.length(cache.add([*other, 5])) == len(other)


def test_what_a_truncate_cut_off_is_found_until_it_is_overwritten():
    cache, text = make(), ids(10)
    a = start(cache, text)
    cache.truncate(a, 5)
    assert cache.length(cache.add([*text, 1])) == 10
    cache = make()
    a = start(cache, text)
    cache.truncate(a, 5)
    advance(cache, {a: [*text[:5], 99]})
    b = cache.add([*text, 1])
    assert cache.length(b) == 5
    assert_contents(cache, b, text[:5])
