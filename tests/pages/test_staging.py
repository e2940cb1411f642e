"""The first and the newest page of a text stay exact beside pages in fewer bits."""

import pytest
import torch

from pagedkv import OutOfPagesError, PagedKVCache, paged_attention
from tests.storage.coded import DIM, LAYERS, config, feed, kv, part, words


@pytest.mark.parametrize("kv_format", ["int4", ("int4", "int8"), ("dense", "int4")], ids=str)
def test_the_first_and_the_newest_page_are_exact(kv_format):
    cache, text = PagedKVCache(config(kv_format), device="cpu"), kv(75)
    seq = cache.add()
    feed(cache, [seq], [text])
    for layer in range(LAYERS):
        for stored, given in zip(cache.gather(seq, layer), text):
            assert torch.equal(stored[:16], given[layer, :16])
            assert torch.equal(stored[64:], given[layer, 64:])
    k, v = cache.gather(seq, 0)
    assert any(not torch.equal(x[16:64], y[0, 16:64]) for x, y in ((k, text[0]), (v, text[1])))


def test_committed_bytes_change_by_the_own_commit_only():
    cache, text = PagedKVCache(config("int4"), device="cpu", debug=True), kv(80)
    a = cache.add()
    feed(cache, [a], [part(text, 0, 40)])
    b, c = cache.fork(a, 2)
    before = [cache.gather(s, 1) for s in (b, c)]
    feed(cache, [a], [part(text, 40, 50)])  # completes the page they share
    for seq, held in zip((b, c), before):
        assert all(torch.equal(x, y) for x, y in zip(cache.gather(seq, 1), held))
    assert torch.equal(cache.gather(b, 0)[0][32:], text[0][0, 32:40]), "no longer exact"
    feed(cache, [b, c], [part(kv(80, 5), 40, 52), part(text, 40, 52)])
    assert all(torch.equal(x[:40], y) for x, y in zip(cache.gather(a, 0), (
        x[:40] for x in cache.gather(c, 0)
    )))  # fmt: skip
    assert not torch.equal(cache.gather(b, 0)[0][40:48], cache.gather(c, 0)[0][40:48])


def test_a_text_cut_within_a_coded_page_goes_on_from_what_it_held():
    cache, text = PagedKVCache(config("int4"), device="cpu", debug=True), kv(80)
    seq = cache.add()
    feed(cache, [seq], [text])
    held = cache.gather(seq, 1)
    cache.truncate(seq, 40)
    other = kv(60, 3)
    feed(cache, [seq], [part(other, 40, 44)])
    assert all(torch.equal(x[:40], y[:40]) for x, y in zip(cache.gather(seq, 1), held))
    assert torch.equal(cache.gather(seq, 1)[0][40:], other[0][1, 40:44])
    feed(cache, [seq], [part(other, 44, 60)])
    step = (held[0][32:40].amax(0) - held[0][32:40].amin(0)).max() / 15
    assert (cache.gather(seq, 1)[0][32:40] - held[0][32:40]).abs().max() < 4 * step


def test_a_rejected_draft_leaves_no_trace_in_a_page_that_is_coded_later():
    text, drafted = kv(64), kv(64, 8)
    found = []
    for draft in (0, 30):
        cache = PagedKVCache(config("int4"), device="cpu", debug=True)
        seq = cache.add()
        feed(cache, [seq], [part(text, 0, 40)])
        if draft:
            feed(cache, [seq], [part(drafted, 40, 40 + draft)], accepted=[0])
        feed(cache, [seq], [part(text, 40, 64)])
        found.append(words(cache, seq))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_staging_pages_that_run_out_say_so_and_the_advice_works():
    cache = PagedKVCache(config("int4", max_sequences=4), device="cpu")
    seqs, texts = [cache.add() for _ in range(4)], [kv(60, seed) for seed in range(4)]
    feed(cache, seqs, [part(text, 0, 20) for text in texts])
    before = cache.stats()
    with pytest.raises(OutOfPagesError, match=r"staging pages.*step fewer.*max_sequences"):
        feed(cache, seqs, [part(text, 20, 40) for text in texts])
    assert cache.stats() == before
    for both in (seqs[:2], seqs[2:]):
        feed(cache, both, [part(texts[seqs.index(s)], 20, 40) for s in both])


def test_a_prompt_found_in_coded_pages_is_not_coded_again():
    cache, text = PagedKVCache(config("int4"), device="cpu", debug=True), kv(70)
    ids = list(range(70))
    a = cache.add(ids)
    with cache.step([a]) as step:
        for layer in range(LAYERS):
            paged_attention(torch.zeros(70, 4, DIM), text[0][layer], text[1][layer], step, layer)
    held = words(cache, a)
    cache.free(a)
    b = cache.add([*ids[:60], 7])
    assert cache.length(b) == 60
    cache.truncate(b, 48)
    c = cache.add(ids)
    assert cache.length(c) == 69
    assert all(torch.equal(x, y) for x, y in zip(words(cache, c), held))
