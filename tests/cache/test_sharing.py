"""Prompts found, pages shared and copied: what a sequence has in common with others."""

import random

import pytest
import torch

from pagedkv import write_kv
from tests.cache.small import P, ids, make, table_of
from tests.cases import one_group, two_groups
from tests.contents import advance, assert_contents, start, write_step


def test_fork_copies_nothing_and_the_next_write_only_the_last_page():
    cache, text = make(), ids(10)
    a = start(cache, text)
    b, c = cache.fork(a, 2)
    assert (cache.stats().live, cache.stats().shared) == (3, 3)
    step = cache.prepare([b], tokens=[[77]])
    write_step(cache, step, [[*text, 77]])
    assert cache.stats().live == 4
    table_b = table_of(step, 0, 3)
    cache.commit(step)
    assert (cache.stats().live, cache.stats().shared) == (4, 3)
    step = cache.prepare([a, c], tokens=[[78], [79]])
    table_a, table_c = table_of(step, 0, 3), table_of(step, 1, 3)
    assert table_a[:2] == table_b[:2] == table_c[:2]
    assert len({table_a[2], table_b[2], table_c[2]}) == 3
    write_step(cache, step, [[*text, 78], [*text, 79]])
    cache.commit(step)
    for seq, last in ((a, 78), (b, 77), (c, 79)):
        assert_contents(cache, seq, [*text, last])
    assert cache.stats().live == 2 + 3


def test_all_owners_but_one_copy_when_all_write_in_one_step():
    cache, text = make(), ids(10)
    a = start(cache, text)
    seqs = [a, *cache.fork(a, 3)]
    step = cache.prepare([a], num_new=1)
    cache.abort(step)
    texts = [[*text, 50 + i] for i in range(4)]
    step = cache.prepare(seqs, tokens=[t[-1] for t in texts])
    assert cache.stats().live == 2 + 4, "three copies, not four"
    tails = [table_of(step, row, 3)[2] for row in range(4)]
    assert len(set(tails)) == 4
    write_step(cache, step, texts)
    cache.commit(step)
    for seq, t in zip(seqs, texts, strict=True):
        assert_contents(cache, seq, t)
    assert cache.stats().live == 2 + 4


def test_the_owner_that_writes_last_in_order_keeps_the_page():
    cache, text = make(), ids(10)
    a = start(cache, text)
    b = cache.fork(a)[0]
    step = cache.prepare([a], num_new=1)  # copies: b does not write
    cache.abort(step)
    step = cache.prepare([b, a], tokens=[[1], [2]])
    kept = table_of(step, 1, 3)[2]
    cache.abort(step)
    step = cache.prepare([a, b], tokens=[[2], [1]])
    assert table_of(step, 1, 3)[2] == kept
    cache.abort(step)
    assert_contents(cache, a, text)
    assert_contents(cache, b, text)


def test_what_a_fork_wrote_behind_the_head_of_a_page_is_found():
    """The copy of the page is listed, too."""
    cache, text = make(), ids(6)
    fork = cache.fork(start(cache, text))[0]
    advance(cache, {fork: [*text, 50]})
    assert cache.length(cache.add([*text, 50, 99])) == 7


def test_a_writer_copies_when_another_owner_does_not_write():
    cache, text = make(), ids(10)
    a = start(cache, text)
    b, c = cache.fork(a, 2)
    advance(cache, {a: [*text, 1], b: [*text, 2]})
    assert cache.stats().live == 2 + 3
    assert_contents(cache, c, text)
    advance(cache, {c: [*text, 3]})
    assert cache.stats().live == 2 + 3, "a sole owner writes in place"


@pytest.mark.parametrize("config", [one_group(), two_groups(3)], ids=["full", "full and window"])
@pytest.mark.parametrize("n", [2, 4, 7, 8, 9, 11])
def test_a_prompt_found_whole_leaves_one_token_to_compute_and_nothing_to_write(n, config):
    cache, text = make(config), ids(n)
    a = start(cache, text)
    live = cache.stats().live
    b = cache.add(text)
    assert cache.length(b) == n - 1
    assert cache.uncached(b).tolist() == text[-1:]
    with cache.step([b]) as step:
        assert step.tokens.tolist() == text[-1:]
        assert step.positions.tolist() == [n - 1]
        if (n - 1) % P:  # else the token begins a page of its own
            assert step.slots().tolist() == [-1]
            nothing = torch.full((1, 2, 4), torch.nan)
            for layer in range(config.num_layers):
                write_kv(nothing, nothing, step, layer)
        else:
            write_step(cache, step, [text])
    cache.check()
    assert_contents(cache, a, text)
    assert_contents(cache, b, text)
    assert cache.uncached(b).tolist() == []
    assert cache.stats().live == live + len(config.groups) * ((n - 1) % P == 0)
    advance(cache, {b: [*text, 99], a: [*text, 98]})
    assert_contents(cache, a, [*text, 98])
    assert_contents(cache, b, [*text, 99])


