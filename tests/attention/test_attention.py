"""Attention over pages is attention: laws, held against float64 over each text by itself."""

import itertools

import pytest
import torch

from pagedkv import LayerGroup, attend_again, paged_attention
from pagedkv.attention.api import gather_kv
from tests.attention.texts import (
    HALF,
    LENGTHS,
    P,
    Sizes,
    Text,
    all_at_once,
    assert_accurate,
    attention,
    cache_for,
    check,
    prefill_then_decode,
    run,
    text,
)
from tests.effort import each_pair, each_value

SIZES = [
    Sizes(),
    Sizes(heads=3, groups=3, dim=80),
    Sizes(heads=6, groups=2, dim=64),
    Sizes(heads=6, groups=2, dim=80),
    Sizes(heads=4, groups=1, dim=64),
    Sizes(heads=1, groups=1, dim=16),
    Sizes(heads=6, groups=2, dim=48, v_dim=32),
    Sizes(heads=5, groups=1, dim=40, v_dim=32, v_is_k=True),
    Sizes(heads=16, groups=1, dim=80, v_dim=64, v_is_k=True, dtype=torch.bfloat16),
    *(Sizes(dtype=dtype) for dtype in HALF),
    *(Sizes(heads=6, groups=2, dim=80, dtype=dtype) for dtype in HALF),
    *(Sizes(heads=4, groups=1, dim=64, dtype=dtype) for dtype in HALF),
]
IDS = [
    f"H{s.heads}-G{s.groups}-D{s.dim}{f'-V{s.v_dim}' * bool(s.v_dim)}{'-latent' * s.v_is_k}"
    f"-{str(s.dtype)[6:]}"
    for s in SIZES
]


@pytest.fixture(params=SIZES, ids=IDS)
def sizes(request):
    return request.param


# ------------------------------------------------------------------ laws


@pytest.mark.parametrize(("length", "sizes"), each_value(LENGTHS, SIZES))
def test_paged_attention_is_contiguous_attention(length, sizes):
    texts = [text(sizes, length, seed=length)]
    check(texts, run(cache_for(sizes), texts, all_at_once(texts)))


def test_prefill_then_decode_is_prefill_of_all(sizes):
    texts = [text(sizes, n + 12, seed=n) for n in LENGTHS]
    check(texts, run(cache_for(sizes), texts, prefill_then_decode(texts, 12)))


def test_prefill_and_decode_mix_in_one_step(sizes):
    texts = [text(sizes, n, seed=n) for n in (30, 61, 17, 8, 90)]
    schedule = [
        [20, 0, 1, 0, 64],
        [1, 50, 1, 0, 1],
        [5, 1, 7, 7, 1],
        [4, 10, 8, 1, 24],
    ]
    check(texts, run(cache_for(sizes), texts, schedule))


@pytest.mark.parametrize("window", [1, 3, P, P + 1, 2 * P + 5, 1000])
@pytest.mark.parametrize("schedule", ["at once", "decode", "chunks"])
def test_a_window_sees_itself_and_what_is_just_before(window, schedule):
    sizes = Sizes(heads=3, groups=1, dim=32)
    groups = (LayerGroup((1,)), LayerGroup((0, 2), window))
    texts = [text(sizes, n, seed=n, layers=3) for n in (5 * P + 3, 29, 14)]
    steps = {
        "at once": all_at_once(texts),
        "decode": prefill_then_decode(texts, 13),
        "chunks": [[11, 9, 1], [1, 1, 12], [17, 0, 1], [14, 19, 0]],
    }[schedule]
    cache = cache_for(sizes, groups, layers=3)
    check(texts, run(cache, texts, steps), windows=(window, None, window))


def sinks_of(sizes: Sizes, dtype=None) -> torch.Tensor:
    """One per head, from hardly a share to nearly all of a row's weight."""
    return torch.linspace(-4, 6, sizes.heads).to(dtype or sizes.dtype)


