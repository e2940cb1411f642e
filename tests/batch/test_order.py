"""A known job that is larger than its pages takes prompts by their prefixes, and no more."""

import numpy as np

from pagedkv import BatchGenerator
from pagedkv.batch.order import by_prefix
from pagedkv.pages.salts import up_to
from pagedkv.planner.shards import own_tokens
from tests.batch.letters import tokens
from tests.effort import examples, sampled
from tests.hf.tiny import tiny

PAGE = 16


def behind_prefixes(count, each, prefix, own, seed=0):
    """Prompts behind some prefixes, in random order."""
    source = np.random.default_rng(seed)
    starts = [source.integers(2, 100, prefix) for _ in range(count)]
    rows = [np.append(start, source.integers(2, 100, own)) for start in starts for _ in range(each)]
    return [rows[i].tolist() for i in source.permutation(len(rows))]


@sampled
def test_the_order_is_that_of_the_first_at_every_page():
    for seed in range(examples(50)):
        source = np.random.default_rng(seed)
        ids = [source.integers(0, 2, source.integers(0, 9)) for _ in range(30)]
        regions = [b"", b"one", ((0, b""), (3, b"one")), ((0, b""), (3, b"one"), (6, b"other"))]
        salts, page = [regions[i] for i in source.integers(0, 4, 30)], 2
        pieces = [
            [
                *(
                    (up_to(salt, max(1, min(k + page, len(text)))), text[k : k + page].tolist())
                    for k in range(0, len(text) + page, page)
                ),
            ]
            for salt, text in zip(salts, ids)
        ]

        def firsts(i, pieces=pieces):
            """Of each depth the first prompt that is like this one so far."""
            return [
                next(j for j, other in enumerate(pieces) if other[:depth] == pieces[i][:depth])
                for depth in range(1, len(pieces[i]) + 1)
            ]

        assert by_prefix(ids, salts, page) == sorted(range(30), key=firsts)


def test_a_job_behind_many_prefixes_computes_each_token_once_though_pages_hold_a_tenth():
    prompts, room = behind_prefixes(200, 4, 128, 16), 200 * 128 // 10
    with BatchGenerator(tiny(num_hidden_layers=1).eval(), max_tokens=room) as batched:
        results = batched.generate(prompts, max_new_tokens=2, do_sample=False)
        stats = batched.stats
    assert not any(result.error for result in results)
    again = stats.computed - (stats.new_tokens - len(prompts)) - sum(own_tokens(prompts))
    assert 0 <= again <= sum(own_tokens(prompts)) / 100


def test_what_a_prompt_has_of_its_own_goes_with_it():
    prompts = behind_prefixes(5, 5, 2 * PAGE, 4)
    own = {"seed": [*range(25)], "salt": [b"one", b"other"] * 12 + [b"one"]}
    own |= {"max_new_tokens": [1 + i % 5 for i in range(25)]}
    with BatchGenerator(tiny().eval(), max_tokens=8 * PAGE) as batched:
        in_order = batched.generate(iter(prompts), do_sample=True, **own)
        by_prefixes = [*batched.stream(prompts, do_sample=True, **own)]
    assert [result.index for result in by_prefixes] != sorted(r.index for r in by_prefixes)
    by_prefixes.sort(key=lambda result: result.index)
    assert tokens(by_prefixes) == tokens(in_order)
