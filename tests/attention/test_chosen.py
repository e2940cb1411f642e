"""Attention to given tokens is attention to a text of these alone, and reads no others."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from pagedkv import LayerGroup, PagedKVCache, attend_again, paged_attention
from pagedkv.attention.api import write_kv
from pagedkv.attention.chosen import _by_slot
from tests.attention.texts import (
    SIZES,
    TERMS,
    P,
    Sizes,
    assert_accurate,
    attention,
    cache_for,
    text,
)
from tests.effort import each_value

LENGTHS = (1, P, P + 1, 3 * P + 3)
NEW = (1, 5, 1, 7)


def chosen_of(lengths, new, most, seed=0):
    """Places for each query: its own token or not, in any order, some none, some behind it."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for length, count in zip(lengths, new):
        for place in range(length - count, length):
            n = int(torch.randint(1, min(most, place + 1) + 1, (), generator=random))
            own = torch.randperm(place + 1, generator=random)[:n]
            rest = torch.where(torch.arange(most - n) % 2 == 0, -1, length + 5)
            whole = torch.cat([own, rest])
            rows.append(whole[torch.randperm(most, generator=random)])
    return torch.stack(rows)


def attend_to(cache, texts, new, indices, **options):
    """The last tokens of texts attend to the tokens given; all others of a text are NaN."""
    seqs = [cache.add() for _ in texts]
    before = [t.length - n for t, n in zip(texts, new)]
    assert indices.shape[0] == sum(new)
    read = reads_of(texts, new, indices)
    lost = [torch.where(seen[:, None, None], t.k[0], torch.nan) for t, seen in zip(texts, read)]
    lost_v = [torch.where(seen[:, None, None], t.v[0], torch.nan) for t, seen in zip(texts, read)]
    if cache.config.shapes[0].v_is_k:
        lost_v = [k[..., : v.shape[2]] for k, v in zip(lost, lost_v)]
    if any(before):
        rows = [i for i, n in enumerate(before) if n]
        with cache.step([seqs[i] for i in rows], num_new=[before[i] for i in rows]) as step:
            k = torch.cat([lost[i][: before[i]] for i in rows])
            v = torch.cat([lost_v[i][: before[i]] for i in rows])
            write_kv(k, k[..., : v.shape[2]] if cache.config.shapes[0].v_is_k else v, step, 0)
    with cache.step(seqs, num_new=new) as step:
        q = torch.cat([t.q[0, n:] for t, n in zip(texts, before)])
        k = torch.cat([x[n:] for x, n in zip(lost, before)])
        v = torch.cat([x[n:] for x, n in zip(lost_v, before)])
        v = k[..., : v.shape[2]] if cache.config.shapes[0].v_is_k else v
        found = paged_attention(q, k, v, step, 0, indices=indices, return_lse=True, **options)
    cache.check()
    return found


def reads_of(texts, new, indices):
    """Which tokens of each text are read by any of its queries."""
    read, at = [], 0
    for t, count in zip(texts, new):
        seen = torch.zeros(t.length, dtype=torch.bool)
        for i, own in enumerate(indices[at : at + count]):
            place = t.length - count + i
            seen[own[(own >= 0) & (own <= place)]] = True
        read.append(seen)
        at += count
    return read


@pytest.mark.parametrize(
    ("sizes", "terms", "backend"), each_value(SIZES, TERMS, ["c", "torch", "triton"])
)
def test_given_tokens_are_a_text_of_their_own(sizes, terms, backend):
    """Every token that no query names is NaN: whatever else were read would show."""
    if backend == "triton":
        pytest.importorskip("triton")
    sizes, options = SIZES[sizes], TERMS[terms]
    texts = [text(sizes, n, seed=n) for n in LENGTHS]
    config = cache_for(sizes).config
    cache = PagedKVCache(config, device="cpu", backend=backend, debug=True)
    indices = chosen_of(LENGTHS, NEW, most=6)
    out, lse = attend_to(cache, texts, NEW, indices.int(), **options)
    at = 0
    for t, count in zip(texts, NEW):
        for place in range(t.length - count, t.length):
            own = indices[at]
            own = own[(own >= 0) & (own <= place)].sort().values
            alone = t.q[0, place : place + 1], t.k[0, own], t.v[0, own], len(own) - 1
            (exact, exact_lse), (twin, twin_lse) = (
                attention(*alone, **options, rounded=r) for r in (None, sizes.dtype)
            )
            products = (alone[0].norm(dim=-1).max() * alone[1].norm(dim=-1).max()).item()
            terms = len(own) + 2 * t.q.shape[-1] * products + 8
            largest = alone[2].abs().max().item()
            one = slice(at, at + 1)
            assert_accurate(out[one], twin, exact, reduction=terms, largest=largest)
            assert_accurate(lse[one], twin_lse, exact_lse, reduction=terms, largest=products + 2)
            at += 1


