"""A sequence with a share keeps that much of what it has seen, at every length."""

import numpy as np
import pytest

from pagedkv import LayerGroup, PagedKVCache
from pagedkv.errors import OutOfPagesError
from pagedkv.retention import Fifo, Kept, Policy, Sinks
from tests.cases import one_group
from tests.contents import advance, start
from tests.effort import each_value
from tests.retention.cases import Scattered
from tests.retention.test_budget import assert_kept, grow, text

FIRST_AND_NEWEST = Sinks(Fifo(recent=8), 1)  # three pages of four tokens


def sharing(retention=FIRST_AND_NEWEST, keep=0.5, **fields):
    return one_group(retention=retention, keep=keep, max_sequence_length=10_000, **fields)


class Any(Policy):
    """Any page may go, in the same order whatever else is in the batch."""

    recent = 4

    def keep_scores(self, pages):
        return (pages.position * 2654435761 + pages.length) % 1009


def held(cache, seq, layer=0):
    return cache.positions(seq, layer).tolist()


# ------------------------------------------------------------------ how much


@pytest.mark.parametrize(
    ("keep", "page_size", "by"), each_value([0.1, 0.29, 0.5, 0.75, 1.0], [1, 3, 4], [1, 5, 40])
)
def test_at_every_length_a_sequence_holds_its_share_within_a_page(keep, page_size, by):
    policy = Scattered(recent=6)
    least = policy.pinned_pages(page_size) * page_size
    cache = PagedKVCache(
        sharing(policy, keep, page_size=page_size, max_tokens=400), device="cpu", debug=True
    )
    seq, tokens = cache.add(), text(203)
    while (n := cache.length(seq)) < len(tokens):
        advance(cache, {seq: tokens[: min(n + by, len(tokens))]})
        n, found = cache.length(seq), len(held(cache, seq))
        assert found <= n
        assert abs(found - min(n, max(least, keep * n))) < page_size
    cache.check()
    assert_kept(cache, seq, tokens, held(cache, seq))


