"""`explain` says how much of a prompt `add` would find, and what keeps it from more."""

import random

import pytest

from pagedkv import PagedKVCache
from pagedkv.cache.explain import REASONS
from pagedkv.cache.identity import Identity
from tests.cache import stored
from tests.cache.small import P, ids, make
from tests.cases import CASES, one_group, two_groups, varied
from tests.contents import advance, start
from tests.states import begin, with_states

TEXT = ids(14)


def computed(config=None, text=TEXT, salt=b"", **fields):
    """A cache in which a text was computed and freed."""
    cache = make(config, **fields)
    cache.free(start(cache, text, salt))
    return cache


def test_a_text_is_found_but_for_its_last_token():
    cache = computed()
    said = cache.explain([*TEXT, 99])
    assert (said.tokens, said.found, said.reason) == (15, 14, "found")
    assert str(said) == f"Of 15 tokens 14 are found. {REASONS['found']}"
    assert cache.explain([5]).reason == "found", "of one token nothing can be"
    with pytest.raises(ValueError, match="tokens: expected at least one id"):
        cache.explain([])


@pytest.mark.parametrize("at", [0, 1, 4, 7, 8, 13])
def test_a_text_that_parts_is_shown_beside_the_stored_one(at):
    said = computed().explain([*TEXT[:at], 77, 78, 79, 80])
    assert (said.found, said.agrees, said.reason) == (at, at, "parts")
    assert said.given == (77, 78, 79, 80)
    beside = said.stored
    assert beside == tuple(TEXT[at : at // P * P + P])  # of the page in which they part
    assert f"At token {at} the nearest stored text parts: it goes on with {beside[0]}" in str(said)


@pytest.mark.parametrize("length", [8, 10])
def test_a_stored_text_may_end(length):
    said = computed(text=TEXT[:length]).explain(TEXT)
    assert (said.found, said.reason, said.stored) == (length, "ends", ())


def test_nothing_begins_like_a_new_text():
    said = make().explain(TEXT)
    assert (said.found, said.reason, said.store) == (0, "new", "none")
    assert "no prefix store" in str(said)


@pytest.mark.parametrize("length", [3, 14])
def test_a_text_under_another_salt_is_named_and_not_shown(length):
    cache = computed(text=TEXT[:length], salt=b"a")
    said = cache.explain([*TEXT[:length], 98, 99], salt=b"b")
    assert (said.found, said.agrees, said.reason, said.stored) == (0, length, "salt", ())
    # An own text that agrees as far is the reason then, not the other's.
    cache.free(start(cache, TEXT[:length], b"b"))
    assert cache.explain([*TEXT[:length], 98, 99], salt=b"b").reason == "ends"


def test_a_text_under_another_salt_is_named_where_many_begin_alike():
    """Finds a search that knows of listed pages only: at most 8 are, of those that begin alike."""
    cache = make(max_tokens=256, max_sequences=32)
    texts = [[0, *ids(11, seed)] for seed in range(1, 13)]
    for text in texts:
        start(cache, text, b"a")
    assert {cache.explain([*text, 99], salt=b"b").agrees for text in texts} == {12}


def test_a_text_without_the_adapters_that_act_is_named():
    class Adapted(Identity):
        def salted(self, salt):
            return b"an adapter" + salt

    cache = computed(salt=b"a")
    cache.identity = Adapted(b"")
    assert cache.explain(TEXT, salt=b"a").reason == "adapter"
    assert cache.explain(TEXT, salt=b"b").reason == "salt"


def test_prefixes_that_were_forgotten_are_known_as_such():
    cache = computed()
    cache.clear_prefixes()
    said = cache.explain(TEXT)
    assert (said.found, said.agrees, said.reason) == (0, 12, "weights")
    cache.free(start(cache, TEXT))
    assert cache.explain(TEXT).reason == "found"


def test_pages_that_were_reused_are_known_as_such():
    cache = computed(max_tokens=16)
    start(cache, ids(16, 1))
    said = cache.explain(TEXT)
    assert (said.found, said.agrees, said.reason) == (0, 12, "recycled")
    assert cache.explain(TEXT, salt=b"a").reason == "new", "its keys are others"


def test_a_window_that_dropped_pages_is_named():
    cache = make(two_groups(window=6, max_sequences=2, max_step_tokens=8))
    for seed in (0, 1):  # the second reuses what the window of the first dropped
        seq = cache.add()
        for length in range(6, 31, 6):
            advance(cache, {seq: ids(length, seed)})
    said = cache.explain([*TEXT[:9], 99])
    assert said.reason == "window"
    assert said.found < said.agrees == 8
    assert cache.explain([*ids(30, 1), 99]).found == 30, "the other still has its window"


def test_a_state_that_was_not_kept_is_named():
    cache = make(with_states(one_group()))
    seq = begin(cache, TEXT)
    said = cache.explain([*TEXT, 99])
    assert (said.found, said.agrees, said.reason) == (0, 14, "state")
    cache.checkpoint(seq)
    assert cache.explain([*TEXT, 99]).reason == "found"


def test_a_prompt_that_waits_to_be_computed_is_named():
    cache = make()
    cache.free(start(cache, TEXT[:5]))
    seq = cache.add(TEXT)
    said = cache.explain(TEXT)
    assert (said.found, said.agrees, said.reason) == (5, 13, "computing")
    advance(cache, {seq: TEXT})
    assert cache.explain(TEXT).reason == "found"


def test_a_text_of_which_a_policy_took_tokens_is_named():
    cache = make(one_group(retention="fifo", budget=8, max_sequence_length=10_000))
    seq = start(cache, ids(24))
    assert cache.positions(seq, 0)[0] > 0
    assert cache.explain([*ids(24), 99]).reason in ("evicted", "found")
    start(cache, ids(44, 1))  # reuses what was evicted
    assert cache.explain([*ids(24), 99]).reason == "evicted"
    assert cache.explain([*ids(24), 99], salt=b"a").reason != "evicted"


def test_host_memory_counts_as_found_and_is_named():
    cache = computed(max_tokens=16, host_tokens=64)
    start(cache, ids(16, 1))
    said = cache.explain([*TEXT, 99])
    assert (said.found, said.from_host, said.reason) == (14, 14, "found")
    parted = cache.explain([*TEXT[:6], 99, 98])
    assert (parted.found, parted.stored) == (6, tuple(TEXT[6:8]))


def test_a_store_counts_as_found_and_one_that_is_off_is_named(folder):
    cache = stored.make(folder)
    cache.free(start(cache, stored.TEXT))
    other = stored.make(folder)
    said = other.explain(stored.TEXT)
    assert (said.found, said.from_store, said.store) == (24, 24, "on")
    assert other.stats().cached == 0, "it was looked for, not loaded"

    class Unknown(Identity):
        def weights(self):
            return b""

    other.identity = Unknown(b"")
    said = other.explain(stored.TEXT)
    assert (said.found, said.store) == (0, "off")
    assert "is not asked" in str(said)


@pytest.mark.parametrize("case", varied(CASES), ids=lambda case: case.name)
def test_it_says_what_add_finds_and_changes_nothing(case):
    """Finds a rule of `add` that `explain` does not know: any cache, random texts and room."""
    cache, source = PagedKVCache(case.config, device="cpu"), random.Random(3)
    live: list[int] = []
    for _ in range(40):
        text = [source.randrange(2) for _ in range(source.randrange(1, 12))]
        salt = source.choice([b"", b"a"])
        before = cache.stats()
        said = cache.explain(text, salt=salt)
        assert cache.stats() == before
        assert said.found <= said.agrees <= len(text)
        roomy = before.free > 12 * len(case.config.groups)
        seq = cache.add(text, salt=salt)
        assert cache.length(seq) == said.found if roomy else cache.length(seq) <= said.found
        advance(cache, {seq: text}, salt)
        live.append(seq)
        while len(live) > 1:
            cache.free(live.pop(source.randrange(len(live))))
