"""Pages that were promised are there when they are asked for, or refused at once."""

from contextlib import suppress

import pytest

from pagedkv import OutOfPagesError
from pagedkv.errors import SequenceTooLongError
from tests.cache.small import P, ids, make, snapshot
from tests.cases import window_only
from tests.contents import advance, assert_contents, start


def test_a_reservation_is_kept_whatever_others_take():
    cache = make(max_tokens=10 * P)
    r = cache.add(ids(6), max_tokens=24)
    assert cache.stats().promised == 6
    other = cache.add()
    advance(cache, {other: ids(16, 1)})
    before = snapshot(cache, [r, other])
    with pytest.raises(OutOfPagesError) as caught:
        cache.prepare([other], num_new=1)
    assert (caught.value.pages_needed, caught.value.pages_free) == (1, 0)
    assert snapshot(cache, [r, other]) == before
    for n in range(6, 25):
        advance(cache, {r: ids(n)})
    assert cache.stats().promised == 0
    assert_contents(cache, r, ids(24))
    with pytest.raises(OutOfPagesError):
        cache.prepare([r], num_new=1)
    cache.free(r)
    advance(cache, {other: ids(20, 1)})


def test_a_reservation_that_cannot_be_kept_is_refused_now_and_one_that_never_can_at_once():
    cache = make(max_tokens=10 * P, max_sequence_length=36)
    r = cache.add(max_tokens=20)
    before = snapshot(cache, [r])
    with pytest.raises(OutOfPagesError):
        cache.add(ids(3), max_tokens=24)
    with pytest.raises(SequenceTooLongError, match="37"):
        cache.add(ids(3), max_tokens=37)
    with pytest.raises(SequenceTooLongError, match="37"):
        cache.add(ids(37))
    assert snapshot(cache, [r]) == before
    cache.free(r)
    cache.free(cache.add(ids(3), max_tokens=36))
    assert cache.stats().promised == 0


def test_shared_full_pages_count_towards_a_reservation():
    cache = make(max_tokens=6 * P)
    start(cache, ids(2 * P))
    r = cache.add([*ids(2 * P), *ids(1, 1)], max_tokens=6 * P)
    for n in range(2 * P + 1, 6 * P + 1):
        advance(cache, {r: ids(2 * P) + ids(n - 2 * P, 1)})
    assert cache.stats().live == 6


@pytest.mark.parametrize("first", ["parent", "child", "together"])
def test_sharing_the_tail_of_a_reserved_sequence_sets_one_page_aside(first):
    # The page set aside is the reserved sequence's: a child that writes first needs another.
    cache = make(max_tokens=(5 + (first == "child")) * P)
    r = start(cache, ids(6), max_tokens=16)
    promised = cache.stats().promised
    child = cache.fork(r)[0]
    assert cache.stats().promised == promised + 1
    mine, other = [*ids(6), 70], [*ids(6), 71]
    if first == "together":
        advance(cache, {r: mine, child: other})
    elif first == "parent":
        advance(cache, {r: mine})
        advance(cache, {child: other})
    else:
        advance(cache, {child: other})
        advance(cache, {r: mine})
    assert_contents(cache, child, other)
    for n in range(8, 17):
        advance(cache, {r: mine + ids(n - 7, 2)})
    assert_contents(cache, child, other)
    assert cache.stats().promised == 0


def test_fork_of_a_reserved_sequence_is_refused_without_a_page_for_its_tail():
    cache = make(max_tokens=4 * P)
    r = start(cache, ids(6), max_tokens=16)
    before = snapshot(cache, [r])
    with pytest.raises(OutOfPagesError):
        cache.fork(r)
    with pytest.raises(OutOfPagesError):
        cache.fork(r, 2)
    assert snapshot(cache, [r]) == before
    advance(cache, {r: ids(8)})
    child = cache.fork(r)[0]  # the tail is full: nobody will write to it
    with pytest.raises(OutOfPagesError):
        cache.prepare([child], num_new=1)
    for n in range(9, 17):
        advance(cache, {r: ids(n)})
    assert_contents(cache, r, ids(16))
    assert_contents(cache, child, ids(8))


