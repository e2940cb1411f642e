"""A tree of drafts: each path is attended as if it were its row's text, and one is kept.

What these cases alone find: faults between a caller's parents and the kernels, which have tests of
their own, and in what `commit` moves.
"""

import pytest
import torch

from pagedkv import LayerGroup, PagedKVCache, paged_attention, tree_of
from pagedkv.attention.api import write_kv
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

# A path beside others, two rows alike but for their trees, a token alone, paths of nothing but the
# text, a long row beside which the short ones are decoded.
PARENTS = [
    [-1, 0, 0, 2, 1, 3, 0, 5],
    [-1, 0, 1, 2],
    [-1, 0, 0, 1],
    [-1],
    [-1, -1, 0, 1],
    [-1, *(i // 2 for i in range(20))],
]
PATHS = [[0, 2, 3, 5], [0, 1], [0, 1, 3], [0], [1, 3], [0, 2, 6, 14]]
BEFORE = [P - 1, 3 * P + 3, 3 * P + 3, 2 * P, 5, 70]

PAST = [[1000 + row] * n for row, n in enumerate(BEFORE)]  # alike, they would share their pages


def branch(parents, place):
    """The places of a token and of those that it follows."""
    path = []
    while place >= 0:
        path.append(place)
        place = parents[place]
    return path[::-1]


def begun(sizes, backend="torch", **fields):
    """A cache with rows that have a past, and their texts with what is new at the end."""
    config = cache_for(sizes, **fields).config
    cache = PagedKVCache(config, device="cpu", backend=backend, debug=True)
    texts = [text(sizes, n + len(new), i) for i, (n, new) in enumerate(zip(BEFORE, PARENTS))]
    seqs = [cache.add() for _ in texts]
    with cache.step(seqs, tokens=PAST) as step:
        write_kv(*packed(texts, [slice(0, n) for n in BEFORE], "kv"), step, 0)
    return cache, texts, seqs


def packed(texts, slices, names):
    """Some tokens of each text."""
    made = {x: torch.cat([getattr(t, x)[0, s] for t, s in zip(texts, slices)]) for x in names}
    if "v" in made and texts[0].k.data_ptr() == texts[0].v.data_ptr():
        made["v"] = made["k"][..., : made["v"].shape[2]]
    return [made[x] for x in names]


def branched(cache, texts, seqs, **options):
    """Opens a step of the new tokens, and attends to them as they branch."""
    ids = [[100 * row + i for i in range(len(new))] for row, new in enumerate(PARENTS)]
    step = cache.prepare(seqs, tokens=ids)
    tree, positions = tree_of(step, PARENTS)
    expected = [n + len(branch(p, i)) - 1 for n, p in zip(BEFORE, PARENTS) for i in range(len(p))]
    assert positions.tolist() == expected
    q, k, v = packed(texts, [slice(n, None) for n in BEFORE], "qkv")
    return step, paged_attention(q, k, v, step, 0, tree=tree, return_lse=True, **options)


@pytest.mark.parametrize(
    ("sizes", "terms", "backend"), each_value(SIZES, TERMS, ["c", "torch", "triton"])
)
def test_each_token_sees_the_text_and_its_own_branch(sizes, terms, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    sizes, options = SIZES[sizes], TERMS[terms]
    cache, texts, seqs = begun(sizes, backend)
    _, (out, lse) = branched(cache, texts, seqs, **options)
    at = 0
    for t, n, parents in zip(texts, BEFORE, PARENTS):
        for place in range(len(parents)):
            seen = [*range(n), *(n + i for i in branch(parents, place))]
            alone = t.q[0, n + place][None], t.k[0, seen], t.v[0, seen], len(seen) - 1
            (exact, exact_lse), (twin, twin_lse) = (
                attention(*alone, **options, rounded=r) for r in (None, sizes.dtype)
            )
            products = (alone[0].norm(dim=-1).max() * alone[1].norm(dim=-1).max()).item()
            terms = len(seen) + 2 * t.q.shape[-1] * products + 8
            one, largest = slice(at, at + 1), alone[2].abs().max().item()
            assert_accurate(out[one], twin, exact, reduction=terms, largest=largest)
            assert_accurate(lse[one], twin_lse, exact_lse, reduction=terms, largest=products + 2)
            at += 1


@pytest.mark.parametrize("backend", ["c", "torch", "triton"])
def test_a_tree_that_does_not_branch_gives_the_bits_of_a_draft_without_one(backend):
    if backend == "triton":
        pytest.importorskip("triton")
    cache, texts, seqs = begun(Sizes(), backend)
    new = packed(texts, [slice(n, None) for n in BEFORE], "qkv")
    found = []
    for chained in (False, True):
        step = cache.prepare(seqs, num_new=[len(p) for p in PARENTS])
        chains = [range(-1, len(p) - 1) for p in PARENTS]
        tree, positions = tree_of(step, chains)
        assert torch.equal(positions, step.positions)
        found += paged_attention(*new, step, 0, tree=tree if chained else None, return_lse=True)
        cache.abort(step)
    plain, plain_lse, out, lse = found
    if backend != "torch":  # whose product takes another way where it is given a mask
        assert torch.equal(plain, out)
    torch.testing.assert_close(plain, out)
    torch.testing.assert_close(plain_lse, lse)


@pytest.mark.parametrize(
    ("sizes", "kv_format"),
    [("groups", "dense"), ("latents", "dense"), ("narrow values", "int8"), ("groups", "fp8")],
)
def test_the_branch_that_is_kept_is_stored_as_if_there_were_no_other(sizes, kv_format):
    """Bit for bit, also where pages are coded; found as a prefix, and written behind."""
    sizes = SIZES[sizes]
    stored = []
    for drafts in (True, False):
        cache, texts, seqs = begun(sizes, kv_format=kv_format)
        ids = [[100 * row + i for i in path] for row, path in enumerate(PATHS)]
        if drafts:
            step, _ = branched(cache, texts, seqs)
            cache.commit(step, accepted=PATHS)
        else:
            with cache.step(seqs, tokens=ids) as step:
                new = [[n + i for i in path] for n, path in zip(BEFORE, PATHS)]
                write_kv(*packed(texts, new, "kv"), step, 0)
        cache.check()
        assert [cache.length(s) for s in seqs] == [n + len(p) for n, p in zip(BEFORE, PATHS)]
        for past, own in zip(PAST, ids):
            prompt = past + own
            assert cache.stored_prefix([*prompt, 9])[0] == len(prompt)
        with cache.step(seqs, num_new=1) as step:
            write_kv(*packed(texts, [slice(0, 1)] * len(texts), "kv"), step, 0)
        stored.append([cache.gather(seq, 0) for seq in seqs])
    for mine, other in zip(*stored):
        assert all(torch.equal(x, y) for x, y in zip(mine, other))


REFUSED = {
    "a window of 16": {"groups": (LayerGroup((0,), window=16),)},
    "a window of 8": {"groups": (LayerGroup((0,), window=8, chunked=True),)},
    "retention=": {"retention": "fifo", "budget": 128},
    "read_tokens=32": {"read_tokens": 32},
}


@pytest.mark.parametrize("what", REFUSED)
def test_layers_that_do_not_see_all_of_a_text_refuse_a_tree(what):
    cache = cache_for(Sizes(), **REFUSED[what])
    t = text(Sizes(), 3, seed=0)
    step = cache.prepare([cache.add()], tokens=[[1, 2, 3]])
    tree, _ = tree_of(step, [[-1, 0, 0]])
    with pytest.raises(NotImplementedError, match=f"tree: expected layers that see all.*{what}"):
        paged_attention(t.q[0], t.k[0], t.v[0], step, 0, tree=tree)
    assert not step.wrote


@pytest.mark.parametrize("name", ["alibi_slopes", "distance_bias"])
def test_a_bias_by_distance_is_refused_beside_a_tree(name):
    """It would go by places, of which siblings in between take some."""
    t = text(Sizes(), 3, seed=0)
    cache = cache_for(Sizes())
    step = cache.prepare([cache.add()], tokens=[[1, 2, 3]])
    term = torch.ones(4) if name == "alibi_slopes" else torch.ones(3, 4, 5)
    tree, _ = tree_of(step, [[-1, 0, 0]])
    with pytest.raises(ValueError, match="tree: expected None with a bias by distance"):
        paged_attention(t.q[0], t.k[0], t.v[0], step, 0, tree=tree, **{name: term})
    assert not step.wrote


@pytest.mark.parametrize("fields", [{"kv_format": "int4"}, REFUSED["retention="]], ids=str)
def test_what_places_tokens_otherwise_refuses_to_move_them_and_leaves_the_step_open(fields):
    cache = cache_for(Sizes(dim=64), **{"page_size": 16, **fields})
    t = text(Sizes(), 3, seed=0)
    seq = cache.add()
    step = cache.prepare([seq], tokens=[[1, 2, 3]])
    write_kv(t.k[0], t.v[0], step, 0)
    with pytest.raises(
        NotImplementedError, match=r"accepted: expected the first tokens of each.*(policy|int4)"
    ):
        cache.commit(step, accepted=[[0, 2]])
    cache.commit(step, accepted=[[0, 1]])
    assert cache.length(seq) == 2


def test_mistakes_are_named():
    cache = cache_for(Sizes())
    t = text(Sizes(), 3, seed=0)
    step = cache.prepare([cache.add()], tokens=[[1, 2, 3]])
    with pytest.raises(ValueError, match=r"parents: expected \[3\] for the rows, got \[2\]"):
        tree_of(step, [[-1, 0]])
    with pytest.raises(ValueError, match="parents: expected -1 to 0 at 1, got 1"):
        tree_of(step, [[-1, 1, 0]])
    good, _ = tree_of(step, [[-1, 0, 0]])
    new = t.q[0], t.k[0], t.v[0], step, 0
    with pytest.raises(TypeError, match="tree: expected a dense int64 tensor, got torch"):
        paged_attention(*new, tree=good.int())
    with pytest.raises(ValueError, match=r"tree: expected a contiguous \[T\] = \[3\], got \[2\]"):
        paged_attention(*new, tree=good[:2])
    with pytest.raises(ValueError, match="indices: expected none beside a tree"):
        paged_attention(*new, tree=good, indices=torch.zeros(3, 1, dtype=torch.int64))
    paged_attention(*new, tree=good)
    for wrong in ([[0, 3]], [[1, 0]], [[0, 0]], [[0], [1]]):
        with pytest.raises(ValueError, match=r"accepted: expected "):
            cache.commit(step, accepted=wrong)
    with pytest.raises(ValueError, match="tokens: expected None with places"):
        cache.commit(step, accepted=[[0, 2]], tokens=[[1, 3]])
    cache.abort(step)
    step = cache.prepare([cache.add()], num_new=[64])
    with pytest.raises(ValueError, match="parents: expected at most 63 that branch, got 64"):
        tree_of(step, [[-1, *[0] * 63]])
    tree_of(step, [range(-1, 63)])
