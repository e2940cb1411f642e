"""Salts by region: a public beginning is shared, what follows is its owner's alone, wherever."""

import random

import pytest

from pagedkv import PagedKVCache
from pagedkv.pages.salts import shared_tokens
from tests.cache import stored
from tests.cache.small import P, ids, make
from tests.cases import one_group, two_groups
from tests.contents import advance, assert_contents, start, write_step
from tests.effort import few
from tests.states import grow, with_states

TEXT = ids(14)
PROMPT = [*TEXT, 99]


def of(user: bytes, n: int) -> list[tuple[int, bytes]]:
    return [(0, b""), (n, user)]


def computed(cache, salt, text=TEXT) -> int:
    """A text that was computed under a salt. K and V depend on its tokens alone."""
    seq = cache.add(text, salt=salt)
    advance(cache, {seq: text})
    return seq


def found(cache, salt, prompt=PROMPT) -> int:
    seq = cache.add(prompt, salt=salt)
    length = cache.length(seq)
    assert_contents(cache, seq, prompt[:length])
    assert cache.explain(prompt, salt=salt).found == length
    cache.free(seq)
    cache.check()
    return length


@pytest.mark.parametrize("n", [1, 4, 6, 8, 13, 14, 20])
@pytest.mark.parametrize("config", [one_group, two_groups])
def test_the_pages_before_a_region_are_shared_and_no_token_behind(config, n):
    """Finds a page that begins before the region, or a single token, that others find."""
    cache = make(config())
    computed(cache, of(b"a", n))
    assert found(cache, of(b"a", n)) == 14
    whole = 14 if n > 14 else n // P * P  # a text may end before its region begins
    assert found(cache, of(b"b", n)) == found(cache, b"") == whole
    assert found(cache, b"a") == found(cache, [(0, b"a"), (n, b"a")]) == 0


def test_what_is_public_is_found_by_those_with_regions():
    cache = make()
    computed(cache, b"")
    assert found(cache, of(b"a", 9)) == 8
    computed(cache, of(b"a", 9))
    assert found(cache, of(b"a", 9)) == 14
    assert found(cache, of(b"a", 6)) == 4, "of the same user, but from an earlier page on"


