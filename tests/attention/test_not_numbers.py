"""NaN and infinity in a layer's input: an answer that depends on them is NaN, and no other changes.

What these tests alone find: a kernel that says 0 where there is no number, in a prompt say, while a
later step says NaN; and tokens that change those before them, whose pages others may share.
"""

import itertools
import math

import pytest
import torch

from pagedkv import PagedKVCache, paged_attention
from pagedkv.kernels import reference
from pagedkv.kernels.c.library import missing
from tests.cases import one_group, window_only
from tests.effort import each_value

BACKENDS = [
    "torch",
    pytest.param("c", marks=pytest.mark.skipif(bool(missing()), reason=missing() or "there")),
]
H, G, D = 4, 2, 16
# Tokens before the step and in it, of each row: prompts, decoding rows of one length, of two, and
# a part of a prompt.
STEPS = {"prompt": [(0, 12)], "decode": [(11, 1)], "ragged": [(11, 1), (8, 1)], "chunk": [(6, 6)]}


def attended(backend, config, rows, parts):
    """Returns the attention of all rows in their last step, one `[new, H, D]` each."""
    cache = PagedKVCache(config, device="cpu", backend=backend)
    seqs = [cache.add() for _ in rows]
    before = [past for past, _ in rows]
    for begin, counts in (([0] * len(rows), before), (before, [new for _, new in rows])):
        if not any(counts):
            continue
        step = cache.prepare(seqs, num_new=counts)
        cut = [
            torch.cat([x[row, at : at + n] for row, (at, n) in enumerate(zip(begin, counts))])
            for x in parts
        ]
        out = paged_attention(*cut, step, 0)
        cache.commit(step, layers=[0])
    return out.split([new for _, new in rows])


def truth(q, k, v, scale, window):
    """Whether each query sees a number that is none; and what the others attend to."""
    tokens = torch.arange(len(q))
    away = tokens[:, None] - tokens
    sees = (away >= 0) & (away < (window or math.inf))
    k, v = (x.double().repeat_interleave(H // G, 1) for x in (k, v))
    products = torch.einsum("thd,shd->hts", q.double(), k) * scale
    weights = products.masked_fill(~sees, -math.inf).softmax(-1)
    each = [
        (weights[:, i, sees[i]].unsqueeze(-1) * v[sees[i]].transpose(0, 1)).sum(1)
        for i in range(len(q))
    ]
    return torch.stack(each)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("bad", "make", "name"),
    each_value([math.nan, math.inf, -math.inf], [one_group, window_only], STEPS),
)
def test_what_is_no_number_is_told_to_all_who_see_it_and_to_no_others(bad, make, name, backend):
    rows, config = STEPS[name], make(head_dim=D, max_sequences=2)
    places = ("q", 0), ("q", -1), ("k", 0), ("k", -1), ("v", 3), ("v", -2)
    # One element makes scores infinite, all of them scores that are no number.
    for (part, token), broken in itertools.product(places, (1, D)):
        drawn = torch.Generator().manual_seed(5)
        parts = [torch.randn(len(rows), 12, heads, D, generator=drawn) for heads in (H, G, G)]
        clean = attended(backend, config, rows, parts)
        token %= sum(rows[0])
        parts["qkv".index(part)][0, token, 0, :broken] = bad
        found = attended(backend, config, rows, parts)
        past, new = rows[0]
        mine = [x[0, : past + new] for x in parts]
        window = config.groups[0].window
        expected = truth(*mine, D**-0.5, window)[past:]
        said = found[0].isfinite() & found[0].ne(0)
        assert not (said & expected.isnan()).any(), (part, token, broken)
        assert not (expected.isnan() & found[0].eq(0)).any(), f"{part}: zeros for no number"
        away = torch.arange(past, past + new) - token
        sees = away == 0 if part == "q" else (away >= 0) & (away < (window or math.inf))
        torch.testing.assert_close(found[0][~sees], clean[0][~sees])
        for row, other in enumerate(clean[1:], start=1):
            torch.testing.assert_close(found[row], other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_is_no_number_leaves_those_it_shares_a_prefix_with_alone(backend):
    cache = PagedKVCache(one_group(head_dim=D, max_tokens=512), device="cpu", backend=backend)
    drawn = torch.Generator().manual_seed(0)
    first = cache.add()

    def fed(seqs, count, broken=False):
        step = cache.prepare(seqs, num_new=count)
        q, k, v = (torch.randn(step.num_tokens, n, D, generator=drawn) for n in (H, G, G))
        if broken:
            q[1] = math.nan
        out = paged_attention(q, k, v, step, 0)
        cache.commit(step, layers=[0])
        return out

    fed([first], 128)
    out = fed(cache.fork(first, 5), 1, broken=True)
    assert out.isnan().all(-1).all(-1).tolist() == [False, True, False, False, False]
    assert out[[0, 2, 3, 4]].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_that_are_no_numbers_give_what_the_mathematics_says(backend):
    cache = PagedKVCache(one_group(head_dim=D), device="cpu", backend=backend)
    sinks = torch.tensor([0.5, math.nan, math.inf, -math.inf])
    for count in (6, 1):
        step = cache.prepare([cache.add()], num_new=[count])
        q, k, v = (torch.ones(count, heads, D) for heads in (H, G, G))
        out, lse = paged_attention(q, k, v, step, 0, sinks=sinks, return_lse=True)
        cache.abort(step)
        pages = torch.zeros(1, G, count, D, dtype=torch.float64)
        rows = torch.tensor([[0]]), torch.tensor([count]), torch.tensor([0, count])
        k_pages, v_pages = (pages + x.double().transpose(0, 1) for x in (k, v))
        terms = {"scale": D**-0.5, "sinks": sinks.double()}
        right = reference.paged_attention(q.double(), k_pages, v_pages, *rows, **terms)
        for mine, other in zip((out, lse), right):
            torch.testing.assert_close(mine.double(), other, equal_nan=True, rtol=1e-5, atol=1e-6)