def test_pages_leave_only_as_the_text_grows_and_those_that_stay_are_not_rewritten():
    cache = PagedKVCache(sharing(Scattered(recent=4), max_tokens=200), device="cpu", debug=True)
    seq, tokens, before = cache.add(), text(150), {}
    for n in range(1, 150):
        advance(cache, {seq: tokens[:n]})
        row = cache._tables.row_of(seq)
        count = int(cache._tables.num_pages[row] - cache._tables.evicted[0, row])
        pages = cache._tables.tables[0, row, :count]
        now = dict(zip(cache._tables.column_of[pages].tolist(), pages.tolist()))
        assert all(now[column] == before[column] for column in now.keys() & before.keys())
        assert now.keys() - before.keys() <= {(n - 1) // 4}, "what was evicted came back"
        assert len(before.keys() - now.keys()) <= 1
        before = now


@pytest.mark.parametrize("keep", [0.02, 0.5])
def test_a_short_text_keeps_its_first_page_and_its_newest_tokens(keep):
    """Policies that name no newest tokens keep 64 of them, however small the share is."""
    for name, first in (("sinks", [0, 1, 2, 3]), ("fifo", [])):
        cache = PagedKVCache(sharing(name, keep, max_tokens=512), device="cpu")
        seq, tokens = cache.add(), text(120)
        for n in range(1, 121):
            advance(cache, {seq: tokens[:n]})
            found = held(cache, seq)
            assert found[: len(first)] == first[:n]
            assert found[-64:] == list(range(n))[-64:]


def test_a_share_evicts_the_pages_that_a_budget_of_the_same_size_does():
    tokens, size = text(97), {"max_tokens": 400, "groups": (LayerGroup((0,)), LayerGroup((1,)))}
    for policy in (Fifo(), Scattered(recent=4), Sinks(Scattered(recent=4), 2)):
        cache = PagedKVCache(sharing(policy, 0.5, **size), device="cpu")
        seq = start(cache, tokens)  # one step: what goes follows from its end alone
        budget = one_group(retention=policy, budget=48, max_sequence_length=10_000, **size)
        other = PagedKVCache(budget, device="cpu")
        twin = start(other, tokens)
        if policy == Fifo():  # 64 newest tokens stay
            assert len(held(cache, seq)) == 65
            continue
        for layer in range(2):
            assert held(cache, seq, layer) == held(other, twin, layer)


def test_of_a_share_and_a_budget_the_smaller_counts():
    policy = Sinks(Fifo(recent=4), 1)
    cache = PagedKVCache(sharing(policy, 0.5, budget=24, max_tokens=400), device="cpu")
    seq, tokens = cache.add(), text(100)
    grow(cache, seq, tokens[:32])
    assert len(held(cache, seq)) == 16
    grow(cache, seq, tokens)
    assert len(held(cache, seq)) == 24


def test_all_of_it_is_a_share_too():
    cache = PagedKVCache(sharing(keep=1), device="cpu")
    seq, tokens = cache.add(), text(40)
    grow(cache, seq, tokens)
    assert_kept(cache, seq, tokens, range(40))


def test_a_share_of_pages_is_not_lost_to_rounding():
    shares = np.arange(1, 101) / 100
    for share, percent in zip(shares.tolist(), range(1, 101)):
        assert Kept(0, share=share).pages(100) == percent
        assert Kept(0, share=share).pages(10_000) == 100 * percent


# ------------------------------------------------------------------ rows beside one another


def test_a_row_keeps_the_same_alone_and_in_a_batch():
    config = sharing(Any(), 0.4, max_tokens=400, max_sequences=8)
    texts = [[i, *text(n)] for i, n in enumerate((90, 33, 61, 8))]
    together = PagedKVCache(config, device="cpu", debug=True)
    seqs = [together.add() for _ in texts]
    for n in range(1, 92):
        advance(together, {s: t[:n] for s, t in zip(seqs, texts) if n <= len(t)})
    for seq, tokens in zip(seqs, texts):
        cache = PagedKVCache(config, device="cpu")
        alone = cache.add()
        grow(cache, alone, tokens)
        for layer in range(2):
            assert_kept(together, seq, tokens, held(cache, alone, layer), layer)


def test_shared_pages_stay_and_go_once_their_other_owner_has_left():
    cache = PagedKVCache(sharing(max_tokens=400), device="cpu", debug=True)
    seq, tokens = cache.add(), text(40)
    grow(cache, seq, tokens[:20], by=20)
    twin = cache.fork(seq)[0]
    shared = held(cache, twin)
    grow(cache, seq, tokens + [5] * 40)
    assert set(shared) <= set(held(cache, seq))
    assert_kept(cache, twin, tokens[:20], shared)
    cache.free(twin)
    grow(cache, seq, tokens + [5] * 44)
    assert len(held(cache, seq)) == 40


def test_a_fork_goes_on_as_a_copy_of_its_source():
    config = sharing(Scattered(recent=4), max_tokens=400)
    cache, other = (PagedKVCache(config, device="cpu", debug=True) for _ in range(2))
    seq, tokens = start(cache, text(61)), text(61) + [3] * 60
    twin = cache.fork(seq)[0]
    cache.free(seq)
    copy = start(other, text(61))
    grow(cache, twin, tokens)
    grow(other, copy, tokens)
    assert_kept(cache, twin, tokens, held(other, copy))


# ------------------------------------------------------------------ promises


@pytest.mark.parametrize("kv_format", ["dense", "int4"])
def test_a_reservation_covers_the_share_of_what_a_text_may_become(kv_format):
    sizes = {"page_size": 16, "head_dim": 32, "max_sequences": 4, "kv_format": kv_format}
    config = sharing(Sinks(Fifo(recent=16), 1), 0.25, max_tokens=416, **sizes)
    cache = PagedKVCache(config, device="cpu")
    staged = int(config.staged)
    first = cache.add([1, 2], max_tokens=800)
    assert cache.stats().promised == 13  # a quarter of 50 pages, and the one being written
    second = cache.add([2, 1], max_tokens=700 if staged else 800)
    with pytest.raises(OutOfPagesError):
        cache.add([1, 2], max_tokens=400)
    tokens = text(700)
    for n in range(7, 701, 7):
        advance(cache, {first: tokens[:n], second: [2, *tokens][:n]})
    cache.check()


def test_a_prompt_is_promised_whole_until_it_is_computed():
    cache = PagedKVCache(sharing(max_tokens=400), device="cpu")
    tokens = text(160)
    seq = cache.add(tokens, max_tokens=200)
    assert cache.stats().promised == 40  # pages of the prompt
    advance(cache, {seq: tokens})
    stats = cache.stats()
    assert (stats.live, stats.live + stats.promised) == (20, 26)  # half of 50, and one
    grow(cache, seq, text(200), by=3)
    cache.check()


def test_what_returns_from_the_host_is_promised_its_share():
    cache = PagedKVCache(sharing(max_tokens=400, host_tokens=400), device="cpu")
    tokens = text(160)
    seq = start(cache, tokens)
    cache.offload(seq)
    cache.restore(seq, max_tokens=200)
    grow(cache, seq, [*tokens, 1, 1, 1, 1])
    stats = cache.stats()
    assert stats.live + stats.promised == 26
    grow(cache, seq, text(160) + [1] * 40)
    assert cache.stats().promised <= 1


# ------------------------------------------------------------------ attention


def test_queries_may_choose_among_the_pages_of_a_share():
    cache = PagedKVCache(sharing(read_tokens=16, max_tokens=400), device="cpu", debug=True)
    seq, tokens = cache.add(), text(90)
    grow(cache, seq, tokens)
    assert_kept(cache, seq, tokens, held(cache, seq))


# ------------------------------------------------------------------ configuration


class Pinned(Policy):
    """Keeps everything."""

    def keep_scores(self, pages):
        return np.full(len(pages.position), np.inf)


def test_what_a_policy_never_gives_up_stays_whatever_the_share():
    cache = PagedKVCache(sharing(Pinned(), 0.1, max_tokens=400), device="cpu")
    seq, tokens = cache.add(), text(100)
    grow(cache, seq, tokens)
    assert_kept(cache, seq, tokens, range(100))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"keep": 0.5}, ValueError, "keep: needs retention=, for example"),
        ({"retention": "fifo", "keep": 0}, ValueError, "keep: expected a share above 0 and up to"),
        ({"retention": "fifo", "keep": -0.5}, ValueError, "keep: .* got -0.5"),
        ({"retention": "fifo", "keep": 1.5}, ValueError, "keep: .* got 1.5"),
        ({"retention": "fifo", "keep": 512}, ValueError, "keep: .* got 512; budget= is in tokens"),
        ({"retention": "fifo", "keep": float("nan")}, ValueError, "keep: .* got nan"),
        (
            {"retention": "fifo", "keep": True},
            TypeError,
            "keep: expected a share such as 0.5, got b",
        ),
        ({"retention": "fifo", "keep": "0.5"}, TypeError, "keep: expected a share .* 0.5, got str"),
        ({"retention": "keydiff", "keep": 0.5, "budget": 64}, ValueError, "budget: expected at l"),
        ({"retention": "fifo", "budget": 0.5}, TypeError, "budget: expected an int"),
    ],
)
def test_a_share_that_cannot_be_is_refused_by_name(fields, error, message):
    with pytest.raises(error, match=message):
        one_group(**fields)


# ------------------------------------------------------------------ what is shared


@pytest.mark.parametrize("retention", ["fifo", "sinks"])
@pytest.mark.parametrize(
    ("fields", "newest"), [({"keep": 0.5}, 64), ({"budget": 96}, 64), ({"budget": 48}, 32)]
)
def test_a_window_keeps_its_newest_tokens_beside_shared_pages(retention, fields, newest):
    config = one_group(
        retention=retention, page_size=16, max_tokens=1024, max_sequence_length=10_000, **fields
    )
    cache = PagedKVCache(config, device="cpu", debug=True)
    shared = 96 if fields == {"budget": 96} else 48
    seq, tokens = start(cache, text(shared if "budget" in fields else 150)), text(150)
    tokens = tokens[: cache.length(seq)] + [3] * 100
    twin = cache.fork(seq)[0]
    grow(cache, twin, tokens)
    assert held(cache, twin)[-newest:] == list(range(len(tokens) - newest, len(tokens)))