@pytest.mark.parametrize("seed", few(range(4), 0, 1))
def test_any_two_salts_share_exactly_what_they_have_in_common(seed):
    source = random.Random(seed)
    cache = make(max_tokens=4096, max_sequences=256)

    def regions():
        starts = sorted(source.sample(range(1, 12), source.randrange(3)))
        return tuple((at, source.choice([b"", b"a", b"b"])) for at in (0, *starts))

    for _ in range(50):
        one, other = regions(), regions()
        cache.clear_prefixes()
        seq = computed(cache, one)
        least = min(14, shared_tokens(one, other, P))
        # Two regions that begin in one page are kept apart no further than by that page.
        assert found(cache, other) >= least
        if {at // P for at, _ in one} != {at // P for at, _ in other}:
            assert found(cache, other) == least
        assert found(cache, one) == 14
        cache.free(seq)


def test_what_is_generated_forked_or_taken_back_stays_its_owners():
    cache, salt = make(), of(b"a", 6)
    seq = computed(cache, salt, TEXT[:5])
    fork = cache.fork(seq)[0]
    parted = [*ids(7), 50, 51, 52]
    for text in (ids(11), parted):
        cache.truncate(fork, min(7, cache.length(fork)))
        advance(cache, {fork: text})
        assert found(cache, salt, [*text, 99]) == len(text)
        assert found(cache, of(b"b", 6), [*text, 99]) == found(cache, b"", [*text, 99]) == 4
    cache.free([seq, fork])
    assert cache._tables.mixed == {}


def test_equal_texts_of_two_users_computed_side_by_side_share_what_is_public():
    cache = make()
    a, b = (cache.add(TEXT, salt=of(user, 8)) for user in (b"a", b"b"))
    with cache.step([a, b]) as step:
        write_step(cache, step, [TEXT, TEXT])
    cache.check()
    assert cache.stats().shared == 2
    for seq in (a, b):
        assert_contents(cache, seq, TEXT)


def test_host_memory_keeps_regions_apart():
    cache = make(max_tokens=20, host_tokens=64)
    cache.free(computed(cache, of(b"a", 8)))
    cache.free(start(cache, ids(20, 1)))  # pushes it out
    assert found(cache, of(b"b", 8)) == found(cache, b"") == 8
    assert found(cache, of(b"a", 8)) == 14
    seq = computed(cache, of(b"a", 9), ids(11, 2))
    cache.offload(seq)
    cache.restore(seq)
    advance(cache, {seq: ids(13, 2)})
    assert found(cache, of(b"a", 9), [*ids(13, 2), 99]) == 13
    assert found(cache, of(b"b", 9), [*ids(13, 2), 99]) == 8


def test_a_store_keeps_regions_apart(folder):
    n = 17  # of pieces of 8 tokens
    cache = stored.make(folder)
    seq = computed(cache, of(b"a", n), stored.TEXT)
    assert cache.store(seq, salt=of(b"a", n)) == 24
    for wrong in (b"", of(b"a", 8), of(b"b", n)):
        with pytest.raises(ValueError, match="salt"):
            cache.store(seq, salt=wrong)
    for salt, length in ((of(b"a", n), 24), (of(b"b", n), 16), (b"", 16), (b"a", 0)):
        assert found(stored.make(folder), salt, stored.TEXT) == length


def test_a_splice_moves_no_token_out_of_its_region():
    """Finds a user's tokens where the public region was, once what stood before them is shorter."""
    cache = make()
    seq = computed(cache, of(b"a", 9))
    with pytest.raises(ValueError, match="would move before it and be found by others"):
        cache.splice(seq, 0, 6, [1])
    assert cache.length(seq) == 14
    cache.splice(seq, 0, 1, [1, 2])  # further back they stay the user's
    advance(cache, {seq: cache.uncached(seq)})
    assert found(cache, b"", [1, 2, *TEXT[1:], 99]) == 8
    cache.splice(seq, 10, 12, [])
    assert cache.length(seq) == 10


def test_a_file_is_loaded_under_regions(tmp_path):
    cache = make(one_group(fingerprint=b"a model"))
    cache.save(computed(cache, b""), tmp_path / "x")
    other = PagedKVCache(cache.config, device="cpu", debug=True)
    other.load(tmp_path / "x", salt=of(b"a", 8))
    assert found(other, of(b"a", 8)) == 14
    assert found(other, b"") == 8


@pytest.mark.parametrize("n", [8, 9])
def test_a_state_behind_a_region_is_its_owners(n):
    """Finds a checkpoint in the page in which a region begins, by its tokens alone."""
    cache = make(with_states(one_group()))
    for length in (8, 10):
        seq = cache.add(TEXT[:length], salt=of(b"a", n))
        grow(cache, {seq: TEXT[:length]})
        cache.checkpoint(seq)
    for user, lengths in ((b"a", (8, 10)), (b"b", (8, 8))):
        for prompt, length in zip((TEXT[:9], TEXT[:11]), lengths, strict=True):
            assert cache.stored_prefix(prompt, salt=of(user, n))[1] == length


def test_pages_of_a_public_region_are_reused_and_private_ones_by_their_user_alone():
    cache = PagedKVCache(one_group(), device="cpu")
    for user in (b"a", b"b", b"a"):
        cache.free(computed(cache, of(user, 6), PROMPT))
    assert cache.stats().tokens_reused == 4 + 14


@pytest.mark.parametrize(("n", "shared"), [(2, 0), (9, 8)])
def test_explain_names_the_salt_of_a_region(n, shared):
    for stored_under, others in ((of(b"a", n), (of(b"b", n), b"")), (b"", (of(b"b", n),))):
        cache = make()
        computed(cache, stored_under)
        for salt in others:
            said = cache.explain(PROMPT, salt=salt)
            assert (said.found, said.agrees, said.reason, said.stored) == (shared, 14, "salt", ())
        assert cache.explain(PROMPT, salt=stored_under).reason == "found"


@pytest.mark.parametrize(
    ("salt", "error"),
    [
        ([], TypeError),
        ([(0, "a")], TypeError),
        ([0, b"a"], TypeError),
        ([(1, b"a")], ValueError),
        ([(0, b"a"), (4, b"b"), (4, b"c")], ValueError),
        ([(0, b"a"), (5, b"b"), (4, b"c")], ValueError),
    ],
)
def test_regions_that_are_none_are_refused(salt, error):
    cache = make()
    for call in (cache.add, cache.explain, cache.stored_prefix):
        with pytest.raises(error, match="salt: expected"):
            call(TEXT, salt=salt)
    assert cache.stats().sequences == 0


def test_one_region_is_the_salt_itself():
    cache = make()
    computed(cache, [(0, b"a")])
    assert found(cache, b"a") == 14
