"""Decoding queries that choose the pages they read."""

import pytest
import torch

from pagedkv import CacheConfig, LayerGroup, PagedKVCache, paged_attention
from pagedkv.kernels.c.library import missing
from pagedkv.kernels.torch import select_pages as sparse
from pagedkv.storage.key_bounds import PageBounds
from tests.effort import few

HEADS, DIM, LAYERS, P = 2, 32, 2, 16
NO_C = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a library")
BACKENDS = ["torch", pytest.param("c", marks=NO_C)]
FORMATS = ["dense", "int8", "fp8", "int4", ("int8", "int4")]


def config(kv_format="dense", **fields):
    sizes = {"max_tokens": 1024, "page_size": P, "max_sequences": 4, "read_tokens": 5 * P, **fields}
    return CacheConfig(LAYERS, HEADS, DIM, "float32", kv_format=kv_format, **sizes)


def text(tokens, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(2, LAYERS, tokens, HEADS, DIM, generator=source)


def feed(cache, seqs, parts, **options):
    """One step of `[2, L, n, G, D]` for each sequence: what attention makes of each layer."""
    step = cache.prepare(seqs, num_new=[part.shape[2] for part in parts])
    outs = []
    for layer in range(LAYERS):
        k, v = torch.cat(parts, 2)[:, layer]
        outs.append(paged_attention(torch.cat([v, k], 1), k, v, step, layer, **options))
    cache.commit(step)
    cache.check()
    return outs


def choose(q, bounds, ids, lens, count):
    return sparse.choose_columns(sparse.score_columns(q, bounds, ids, lens, P), count)


def test_bounds_hold_for_every_key_of_a_page():
    keys = torch.randn(5, HEADS, P, DIM) * 3
    step, low = sparse.page_bounds(keys).float().unbind(-1)
    q = torch.randn(HEADS, DIM)
    bound = (torch.maximum(q * low, q * (low + 15 * step))).sum(-1)
    scores = torch.einsum("gd,ngpd->ngp", q, keys).amax(-1)
    assert (scores <= bound + 1e-2 * q.norm()).all()  # of float16


def test_the_first_and_newest_pages_are_read_whatever_their_bounds_and_the_best_of_the_others():
    bounds = torch.zeros(12, 1, DIM, 2)
    bounds[[4, 7], :, :, 1] = 1.0
    bounds[[0, 9, 10], :, :, :] = torch.nan
    ids = torch.arange(12)[None]
    lens = torch.tensor([10 * P + 1])  # columns 9 and 10 are the newest
    q = torch.ones(1, 3, DIM)
    assert choose(q, bounds, ids, lens, 5).tolist() == [[[0, 4, 7, 9, 10]]]
    bounds[2, :, :, 1] = 2.0
    assert choose(q, bounds, ids, lens, 4).tolist() == [[[0, 2, 9, 10]]]


def test_pages_without_bounds_are_read_before_others_and_after_those_that_always_are():
    bounds = torch.zeros(12, 1, DIM, 2)
    bounds[[2, 8], :, 0, 1], bounds[3, :, 1, 1] = torch.nan, 1e30
    ids, lens = torch.arange(12)[None], torch.tensor([10 * P + 1])
    q = torch.ones(1, 3, DIM)
    assert choose(q, bounds, ids, lens, 5).tolist() == [[[0, 2, 8, 9, 10]]]
    bounds[:, :, 0, 1] = torch.inf
    assert choose(q, bounds, ids, lens, 5).tolist() == [[[0, 1, 2, 9, 10]]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_page_whose_keys_no_half_bounds_is_not_skipped(backend):
    cache = PagedKVCache(config(read_tokens=4 * P), device="cpu", backend=backend)
    seq, x = cache.add(), 0.01 * text(320)
    x[0, :, 100, :, 0], x[1, :, 100] = -8e4, 7.0
    x[0, :, 150, :, :2] = torch.tensor([-6.5e4, 1e4])  # whose bound is above the other's, cut off
    feed(cache, [seq], [x])
    new = torch.zeros(2, LAYERS, 1, HEADS, DIM)
    new[1, ..., :2] = torch.tensor([-5.0, 1.0])
    out = feed(cache, [seq], [new])[0]
    assert (out[0, :HEADS] > 6.9).all()


def test_each_kv_head_reads_what_its_query_heads_want_most():
    bounds = torch.zeros(10, 2, DIM, 2)
    bounds[3, 0, :, 1] = bounds[5, 1, 0, 1] = 1.0
    q = torch.zeros(1, 4, DIM)
    q[0, 0], q[0, 3, 0] = 1.0, 1.0
    chosen = choose(q, bounds, torch.arange(10)[None], torch.tensor([160]), 4)
    assert chosen.tolist() == [[[0, 3, 8, 9], [0, 5, 8, 9]]]


def outputs(backend, kv_format):
    """Of steps in which all rows decode, and in which one decodes and others do not."""
    whole, lengths = [text(120, seed) for seed in range(3)], [110, 90, 30]
    cache = PagedKVCache(config(kv_format), device="cpu", backend=backend, debug=True)
    seqs = [cache.add() for _ in whole]
    feed(cache, seqs, [x[:, :, :n] for x, n in zip(whole, lengths)])
    one = [x[:, :, n : n + 1] for x, n in zip(whole, lengths)]
    some = [one[0], whole[1][:, :, 91:94], whole[2][:, :, 31:60]]
    return [*feed(cache, seqs, one), *feed(cache, seqs, some)]


@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
def test_what_is_read_is_attended_to_exactly_and_alike_alone_and_in_a_batch(kv_format):
    whole = [text(301, seed) for seed in range(3)]
    lengths = [300, 170, 40]
    batch = PagedKVCache(config(kv_format), device="cpu", debug=True)
    seqs = [batch.add() for _ in whole]
    # One after the other, so that static scales are the first one's in every cache.
    for seq, x, n in zip(seqs, whole, lengths):
        feed(batch, [seq], [x[:, :, :n]])
    new = [x[:, :, n : n + 1] for x, n in zip(whole, lengths)]
    together = feed(batch, seqs, new)
    alone = PagedKVCache(config(kv_format), device="cpu", debug=True)
    seq = alone.add()
    feed(alone, [seq], [whole[0][:, :, :300]])
    for mine, batched, layer in zip(feed(alone, [seq], new[:1]), together, range(LAYERS)):
        assert torch.allclose(mine[0], batched[0], atol=1e-6)
        q = torch.cat([new[0][1, layer], new[0][0, layer]], 1)
        k, v = (x.double() for x in alone.gather(seq, layer))
        row = alone._tables.row_of(seq)
        ids = torch.from_numpy(alone._tables.tables[:1, row, :19])
        bounds = alone._storage.bounds.of(layer)
        columns = choose(q, bounds, ids, torch.tensor([301]), 5)[0]
        for head in range(2 * HEADS):
            slots = (columns[head // 2][:, None] * P + torch.arange(P)).flatten()
            slots = slots[slots < 301]
            scores = k[slots, head // 2] @ q[0, head].double() * DIM**-0.5
            expected = scores.softmax(0) @ v[slots, head // 2]
            assert torch.allclose(mine[0, head].double(), expected, atol=1e-5)
        assert columns[:, 0].tolist() == [0, 0]
        assert columns[:, -2:].tolist() == [[17, 18]] * HEADS


def test_a_page_that_matters_is_found_and_one_that_does_not_is_left_out():
    cache = PagedKVCache(config(read_tokens=4 * P), device="cpu")
    seq, x = cache.add(), 0.01 * text(320)
    x[0, :, 100, :, 0], x[1, :, 100] = 50.0, 7.0  # the needle: page 6
    feed(cache, [seq], [x])
    new = torch.zeros(2, LAYERS, 1, HEADS, DIM)
    new[1, ..., 0] = 5.0  # queries are made of V: those of the first heads look for it
    out = feed(cache, [seq], [new])[0]
    assert (out[0, :HEADS] > 6.9).all()


def test_prefill_and_short_texts_read_everything():
    x = text(200)
    outs = []
    for read in (None, 4 * P):
        cache = PagedKVCache(config(read_tokens=read), device="cpu")
        seq = cache.add()
        outs.append([*feed(cache, [seq], [x[:, :, :150]]), *feed(cache, [seq], [x[:, :, 150:]])])
        other = cache.add()
        feed(cache, [other], [x[:, :, :40]])
        outs[-1] += feed(cache, [other], [x[:, :, 40:41]])
    assert all(torch.equal(a, b) for a, b in zip(*outs))


@pytest.mark.parametrize(
    "kv_format",
    few([*FORMATS, ("dense", "int4"), ("fp8", "int4")], "dense", "int4"),
    ids=str,
)
def test_pages_that_were_filled_token_by_token_are_chosen_by_their_own_keys(kv_format):
    cache = PagedKVCache(config(kv_format), device="cpu", debug=True)
    for kept in cache._storage.bounds._kept.values():
        kept.fill_(torch.nan)  # not what the cache before this one left there
    seq, k = cache.add(), text(150)
    feed(cache, [seq], [k[:, :, :40]])
    for i in range(40, 150):
        feed(cache, [seq], [k[:, :, i : i + 1]])  # which checks
    for layer in range(LAYERS):
        keys = cache.gather(seq, layer)[0][P : 9 * P].view(8, P, HEADS, DIM).transpose(1, 2)
        pages = cache._tables.tables[0, cache._tables.row_of(seq), 1:9]
        bounds = cache._storage.bounds.of(layer)[torch.from_numpy(pages)]
        low, high = bounds[..., 1].float(), (bounds[..., 1] + 15 * bounds[..., 0]).float()
        slack = 0.02 * keys.abs().max()  # of float16, and of 4 bits
        assert (low - slack <= keys.amin(2)).all()
        assert (high + slack >= keys.amax(2)).all()
        assert (high - low).max() < 2 * (keys.max() - keys.min())


def test_a_commit_without_memory_for_bounds_changes_nothing_and_may_be_repeated(monkeypatch):
    cache = PagedKVCache(config(), device="cpu", debug=True)
    seq, k = cache.add(), text(40)
    feed(cache, [seq], [k])
    step = cache.prepare([seq], num_new=20)
    for layer in range(LAYERS):
        paged_attention(*torch.cat([text(20), text(20)])[:3, layer], step, layer)

    def refuse(*args):
        raise MemoryError("no room for keys")

    with monkeypatch.context() as patch:
        patch.setattr(PageBounds, "update", refuse)
        with pytest.raises(MemoryError, match="no room for keys"):
            cache.commit(step)
    assert cache.open_step is step
    assert cache.length(seq) == 40
    cache.check()
    cache.commit(step)
    assert cache.length(seq) == 60
    cache.check()


def test_a_softcap_goes_with_chosen_pages():
    x, outs = text(151), []
    for softcap in (None, 1e4, 1.0):  # one that changes nothing, one that does
        cache = PagedKVCache(config(read_tokens=4 * P), device="cpu", backend="torch")
        seq = cache.add()
        feed(cache, [seq], [x[:, :, :150]])
        outs.append(feed(cache, [seq], [x[:, :, 150:]], softcap=softcap)[0])
    assert torch.allclose(outs[0], outs[1], atol=1e-5)
    assert not torch.allclose(outs[0], outs[2], atol=1e-2)


def test_bounds_are_counted_and_int4_needs_none():
    for kv_format in FORMATS:
        cache = PagedKVCache(config(kv_format), device="cpu")
        assert cache._storage.nbytes == cache.config.nbytes
        more = cache.config.nbytes - config(kv_format, read_tokens=None).nbytes
        pages = cache.config.num_pages()
        assert more == (0 if kv_format == "int4" else 4 * DIM * HEADS * LAYERS * pages)


def test_pages_to_choose_from_are_small_unless_you_say_otherwise():
    shape = {"kv_format": "int4", "read_tokens": 128}
    assert CacheConfig(1, 1, 32, "float32", 512, **shape).page_size == 16
    assert CacheConfig(1, 1, 32, "float32", 512, page_size=32, **shape).page_size == 32


@pytest.mark.parametrize("tokens", [0, -1, 4 * P - 1, 2.5, True])
def test_too_few_tokens_to_read_are_refused_by_name(tokens):
    with pytest.raises((ValueError, TypeError), match="read_tokens"):
        config(read_tokens=tokens)


def test_reading_less_is_refused_where_all_layers_have_a_window():
    with pytest.raises(ValueError, match="read_tokens: expected layers without a window"):
        config(groups=(LayerGroup(tuple(range(LAYERS)), 16),))
