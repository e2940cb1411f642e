"""A job is cut into shards that lose no prompt, share few prefixes and have about equal work."""

import random
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import split_by_prefix
from pagedkv.planner.shards import SLACK, own_tokens, packed
from tests.effort import examples, sampled


def computed(prompts):
    """Tokens that one process computes which keeps all that it has computed; the slow way."""
    known, count = set(), 0
    for ids in map(tuple, prompts):
        found = max((k for k in range(len(ids)) if ids[:k] in known), default=0)
        known.update(ids[:k] for k in range(len(ids) + 1))
        count += len(ids) - found
    return count


def work(prompts, new, shard):
    return computed(prompts[i] for i in shard) + sum(new[i] for i in shard)


def job(rows, prefixes, seed=0, draw=None):
    """Prompts behind long prefixes, in a mixed order."""
    rng = random.Random(seed)
    texts = [[rng.randrange(40_000) for _ in range(170)] for _ in range(prefixes)]
    own = [[rng.randrange(40_000) for _ in range(rng.randint(8, 16))] for _ in range(rows)]
    prompts = [texts[draw(rng) if draw else i % prefixes] + ids for i, ids in enumerate(own)]
    rng.shuffle(prompts)
    return prompts


@pytest.mark.parametrize("n", [2, 4, 8])
def test_shards_together_compute_what_one_process_does_and_none_has_much_more_than_others(n):
    prompts, new = job(64, 8), [16] * 64
    shards = split_by_prefix(prompts, n, 16)
    assert sorted(i for shard in shards for i in shard) == list(range(64))
    assert sum(computed(prompts[i] for i in shard) for shard in shards) == computed(prompts)
    sizes = [work(prompts, new, shard) for shard in shards]
    assert max(sizes) <= 1.2 * sum(sizes) / n
    by_row = [range(i, 64, n) for i in range(n)]  # what this is for
    assert sum(computed(prompts[i] for i in shard) for shard in by_row) > 1.5 * computed(prompts)


def test_prefixes_that_are_not_equally_common_cost_little_more_on_few_shards():
    prompts = job(400, 20, draw=lambda rng: min(19, int(rng.paretovariate(0.7)) - 1))
    new = [16] * 400
    for n in (2, 4, 8):
        shards = split_by_prefix(prompts, n, 16)
        sizes = [work(prompts, new, shard) for shard in shards]
        assert max(sizes) <= 1.2 * sum(sizes) / n
        assert sum(computed(prompts[i] for i in s) for s in shards) <= 1.1 * computed(prompts)


texts = st.lists(st.integers(0, 2), max_size=6)
jobs = st.lists(st.tuples(texts, st.integers(0, 9)), max_size=8)


@sampled
@settings(max_examples=examples(100, 30))
@given(jobs, st.integers(1, 4))
def test_no_shard_is_much_larger_than_the_largest_must_be(rows, n):
    prompts, new = [ids for ids, _ in rows], [count for _, count in rows]
    shards = split_by_prefix(prompts, n, new)
    order = [i for shard in shards for i in shard]
    assert len(shards) == n
    assert sorted(order) == list(range(len(rows)))
    assert order == sorted(order, key=lambda i: (prompts[i], i))
    cuts = combinations_with_replacement(range(len(rows) + 1), n - 1)
    least = min(
        max(work(prompts, new, order[a:b]) for a, b in pairwise([0, *inner, len(rows)]))
        for inner in cuts
    )
    assert max(work(prompts, new, shard) for shard in shards) <= least * (1 + SLACK)


@sampled
@settings(max_examples=examples(100, 30))
@given(st.lists(texts, min_size=1, max_size=40), st.integers(1, 12), st.integers(0, 5))
def test_a_shard_is_empty_only_where_nothing_is_left_for_it(prompts, n, new):
    sizes = [len(shard) for shard in split_by_prefix(prompts, n, new)]
    assert sizes == sorted(sizes, key=lambda size: size == 0)


def test_prompts_that_are_all_the_same_are_cut_by_their_answers():
    shards = split_by_prefix([[1, 2, 3]] * 12, 4, 10)
    assert [len(shard) for shard in shards] == [3, 3, 3, 3]
    assert shards[0] == [0, 1, 2]  # in the order they came


def test_a_giant_prompt_has_a_shard_of_its_own():
    prompts = [[i, 1] for i in range(30)]
    prompts[7] = [7] * 1000
    shards = split_by_prefix(prompts, 3, 2)
    assert [7] in shards
    assert sum(map(len, shards)) == 30


def test_a_prompt_that_may_go_on_long_counts_as_much():
    shards = split_by_prefix([[i] for i in range(9)], 2, [45, *[5] * 8])
    assert shards == [[0], list(range(1, 9))]


def test_fewer_prompts_than_shards_have_one_each():
    assert split_by_prefix([[3], [1], [2]], 5, 4) == [[1], [2], [0], [], []]
    assert split_by_prefix([], 2) == [[], []]


def test_ids_sort_as_they_are_packed():
    rng = random.Random(0)
    texts = [[rng.choice((0, 1, 255, 256, 49_151, 2**31)) for _ in range(4)] for _ in range(50)]
    texts += [ids[:2] for ids in texts]
    assert list(map(packed, sorted(texts))) == sorted(map(packed, texts))


@pytest.mark.parametrize(
    ("prompts", "n", "new", "said"),
    [
        ([[1]], 0, 0, "n: expected a number of shards from 1 on, got 0"),
        ([[1]], True, 0, "n: expected .* got True"),
        ([[1]], 2.0, 0, r"n: expected .* got 2\.0"),
        (["a text"], 2, 0, "prompts: expected token ids, got str as prompt 0; tokenizer"),
        (
            [[1], [-1]],
            2,
            0,
            r"prompts: expected .* integers from 0 on and below 2\*\*32, got \[-1\] as ",
        ),
        ([[1], [2**32]], 2, 0, r"prompts: expected .* below .*, got \[4294967296\] as prompt 1"),
        ([[1], [0.5]], 2, 0, r"got \[0\.5\] as prompt 1"),
        ([[1], 5], 2, 0, "got 5 as prompt 1"),
        ([[1], [2]], 2, [1], r"new_tokens: expected a count .*, or 2 of them, got \[1\]"),
        ([[1], [2]], 2, [[1], [1, 2]], r"new_tokens: expected .* got \[\[1\], \[1, 2\]\]"),
        ([[1]], 2, -1, "new_tokens: expected a count .*, or 1 of them, got -1"),
        ([[1]], 2, 2**32, r"new_tokens: expected a count below 2\*\*32, .* got 4294967296"),
        ([[1]], 2, 1.5, r"new_tokens: .* got 1\.5"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(prompts, n, new, said):
    with pytest.raises((ValueError, TypeError), match=said):
        split_by_prefix(prompts, n, new)


def test_tokens_of_each_prompt_are_those_that_none_before_it_has_in_a_sorted_order():
    prompts = [*job(200, 3), [], [5], [5], [5, 6]]
    own = own_tokens(prompts)
    assert sum(own) == computed(sorted(filter(None, prompts)))
    assert own[-4:] == [0, 1, 1, 1]
