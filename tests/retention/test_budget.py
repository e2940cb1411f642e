"""A sequence with a budget keeps so much of its text, as its policy says, and attends to that."""

from typing import ClassVar

import numpy as np
import pytest
import torch

from pagedkv import CacheConfig, LayerGroup, PagedKVCache, paged_attention
from pagedkv.errors import OutOfPagesError, PolicyError
from pagedkv.kernels.torch.select_pages import page_bounds
from pagedkv.retention import Fifo, Policy, Semantic, Sinks
from pagedkv.storage import merge_values as merging
from tests.cases import one_group
from tests.contents import advance, kv_of, start, write_step


def text(n):
    return [i % 7 + 1 for i in range(n)]


def evicting(retention="fifo", budget=8, **fields):
    return one_group(retention=retention, budget=budget, max_sequence_length=10_000, **fields)


def grow(cache, seq, tokens, by=1):
    """Feeds a sequence up to these tokens."""
    while (n := cache.length(seq)) < len(tokens):
        advance(cache, {seq: tokens[: min(n + by, len(tokens))]})
        cache.check()


def assert_kept(cache, seq, tokens, expected, layer=0):
    """A layer holds exactly these positions of the text, each with its own K and V."""
    assert cache.positions(seq, layer).tolist() == list(expected)
    for actual, whole in zip(
        cache.gather(seq, layer), kv_of(tokens, layer, cache.config), strict=True
    ):
        assert torch.equal(actual, whole[list(expected)])


def test_a_static_cache_of_five_slots_holds_the_last_five_of_eight_tokens():
    cache = PagedKVCache(evicting(budget=5, page_size=1), device="cpu", debug=True)
    seq, tokens = cache.add(), text(8)
    for length, kept in ((3, [0, 1, 2]), (5, [0, 1, 2, 3, 4]), (8, [3, 4, 5, 6, 7])):
        advance(cache, {seq: tokens[:length]})
        assert_kept(cache, seq, tokens, kept)
    cache.check()


def test_a_window_of_pages_keeps_the_budget_and_the_page_being_written():
    cache = PagedKVCache(evicting(budget=8), device="cpu", debug=True)
    seq, tokens = cache.add(), text(31)
    grow(cache, seq, tokens)
    # Two whole pages of four, and three tokens of the next.
    assert_kept(cache, seq, tokens, range(20, 31))
    assert cache.length(seq) == 31
    assert cache.stats().live == 3


def test_a_budget_is_rounded_up_to_whole_pages():
    cache = PagedKVCache(evicting(budget=5), device="cpu")
    seq, tokens = cache.add(), text(24)
    grow(cache, seq, tokens)
    assert_kept(cache, seq, tokens, range(16, 24))


def test_sinks_stay_in_front_of_the_window():
    cache = PagedKVCache(evicting(Sinks(Fifo(), 2), budget=12), device="cpu")
    seq, tokens = cache.add(), text(33)
    grow(cache, seq, tokens, by=3)
    assert_kept(cache, seq, tokens, [0, 1, 2, 3, *range(24, 33)])


def test_the_newest_tokens_of_a_policy_are_not_offered_to_it():
    class Newest(Policy):
        recent = 6
        offered: ClassVar = []

        def keep_scores(self, pages):
            self.offered.append((pages.position.tolist(), pages.age.tolist()))
            return -pages.position

    policy = Newest()
    cache = PagedKVCache(evicting(policy, budget=12), device="cpu")
    seq, tokens = cache.add(), text(24)
    grow(cache, seq, tokens)
    # Of the pages that may go the newest does: the first of the text stays for good.
    assert_kept(cache, seq, tokens, [0, 1, 2, 3, *range(16, 24)])
    assert policy.offered[0] == ([0, 4], [12, 8])


def test_layers_choose_for_themselves():
    class Apart(Policy):
        recent = 0

        def keep_scores(self, pages):
            return np.where(pages.owner == 0, pages.position, -pages.position)

    groups = (LayerGroup((0,)), LayerGroup((1,)))
    cache = PagedKVCache(evicting(Apart(), budget=4, groups=groups), device="cpu", debug=True)
    seq, tokens = cache.add(), text(14)
    grow(cache, seq, tokens)
    assert_kept(cache, seq, tokens, range(8, 14), layer=0)
    assert_kept(cache, seq, tokens, [0, 1, 2, 3, 12, 13], layer=1)


def test_a_policy_is_asked_once_a_page_for_all_rows_together():
    class Counting(Policy):
        recent = 0
        calls: ClassVar = []

        def keep_scores(self, pages):
            self.calls.append(pages.owner.tolist())
            return pages.position

    policy = Counting()
    cache = PagedKVCache(evicting(policy, budget=4), device="cpu")
    seqs, tokens = [cache.add(), cache.add()], text(17)
    for n in range(1, 17):
        advance(cache, {seqs[0]: tokens[:n], seqs[1]: tokens[1 : n + 1]})
    assert policy.calls == [[0, 0, 1, 1]] * 3


