"""A call for which pages are short changes nothing, and its advice works."""

import re

import pytest

from pagedkv import OutOfPagesError
from tests.cache.small import P, ids, make, snapshot
from tests.contents import advance, start


def full_cache(**fields):
    cache = make(max_tokens=8 * P, **fields)
    seqs = [start(cache, ids(n, i)) for i, n in enumerate((4, 8, 16))]
    assert cache.stats().free == 1
    return cache, seqs


def test_running_out_in_the_middle_of_a_batch_changes_nothing():
    cache, seqs = full_cache()
    before = snapshot(cache, seqs)
    for order in (seqs, seqs[::-1]):
        with pytest.raises(OutOfPagesError) as caught:
            cache.prepare(order, num_new=1)
        assert (caught.value.pages_needed, caught.value.pages_free) == (3, 1)
        assert snapshot(cache, seqs) == before


def advised(error: OutOfPagesError) -> dict:
    text = str(error)
    assert str(error.pages_needed) in text
    assert str(error.pages_free) in text
    holders = [(int(a), int(b)) for a, b in re.findall(r"\b(\d+) \((\d+)\)", text)]
    assert holders, text
    return {
        "holders": holders,
        "missing": int(re.search(r"until (\d+) more", text).group(1)),
        "larger": int(re.search(r"max_tokens larger by (\d+)", text).group(1)),
    }


def test_the_advice_to_free_sequences_works():
    cache, seqs = full_cache()
    b = cache.fork(seqs[1])[0]  # shares: freeing one of the two returns nothing
    with pytest.raises(OutOfPagesError) as caught:
        cache.prepare([seqs[0], b], num_new=[5, 1])
    advice = advised(caught.value)
    assert advice["missing"] == 2
    returned = 0
    for seq, pages in advice["holders"]:
        if seq in (seqs[0], b) or returned >= advice["missing"]:
            continue
        stats = cache.stats()
        cache.free(seq)
        gained = cache.stats().free + cache.stats().cached - stats.free - stats.cached
        assert gained == pages, "the error names the pages that freeing returns"
        returned += gained
    assert returned >= advice["missing"]
    cache.abort(cache.prepare([seqs[0], b], num_new=[5, 1]))


def test_the_advice_to_truncate_and_to_step_fewer_sequences_works():
    cache, seqs = full_cache()
    with pytest.raises(OutOfPagesError) as caught:
        cache.prepare(seqs, num_new=1)
    missing = advised(caught.value)["missing"]
    cache.abort(cache.prepare(seqs[:1], num_new=1))
    cache.truncate(seqs[2], 16 - missing * P)
    cache.abort(cache.prepare(seqs[:2], num_new=1))
    cache.abort(cache.prepare(seqs, num_new=1))


def test_the_advice_to_build_a_larger_cache_works():
    def work(max_tokens):
        cache = make(max_tokens=max_tokens)
        a, b = start(cache, ids(8)), start(cache, ids(9, 1), max_tokens=16)
        for n in (3, 9):
            advance(cache, {a: ids(8 + n), b: ids(9 + min(n, 7), 1)})
        c = cache.add(ids(6, 2), max_tokens=13)
        advance(cache, {c: ids(13, 2)})
        cache.fork(b)
        return cache

    size, tries = 5 * P, 0
    while True:
        tries += 1
        try:
            work(size)
            break
        except OutOfPagesError as error:
            larger = advised(error)["larger"]
            assert larger > 0
            with pytest.raises(OutOfPagesError):  # it is the least that helps
                work(size + larger - P) if larger > P else work(size)
            size += larger
    assert tries > 1


@pytest.mark.parametrize("call", ["add", "fork"])
def test_the_advice_helps_reservations_too(call):
    cache = make(max_tokens=8 * P)
    r = start(cache, ids(6), max_tokens=16)
    a, b = start(cache, ids(8, 1)), start(cache, ids(8, 2))
    run = (lambda: cache.add(ids(3, 3), max_tokens=8)) if call == "add" else lambda: cache.fork(r)
    before = snapshot(cache, [r, a, b])
    with pytest.raises(OutOfPagesError) as caught:
        run()
    assert snapshot(cache, [r, a, b]) == before
    advice = advised(caught.value)
    assert advice["missing"] == caught.value.pages_needed - caught.value.pages_free
    victim = next(seq for seq, pages in advice["holders"] if seq != r)
    cache.free(victim)
    run()
