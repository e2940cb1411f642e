"""Pages in fewer bits: what is stored, what attention makes of it, and who sees it change."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from pagedkv import CacheConfig, PagedKVCache
from pagedkv.kernels.formats import FORMATS, FP8
from pagedkv.kernels.torch.codes import decode, encode
from tests.effort import slow
from tests.storage.coded import LAYERS, PAIRS, config, feed, kv, part, words

# ------------------------------------------------------------------ numbers


def test_an_element_of_fp8_is_off_by_half_a_step():
    """Others: `tests/kernels/triton/test_page_coding.py`."""
    x = torch.randn(3, 2, 16, 64) * torch.rand(64) * 9
    back = decode(*encode(x, FP8, torch.full((2, 1, 1), 0.125)), FP8, torch.float32)
    half = (x.abs() * 2**-4).clamp(min=0.125 * 2**-10)
    assert ((back - x).abs() <= half * 1.001).all()
    assert (back != x).any()


@pytest.mark.parametrize("name", ["int8", "int4_token", "int4_channel"])
@pytest.mark.parametrize("value", [0.0, 1e-9, -3.0, 1e6, -1e6])
def test_elements_that_are_all_alike_come_back_without_nan(name, value):
    coded = encode(torch.full((1, 1, 16, 32), value), FORMATS[name])
    back = decode(*coded, FORMATS[name], torch.float32)
    # A float16 minimum ends at -65504; above it there is a step.
    expected = max(value, -65504) if "int4" in name else value
    assert torch.allclose(back, torch.full_like(back, expected), rtol=0.1, atol=1e-6)


def test_words_hold_elements_split_over_the_head_dim():
    x = torch.arange(16.0).repeat(2)[None, None, None]  # D = 32, codes of a 4-bit token: its values
    (word, _), D = encode(x, FORMATS["int4_token"]), 32
    for c, j in itertools.product(range(D // 4), range(4)):
        assert (int(word[0, 0, 0, c]) >> (4 * j)) & 15 == int(x[0, 0, 0, c + j * D // 4])
    word, scale = encode(x, FORMATS["int8"])
    for c, j in itertools.product(range(D // 2), range(2)):
        code = ((int(word[0, 0, 0, c]) >> (8 * j)) & 255) - 128
        assert code * float(scale) == pytest.approx(float(x[0, 0, 0, c + j * D // 2]), abs=0.07)


def test_fp8_saturates_instead_of_becoming_infinite():
    x = torch.tensor([1e5, -1e5] * 16)[None, None, None]
    coded = encode(x, FP8, torch.ones(1, 1, 1))
    assert decode(*coded, FP8, torch.float32).abs().unique().tolist() == [448.0]


# ------------------------------------------------------------------ attention


# Kernels are held to every pair in `tests/kernels`. Here two show that the cache hands its pages to
# them as they take them, with staging pages and without.
ON_TRITON = [("int8", "triton"), (("int4", "fp8"), "triton")]
ON_BACKENDS = [*((pair, "torch") for pair in PAIRS), ON_TRITON[0], *slow(ON_TRITON[1])]


@pytest.mark.parametrize(("kv_format", "backend"), ON_BACKENDS, ids=str)
def test_attention_is_that_over_what_the_pages_hold(kv_format, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    cache = PagedKVCache(config(kv_format), device="cpu", backend=backend, debug=True)
    seqs, texts, at = [cache.add() for _ in range(3)], [kv(120, seed) for seed in range(3)], [0] * 3
    for sizes in ([5, 40, 16], [1, 1, 1], [11, 7, 1], [17, 1, 33], [1, 1, 1]):
        spans = [(text, a, a + n) for text, a, n in zip(texts, at, sizes)]
        counts, layers = feed(cache, seqs, [part(*span) for span in spans])
        at = [end for _, _, end in spans]
        for q, out, held in layers:
            for queries, result, (k, v) in zip(q.split(counts), out.split(counts), held):
                mask = torch.ones(len(queries), len(k), dtype=bool).tril(len(k) - len(queries))
                expected = F.scaled_dot_product_attention(
                    *(x.double().transpose(0, 1) for x in (queries, k, v)),
                    attn_mask=mask,
                    enable_gqa=True,
                ).transpose(0, 1)
                assert torch.allclose(result.double(), expected, atol=2e-5)


def test_scales_that_kernels_cannot_read_are_refused_before_a_step():
    """Those of the second layer begin where the first one's end."""
    pytest.importorskip("triton")
    sizes = {"num_kv_heads": 1, "head_dim": 16, "dtype": "float32", "max_tokens": 50}
    for layers, page_size, is_served in ((1, 5, True), (2, 5, False), (2, 8, True)):
        fields = {**sizes, "num_layers": layers, "page_size": page_size, "kv_format": "int8"}
        with nullcontext() if is_served else pytest.raises(NotImplementedError, match="page_size"):
            PagedKVCache(CacheConfig(**fields), device="cpu", backend="triton")