@pytest.mark.parametrize(("sizes", "backend"), each_value(SIZES, ["c", "torch", "triton"]))
def test_heads_that_choose_apart_read_as_if_each_were_alone(sizes, backend):
    """Each KV head against a cache of that head, which the tests above hold; and once more."""
    if backend == "triton":
        pytest.importorskip("triton")
    sizes, lengths = SIZES[sizes], LENGTHS if backend != "triton" else (1, P + 1)
    texts = [text(sizes, n, seed=n) for n in lengths]
    heads, each = sizes.groups, sizes.heads // sizes.groups
    indices = torch.stack([chosen_of(lengths, lengths, 6, seed) for seed in range(heads)], 1)
    q, k, v = (torch.cat([getattr(t, name)[0] for t in texts]) for name in "qkv")

    def attended(q, k, v, indices, groups, again=False):
        config = cache_for(replace(sizes, groups=groups)).config
        cache = PagedKVCache(config, device="cpu", backend=backend, debug=True)
        v = k[..., : v.shape[2]] if sizes.v_is_k else v
        with cache.step([cache.add() for _ in texts], num_new=lengths) as step:
            found = paged_attention(q, k, v, step, 0, indices=indices, return_lse=True)
        if again:
            with cache.step([cache.add() for _ in texts], num_new=lengths) as step:
                once = paged_attention(q, k, v, step, 0, indices=indices)
                assert torch.equal(attend_again(q, step, 0, indices=indices), once)
        return found

    found = attended(q, k, v, indices, heads, again=True)
    for head in range(heads):
        its, one = slice(each * head, each * (head + 1)), slice(head, head + 1)
        alone = attended(q[:, its], k[:, one], v[:, one], indices[:, head], 1)
        for ours, expected in zip(found, alone):
            torch.testing.assert_close(ours[:, its], expected)


@pytest.mark.parametrize("backend", ["c", "torch"])
def test_a_query_with_none_reads_itself(backend):
    sizes = Sizes(heads=4, groups=2, dim=32, v_dim=64)  # the triton backend refuses such pages
    t = text(sizes, P + 3, seed=1)
    cache = PagedKVCache(cache_for(sizes).config, device="cpu", backend=backend, debug=True)
    with cache.step([cache.add()], num_new=[t.length]) as step:
        none = torch.full((t.length, 2), -1)
        out = paged_attention(t.q[0], t.k[0], t.v[0], step, 0, indices=none)
    torch.testing.assert_close(out, t.v[0].repeat_interleave(2, 1))


def test_all_tokens_given_are_plain_attention():
    sizes = Sizes()
    t = text(sizes, 3 * P + 1, seed=1)
    every = torch.arange(t.length).expand(t.length, -1)
    results = []
    for options in ({}, {"indices": every}):
        cache = cache_for(sizes)
        with cache.step([cache.add()], num_new=[t.length]) as step:
            results.append(paged_attention(t.q[0], t.k[0], t.v[0], step, 0, **options))
    torch.testing.assert_close(*results)


def test_what_cannot_be_given_is_refused_before_anything_is_written():
    sizes = Sizes()
    t = text(sizes, P, seed=1)
    every = torch.arange(P).expand(P, -1)
    for fields, indices, message in (
        ({"groups": (LayerGroup((0,), 4),)}, every, "without a window"),
        ({"retention": "fifo", "budget": 64}, every, "without a window, whose pages all stay"),
        ({"kv_format": "int8", "page_size": 16}, every, "dense pages, got"),
        ({}, every[:3], r"expected shape \[8, 'n'\], got \[3, 8\]"),
        ({}, every[:, :0], r"expected shape \[8, 'n'\], got \[8, 0\]"),
        ({}, every.float(), "expected int32 or int64, got torch.float32"),
        ({}, every.to("meta"), "expected device cpu, got meta"),
    ):
        cache = cache_for(sizes, **fields)
        step = cache.prepare([cache.add()], num_new=[P])
        with pytest.raises((ValueError, TypeError), match=f"indices: .*{message}"):
            paged_attention(t.q[0], t.k[0], t.v[0], step, 0, indices=indices)
        assert not step.wrote
        cache.abort(step)


@pytest.mark.parametrize("heads_first", [False, True])
def test_every_slot_is_a_page_in_either_layout(heads_first):
    pages = torch.arange(5 * 3 * P * 4).view(5, 3, P, 4)
    if not heads_first:
        pages = pages.transpose(1, 2).contiguous().transpose(1, 2)
    slots = _by_slot(pages)
    for page in range(5):
        for slot in range(P):
            number = page * (pages.stride(0) // pages.stride(2)) + slot
            assert torch.equal(slots[number, :, 0], pages[page, :, slot])
    unit = min(pages.stride()[1:3])
    alone = _by_slot(pages, apart=True)
    for place in product(range(5), range(3), range(P)):
        number = sum(at * step // unit for at, step in zip(place, pages.stride()))
        assert torch.equal(alone[number, 0, 0], pages[place])