@pytest.mark.parametrize(("schedule", "sizes"), each_value(["at once", "decode", "mixed"], SIZES))
def test_sinks_take_their_share_of_every_query(sizes, schedule):
    texts = [text(sizes, n, seed=n) for n in (1, 5 * P + 3, 2 * P, 17)]
    steps = {
        "at once": all_at_once(texts),
        "decode": [[1, 1, 1, 1], *[[0, 1, 1, 1]] * 15, [0, 27, 0, 1]],
        "mixed": [[0, 20, 1, 16], [1, 1, 14, 1], [0, 22, 1, 0]],
    }[schedule]
    sinks = sinks_of(sizes)
    check(texts, run(cache_for(sizes), texts, steps, sinks=sinks), sinks=sinks)


@pytest.mark.parametrize(
    ("dtype", "window", "options", "with_sinks"),
    each_pair(
        [torch.float32, *HALF],
        [None, 1, 9],
        [{}, {"softcap": 0.5}, {"scale": 0.3, "softcap": 2.0}, {"scale": 0.0}, {"scale": -0.3}],
        [False, True],
    ),
)
def test_sinks_scale_softcap_and_window_go_together(dtype, window, options, with_sinks):
    sizes = Sizes(heads=6, groups=2, dim=32, dtype=dtype)
    texts = [text(sizes, n, seed=n) for n in (35, 12, 20)]
    cache = cache_for(sizes, (LayerGroup((0,), window),))
    options = {**options, **({"sinks": sinks_of(sizes)} if with_sinks else {})}
    results = run(cache, texts, prefill_then_decode(texts, 4), **options)
    check(texts, results, windows=(window,), **options)


def test_sinks_count_in_the_log_sum_exp_and_are_not_rounded_to_the_dtype_of_pages():
    sizes = Sizes(dim=16, dtype=torch.bfloat16)
    t = text(sizes, 20, seed=0)
    t.q.zero_()
    sinks = sinks_of(sizes, torch.float32) + 1e-3
    ((_, lse, _),) = run(cache_for(sizes), [t], [[18], [1], [1]], sinks=sinks)
    expected = (torch.arange(1, 21)[:, None] + sinks.double().exp()).log()
    allowed = 4 * torch.finfo(torch.float32).eps * (1 + sinks.abs().max() + expected.abs())
    assert ((lse[0].double() - expected).abs() <= allowed).all()