@pytest.mark.parametrize("kv_format", PAIRS, ids=str)
def test_a_sequence_holds_and_attends_alike_alone_and_in_a_batch(kv_format):
    texts = [kv(70, seed) for seed in range(3)]
    alone, together = (PagedKVCache(config(kv_format), device="cpu") for _ in range(2))
    seq, seqs = alone.add(), [together.add() for _ in texts]
    for cache, mine in ((alone, seq), (together, seqs[0])):
        feed(cache, [mine], [part(texts[0], 0, 20)])  # sets the same static scales
    feed(together, seqs[1:], [part(text, 0, 20) for text in texts[1:]])
    for span in ((20, 50), (50, 70)):
        _, by_itself = feed(alone, [seq], [part(texts[0], *span)])
        counts, batched = feed(together, seqs, [part(text, *span) for text in texts])
        for (_, out, _), (_, batch, _) in zip(by_itself, batched):
            assert torch.allclose(out, batch[: counts[0]], atol=2e-6)
    pairs = zip(words(alone, seq), words(together, seqs[0]), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kv_format", [*slow("int8", "int4"), ("int8", "int4")], ids=str)
def test_bytes_do_not_depend_on_how_a_text_was_fed(kv_format):
    text, found = kv(100), []
    for chunk in (100, 1, 7, 16, 33):
        cache = PagedKVCache(config(kv_format), device="cpu", debug=True)
        seq = cache.add()
        for begin in range(0, 100, chunk):
            feed(cache, [seq], [part(text, begin, begin + chunk)])
        found.append([*words(cache, seq), *cache.gather(seq, 1)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize(
    ("kv_format", "dim", "tokens", "ratio"),
    [
        *(("int8", dim, tokens, 1.9) for dim in (64, 128) for tokens in (512, 8192)),
        *(("fp8", dim, tokens, 1.99) for dim in (64, 128) for tokens in (512, 8192)),
        ("int4", 128, 2048, 3.0),
        ("int4", 128, 8192, 3.3),
        ("int4", 64, 8192, 3.2),
    ],
)
def test_bytes_against_bf16(kv_format, dim, tokens, ratio):
    """As many as are allocated: `tests/cache/test_counting.py`."""

    def nbytes(kv_format):
        sizes = {"max_tokens": 8 * tokens, "max_sequences": 8, "kv_format": kv_format}
        return CacheConfig(2, 4, dim, "bfloat16", **sizes).nbytes

    assert nbytes("dense") / nbytes(kv_format) >= ratio


def test_int4_and_half_of_a_text_of_8192_tokens_take_less_than_a_sixth_and_a_half():
    def nbytes(tokens, **fields):
        return CacheConfig(
            2, 4, 128, "bfloat16", max_tokens=8 * tokens, max_sequences=8, **fields
        ).nbytes

    # Keydiff keeps a mean key of every page beside them: 5 % more.
    half = {"kv_format": "int4", "retention": "sinks", "budget": 4096}
    assert nbytes(8192) / nbytes(4096, **half) >= 6.5


def test_auto_pages_are_16_tokens_and_32_with_int4():
    sizes = [CacheConfig(1, 1, 32, "float32", 64, kv_format=f).page_size for f in ("int8", "int4")]
    assert sizes == [16, 32]
    assert CacheConfig(1, 1, 32, "float32", 64, page_size="auto").page_size == 16


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"kv_format": "int2"}, "kv_format: expected one of dense, fp8, int8, int4"),
        ({"kv_format": ("int8",)}, "kv_format"),
        ({"kv_format": None}, "kv_format"),
        ({"kv_format": (["int8"], "int4")}, "kv_format"),
        ({"kv_format": "int4", "head_dim": 48}, "int4 needs a head_dim.*32, got 48"),
        ({"kv_format": "int8", "head_dim": 24}, "int8 needs a head_dim.*16, got 24"),
        ({"kv_format": "int4", "page_size": 8}, "int4 needs a page_size.*16, got 8"),
    ],
)
def test_a_format_that_does_not_fit_is_refused_by_name(fields, match):
    shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 32, "dtype": "float32"}
    with pytest.raises(ValueError, match=match):
        CacheConfig(**{**shape, "max_tokens": 64, **fields})


