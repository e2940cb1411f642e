"""A chunk of chunked attention is a text of its own; what comes before it is not seen."""

import pytest
import torch

from pagedkv import LayerGroup, PagedKVCache, attend_again, paged_attention
from tests.attention.texts import (
    P,
    Sizes,
    Text,
    all_at_once,
    cache_for,
    check,
    prefill_then_decode,
    run,
    text,
)
from tests.effort import each_value

CHUNK = 2 * P
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * P + 3, 5 * P + 1)
SCHEDULES = {
    "at once": all_at_once,
    "decoded": lambda texts: [[1] * len(texts)] * min(t.length for t in texts),
    "then decoded": lambda texts: prefill_then_decode(texts, min(t.length for t in texts) - 1),
    "in parts": lambda texts: [
        [min(5, max(0, t.length - 5 * i)) for t in texts]
        for i in range(-(-max(t.length for t in texts) // 5))
    ],
}
GROUPS = (LayerGroup((1,)), LayerGroup((0, 2), CHUNK, chunked=True))


def chunked_cache(sizes, backend="auto", **fields):
    config = cache_for(sizes, GROUPS, 3, **fields).config
    return PagedKVCache(config, device="cpu", backend=backend, debug=True)


def parts_of(t, size):
    """The chunks of a text, each as a text; the last may be shorter."""
    cuts = range(0, t.length, size)
    return [Text(*(x[:, a : a + size] for x in (t.q, t.k, t.v))) for a in cuts]


def check_chunks(texts, results):
    """Layer 1 sees all, the others what is in the chunk of their query."""
    for t, found in zip(texts, results, strict=True):
        n = found[0].shape[1]
        whole = Text(*(x[1:2, :n] for x in (t.q, t.k, t.v)))
        check([whole], [tuple(x[1:2] for x in found)])
        for part, at in zip(
            parts_of(Text(t.q[:, :n], t.k[:, :n], t.v[:, :n]), CHUNK), range(0, n, CHUNK)
        ):
            for layer in (0, 2):
                own = Text(*(x[layer : layer + 1] for x in (part.q, part.k, part.v)))
                check([own], [tuple(x[layer : layer + 1, at : at + CHUNK] for x in found)])


@pytest.mark.parametrize(("schedule", "backend"), each_value(SCHEDULES, ["c", "torch"]))
def test_a_chunk_is_a_text_of_its_own(schedule, backend):
    """Lengths around every border, beside each other in one step."""
    sizes = Sizes()
    lengths = LENGTHS if schedule == "at once" else LENGTHS[1:]
    texts = [text(sizes, n, seed=n, layers=3) for n in lengths]
    check_chunks(texts, run(chunked_cache(sizes, backend), texts, SCHEDULES[schedule](texts)))


def test_kernels_of_a_card_read_chunks_too():
    pytest.importorskip("triton")
    sizes = Sizes(heads=2, groups=1, dim=32)
    texts = [text(sizes, n, seed=n, layers=3) for n in (CHUNK + 3, 2 * P)]
    cache = chunked_cache(sizes, "triton", max_tokens=128)
    check_chunks(texts, run(cache, texts, prefill_then_decode(texts, 2)))


def test_pages_before_the_chunk_are_given_back():
    cache, sizes = chunked_cache(Sizes()), Sizes()
    texts = [text(sizes, 4 * CHUNK, seed=1, layers=3)]
    run(cache, texts, SCHEDULES["in parts"](texts))
    assert cache.stats().live < 3 * 4 * CHUNK // P
    cache.check()


def test_some_rows_may_attend_again_to_the_chunks_of_another_layer():
    sizes = Sizes()
    texts = [text(sizes, n, seed=n, layers=3) for n in (CHUNK + 5, 5)]
    cache = chunked_cache(sizes)
    seqs = [cache.add(), cache.add()]
    with cache.step(seqs, num_new=[t.length for t in texts]) as step:
        for layer in range(3):
            q, k, v = (torch.cat([getattr(t, x)[layer] for t in texts]) for x in "qkv")
            out = paged_attention(q, k, v, step, layer)
        last = torch.cat([t.q[2, -n:] for t, n in zip(texts, (7, 1))])
        again = attend_again(last, step, 2, num_queries=[7, 1])
        alone = attend_again(torch.cat([t.q[2] for t in texts]), step, 2)
    assert torch.equal(alone, out)
    torch.testing.assert_close(again, torch.cat([out[: CHUNK + 5][-7:], out[-1:]]))


def test_a_chunk_is_whole_pages():
    with pytest.raises(ValueError, match=r"page_size: expected a divisor of 20, .* got 8"):
        cache_for(Sizes(), (LayerGroup((0,), 20, chunked=True),))
    assert (
        cache_for(Sizes(), (LayerGroup((0,), 20, chunked=True),), page_size="auto").config.page_size
        == 4
    )
