"""What `PagedKVCache` promises, one sentence a test."""

import random
import re

import numpy as np
import pytest
import torch

from pagedkv import (
    CacheConfig,
    LayerGroup,
    OutOfPagesError,
    PagedKVCache,
    PagedKVError,
    paged_attention,
    write_kv,
)
from pagedkv.errors import (
    BudgetExceeded,
    ClosedStepError,
    GradModeError,
    OpenStepError,
    SequenceTooLongError,
    TooManySequencesError,
    UnknownSequenceError,
    WrongCacheError,
)
from tests.support import (
    advance,
    assert_contents,
    kv_of,
    one_group,
    start,
    two_groups,
    window_only,
    write_step,
)

P = 4


def make(config: CacheConfig | None = None, debug: bool = True, **fields) -> PagedKVCache:
    return PagedKVCache(config or one_group(page_size=P, **fields), device="cpu", debug=debug)


def ids(n: int, seed: int = 0) -> list[int]:
    """The first ids of a stretch; different seeds have none in common."""
    return [1000 * seed + i for i in range(n)]


def snapshot(cache: PagedKVCache, seqs) -> dict:
    """All that can be seen of a cache between steps."""
    cache.check()
    return {
        "stats": cache.stats(),
        "lengths": [cache.length(seq) for seq in seqs],
        "uncached": [cache.uncached(seq).tolist() for seq in seqs],
        "contents": [
            [x.tolist() for x in cache.gather(seq, layer)]
            for seq in seqs
            for layer in range(cache.config.num_layers)
        ],
    }


def table_of(step, row: int, columns: int, group: int = 0) -> list[int]:
    return step.page_table(group)[row, :columns].tolist()


# ------------------------------------------------------------------ sharing


def grow_three(cache: PagedKVCache, salts) -> None:
    prompt = ids(512)
    for i, (own, salt) in enumerate(zip((100, 150, 200), salts, strict=True)):
        text = prompt + ids(own, i + 1)
        seq = cache.add(prompt + text[512:513], salt=salt)
        advance(cache, {seq: text[:513]}, salt)
        for n in (540, 512 + own):
            advance(cache, {seq: text[:n]}, salt)
        assert_contents(cache, seq, text, salt)


def test_three_texts_with_a_shared_prompt_of_512_take_62_pages_instead_of_126():
    config = one_group(page_size=16, max_tokens=4096, head_dim=2)
    shared, alone = make(config), make(config)
    grow_three(shared, [b"", b"", b""])
    assert shared.stats().live == 32 + 7 + 10 + 13 == 62
    assert shared.stats().shared == 32
    grow_three(alone, [b"1", b"2", b"3"])
    assert alone.stats().live == 39 + 42 + 45 == 126
    assert alone.stats().shared == 0
    assert alone.stats().tokens_reused == 0
    assert shared.stats().tokens_reused == 2 * 512


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


def test_fork_after_a_full_page_copies_nothing_even_when_written():
    cache, text = make(), ids(8)
    a = start(cache, text)
    b = cache.fork(a)[0]
    advance(cache, {a: [*text, 1], b: [*text, 2]})
    assert (cache.stats().live, cache.stats().shared) == (4, 2)
    assert_contents(cache, a, [*text, 1])
    assert_contents(cache, b, [*text, 2])


def test_a_fork_outlives_its_parent_and_an_empty_sequence_can_be_forked():
    cache, text = make(), ids(10)
    a = start(cache, text)
    b = cache.fork(a)[0]
    cache.free(a)
    assert (cache.stats().live, cache.stats().shared) == (3, 0)
    advance(cache, {b: [*text, 1]})
    assert_contents(cache, b, [*text, 1])
    empty = cache.add()
    c, d = cache.fork(empty, 2)
    advance(cache, {c: ids(5, 1), d: ids(5, 2)})
    assert_contents(cache, empty, [])
    assert_contents(cache, c, ids(5, 1))
    assert_contents(cache, d, ids(5, 2))


def test_many_texts_that_begin_alike_are_each_found_or_computed_right():
    cache = make(max_tokens=64 * P, max_sequences=64)
    texts = [[7, 7, 7, 7, 1, i, i, 5, i] for i in range(12)]
    seqs = [start(cache, t) for t in texts]
    assert cache.stats().shared == 1
    for t in texts:
        for n in (6, 7, 8, 9):
            b = cache.add([*t[:n], 99])
            assert cache.length(b) >= (n if n >= 8 else 5)
            assert_contents(cache, b, t[: cache.length(b)])
            cache.free(b)
    cache.free(seqs)
    cache.check()


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


def test_a_writer_copies_when_another_owner_does_not_write():
    cache, text = make(), ids(10)
    a = start(cache, text)
    b, c = cache.fork(a, 2)
    advance(cache, {a: [*text, 1], b: [*text, 2]})
    assert cache.stats().live == 2 + 3
    assert_contents(cache, c, text)
    advance(cache, {c: [*text, 3]})
    assert cache.stats().live == 2 + 3, "a sole owner writes in place"


def test_owners_at_different_lengths_of_one_page_do_not_disturb_each_other():
    cache, text = make(), ids(7)
    a = start(cache, text)
    b, c = cache.fork(a, 2)
    cache.truncate(b, 5)
    cache.truncate(c, 6)
    for order in ([a, b, c], [c, b, a], [b, a, c]):
        texts = {a: [*text, 1], b: [*text[:5], 2], c: [*text[:6], 3]}
        step = cache.prepare(order, tokens=[texts[s][-1:] for s in order])
        write_step(cache, step, [texts[s] for s in order])
        cache.abort(step)
        for seq, t in ((a, text), (b, text[:5]), (c, text[:6])):
            assert_contents(cache, seq, t)
    advance(cache, {a: [*text, 1], b: [*text[:5], 2], c: [*text[:6], 3]})
    assert_contents(cache, a, [*text, 1])
    assert_contents(cache, b, [*text[:5], 2])
    assert_contents(cache, c, [*text[:6], 3])


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


def test_a_prompt_found_but_for_its_last_token_writes_a_copy():
    cache, text = make(), ids(7)
    a = start(cache, text)
    b = cache.add([*text[:-1], 99])
    assert cache.length(b) == 6
    advance(cache, {b: [*text[:-1], 99]})
    assert_contents(cache, a, text)
    assert_contents(cache, b, [*text[:-1], 99])
    assert (cache.stats().live, cache.stats().shared) == (3, 1)


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


def test_a_longer_prompt_goes_on_where_the_cached_one_ends():
    cache, text = make(), ids(10)
    start(cache, text)
    for more in (1, 2, 3, 7):
        longer = text + ids(more, seed=more)
        b = cache.add(longer)
        assert cache.length(b) == 10
        advance(cache, {b: longer})
        assert_contents(cache, b, longer)