def test_evicted_tokens_are_found_by_nobody_and_what_follows_them_neither():
    cache = PagedKVCache(evicting(budget=8), device="cpu")
    tokens = text(30)
    seq = cache.add(tokens)
    advance(cache, {seq: tokens[:12]})
    assert cache.length(cache.add(tokens)) == 0
    advance(cache, {seq: tokens})
    cache.free(seq)
    assert cache.length(cache.add(tokens)) == 0
    cache.check()


def test_what_was_published_before_anything_was_evicted_is_found():
    cache = PagedKVCache(evicting(Sinks(Fifo(), 4), budget=8), device="cpu")
    tokens = text(30)
    seq = start(cache, tokens)
    other = cache.add(tokens)
    assert cache.length(other) == 4
    advance(cache, {other: tokens[:6]})
    assert cache.positions(other, 0).tolist() == list(range(6))
    assert cache.positions(seq, 0).tolist()[:4] == [0, 1, 2, 3]


def test_truncating_behind_the_last_evicted_token_goes_on_from_there():
    cache = PagedKVCache(evicting(budget=12), device="cpu", debug=True)
    seq, tokens = cache.add(), text(26)
    grow(cache, seq, tokens)
    cache.truncate(seq, 15)
    assert_kept(cache, seq, tokens[:15], [12, 13, 14])
    grow(cache, seq, tokens[:15] + [3] * 11)
    assert_kept(cache, seq, tokens[:15] + [3] * 11, range(12, 26))


def test_truncating_into_what_was_evicted_raises_and_to_nothing_does_not():
    cache = PagedKVCache(evicting(budget=12), device="cpu")
    seq, tokens = cache.add(), text(26)
    grow(cache, seq, tokens)
    for n in (1, 8, 11):
        with pytest.raises(ValueError, match=r"expected 12\.\.26 or 0 for sequence 0, got"):
            cache.truncate(seq, n)
    assert_kept(cache, seq, tokens, range(12, 26))
    cache.truncate(seq, 0)
    cache.check()
    grow(cache, seq, tokens[:6])
    assert_kept(cache, seq, tokens[:6], range(6))


def test_an_aborted_step_evicts_nothing():
    cache = PagedKVCache(evicting(budget=4), device="cpu", debug=True)
    seq, tokens = cache.add(), text(11)
    grow(cache, seq, tokens)
    kept = cache.positions(seq, 0)
    step = cache.prepare([seq], tokens=[[1, 1, 1]])
    write_step(cache, step, [[*tokens, 1, 1, 1]])
    cache.abort(step)
    assert_kept(cache, seq, tokens, kept)
    cache.check()


def test_a_rejected_token_does_not_make_a_page_full():
    cache = PagedKVCache(evicting(budget=4), device="cpu")
    seq, tokens = cache.add(), text(7)
    grow(cache, seq, tokens)
    step = cache.prepare([seq], tokens=[[1, 1]])
    write_step(cache, step, [[*tokens, 1, 1]])
    cache.commit(step, accepted=[0])
    assert_kept(cache, seq, tokens, range(7))


def test_a_reservation_under_a_budget_covers_the_budget():
    config = evicting(budget=8, max_tokens=24)
    cache = PagedKVCache(config, device="cpu")
    seqs = [cache.add([1, 2], max_tokens=400) for _ in range(2)]
    assert cache.stats().promised == 6
    with pytest.raises(OutOfPagesError):
        cache.add([1, 2], max_tokens=400)
    for seq in seqs:
        grow(cache, seq, text(40))
    cache.check()


# ------------------------------------------------------------------ attention


@pytest.mark.parametrize("by", [1, 3], ids=["decode", "chunks"])
def test_attention_sees_the_kept_tokens_at_their_positions_and_no_others(by):
    groups = (LayerGroup((0,)), LayerGroup((1,)))
    config = evicting(Sinks(Fifo(), 1), budget=12, groups=groups)
    cache = PagedKVCache(config, device="cpu", debug=True)
    seq, n = cache.add(), 45
    q, k, v = torch.randn(3, 2, n, 2, 4)
    while (start := cache.length(seq)) < n:
        stop = min(start + by, n)
        with cache.step([seq], num_new=stop - start) as step:
            assert step.positions.tolist() == list(range(start, stop))
            for layer in range(2):
                new = slice(start, stop)
                out = paged_attention(q[layer, new], k[layer, new], v[layer, new], step, layer)
                kept = [*cache.positions(seq, layer), *range(start, stop)]
                expected = dense_attention(q[layer, new], k[layer, kept], v[layer, kept])
                assert (out - expected).abs().max() < 1e-5
    assert cache.stats().evicted > 0