def test_sinks_that_would_be_wrong_are_refused_and_nothing_is_written():
    sizes = Sizes(dim=16)
    t = text(sizes, 8, seed=0)
    cache = cache_for(sizes)
    step = cache.prepare([cache.add()], num_new=8)
    for wrong in (torch.zeros(2), torch.zeros(1, 4), torch.zeros(4, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"sinks: expected float32, .*\[4\]"):
            paged_attention(t.q[0], t.k[0], t.v[0], step, 0, sinks=wrong)
    with pytest.raises(ValueError, match="sinks: expected device cpu"):
        paged_attention(t.q[0], t.k[0], t.v[0], step, 0, sinks=torch.zeros(4, device="meta"))
    assert all(x.isnan().all() for x in gather_kv(step, 0)[0]), "debug pages hold NaN until then"


@pytest.mark.parametrize("window", [None, 7])
def test_other_queries_attend_again_to_what_a_layer_has_written(window):
    sizes = Sizes(dim=16)
    texts, others = ([text(sizes, n, seed=n + s) for n in (20, 33, 9)] for s in (0, 100))
    cache = cache_for(sizes, (LayerGroup((0,), window),))
    seqs = [cache.add() for _ in texts]
    for new, last in [
        ((12, 20, 4), (5, 1, 4)), ((1, 1, 1), (0, 1, 1)), ((6, 11, 3), (0, 11, 0)),
        ((1, 1, 1), (1, 0, 0)),
    ]:  # fmt: skip
        begun = [cache.length(seq) for seq in seqs]
        with cache.step(seqs, num_new=new) as step:
            held = [slice(at, at + n) for at, n in zip(begun, new)]
            parts = [[getattr(t, x)[0, s] for t, s in zip(texts, held)] for x in "qkv"]
            written = paged_attention(*map(torch.cat, parts), step, 0)
            again = attend_again(torch.cat(parts[0]), step, 0)
            torch.testing.assert_close(again, written)  # if they are the same queries
            ends = [slice(s.stop - n, s.stop) for s, n in zip(held, last)]
            queries = [t.q[0, s] for t, s in zip(others, ends)]
            outs = attend_again(torch.cat(queries), step, 0, num_queries=last).split(last)
        assert [len(out) for out in outs] == list(last)
        for q, s, t, out in zip(queries, ends, texts, outs):
            if not len(q):
                continue
            k, v = t.k[0, : s.stop], t.v[0, : s.stop]
            exact, twin = (
                attention(q, k, v, s.start, window=window, rounded=r)[0]
                for r in (None, torch.float32)
            )
            assert_accurate(out, twin, exact, reduction=33 + 32 * 8, largest=v.abs().max().item())


def test_attending_again_leaves_the_statistics_of_pages_as_they_were():
    sizes, seen = Sizes(dim=16), []
    t = text(sizes, 20, seed=0)
    for again in (False, True):
        cache = cache_for(sizes, retention="importance")
        with cache.step([cache.add()], num_new=20) as step:
            paged_attention(t.q[0], t.k[0], t.v[0], step, 0)
            if again:
                attend_again(t.q[0], step, 0)
        seen.append(step.observer._mass.clone())
    assert seen[0].any()
    assert torch.equal(*seen)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_tensors_need_not_be_contiguous(layout):
    sizes = Sizes(dim=16)
    t = text(sizes, 21, seed=0)

    def odd(x):
        if layout == "transposed":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        if layout == "sliced":
            return torch.cat([x, x.flip(0)], -1)[..., : x.shape[-1]]
        return x[:, :1].expand_as(x)

    q, k, v = (odd(x[0]) for x in (t.q, t.k, t.v))
    results = []
    for tensors in ((q, k, v), tuple(x.contiguous() for x in (q, k, v))):
        cache = cache_for(sizes)
        with cache.step([cache.add()], num_new=21) as step:
            results.append(paged_attention(*tensors, step, 0))
    assert torch.equal(*results)
    assert torch.isfinite(results[0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_large_scores_do_not_overflow(dtype):
    t = text(Sizes(dim=16, dtype=dtype), 30, seed=0)
    t.q.mul_(30)
    t.k.mul_(30)
    results = run(cache_for(Sizes(dim=16, dtype=dtype)), [t], [[29], [1]])
    assert all(torch.isfinite(x).all() for x in results[0])
    check([t], results)


def test_layers_do_not_mix():
    sizes = Sizes(dim=16)
    texts = [text(sizes, n, seed=n, layers=4) for n in (20, 33)]
    groups = (LayerGroup((3, 0)), LayerGroup((1,), 7), LayerGroup((2,), 12))
    cache = cache_for(sizes, groups, layers=4)
    results = run(cache, texts, [[12, 20], [1, 1], [7, 12]])
    check(texts, results, windows=(None, 7, 12, None))


def test_the_tolerance_notices_one_wrong_key():
    """The budget is tight enough: a single misplaced key is out of bounds in every dtype."""
    for sizes, wrong in itertools.product(SIZES, ("k", "v")):
        t = text(sizes, 40, seed=0)
        results = run(cache_for(sizes), [t], [[40]])
        bent = Text(t.q, t.k.clone(), t.v.clone())
        getattr(bent, wrong)[0, 3] = getattr(bent, wrong)[0, 11]
        with pytest.raises(AssertionError):
            check([bent], results)