def test_generated_tokens_are_found_too():
    cache, text = make(), ids(5)
    a = start(cache, text)
    for n in range(6, 13):
        advance(cache, {a: ids(n)})
    assert cache.length(cache.add(ids(20))) == 12


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("by_count", [False, True])
def test_rejected_tokens_are_never_found(accepted, by_count):
    cache, text = make(), ids(6)
    a = start(cache, text)
    draft = ids(11)
    if by_count:
        step = cache.prepare([a], num_new=5)
        write_step(cache, step, [draft])
        cache.commit(step, [accepted], tokens=[draft[6:]])
    else:
        advance(cache, {a: draft}, accepted=[accepted])
    assert cache.length(a) == 6 + accepted
    cache.check()
    assert_contents(cache, a, draft[: 6 + accepted])
    b = cache.add([*draft, 99])
    assert cache.length(b) == 6 + accepted
    assert_contents(cache, b, draft[: 6 + accepted])
    assert cache.stats().live == -(-(6 + accepted) // P), "pages without a committed slot go back"


def test_tokens_of_an_aborted_step_are_never_found():
    cache = make()
    a = cache.add(ids(6))
    step = cache.prepare([a])
    write_step(cache, step, [ids(6)])
    b = cache.add(ids(6))
    assert cache.length(b) == 0, "not committed, not findable"
    cache.abort(step)
    assert cache.length(cache.add(ids(6))) == 0
    assert cache.stats().live == 0


def test_a_sequence_fed_by_count_is_not_found_from_there_on():
    cache, text = make(), ids(6)
    a = start(cache, text)
    with cache.step([a], num_new=3) as step:
        write_step(cache, step, [ids(9)])
    advance(cache, {a: ids(12)})  # with ids again, but after a hole
    assert_contents(cache, a, ids(12))
    b = cache.add(ids(12))
    assert cache.length(b) == 6
    assert_contents(cache, b, ids(6))


@pytest.mark.parametrize("with_prompt", [False, True])
def test_a_count_step_of_which_nothing_is_accepted_loses_nothing(with_prompt):
    cache = make()
    a, b = cache.add(ids(9) if with_prompt else None), cache.add()
    step = cache.prepare([a, b], num_new=2)
    write_step(cache, step, [ids(2), ids(2, 1)])
    cache.commit(step, [0, 0])
    advance(cache, {a: ids(9), b: ids(6, 1)})
    assert cache.length(cache.add([*ids(9), 99])) == 9
    assert cache.length(cache.add([*ids(6, 1), 99])) == 6


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


def test_prompt_ids_stay_findable_in_a_count_step_with_a_sequence_that_has_none():
    cache = make()
    a, b = cache.add(ids(9)), cache.add()
    with cache.step([a, b], num_new=[8, 1]) as step:
        write_step(cache, step, [ids(8), [5]])
    assert cache.uncached(a).tolist() == [8]
    assert cache.length(cache.add(ids(9))) == 8, "a took its ids from its prompt"


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


@pytest.mark.parametrize("with_prompt", ["all", "some", "none"])
def test_a_count_step_takes_ids_at_commit_whatever_is_uncached(with_prompt):
    cache = make()
    a = cache.add(None if with_prompt == "none" else ids(5))
    b = cache.add(ids(5, 1) if with_prompt == "all" else None)
    step = cache.prepare([a, b], num_new=5)
    write_step(cache, step, [ids(5), ids(5, 1)])
    cache.commit(step, tokens=[ids(5), ids(5, 1)])
    assert cache.length(cache.add([*ids(5), 9])) == 5
    assert cache.length(cache.add([*ids(5, 1), 9])) == 5


def test_equal_texts_computed_side_by_side_stay_right_and_share_in_the_end():
    cache, text = make(), ids(9)
    a, b = cache.add(text), cache.add(text)
    assert cache.length(b) == 0
    with cache.step([a, b]) as step:
        write_step(cache, step, [text, text])
    cache.check()
    for seq in (a, b):
        assert_contents(cache, seq, text)
    advance(cache, {a: [*text, 1], b: [*text, 2]})
    assert_contents(cache, a, [*text, 1])
    assert_contents(cache, b, [*text, 2])


def test_hits_never_cross_salts():
    cache, text = make(max_sequences=64, max_tokens=256), ids(9)
    salts = [b"", b"a", b"b", b"aa", b"\0", b"\0\0", b"x" * 100]
    for salt in salts:
        assert cache.length(start_salted(cache, text, salt)) == 9
    assert cache.stats().tokens_reused == 0
    for salt in salts:
        seq = cache.add([*text, 99], salt=salt)
        assert cache.length(seq) == 9
        assert_contents(cache, seq, text, salt)
    assert cache.length(cache.add(text, salt=b"c")) == 0


def start_salted(cache, text, salt):
    seq = cache.add(text, salt=salt)
    assert cache.length(seq) == 0, "found under another salt"
    advance(cache, {seq: text}, salt)
    return seq


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


def test_clear_prefixes_forgets_what_is_cached_and_what_is_live():
    cache, text = make(), ids(10)
    cache.free(start(cache, ids(8, 1)))
    a = start(cache, text)
    cache.clear_prefixes()
    assert (cache.stats().cached, cache.stats().free + cache.stats().live) == (0, 16)
    assert cache.length(cache.add(text)) == 0
    assert cache.length(cache.add(ids(8, 1))) == 0
    assert_contents(cache, a, text)
    # Its first pages are of the old weights: what it computes from now on is not findable either,
    # not even below a prefix that is.
    advance(cache, {a: ids(14)})
    b = cache.add(ids(10))
    advance(cache, {b: ids(10)})
    assert cache.length(cache.add([*ids(14), 99])) == 10
    assert_contents(cache, a, ids(14))


def test_freed_pages_stay_findable_and_are_counted_as_cached():
    cache, text = make(max_tokens=6 * P), ids(4 * P)
    cache.free(start(cache, text))
    stats = cache.stats()
    assert (stats.live, stats.cached, stats.free) == (0, 4, 2)
    a = cache.add([*text, 1])
    assert cache.length(a) == 4 * P
    stats = cache.stats()
    assert (stats.live, stats.cached, stats.free) == (4, 0, 2)
    assert_contents(cache, a, text)


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


# ------------------------------------------------------------------ steps


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("config", [one_group(), two_groups(5, rollback=1)], ids=["full", "both"])
def test_abort_restores_lengths_tables_refcounts_and_bytes(config, debug):
    cache, text = make(config, debug), ids(10)
    a = start(cache, text)
    b = cache.fork(a)[0]
    c = start(cache, ids(7, 1))
    seqs = [a, b, c]

    def tables():
        step = cache.prepare(seqs, num_new=1)
        # Of c all pages, of a and b the full ones: their last is a copy made for this step.
        rows = [
            [table_of(step, row, 2, g) for row in range(len(seqs))]
            for g in range(len(config.groups))
        ]
        cache.abort(step)
        return rows

    before = snapshot(cache, seqs)
    first = tables()
    assert snapshot(cache, seqs) == before
    for _ in range(3):
        step = cache.prepare([b, c, a], tokens=[ids(9, 2), ids(2, 3), ids(5, 4)])
        write_step(cache, step, [text + ids(9, 2), ids(7, 1) + ids(2, 3), text + ids(5, 4)])
        for seq, expected in ((a, text), (b, text), (c, ids(7, 1))):
            assert_contents(cache, seq, expected)
        cache.abort(step)
        after = snapshot(cache, seqs)
        assert after == before
    assert tables() == first


@pytest.mark.parametrize("n", range(1, 10))
def test_abort_after_a_truncate_leaves_the_truncated_text(n):
    cache, text = make(), ids(10)
    a = start(cache, text)
    b = cache.fork(a)[0]
    cache.truncate(a, n)
    live = cache.stats().live
    for _ in range(2):
        step = cache.prepare([a], tokens=[ids(6, 1)])
        write_step(cache, step, [text[:n] + ids(6, 1)])
        cache.abort(step)
        cache.check()
        assert cache.stats().live == live
        assert_contents(cache, a, text[:n])
        assert_contents(cache, b, text)
    cache.free(b)
    step = cache.prepare([a], tokens=[ids(6, 1)])
    write_step(cache, step, [text[:n] + ids(6, 1)])
    cache.abort(step)
    cache.check()
    assert_contents(cache, a, text[:n])
    c = cache.add([*text, 5])  # an aborted step has overwritten the rest
    assert_contents(cache, c, text[: cache.length(c)])


def test_lengths_move_in_commit_however_often_layers_write():
    cache = make()
    a = cache.add(ids(6))
    step = cache.prepare([a])
    for layers in ([1], [0, 1], [0, 0]):
        write_step(cache, step, [ids(6)], layers=layers)
        assert cache.length(a) == 0
        assert cache.gather(a, 0)[0].shape == (0, 2, 4)
    cache.commit(step, layers=[0, 1])
    assert_contents(cache, a, ids(6))


def test_leaving_a_step_after_an_explicit_commit_or_abort_does_nothing():
    cache = make()
    a = cache.add(ids(6))
    with cache.step([a]) as step:
        write_step(cache, step, [ids(6)])
        cache.abort(step)
    assert cache.length(a) == 0
    with cache.step([a], num_new=4) as step:
        write_step(cache, step, [ids(4)])
        cache.commit(step, [3])
        b = cache.add([7])
        cache.prepare([b])  # a new step, opened before the old block is left
    assert cache.length(a) == 3
    with pytest.raises(OpenStepError):
        cache.prepare([a], num_new=1)


def test_a_prompt_may_be_fed_in_chunks():
    cache, text = make(), ids(11)
    a = cache.add(text)
    done = 0
    for chunk in (3, 1, 4, 2):
        with cache.step([a], num_new=chunk) as step:
            assert step.tokens.tolist() == text[done : done + chunk]
            write_step(cache, step, [text[: done + chunk]])
        done += chunk
        assert cache.length(a) == done
        assert cache.uncached(a).tolist() == text[done:]
        assert_contents(cache, a, text[:done])
    with cache.step([a]) as step:
        assert step.tokens.tolist() == text[done:]
        write_step(cache, step, [text])
    assert cache.uncached(a).tolist() == []
    assert cache.length(cache.add([*text, 5])) == 11


def test_a_step_describes_itself():
    cache = make()
    a, b, c = start(cache, ids(6)), start(cache, ids(3, 1)), cache.add(ids(5, 2))
    step = cache.prepare([b, c, a], tokens=[ids(2, 3), ids(5, 2), [4]])
    assert list(step.seqs) == [b, c, a]
    assert isinstance(step.num_new, np.ndarray)
    assert step.num_new.tolist() == [2, 5, 1]
    expected = {
        "tokens": (torch.int64, [*ids(2, 3), *ids(5, 2), 4]),
        "positions": (torch.int64, [3, 4, 0, 1, 2, 3, 4, 6]),
        "last_rows": (torch.int64, [1, 6, 7]),
        "query_start_loc": (torch.int32, [0, 2, 7, 8]),
    }
    for name, (dtype, values) in expected.items():
        tensor = getattr(step, name)
        assert (tensor.dtype, tensor.tolist()) == (dtype, values), name
    assert (step.kv_lens().dtype, step.kv_lens().tolist()) == (torch.int32, [5, 5, 7])
    table, slots = step.page_table(), step.slots()
    assert (table.dtype, slots.dtype) == (torch.int32, torch.int64)
    rows = [0, 0, 1, 1, 1, 1, 1, 2]
    at = step.positions
    assert slots.tolist() == (table[rows, at // P].long() * P + at % P).tolist()
    indptr, indices, last = step.csr()
    assert [x.dtype for x in (indptr, indices, last)] == [torch.int32] * 3
    assert indptr.tolist() == [0, 2, 4, 6]
    assert last.tolist() == [1, 1, 3]
    assert indices.tolist() == table[:, :2].flatten().tolist()
    cache.abort(step)


def test_addresses_of_step_tensors_are_stable_while_lengths_change():
    cache = make()
    a = start(cache, ids(3))
    addresses = set()
    for n in range(4, 9):
        step = cache.prepare([a], tokens=[n])
        addresses.add((step.positions.data_ptr(), step.page_table().data_ptr()))
        write_step(cache, step, [[*ids(3), *range(4, n + 1)]])
        cache.commit(step)
    assert len(addresses) <= 2, "double buffered at most"


def test_tensors_of_every_group_begin_where_kernels_can_read_them():
    groups = LayerGroup((0,)), LayerGroup((1,))
    odd = {"max_sequences": 7, "max_sequence_length": 100, "max_step_tokens": 33}
    cache = make(one_group(groups=groups, max_tokens=200, retention="lru", budget=68, **odd))
    step = cache.prepare([cache.add()], num_new=9)
    for tensor in (step.page_table(1), step.slots(1), step.kv_lens(1)):
        assert tensor.data_ptr() % 16 == 0
    cache.abort(step)


def test_pages_that_a_step_fills_are_sent_once_for_all_groups():
    size = 16
    cache = make(two_groups(20, head_dim=32, page_size=size, max_tokens=112, kv_format="int4"))
    a, b = cache.add(), cache.add()
    step = cache.prepare([a, b], num_new=[3 * size + 5, 2 * size])
    sent = [step.direct(group) for group in range(2)]
    for group, (first, pages) in enumerate(sent):
        table = step.page_table(group)
        assert first.tolist() == [size, 2 * size, 4 * size + 5]
        assert pages.tolist() == [*table[0, 1:3].tolist(), table[1, 1].item()]
        assert first.is_contiguous()
        assert pages.is_contiguous()
        assert not (first.data_ptr() | pages.data_ptr()) % 16, "kernels could not read them"
    assert len({x.untyped_storage().data_ptr() for both in sent for x in both}) == 1
    (slots, tokens), (others, same) = (step.written(group) for group in range(2))
    assert tokens is same
    assert tokens.tolist() == [*range(size), *range(3 * size, 4 * size + 5)]
    assert slots.tolist() == step.slots(0)[tokens].tolist()
    assert others.tolist() == step.slots(1)[tokens].tolist()
    cache.abort(step)


@pytest.mark.parametrize(
    "form",
    [
        [3, 4],
        [[3], [4]],
        np.asarray([3, 4]),
        np.asarray([[3], [4]], dtype=np.int16),
        [np.asarray([3], dtype=np.uint8), [4]],
        torch.tensor([3, 4]),
        torch.tensor([[3], [4]], dtype=torch.int32),
        (np.int64(3), 4),
    ],
    ids=str,
)
def test_ids_come_in_many_forms(form):
    cache = make()
    a, b = start(cache, ids(3)), start(cache, ids(3, 1))
    with cache.step([a, b], tokens=form) as step:
        assert step.tokens.tolist() == [3, 4]
        write_step(cache, step, [[*ids(3), 3], [*ids(3, 1), 4]])
    assert_contents(cache, a, [*ids(3), 3])
    assert_contents(cache, b, [*ids(3, 1), 4])


def test_packed_ids_are_passed_on_when_fed_by_count():
    cache = make()
    a, b = start(cache, ids(3)), start(cache, ids(3, 1))
    seqs = np.asarray([b, a])
    step = cache.prepare(seqs, tokens=torch.tensor([7, 8, 9]), num_new=[2, 1])
    assert step.tokens.tolist() == [7, 8, 9]
    write_step(cache, step, [[*ids(3, 1), 7, 8], [*ids(3), 9]])
    cache.commit(step, np.asarray([1, 1]))
    assert_contents(cache, a, [*ids(3), 9])
    assert_contents(cache, b, [*ids(3, 1), 7])
    cache.free(seqs)
    assert cache.stats().live == 0


@pytest.mark.parametrize(
    "kind", [list, tuple, np.asarray, torch.tensor], ids=lambda kind: kind.__name__
)
def test_prompts_come_in_many_forms(kind):
    cache = make()
    a = cache.add(kind(ids(5)))
    assert cache.uncached(a).tolist() == ids(5)


def test_add_uncached_length_gather_and_stats_see_committed_state_during_a_step():
    cache = make()
    a, b = start(cache, ids(6)), start(cache, ids(5, 1))
    with cache.step([a], tokens=[ids(9)[6:]]) as step:
        write_step(cache, step, [ids(9)])
        assert cache.length(a) == 6
        assert_contents(cache, a, ids(6))
        assert cache.stats().tokens == 11
        c = cache.add(ids(9))
        assert cache.length(c) == 6
        assert cache.uncached(c).tolist() == ids(9)[6:]
        cache.truncate(b, 2)
        d = cache.fork(b)[0]
        cache.free(b)
        cache.check()
    cache.check()
    assert cache.stats().live == 3 + 1
    for seq, text in ((a, ids(9)), (c, ids(6)), (d, ids(5, 1)[:2])):
        assert_contents(cache, seq, text)


# ------------------------------------------------------------------ truncate


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


def test_truncate_of_one_owner_leaves_the_others_alone():
    cache, text = make(), ids(10)
    a = start(cache, text)
    b = cache.fork(a)[0]
    cache.truncate(a, 5)
    assert cache.stats().live == 3
    advance(cache, {a: [*text[:5], 99]})
    assert_contents(cache, b, text)
    assert_contents(cache, a, [*text[:5], 99])
    assert cache.stats().live == 4, "the shared tail was copied"


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


# ------------------------------------------------------------------ windows


@pytest.mark.parametrize("rollback", [0, 3])
@pytest.mark.parametrize("window", [1, 4, 6, 9])
def test_a_window_group_drops_the_pages_behind_it(window, rollback):
    cache = make(two_groups(window, rollback=rollback, max_tokens=64, max_sequences=2))
    a = cache.add()
    for n in range(1, 30):
        advance(cache, {a: ids(n)})
        dropped = max(0, n - rollback - window) // P
        assert cache.gather(a, 1)[0].shape[0] == n - P * dropped
        assert cache.gather(a, 0)[0].shape[0] == n
        assert_contents(cache, a, ids(n))
        assert cache.stats().live == 2 * -(-n // P) - dropped
    cache.check()
    step = cache.prepare([a], num_new=1)
    dropped = max(0, 29 - rollback - window) // P
    table = step.page_table(1)[0]
    assert (table[:dropped] == -1).all()
    assert (table[dropped:8] >= 0).all()
    assert step.kv_lens(1).tolist() == step.kv_lens(0).tolist() == [30]
    indptr, indices, last = step.csr(1)
    assert indptr.tolist() == [0, 8 - dropped]
    assert indices.tolist() == table[dropped:8].tolist()
    assert last.tolist() == [2]
    cache.abort(step)
    assert_contents(cache, a, ids(29))


@pytest.mark.parametrize("config", [window_only(6), two_groups(6, max_tokens=64)])
def test_a_revocable_step_can_be_taken_back_from_windows_until_the_next_commit(config):
    cache = make(config)
    seq = cache.add()
    for new in (17, 9):
        step = cache.prepare([seq], num_new=new)
        cache.commit(step, revocable=True, layers=())
        cache.check()
    for n in (25, 20, 17):  # back to any length of the latest step
        cache.truncate(seq, n)
        cache.check()
    held = cache.stats().live
    with pytest.raises(ValueError, match="set `rollback` to keep more"):
        cache.truncate(seq, 8)
    step = cache.prepare([seq], num_new=1)
    cache.commit(step, layers=())
    with pytest.raises(ValueError, match="set `rollback` to keep more"):
        cache.truncate(seq, 11)
    assert cache.stats().live <= held
    cache.check()


@pytest.mark.parametrize("rollback", [0, 4])
def test_a_window_can_be_truncated_by_rollback_tokens_and_to_nothing(rollback):
    cache = make(window_only(6, rollback=rollback))
    a = start(cache, ids(30))
    dropped = (30 - rollback - 6) // P
    for n in range(1, 30):
        if max(0, n - 6) // P < dropped:
            before = snapshot(cache, [a])
            with pytest.raises(ValueError, match=r"\d"):
                cache.truncate(a, n)
            assert snapshot(cache, [a]) == before
    n = 30 - rollback
    cache.truncate(a, n)
    assert_contents(cache, a, ids(n))
    advance(cache, {a: [*ids(n), 99, 98]})
    assert_contents(cache, a, [*ids(n), 99, 98])
    cache.truncate(a, 0)
    assert (cache.length(a), cache.stats().live) == (0, 0)
    advance(cache, {a: ids(9, 1)})
    assert_contents(cache, a, ids(9, 1))


def test_window_drops_follow_what_was_accepted():
    cache = make(window_only(4))
    a = start(cache, ids(8))
    advance(cache, {a: ids(20)}, accepted=[1])
    assert_contents(cache, a, ids(9))
    assert cache.gather(a, 0)[0].shape[0] == 9 - P * ((9 - 4) // P)


def test_a_hit_needs_only_the_window_in_a_window_group():
    cache = make(two_groups(5, max_tokens=64))
    a = start(cache, ids(24))
    b = cache.add([*ids(24), 7])
    assert cache.length(b) == 24
    assert_contents(cache, b, ids(24))
    advance(cache, {b: [*ids(24), 7], a: [*ids(24), 8]})
    assert_contents(cache, a, [*ids(24), 8])
    assert_contents(cache, b, [*ids(24), 7])
    # Shorter: the window in front of position 12 was dropped, though the full group has it.
    c = cache.add([*ids(12), 7])
    assert_contents(cache, c, ids(cache.length(c)))


def test_a_step_longer_than_the_window_pool_was_sized_for_is_refused_by_name():
    config = window_only(4, max_tokens=256, max_sequences=2, max_step_tokens=8)
    assert config.num_pages() == 2 * (1 + 2) + 2
    cache = make(config)
    a = cache.add()
    with pytest.raises(SequenceTooLongError, match="max_step_tokens"):
        cache.prepare([a], num_new=9)
    b = cache.add()
    for n in range(4, 256, 4):  # two sequences of the greatest length, in a pool of eight pages
        advance(cache, {a: ids(n), b: ids(n, 1)})
    advance(cache, {a: ids(256), b: ids(256, 1)})
    assert_contents(cache, a, ids(256))
    assert_contents(cache, b, ids(256, 1))
    cache.check()


# ------------------------------------------------------------------ reservations


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


# ------------------------------------------------------------------ running out


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


def test_running_out_while_copying_changes_nothing():
    cache = make(max_tokens=4 * P)
    a = start(cache, ids(14))
    b, c = cache.fork(a, 2)
    before = snapshot(cache, [a, b, c])
    with pytest.raises(OutOfPagesError) as caught:
        cache.prepare([a], num_new=1)
    assert (caught.value.pages_needed, caught.value.pages_free) == (1, 0)
    assert snapshot(cache, [a, b, c]) == before
    cache.free([b, c])
    advance(cache, {a: ids(16)})


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


def test_what_can_never_fit_is_refused_at_once_even_while_the_pool_is_full():
    cache, seqs = full_cache()
    before = snapshot(cache, seqs)
    with pytest.raises(SequenceTooLongError):
        cache.add(ids(33, 5))
    with pytest.raises(SequenceTooLongError):
        cache.prepare([seqs[0]], num_new=29)
    with pytest.raises(SequenceTooLongError):
        cache.prepare(seqs, num_new=[1, 1, 40])
    assert snapshot(cache, seqs) == before
    assert cache.length(cache.add(ids(32, 5))) == 0


# ------------------------------------------------------------------ counting


def test_a_hundred_generated_tokens_compute_a_hundred_keys_and_values():
    cache = make(max_tokens=256)
    a = start(cache, ids(10))
    for n in range(11, 111):
        advance(cache, {a: ids(n)})
    assert cache.stats().tokens_computed == 10 + 100
    assert cache.stats().tokens_reused == 0
    assert cache.stats().live == -(-110 // P)


def test_stats_tell_live_shared_cached_free_and_wasted_apart():
    cache = make(max_tokens=16 * P)
    a = start(cache, ids(10))  # 3 pages, 2 slots unused
    b = cache.fork(a)[0]
    c = start(cache, ids(5, 1), max_tokens=20)  # 2 pages, 3 slots unused, 3 pages promised
    gone = start(cache, ids(8, 2))
    cache.free(gone)
    stats = cache.stats()
    assert (stats.pages, stats.live, stats.shared, stats.cached, stats.free) == (16, 5, 3, 2, 9)
    assert (stats.promised, stats.wasted_slots) == (3, 5)
    assert (stats.sequences, stats.tokens) == (3, 25)
    assert stats.tokens_computed == 23
    assert stats.live_bytes == 5 * cache.config.bytes_per_page()
    assert stats.bytes == cache.config.nbytes == 16 * P * cache.config.bytes_per_token
    assert all(str(x) in str(stats) for x in (16, 5, 3, 2, 9))
    cache.free([a, b, c])
    stats = cache.stats()
    assert (stats.live, stats.shared, stats.promised, stats.wasted_slots) == (0, 0, 0, 0)
    assert stats.free + stats.cached == stats.pages
    cache.clear_prefixes()
    assert cache.stats().free == stats.pages


def test_rejected_and_aborted_tokens_do_not_count_as_computed():
    cache = make()
    a = start(cache, ids(4))
    advance(cache, {a: ids(9)}, accepted=[2])
    step = cache.prepare([a], num_new=3)
    cache.abort(step)
    assert cache.stats().tokens_computed == 6


def test_a_thousand_sequences_come_and_go_without_a_leak():
    cache = make(max_tokens=12 * P, debug=False)
    source = random.Random(3)
    seen = set()
    for i in range(1000):
        seq = start(cache, ids(source.randint(1, 12 * P), seed=i % 7))
        assert seq not in seen
        seen.add(seq)
        cache.free(seq)
    stats = cache.stats()
    assert (stats.live, stats.cached + stats.free) == (0, 12)
    cache.check()


def test_the_same_operations_take_the_same_pages():
    def run():
        cache, tables = make(max_tokens=10 * P), []
        a = start(cache, ids(9))
        b, c = cache.fork(a, 2)
        cache.free(b)
        d = start(cache, ids(6, 1))
        for n in range(3):
            step = cache.prepare([a, c, d], tokens=[n, n + 1, n + 2])
            tables.append(step.page_table().tolist())
            cache.commit(step, layers=())
        return tables

    assert run() == run()


# ------------------------------------------------------------------ bad input


BAD_CALLS = [
    ("length of an unknown sequence", lambda c, a, f: c.length(999), UnknownSequenceError, "999"),
    ("length of a freed one", lambda c, a, f: c.length(f), UnknownSequenceError, "live"),
    ("gather from a freed one", lambda c, a, f: c.gather(f, 0), UnknownSequenceError, "live"),
    ("fork a freed one", lambda c, a, f: c.fork(f), UnknownSequenceError, "live"),
    ("truncate a freed one", lambda c, a, f: c.truncate(f, 0), UnknownSequenceError, "live"),
    ("free twice", lambda c, a, f: c.free(f), UnknownSequenceError, "live"),
    ("free one good one bad", lambda c, a, f: c.free([a, f]), UnknownSequenceError, "live"),
    ("free the same twice", lambda c, a, f: c.free([a, a]), (ValueError, KeyError), r"\d"),
    ("uncached of a negative id", lambda c, a, f: c.uncached(-1), UnknownSequenceError, "-1"),
    (
        "step a freed one",
        lambda c, a, f: c.prepare([a, f], num_new=1),
        UnknownSequenceError,
        "live",
    ),
    ("the same twice", lambda c, a, f: c.prepare([a, a], num_new=1), ValueError, "seqs"),
    ("no sequences", lambda c, a, f: c.prepare([], tokens=[]), ValueError, "seqs"),
    ("no new tokens", lambda c, a, f: c.prepare([a], tokens=[[]]), ValueError, "tokens"),
    ("a count of none", lambda c, a, f: c.prepare([a], num_new=0), ValueError, "num_new"),
    ("a negative count", lambda c, a, f: c.prepare([a], num_new=-2), ValueError, "num_new"),
    ("a broken count", lambda c, a, f: c.prepare([a], num_new=1.5), TypeError, "num_new"),
    ("counts for others", lambda c, a, f: c.prepare([a], num_new=[1, 1]), ValueError, "num_new"),
    ("nothing uncached", lambda c, a, f: c.prepare([a]), ValueError, "tokens"),
    ("ids for others", lambda c, a, f: c.prepare([a], tokens=[[1], [2]]), ValueError, "tokens"),
    (
        "ids and a count",
        lambda c, a, f: c.prepare([a], tokens=[[1]], num_new=1),
        ValueError,
        "num_new",
    ),
    ("an empty prompt", lambda c, a, f: c.add([]), ValueError, "tokens"),
    ("a prompt of floats", lambda c, a, f: c.add([1.0, 2.5]), TypeError, "tokens"),
    ("a prompt of bools", lambda c, a, f: c.add(np.asarray([True])), TypeError, "tokens"),
    ("a prompt of words", lambda c, a, f: c.add(["the"]), TypeError, "tokens"),
    ("a prompt that is text", lambda c, a, f: c.add("the"), TypeError, "tokens"),
    ("a negative id in a prompt", lambda c, a, f: c.add([1, -1]), ValueError, "tokens"),
    ("an id too large", lambda c, a, f: c.add([2**31]), ValueError, "tokens"),
    ("an id far too large", lambda c, a, f: c.add([2**70]), (ValueError, TypeError), "tokens"),
    ("a prompt of two axes", lambda c, a, f: c.add([[1, 2]]), ValueError, "tokens"),
    ("a prompt with holes", lambda c, a, f: c.add([1, None]), TypeError, "tokens"),
    ("float ids", lambda c, a, f: c.prepare([a], tokens=[[1.5]]), TypeError, "tokens"),
    ("negative ids", lambda c, a, f: c.prepare([a], tokens=[[-1]]), ValueError, "tokens"),
    ("ids too large", lambda c, a, f: c.prepare([a], tokens=[2**31]), ValueError, "tokens"),
    ("a salt of text", lambda c, a, f: c.add([1], salt="me"), TypeError, "salt"),
    ("no salt", lambda c, a, f: c.add([1], salt=None), TypeError, "salt"),
    ("a prompt over length", lambda c, a, f: c.add(ids(41)), SequenceTooLongError, "41"),
    ("reserve over length", lambda c, a, f: c.add([1], max_tokens=41), SequenceTooLongError, "41"),
    ("reserve too little", lambda c, a, f: c.add([1, 2], max_tokens=1), ValueError, "max_tokens"),
    ("growth over length", lambda c, a, f: c.prepare([a], num_new=35), SequenceTooLongError, "41"),
    ("truncate below 0", lambda c, a, f: c.truncate(a, -1), ValueError, "-1"),
    ("truncate beyond", lambda c, a, f: c.truncate(a, 7), ValueError, "7"),
    ("fork into none", lambda c, a, f: c.fork(a, 0), ValueError, "n"),
    ("fork into too many", lambda c, a, f: c.fork(a, 8), TooManySequencesError, "8"),
    ("fork into a part", lambda c, a, f: c.fork(a, 1.5), TypeError, "n"),
    ("truncate to a part", lambda c, a, f: c.truncate(a, 2.5), TypeError, "n"),
    ("reserve a part", lambda c, a, f: c.add([1], max_tokens=2.5), TypeError, "max_tokens"),
    ("reserve nothing", lambda c, a, f: c.add(max_tokens=0), ValueError, "max_tokens"),
    ("a sequence by name", lambda c, a, f: c.length("a"), (TypeError, UnknownSequenceError), "a"),
    ("step by name", lambda c, a, f: c.prepare(["a"], num_new=1), (TypeError, KeyError), "seqs"),
    ("gather from no layer", lambda c, a, f: c.gather(a, 2), (ValueError, IndexError), "layer"),
    ("gather below 0", lambda c, a, f: c.gather(a, -1), (ValueError, IndexError), "layer"),
]


@pytest.mark.parametrize(
    ("call", "error", "match"), [row[1:] for row in BAD_CALLS], ids=[row[0] for row in BAD_CALLS]
)
def test_bad_input_is_named_and_changes_nothing(call, error, match):
    cache = make(max_tokens=64, max_sequence_length=40)
    a, b, freed = start(cache, ids(6)), cache.add(ids(5, 1)), start(cache, ids(3, 2))
    cache.free(freed)
    before = snapshot(cache, [a, b])
    with pytest.raises(error, match=match) as caught:
        call(cache, a, freed)
    if not isinstance(caught.value, PagedKVError):
        assert str(caught.value), "an error says what is wrong"
    assert snapshot(cache, [a, b]) == before
    advance(cache, {a: ids(7), b: ids(5, 1)})  # nothing is left open


def test_one_sequence_more_than_the_configuration_allows_is_refused():
    cache = make(max_sequences=3)
    a, b, c = start(cache, ids(4)), cache.add(), cache.add(ids(3))
    before = snapshot(cache, [a, b, c])
    for call in (lambda: cache.add(ids(2)), lambda: cache.add(), lambda: cache.fork(a)):
        with pytest.raises(TooManySequencesError, match="3"):
            call()
    assert snapshot(cache, [a, b, c]) == before
    cache.free(b)
    assert cache.fork(a)


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_step_ends_once(end):
    cache = make()
    a = cache.add(ids(6))
    step = cache.prepare([a])
    write_step(cache, step, [ids(6)])
    getattr(cache, end)(step)
    before = snapshot(cache, [a])
    x = torch.zeros(6, 2, 4)
    for call in (
        lambda: cache.commit(step),
        lambda: cache.commit(step, [3]),
        lambda: cache.abort(step),
        lambda: write_kv(x, x, step, 0),
        lambda: paged_attention(x, x, x, step, 0),
    ):
        with pytest.raises(ClosedStepError):
            call()
    assert snapshot(cache, [a]) == before


def test_a_closed_step_stays_closed_while_another_is_open():
    cache = make()
    a, b = start(cache, ids(6)), start(cache, ids(6, 1))
    old = cache.prepare([a], num_new=1)
    cache.abort(old)
    new = cache.prepare([b], num_new=1)
    x = torch.zeros(1, 2, 4)
    for call in (
        lambda: cache.commit(old),
        lambda: cache.abort(old),
        lambda: write_kv(x, x, old, 0),
    ):
        with pytest.raises(ClosedStepError):
            call()
    write_step(cache, new, [[*ids(6, 1), 3]])
    cache.commit(new, tokens=[3])
    assert_contents(cache, a, ids(6))
    assert_contents(cache, b, [*ids(6, 1), 3])


@pytest.mark.parametrize(
    ("accepted", "error"),
    [([3], ValueError), ([-1], ValueError), ([1, 1], ValueError), ([], (TypeError, ValueError)),
     ([1.5], TypeError), ("2", (TypeError, ValueError))],
)  # fmt: skip
def test_a_wrong_accepted_leaves_the_step_open(accepted, error):
    cache = make()
    a = start(cache, ids(6))
    step = cache.prepare([a], tokens=[[6, 7]])
    write_step(cache, step, [ids(8)])
    with pytest.raises(error, match="accepted"):
        cache.commit(step, accepted)
    cache.check()
    assert_contents(cache, a, ids(6))
    cache.commit(step, [1])
    assert_contents(cache, a, ids(7))


@pytest.mark.parametrize(
    "tokens", [[[6]], [[6, 7], [8]], [[6, -7]], [[6.5, 7.5]], [[6, 2**31]], []], ids=str
)
def test_wrong_ids_at_commit_leave_the_step_open(tokens):
    cache = make()
    a = start(cache, ids(6))
    step = cache.prepare([a], num_new=2)
    write_step(cache, step, [ids(8)])
    with pytest.raises((ValueError, TypeError), match="tokens"):
        cache.commit(step, tokens=tokens)
    cache.check()
    assert_contents(cache, a, ids(6))
    cache.commit(step, tokens=[[6, 7]])
    assert_contents(cache, a, ids(8))
    assert cache.length(cache.add(ids(9))) == 8


def test_calls_that_a_step_forbids_change_nothing():
    cache = make()
    a, b = start(cache, ids(6)), start(cache, ids(6, 1))
    step = cache.prepare([a], tokens=[[6]])
    before = snapshot(cache, [a, b])
    for call in (
        lambda: cache.prepare([b], num_new=1),
        lambda: cache.fork(a),
        lambda: cache.truncate(a, 2),
        lambda: cache.free(a),
        lambda: cache.free([b, a]),
        lambda: cache.clear_prefixes(),
    ):
        with pytest.raises(OpenStepError):
            call()
        assert snapshot(cache, [a, b]) == before
    write_step(cache, step, [ids(7)])
    cache.commit(step)
    assert_contents(cache, a, ids(7))


def test_a_step_of_another_cache_is_refused():
    one, two = make(), make()
    a, b = start(one, ids(6)), start(two, ids(5, 1))
    step = one.prepare([a], tokens=[[6]])
    before = snapshot(two, [b])
    for call in (lambda: two.commit(step), lambda: two.abort(step)):
        with pytest.raises(WrongCacheError):
            call()
    other = two.prepare([b], num_new=1)
    with pytest.raises(WrongCacheError):
        two.commit(step)
    two.abort(other)
    assert snapshot(two, [b]) == before
    write_step(one, step, [ids(7)])
    one.commit(step)
    assert_contents(one, a, ids(7))


def bad_tensors():
    good = {"q": (3, 4, 4), "k": (3, 2, 4), "v": (3, 2, 4)}
    rows = []
    for name, shape in good.items():
        tokens, heads, dim = shape
        for what, wrong in (
            ("one token more", (tokens + 1, heads, dim)),
            ("one token less", (tokens - 1, heads, dim)),
            ("another head_dim", (tokens, heads, dim + 1)),
            ("an axis too few", (tokens, heads * dim)),
            ("a batch axis", (1, tokens, heads, dim)),
            ("no multiple of the heads" if name == "q" else "another head count", (3, 3, 4)),
        ):
            rows.append((f"{name}: {what}", name, torch.zeros(wrong), ValueError))
        for dtype in (torch.float64, torch.bfloat16, torch.int32):
            rows.append((f"{name}: {dtype}", name, torch.zeros(shape, dtype=dtype), TypeError))
        rows.append((f"{name}: meta device", name, torch.zeros(shape, device="meta"), ValueError))
        rows.append((f"{name}: numpy", name, np.zeros(shape, np.float32), TypeError))
    return rows


@pytest.mark.parametrize(
    ("name", "tensor", "error"),
    [row[1:] for row in bad_tensors()],
    ids=[row[0] for row in bad_tensors()],
)
def test_wrong_queries_keys_and_values_are_named_and_nothing_is_written(name, tensor, error):
    cache = make()
    a = start(cache, ids(6))
    before = snapshot(cache, [a])
    step = cache.prepare([a], tokens=[[6, 7, 8]])
    k, v = (x[6:] for x in kv_of(ids(9), 0, cache.config))
    write_step(cache, step, [ids(9)])
    good = {"q": torch.zeros(3, 4, 4), "k": k, "v": v}
    with pytest.raises(error, match=rf"\b{name}\b"):
        paged_attention(**{**good, name: tensor}, step=step, layer=0)
    if name != "q":
        with pytest.raises(error, match=rf"\b{name}\b"):
            write_kv(**{**{"k": k, "v": v}, name: tensor}, step=step, layer=0)
    cache.abort(step)
    assert snapshot(cache, [a]) == before


def test_the_error_for_a_wrong_shape_says_what_was_expected_and_what_came():
    cache = make()
    a = start(cache, ids(6))
    step = cache.prepare([a], num_new=3)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        write_kv(torch.zeros(3, 5, 4), torch.zeros(3, 2, 4), step, 0)
    for part in ("k", "3", "2", "4", "5"):
        assert part in str(caught.value)


@pytest.mark.parametrize("layer", [-1, 2, 99])
def test_a_layer_that_is_not_there_is_refused(layer):
    cache = make()
    a = start(cache, ids(6))
    x = torch.zeros(1, 2, 4)
    step = cache.prepare([a], num_new=1)
    for call in (
        lambda: write_kv(x, x, step, layer),
        lambda: paged_attention(x, x, x, step, layer),
    ):
        with pytest.raises((ValueError, IndexError), match="layer"):
            call()
    cache.abort(step)
    assert_contents(cache, a, ids(6))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_tensors_that_require_gradients_are_refused_in_grad_mode(name):
    cache = make()
    a = start(cache, ids(6))
    good = {x: torch.zeros(1, 2, 4) for x in "qkv"}
    bad = {**good, name: torch.zeros(1, 2, 4, requires_grad=True)}
    step = cache.prepare([a], num_new=1)
    with torch.enable_grad():
        with pytest.raises(GradModeError):
            paged_attention(**bad, step=step, layer=0)
        paged_attention(**good, step=step, layer=0)
        if name != "q":
            with pytest.raises(GradModeError):
                write_kv(bad["k"], bad["v"], step, 0)
    with torch.no_grad():
        out = paged_attention(**bad, step=step, layer=0)
    assert not out.requires_grad
    cache.abort(step)


# ------------------------------------------------------------------ configuration


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"page_size": 0}, ValueError, "page_size"),
        ({"page_size": -4}, ValueError, "page_size"),
        ({"page_size": 4.0}, TypeError, "page_size"),
        ({"page_size": True}, TypeError, "page_size"),
        ({"num_layers": 0}, ValueError, "num_layers"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads"),
        ({"head_dim": 0}, ValueError, "head_dim"),
        ({"max_tokens": 0}, ValueError, "max_tokens"),
        ({"max_tokens": "64"}, TypeError, "max_tokens"),
        ({"max_tokens": 2**40}, ValueError, "max_tokens"),
        ({"max_sequences": 0}, ValueError, "max_sequences"),
        ({"max_sequence_length": -1}, ValueError, "max_sequence_length"),
        ({"max_step_tokens": -1}, ValueError, "max_step_tokens"),
        ({"rollback": -1}, ValueError, "rollback"),
        ({"dtype": "int7"}, ValueError, "dtype"),
        ({"dtype": "float64"}, ValueError, "dtype"),
        ({"fingerprint": "weights"}, TypeError, "fingerprint"),
        ({"groups": (LayerGroup((0,)),)}, ValueError, "groups"),
        ({"groups": (LayerGroup((0, 1)), LayerGroup((1,)))}, ValueError, "groups"),
        ({"groups": (LayerGroup((0, 1, 2)),)}, ValueError, "groups"),
        ({"groups": (LayerGroup((0, 1), 0),)}, ValueError, "window"),
        ({"groups": (LayerGroup((0, 1), -3),)}, ValueError, "window"),
        ({"groups": (LayerGroup((0, 1)), LayerGroup(()))}, ValueError, "groups"),
    ],
    ids=str,
)
def test_a_bad_configuration_is_refused_by_name(fields, error, match):
    with pytest.raises(error, match=match):
        one_group(**fields)


def test_a_configuration_counts_its_pages_and_bytes():
    config = two_groups(6, max_tokens=64, max_sequences=2, max_step_tokens=8, rollback=1)
    assert config.num_pages(0) == 16
    assert config.num_pages(1) == 2 * (2 + 2) + 2 == 10
    slot = 2 * 2 * 4 * 4  # K and V, heads, head_dim, bytes
    assert (config.bytes_per_page(0), config.bytes_per_page(1)) == (2 * slot * P, slot * P)
    assert config.bytes_per_token == 3 * slot
    assert config.nbytes == 16 * 2 * slot * P + 10 * slot * P
    assert one_group(dtype="bfloat16").nbytes * 2 == one_group().nbytes
    assert one_group(max_tokens=65).num_pages() == 17
    default = CacheConfig(1, 1, 1, "float32", 100)
    assert (default.page_size, default.max_sequences) == (16, 256)
    assert (default.max_sequence_length, default.max_step_tokens) == (100, 100)


def test_more_bytes_than_there_is_memory_are_refused_before_anything_is_allocated():
    config = CacheConfig(80, 64, 256, "float32", max_tokens=2**27)
    with pytest.raises(BudgetExceeded) as caught:
        PagedKVCache(config, device="cpu")
    assert isinstance(caught.value, MemoryError)
    assert caught.value.needed == config.nbytes
    assert 0 < caught.value.available < config.nbytes
    assert re.search(r"\d", str(caught.value))


@pytest.mark.parametrize(
    "options", [{"device": "abacus"}, {"backend": "abacus"}, {"backend": "triton"}], ids=str
)
def test_an_unknown_device_or_a_backend_that_cannot_run_is_refused(options):
    with pytest.raises((ValueError, RuntimeError, PagedKVError, ImportError, NotImplementedError)):
        PagedKVCache(one_group(), **{"device": "cpu", **options})


# ------------------------------------------------------------------ one row cannot harm another


def attend(cache, step, q, texts, nan_in=None):
    outs = []
    for layer in range(cache.config.num_layers):
        parts = [kv_of(t, layer, cache.config) for t in texts]
        k, v = (
            torch.cat([x[i][len(t) - n :] for x, t, n in zip(parts, texts, step.num_new)])
            for i in (0, 1)
        )
        if nan_in is not None:
            first, last = step.query_start_loc[nan_in : nan_in + 2].tolist()
            k[first:last] = torch.nan
            v[first:last] = torch.nan
        outs.append(paged_attention(q, k, v, step, layer))
    return torch.stack(outs)


@pytest.mark.parametrize("config", [one_group(), two_groups(5)], ids=["full", "full and window"])
@pytest.mark.parametrize("poisoned", [0, 1, 2])
def test_nan_in_one_sequence_does_not_reach_another(poisoned, config):
    texts = [ids(6), ids(11, 1), ids(3, 2)]
    outputs = []
    for nan_in in (None, poisoned):
        cache = make(config)
        seqs = [cache.add(t) for t in texts]
        q = torch.randn(20, 4, 4, generator=torch.Generator().manual_seed(1))
        with cache.step(seqs) as step:
            attend(cache, step, q, texts, nan_in)
        longer = [[*t, 9] for t in texts]
        with cache.step(seqs, tokens=[9, 9, 9]) as step:
            outputs.append(attend(cache, step, q[:3], longer))
    clean, dirty = outputs
    others = [i for i in range(3) if i != poisoned]
    assert torch.isfinite(clean).all()
    assert torch.equal(clean[:, others], dirty[:, others])
    assert torch.isnan(dirty[:, poisoned]).all()


def test_nan_in_rejected_tokens_does_not_reach_what_follows():
    outputs = []
    for nan in (False, True):
        cache = make(debug=False)
        seqs = [start(cache, ids(6)), start(cache, ids(9, 1))]
        texts = [ids(14), ids(17, 1)]
        q = torch.randn(16, 4, 4, generator=torch.Generator().manual_seed(1))
        step = cache.prepare(seqs, tokens=[t[-8:] for t in texts])
        attend(cache, step, q, texts)
        if nan:
            for layer in range(2):
                bad = torch.full((16, 2, 4), torch.nan)
                k, v = (torch.cat([x[-8:] for x in xs])
                        for xs in zip(*(kv_of(t, layer, cache.config) for t in texts)))  # fmt: skip
                bad_k, bad_v = bad.clone(), bad.clone()
                for row in (0, 8, 9):
                    bad_k[row], bad_v[row] = k[row], v[row]
                write_kv(bad_k, bad_v, step, layer)
        cache.commit(step, [1, 2], layers=[0, 1])
        for n in range(1, 4):
            longer = [ids(7) + [70] * n, ids(11, 1) + [71] * n]
            with cache.step(seqs, tokens=[70, 71]) as step:
                outputs.append(attend(cache, step, q[:2], longer))
    for clean, dirty in zip(outputs[:3], outputs[3:], strict=True):
        assert torch.isfinite(clean).all()
        assert torch.equal(clean, dirty)


def test_in_debug_mode_what_was_not_committed_is_nan_and_check_sees_a_stray_write():
    from pagedkv.errors import CorruptCacheError

    cache = make()
    a = start(cache, ids(6))
    step = cache.prepare([a], num_new=1)
    page = table_of(step, 0, 2)[1]
    cache.abort(step)
    k = cache._storage.k[0]
    cache.check()
    k[0, page, :, 3] = 1.0  # beyond the two committed slots
    with pytest.raises(CorruptCacheError, match=str(page)):
        cache.check()