def test_a_text_longer_than_its_pool_is_forked_moved_and_saved(tmp_path):
    """Tables have places for what is kept, not for every column of the text."""
    for way in ("fork", "offload", "load"):
        sizes = {"max_tokens": 64, "max_sequences": 2, "host_tokens": 64}
        cache = PagedKVCache(evicting("fifo", budget=24, **sizes), device="cpu", debug=True)
        seq, tokens = cache.add(), text(150)
        grow(cache, seq, tokens, by=5)
        if way == "fork":
            twin = cache.fork(seq)[0]
            cache.free(seq)
            seq = twin
        elif way == "offload":
            cache.offload(seq)
            cache.restore(seq)
        else:
            cache.save(seq, tmp_path / "x")
            cache.free(seq)
            cache.free([cache.load(tmp_path / "x")])
            seq = cache.load(tmp_path / "x")
        cache.check()
        longer = text(160)
        grow(cache, seq, longer, by=5)
        assert_kept(cache, seq, longer, range(136, 160))


@pytest.mark.parametrize("kv_format", ["dense", "int4"])
def test_pages_that_are_exchanged_and_moved_by_one_commit_are_sent_as_they_are(kv_format):
    """Twins join, or pages are coded, at columns before those that leave."""
    sizes = {"max_tokens": 2048, "page_size": 16, "head_dim": 32, "kv_format": kv_format}
    cache = PagedKVCache(evicting(Last(), budget=128, **sizes), device="cpu", debug=True)
    common = text(100)
    texts = [[*common, *(3 * i % (7 + j) + 1 for i in range(150))] for j in (4, 6)]
    seqs = [cache.add(), cache.add()]
    for end in (40, 250):
        advance(cache, {seq: tokens[:end] for seq, tokens in zip(seqs, texts)})
    cache.check()
    with cache.step(seqs, num_new=1) as step:
        for seq, pages in zip(seqs, step.page_table(0).tolist()):
            row = cache._tables.row_of(seq)
            held = int(cache._tables.num_pages[row] - cache._tables.evicted[0, row])
            assert held < 16
            assert pages[:held] == cache._tables.tables[0, row, :held].tolist()
        write_step(cache, step, [[*tokens, 1] for tokens in texts])


def test_what_queries_choose_pages_by_stays_true_of_those_that_are_left():
    config = evicting(Sinks(Fifo(), 1), budget=24, read_tokens=16)
    cache = PagedKVCache(config, device="cpu")
    seq, n = cache.add(), 61
    k = torch.randn(n, 2, 4)
    while (start := cache.length(seq)) < n:
        new = slice(start, start + 5)
        with cache.step([seq], num_new=len(k[new])) as step:
            for layer in range(2):
                paged_attention(k[new], k[new], k[new], step, layer)
    whole = cache.positions(seq, 0)[: 6 * 4].reshape(-1, 4)
    pages = cache._tables.tables[0, 0, :6]
    for layer in range(2):
        expected = page_bounds(k[whole].transpose(1, 2))
        assert torch.equal(cache._storage.bounds.of(layer)[pages], expected)