def test_a_weak_first_token_leaves_fp8_room_for_what_follows():
    cache = PagedKVCache(config("fp8"), device="cpu")
    seq, text = cache.add(), kv(40)
    feed(cache, [seq], [tuple(0.2 * x for x in part(text, 0, 1))])
    feed(cache, [seq], [part(text, 1, 40)])
    for stored, given in zip(cache.gather(seq, 0), text):
        assert torch.allclose(stored[1:], given[0, 1:], rtol=2**-4, atol=1e-3)


def test_fp8_scales_are_set_by_the_first_write_and_stay():
    cache = PagedKVCache(config("fp8"), device="cpu")
    seq = cache.add()
    feed(cache, [seq], [kv(20)])
    held = cache.gather(seq, 0)
    scales = [pages.scales.clone() for pages in cache._storage._groups[0]]
    assert all(torch.equal(s.log2(), s.log2().round()) for s in scales), "not powers of two"
    feed(cache, [seq], [tuple(100 * x for x in kv(5))])
    again = [pages.scales for pages in cache._storage._groups[0]]
    assert all(torch.equal(a, b) for a, b in zip(scales, again))
    assert all(torch.equal(x[:20], before) for x, before in zip(cache.gather(seq, 0), held))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_no_number_sets_no_scale_that_ruins_what_follows(bad):
    cache = PagedKVCache(config("fp8"), device="cpu")
    seq, (k, v) = cache.add(), kv(20)
    k[:, 3, :, 0] = bad
    feed(cache, [seq], [(k, v)])
    k, v = kv(20)
    other = cache.add()
    feed(cache, [other], [(k, v)])
    for stored, given in zip(cache.gather(other, 0), (k[0], v[0])):
        assert (stored - given).abs().max() < 0.07 * given.abs().max()


@pytest.mark.parametrize("nothing", [0.0, float("nan"), float("inf")])
def test_a_first_write_that_says_nothing_leaves_the_scale_to_what_follows(nothing):
    cache = PagedKVCache(config("fp8"), device="cpu")
    seq, (k, v) = cache.add(), (1e-3 * x for x in kv(20))
    feed(cache, [seq], [(torch.full_like(k[:, :1], nothing), torch.full_like(v[:, :1], nothing))])
    feed(cache, [seq], [(k, v)])
    for stored, given in zip(cache.gather(seq, 0), (k[0], v[0])):
        assert (stored[1:] - given).abs().max() < 0.07 * given.abs().max()
        if not nothing:
            assert not stored[0].any()


def test_each_head_waits_for_a_first_number_of_its_own():
    cache = PagedKVCache(config("fp8"), device="cpu")
    seq, (k, v) = cache.add(), (1e-3 * x for x in kv(20))
    for x in (k, v):
        x[:, :10, 1] = 0
    feed(cache, [seq], [(k[:, :10], v[:, :10])])
    first = [pages.scales.clone() for pages in cache._storage._groups[0]]
    feed(cache, [seq], [(k[:, 10:], v[:, 10:])])
    feed(cache, [seq], [kv(20)])
    for pages, before in zip(cache._storage._groups[0], first):
        assert torch.equal(pages.scales[:, 0], before[:, 0])
    for stored, given in zip(cache.gather(seq, 0), (k[0], v[0])):
        assert (stored[:20] - given).abs().max() < 0.07 * given.abs().max()


def test_layers_are_measured_until_every_head_has_its_scale_and_no_longer(monkeypatch):
    cache = PagedKVCache(config("fp8"), device="cpu")
    seq, (k, v) = cache.add(), kv(3)
    measured, amax = [], torch.Tensor.amax
    monkeypatch.setattr(torch.Tensor, "amax", lambda *a: measured.append(1) or amax(*a))
    counts = []
    for text in [(0 * k, 0 * v), (k, 0 * v), (k, v), (k, v), (k, v)]:
        feed(cache, [seq], [text])
        counts.append(len(measured))
        measured.clear()
    assert counts == [2 * LAYERS, 2 * LAYERS, 2 * LAYERS, 0, 0]


def test_a_head_without_a_scale_is_forked_and_offloaded_and_gets_one_later():
    cache = PagedKVCache(config("fp8", host_tokens=512), device="cpu")
    seq, (k, v) = cache.add(), (1e-3 * x for x in kv(40))
    feed(cache, [seq], [(0 * k, 0 * v)])
    (other,) = cache.fork(seq)
    cache.offload(seq)
    feed(cache, [other], [(k, v)])
    cache.restore(seq)
    feed(cache, [seq], [(k, v)])
    for one in (seq, other):
        for stored, given in zip(cache.gather(one, 0), (k[0], v[0])):
            assert not stored[:40].any()
            assert (stored[40:] - given).abs().max() < 0.07 * given.abs().max()
