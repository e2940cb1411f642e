"""Page mass out of the decode kernel is the softmax over a row's slots, summed over each page."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from pagedkv import CacheConfig, PagedKVCache, paged_attention
from pagedkv.attention import on_triton
from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.torch.page_mass import page_mass
from pagedkv.kernels.triton import backend as paged
from pagedkv.kernels.triton import decode
from pagedkv.storage import page_statistics
from tests.effort import examples, sampled, slow
from tests.kernels.steps import DEVICE, EACH, coded, step_of
from tests.kernels.truth import attend, mass_of, poisoned_outputs


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    """Small texts are split and merged, on a card as well."""
    tuning = decode.tuning
    changes = {"split": 64, "splits": 4}
    monkeypatch.setattr(decode, "tuning", lambda *args: tuning(*args)._replace(**changes))


def observe(step, queries):
    """Output, log-sum-exp, mass of the kernels, and what they leave to others."""
    num_new, lens = np.array(step.num_new), step.kv_lens.cpu().numpy().astype(np.int64)
    with poisoned_outputs():
        plan = paged.plan(
            *(step.kv_lens, step.starts, step.q, step.k_pages, step.v_pages),
            num_new=step.num_new,
            max_kv=int(lens.max()),
        )
        rows = num_new, lens, np.array(queries), step.table.shape[1]
        watched = paged.watch(*rows, step.q.shape[1], step.page, step.q.device)
        out, lse = paged.paged_attention(
            *(step.q, step.k_pages, step.v_pages, step.table, step.kv_lens, step.starts, plan),
            **step.options,
            watched=watched,
        )
        mass = None if watched is None else paged.page_mass(watched, lse)
    return out, lse, mass, None if watched is None else watched.left


def check(step, queries):
    out, lse, mass, left = observe(step, queries)
    for found, plain in zip((out, lse), attend(step), strict=True):
        assert torch.equal(found, plain), "attention has other bits when it is watched"
    assert not left.any()
    exact = mass_of(step, queries)
    # Scores are float32; sums of up to 16 queries and 8 tokens a chunk.
    noise = torch.finfo(torch.float32).eps * (64 + 4 * lse.abs().max().item())
    assert (mass.cpu() - exact).abs().max() < noise * max(queries)
    if step.options["sinks"] is None:
        assert np.allclose(mass.sum(1).cpu(), queries, rtol=1e-4)


# Around chunks, pages, tiles and splits; rows that are not watched between those that are.
SINGLE = [(1, 1), (1, 33), (1, 64), (1, 7), (1, 140)]
WATCHED = [1, 0, 1, 1, 1]
SEVERAL = [(1, 70), (4, 4), (5, 37), (1, 9), (0, 12), (16, 97)]
ASKED = [1, 4, 5, 0, 0, 16]


@pytest.mark.parametrize("page", [1, 24, *slow(3, 16, 32, 64)])
def test_mass_of_pages_of_every_size(page):
    sizes = {"heads": 2, "groups": 1, "page": page}
    check(step_of(SINGLE, **sizes), WATCHED)
    check(step_of(SEVERAL, **sizes), ASKED)


TERMS = {
    "a softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"sinks": True, "softcap": 5.0, "scale": -0.7},
    "scores far apart": {"scale": 12.0},
    "3 query heads a KV head": {"heads": 9, "groups": 3, "dim": 48},
    "71 on one": {"heads": 71, "groups": 1, "dim": 64},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
}


# The narrow types, and what is not part of "all".
FEW = ["all", "scores far apart", "bfloat16"]


@pytest.mark.parametrize("kind", [*FEW, *slow(*(kind for kind in TERMS if kind not in FEW))])
def test_mass_of_every_kind_of_scores(kind):
    check(step_of(SINGLE, **TERMS[kind]), WATCHED)
    check(step_of(SEVERAL[:5], **TERMS[kind]), ASKED[:5])


FORMATS = [*EACH, ("dense", "int4_token"), ("int4_channel", "dense")]
CODED = list(zip(FORMATS, (16, 32, 32, 16, 64)))


@sampled
@pytest.mark.parametrize(("formats", "page"), [CODED[2], *slow(*CODED[:2], *CODED[3:])], ids=str)
def test_mass_of_coded_and_staging_pages(formats, page):
    sizes = {"heads": 2, "groups": 1, "page": page, "dim": 32}
    check(coded(step_of(SINGLE, **sizes), *formats), WATCHED)
    rows = examples(6, 5)
    check(coded(step_of(SEVERAL[:rows], **sizes), *formats), ASKED[:rows])


def test_only_the_last_queries_asked_for_count():
    step = step_of([(9, 70), (5, 5)])
    *_, mass, _ = observe(step, [3, 1])
    assert (mass.cpu() - mass_of(step, [3, 1])).abs().max() < 1e-5


def test_rows_of_many_new_tokens_are_left_to_others():
    step = step_of([(1, 70), (40, 100), (2, 9)])
    *_, mass, left = observe(step, [1, 30, 2])
    assert left.tolist() == [0, 30, 0]
    assert (mass.cpu() - mass_of(step, [1, 0, 2])).abs().max() < 1e-5


def test_nothing_is_noted_down_where_nobody_looks():
    assert observe(step_of([(1, 70), (40, 100)]), [0, 30])[2:] == (None, None)


def test_both_backends_find_the_same_mass():
    step, asked = coded(step_of(SEVERAL[:5], dim=32), "int4_channel", "int4_token"), ASKED[:5]
    rows = (np.array(x) for x in (step.num_new, step.kv_lens.tolist(), asked))
    expected = page_mass(step.q, step.k_pages, step.table, *rows, Scoring(step.options["scale"]))
    torch.testing.assert_close(observe(step, asked)[2], expected, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------ through a cache

HEADS, G = 4, 2


def caches():
    """Makes equal caches on both backends, with room for less than is written."""
    sizes = {"num_layers": 2, "num_kv_heads": G, "head_dim": 16, "dtype": "float32"}
    room = {"max_tokens": 1024, "page_size": 8, "retention": "importance", "budget": 80}
    config = CacheConfig(**sizes | room)
    return [PagedKVCache(config, device="cpu", backend=name) for name in ("triton", "torch")]


def feed(cache, seqs, num_new, seed):
    """Outputs of a step, and the pages that its rows hold."""
    random = torch.Generator().manual_seed(seed)
    found = []
    with cache.step(seqs, num_new=num_new) as step:
        for layer in range(2):
            shapes = [(sum(num_new), count, cache.config.head_dim) for count in (HEADS, G, G)]
            q, k, v = (torch.randn(shape, generator=random) for shape in shapes)
            found.append(paged_attention(3 * q, k, v, step, layer, sinks=torch.zeros(HEADS)))
        table = step.page_table(0).clone()
    return torch.stack(found), table


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="torch's tensors are the CPU's")
def test_a_policy_evicts_the_same_pages_on_both_backends():
    both = caches()
    seqs = [[cache.add(), cache.add()] for cache in both]
    # Hardly any of the mass is a prompt's, which torch computes on both: the 16th step has most.
    steps = [[20, 5], *[[16, 12]] * 3, *[[1, 1]] * 11, [2, 16], *[[16, 12]] * 4]
    for number, new in enumerate(steps):
        (out, table), (expected, known) = (
            feed(cache, mine, new, number) for cache, mine in zip(both, seqs, strict=True)
        )
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(table, known), f"other pages in step {number}"
    held = [both[0].gather(seq, 0)[0].shape[0] for seq in seqs[0]]
    assert max(held) < sum(new[0] for new in steps), "nothing was evicted"


@pytest.mark.skipif(DEVICE == "cuda", reason="torch's tensors are the CPU's")
def test_decoding_rows_keys_are_not_read_again(monkeypatch):
    cache, _ = caches()
    seqs = [cache.add(), cache.add()]
    feed(cache, seqs, [20, 17], 0)
    monkeypatch.setattr(on_triton, "mass_of_pages", None)
    monkeypatch.setattr(page_statistics, "EVERY", 4)
    for number in (1, 2):
        feed(cache, seqs, [1, 1], number)
    before = cache._statistics._mass.sum()
    feed(cache, seqs, [1, 16], 3)
    assert cache._statistics._mass.sum() > before