def dense_attention(q, k, v):
    """Causal attention of the last tokens: `[n, H, D]` over `[s, H, D]`."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    n, s = scores.shape[1:]
    hidden = torch.arange(s) > torch.arange(s - n, s)[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


# ------------------------------------------------------------------ policies that answer wrongly


class Last(Policy):
    """Gives up the newest of the pages it is offered."""

    recent = 0

    def keep_scores(self, pages):
        return -pages.position


class Wrong(Policy):
    recent = 0

    def __init__(self, answer):
        self.answer = answer

    def keep_scores(self, pages):
        return self.answer(len(pages.position))


WRONG = {
    "too few": (lambda n: np.zeros(n - 1), r"expected \[2\] numbers, got float64 of shape \[1\]"),
    "a matrix": (lambda n: np.zeros((n, 1)), r"of shape \[2, 1\]"),
    "nan": (lambda n: np.full(n, np.nan), "got NaN in row 0"),
    "words": (lambda n: ["a"] * n, "got <U1 of shape"),
    "nothing": (lambda n: None, "got object of shape"),
    "ragged": (lambda n: [[1], [1, 2]], "got no array"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_policy_that_returns_no_scores_raises_by_name_and_changes_nothing(name):
    answer, message = WRONG[name]
    cache = PagedKVCache(evicting(Wrong(answer), budget=4), device="cpu", debug=True)
    seq, tokens = cache.add(), text(8)
    grow(cache, seq, tokens[:7])
    before = cache.stats()
    with (
        pytest.raises(PolicyError, match=rf"Wrong\.keep_scores: .*{message}"),
        cache.step([seq], tokens=tokens[7:]) as step,
    ):
        write_step(cache, step, [tokens])
    assert cache.stats() == before
    assert cache.open_step is None
    assert_kept(cache, seq, tokens[:7], range(7))
    cache.check()


@pytest.mark.parametrize("recent", ["64", 1.5, True, -1])
def test_tokens_that_are_never_offered_are_counted_in_whole_ones(recent):
    with pytest.raises(ValueError, match="retention: recent"):
        evicting(Fifo(recent=recent))


def test_a_policy_that_raises_leaves_the_step_open_and_nothing_changed():
    def fail(n):
        raise KeyError("mine")

    cache = PagedKVCache(evicting(Wrong(fail), budget=4), device="cpu")
    seq, tokens = cache.add(), text(8)
    grow(cache, seq, tokens[:7])
    step = cache.prepare([seq], tokens=tokens[7:])
    write_step(cache, step, [tokens])
    with pytest.raises(KeyError, match="mine"):
        cache.commit(step)
    assert cache.length(seq) == 7
    cache.abort(step)
    cache.check()


def test_a_merge_without_memory_leaves_a_committed_step_and_pages_as_they_were(monkeypatch):
    cache = PagedKVCache(evicting(Semantic(recent=0), budget=8), device="cpu", debug=True)
    seq, tokens = cache.add(), text(16)
    advance(cache, {seq: tokens[:11]})
    step, reads, read = cache.prepare([seq], [tokens[11:]]), [], merging._read

    def refuse(*args):
        reads.append(args)
        if len(reads) > 2:  # after the first layer
            raise MemoryError("no room for a copy")
        return read(*args)

    write_step(cache, step, [tokens])
    monkeypatch.setattr(merging, "_read", refuse)
    with pytest.raises(MemoryError, match="no room for a copy"):
        cache.commit(step)
    monkeypatch.undo()
    assert cache.open_step is None
    assert cache.stats().evicted == 0
    cache.check()
    assert_kept(cache, seq, tokens, range(16))
    advance(cache, {seq: text(20)})  # the next page that is filled makes up for it
    assert cache.positions(seq, 0).size == 8


def test_infinite_scores_keep_pages_whatever_the_budget():
    policy = Wrong(lambda n: np.full(n, np.inf))
    cache = PagedKVCache(evicting(policy, budget=4, max_tokens=64), device="cpu")
    seq, tokens = cache.add(), text(20)
    grow(cache, seq, tokens)
    assert_kept(cache, seq, tokens, range(20))


# ------------------------------------------------------------------ configuration


class Greedy(Policy):
    needs = ("gold",)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"retention": "mru"}, ValueError, "retention: expected one of fifo, sinks, .*'mru'"),
        ({"retention": 3}, TypeError, "retention: expected a name or a Policy, got int"),
        ({"retention": Greedy()}, ValueError, "Greedy needs gold; what is measured is mass"),
        ({"retention": Fifo(recent=-1)}, ValueError, "recent: expected 0 or more"),
        ({"budget": 8}, ValueError, "budget: needs retention="),
        ({"retention": "fifo", "budget": 0}, ValueError, "budget: expected at least 1"),
        ({"retention": "fifo", "budget": 2.5}, TypeError, "budget: expected an int"),
        ({"retention": "keydiff", "budget": 64}, ValueError, "budget: expected at least 68 tok"),
        ({"retention": "fifo", "low_water": 0.99}, ValueError, "low_water, high_water: expected"),
        ({"retention": "fifo", "high_water": 1.5}, ValueError, "low_water, high_water: expected"),
        (
            {"retention": "fifo", "groups": (LayerGroup((0, 1), 8),)},
            ValueError,
            "retention: expected layers without a window",
        ),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_name(fields, error, message):
    with pytest.raises(error, match=message):
        one_group(**fields)


class Shape:
    """The fields that `from_model` reads of a decoder with layers of both kinds."""

    num_hidden_layers, num_attention_heads, hidden_size = 4, 2, 8
    max_position_embeddings, sliding_window = 4096, 16
    layer_types = ("full_attention", "sliding_attention") * 2


def test_each_layer_of_a_model_decides_for_itself_but_those_with_a_window():
    config = CacheConfig.from_model(Shape(), max_tokens=256, retention="sinks", budget=64)
    expected = LayerGroup((0,)), LayerGroup((2,)), LayerGroup((1, 3), 16)
    assert config.groups == expected
    assert config.max_sequence_length == 4096


def test_groups_that_are_given_stay_as_they_are():
    groups = (LayerGroup((0, 1, 2, 3)),)
    config = CacheConfig.from_model(Shape(), max_tokens=256, retention="fifo", groups=groups)
    assert config.groups == groups