@pytest.mark.parametrize(("pages", "hit"), [(4, 4), (5, 6)])
def test_a_hit_on_the_tail_of_a_reserved_sequence_needs_a_page_to_set_aside(pages, hit):
    cache = make(max_tokens=pages * P)
    r = start(cache, ids(6), max_tokens=16)
    b = cache.add([*ids(6), 99])
    assert cache.length(b) == hit
    for n in range(7, 17):
        advance(cache, {r: ids(n)})
    assert_contents(cache, r, ids(16))
    assert_contents(cache, b, ids(hit))


def test_a_truncate_that_drops_shared_pages_gives_up_the_reservation_for_them():
    cache = make(max_tokens=4 * P)
    r = start(cache, ids(8), max_tokens=16)
    child = cache.fork(r)[0]
    cache.truncate(r, 4)
    cache.check()
    assert cache.stats().promised == 2, "the dropped page is the child's, no page can replace it"
    text = ids(4) + ids(9, 1)
    advance(cache, {r: text[:8]})
    advance(cache, {r: text[:12]})
    with pytest.raises(OutOfPagesError):
        cache.prepare([r], num_new=1)
    cache.free(child)
    advance(cache, {r: text})
    assert_contents(cache, r, text)


def test_a_truncate_promises_no_page_that_a_window_had_spared():
    cache = make(window_only(3, page_size=1, max_tokens=24))
    cache.free(start(cache, ids(8)))
    r = cache.add([*ids(8), 99], max_tokens=24)  # found: of the first 8 tokens 3 are held
    assert cache.length(r) == 8
    other = cache.add(max_tokens=5)
    cache.truncate(r, 0)
    cache.check()
    advance(cache, {other: ids(5, 1)})
    advance(cache, {r: ids(9, 2)})
    assert_contents(cache, r, ids(9, 2))


def test_truncate_and_regrow_keeps_a_reservation_on_pages_of_its_own():
    cache = make(max_tokens=6 * P)
    r = start(cache, ids(20), max_tokens=20)
    cache.truncate(r, 3)
    assert cache.stats().promised == 4
    other = cache.add()
    advance(cache, {other: ids(4, 1)})
    with pytest.raises(OutOfPagesError):
        cache.prepare([other], num_new=1)
    text = ids(3) + ids(17, 2)
    for n in range(4, 21):
        advance(cache, {r: text[:n]})
    assert_contents(cache, r, text)


@pytest.mark.parametrize("way", ["add", "publish", "restore"])
def test_a_text_that_goes_on_behind_the_end_of_a_reserved_one_takes_no_page_of_its_promise(way):
    # Whoever shares a complete page in which a truncated text ends makes its next write a copy.
    cache = make(max_tokens=6 * P, host_tokens=6 * P)
    other = start(cache, ids(P)) if way == "restore" else None
    r = start(cache, ids(P + 1), max_tokens=5 * P)
    if other is not None:
        cache.offload(other)
    cache.truncate(r, 1)
    if way == "add":
        cache.add([*ids(P), 99])
    elif way == "publish":
        advance(cache, {start(cache, ids(1)): ids(P)})
    else:
        cache.restore(other)
    with suppress(OutOfPagesError):
        while True:  # takes what is promised to nobody
            start(cache, ids(1, 2 + cache.stats().sequences))
    text = [*ids(1), *ids(5 * P - 1, 1)]
    advance(cache, {r: text})
    assert_contents(cache, r, text)


def test_a_step_that_fails_promises_what_was_promised_before():
    cache = make(max_tokens=5 * P)
    r = start(cache, ids(6), max_tokens=16)
    other = cache.fork(r)[0]
    before = snapshot(cache, [r, other])
    with pytest.raises(OutOfPagesError):
        cache.prepare([r, other], num_new=[1, 2 * P])
    assert snapshot(cache, [r, other]) == before
    advance(cache, {r: ids(16)})


def test_an_aborted_step_promises_what_was_promised_before():
    cache = make(max_tokens=5 * P)
    r = start(cache, ids(2 * P), max_tokens=4 * P)
    cache.fork(r)
    other = start(cache, ids(P, 1))
    cache.truncate(r, P + 1)  # no page can be set aside for the tail that it shares
    cache.free(other)
    promised = cache.stats().promised
    cache.abort(cache.prepare([r], num_new=1))
    assert cache.stats().promised == promised