@pytest.mark.parametrize(
    ("common", "hit"), [(0, 0), (1, 1), (3, 3), (4, 4), (6, 6), (8, 8), (9, 9)]
)
def test_heads_of_full_and_of_partly_filled_pages_are_found(common, hit):
    cache, text = make(), ids(10)
    a = start(cache, text)
    other = text[:common] + ids(3, seed=1)
    b = cache.add(other)
    assert cache.length(b) == hit
    assert cache.uncached(b).tolist() == other[hit:]
    advance(cache, {b: other})
    assert_contents(cache, a, text)
    assert_contents(cache, b, other)
    cache.check()


def test_a_page_that_was_shared_while_its_step_was_open_stays_where_it_would_not_become_free():
    cache = make()
    first, second = cache.add(), cache.add()
    advance(cache, {second: ids(P - 1)})
    advance(cache, {first: ids(P)})
    cache.free(first)
    step = cache.prepare([second], tokens=[ids(P)[-1:]])
    found = cache.add([*ids(P - 1), 99])
    write_step(cache, step, [ids(P)])
    cache.commit(step)
    assert (cache.stats().live, cache.stats().cached) == (1, 1)
    cache.check()
    assert_contents(cache, second, ids(P))
    assert_contents(cache, found, ids(P - 1))


def test_ids_given_at_commit_make_a_count_fed_step_findable():
    cache = make()
    a, b = cache.add(), cache.add()
    step = cache.prepare([a, b], num_new=[5, 2])
    write_step(cache, step, [ids(5), ids(2, 1)])
    cache.commit(step, [5, 1], tokens=[ids(5), ids(2, 1)])
    step = cache.prepare([a, b], num_new=1)
    write_step(cache, step, [ids(6), [1000, 7]])
    cache.commit(step, tokens=[5, 7])  # one each
    assert cache.length(cache.add([*ids(6), 99])) == 6
    assert cache.length(cache.add([1000, 7, 99])) == 2


def test_a_token_without_an_id_is_always_written():
    cache = make()
    a, prompted = cache.add(), cache.add(ids(9))
    with cache.step([a], num_new=6) as step:
        write_step(cache, step, [ids(6, 1)])
    cache.truncate(a, 5)  # beyond it lies a token of which the id was never told
    text = [*ids(5, 1), 7]
    for other in ([], [prompted]):
        step = cache.prepare([a, *other], num_new=1)
        assert (step.slots() >= 0).all()
        write_step(cache, step, [text, ids(1)][: 1 + len(other)])
        cache.commit(step)
        assert_contents(cache, a, text)
        cache.truncate(a, 5)


def test_ten_thousand_pairs_of_fingerprint_and_salt_have_their_own_roots():
    source = random.Random(0)
    pairs = {(b"", b""), (b"a", b""), (b"", b"a"), (b"ab", b"c"), (b"a", b"bc")}
    while len(pairs) < 10_000:
        pairs.add((source.randbytes(source.randrange(4)), source.randbytes(source.randrange(4))))
    by_fingerprint: dict[bytes, list[bytes]] = {}
    for fingerprint, salt in pairs:
        by_fingerprint.setdefault(fingerprint, []).append(salt)
    some = sorted(by_fingerprint, key=len)[:200]
    seen = set()
    for fingerprint in some:
        cache = make(debug=False, fingerprint=fingerprint)
        for salt in by_fingerprint[fingerprint]:
            root = cache._tables.index.root(salt)
            assert root not in seen
            seen.add(root)


@pytest.mark.parametrize("taken", [2, 3, 4, 5, 6])
def test_the_tail_of_a_freed_chain_is_reused_before_its_root(taken):
    cache, text = make(max_tokens=6 * P), ids(4 * P)
    cache.free(start(cache, text))
    start(cache, ids(taken * P, seed=1))
    assert cache.length(cache.add([*text, 1])) == (6 - taken) * P
    cache.check()


def test_the_chain_freed_first_is_reused_first():
    cache = make(max_tokens=6 * P)
    a, b = start(cache, ids(2 * P)), start(cache, ids(2 * P, 1))
    cache.free([a])
    cache.free(b)
    start(cache, ids(4 * P, seed=2))
    assert cache.length(cache.add([*ids(2 * P), 9])) == 0
    assert cache.length(cache.add([*ids(2 * P, 1), 9])) == 2 * P


def test_what_chains_freed_together_share_is_reused_behind_the_tails_of_all():
    """A page is as old as what its last owner leaves, not its first."""
    cache, text = make(max_tokens=6 * P), ids(2 * P)
    cache.free([start(cache, [*text, *ids(P, seed)]) for seed in (1, 2)])
    start(cache, ids(4 * P, seed=3))
    assert cache.length(cache.add([*text, 9])) == 2 * P


def test_a_hit_makes_cached_pages_live_and_young_again():
    cache = make(max_tokens=6 * P)
    cache.free(start(cache, ids(2 * P)))
    cache.free(start(cache, ids(2 * P, 1)))
    probe = cache.add([*ids(2 * P), 9])
    assert (cache.stats().live, cache.stats().cached) == (2, 2)
    cache.free(probe)
    start(cache, ids(4 * P, seed=2))
    assert cache.length(cache.add([*ids(2 * P), 9])) == 2 * P
    assert cache.length(cache.add([*ids(2 * P, 1), 9])) == 0


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
