"""Verdicts and recommendations: what passes the gates, what does not, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedkv import CacheConfig, PagedKVCache
from pagedkv.hf.model import cache_config
from pagedkv.kernels.torch import page_coding
from pagedkv.quality import Measured, Quality, Variant, measure, measure_quality, variant
from pagedkv.quality.measure import FORGETS, GOOD, VISIBLE
from pagedkv.quality.probes import Probe
from pagedkv.quality.reading import Reader, Reading
from pagedkv.quality.variants import FULL, bytes_held, pays_from
from tests.hf.tiny import tiny
from tests.quality.test_probes import LONG, Letters


@pytest.fixture(scope="module")
def model():
    return tiny(hidden_size=128, vocab_size=128).eval()


def measured(name, fewer, kl, recalled=1.0, verdict=GOOD):
    one = {"text": kl}
    return Measured(name, 100 / fewer, fewer, {"text": 9.0}, one, one, {"text": 0.99}, 2.0, None,
                    recalled, verdict)  # fmt: skip


def recommended(*variants):
    full = measured("full cache", 1.0, 0.0)
    return Quality({"text": 1024}, "float32", full, 30.0, variants).recommendation


def test_a_dense_cache_is_good_and_at_no_distance(model):
    found = measure_quality(model, Letters(), [variant()], {"text": LONG}, length=200)
    (dense,) = found.variants
    assert abs(dense.worst_kl) < 1e-6
    assert dense.agreement == {"text": 1.0}
    assert dense.fewer == 1.0
    assert dense.verdict == GOOD
    assert found.tokens == {"text": 200}
    assert found.recommendation == "dense is good, but keeps no fewer bytes than the full cache."


def test_a_broken_format_is_not_good(model, monkeypatch):
    def run():
        ways = [variant("int8")]
        (found,) = measure_quality(model, Letters(), ways, {"text": LONG}, length=128).variants
        return found

    whole = run()
    assert whole.verdict == GOOD
    decode = page_coding.decode

    def doubled(words, scales, format, dtype, out=None):
        return decode(words, 2 * scales, format, dtype, out)

    monkeypatch.setattr(page_coding, "decode", doubled)
    monkeypatch.setattr("pagedkv.cache.cache.choose_backend", lambda *_: "torch")
    broken = run()
    assert broken.verdict != GOOD
    assert broken.worst_kl > 100 * whole.worst_kl


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("llama", FULL),
        ("llama", variant("int8")),
        ("llama", variant("int4")),
        ("llama", variant(("int8", "int4"))),
        ("llama", variant(retention="sinks", budget=96)),
        ("llama", variant(retention="sinks", keep=0.5)),
        ("llama", variant("int4", "importance", keep=0.75)),
        ("llama", variant("int8", read=64)),
        ("gemma3", FULL),  # layers with a window beside others
        ("gemma3", variant(retention="keydiff", budget=96)),
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_bytes_are_those_of_the_pages_that_a_text_holds(family, way):
    wide = {"hidden_size": 128} if family == "llama" else {}
    model = tiny(family, **wide).to(torch.bfloat16)
    text = Probe("text", torch.randint(1, 101, (200,)), torch.arange(64, 200), True)
    with torch.inference_mode(), Reader(model, way, [text]) as reader:
        for _ in reader.read(200):
            pass
        held = reader.kv.stats().live_bytes
    assert bytes_held(reader.kv.config, 200) == held


def test_a_measurement_gives_no_advice_on_its_own_small_cache(model, monkeypatch, recwarn):
    said = "int4 takes 9 MiB here, int8 5; int8 takes less"
    monkeypatch.setattr(CacheConfig, "larger_than_int8", said)
    measure_quality(model, Letters(), [variant("int4")], {"text": LONG}, length=128)
    assert not [str(w.message) for w in recwarn if "int8" in str(w.message)]
    with pytest.warns(UserWarning, match=said):
        PagedKVCache(CacheConfig(1, 1, 32, "float32", 64, kv_format="int4"), device="cpu")


def test_a_float32_cache_counts_as_one_of_two_bytes(model):
    found = measure_quality(model, Letters(), [variant("int8")], {"text": LONG}, length=128)
    config = model.config
    heads = config.num_hidden_layers * config.num_key_value_heads
    assert found.full.bytes_per_token == 2 * 2 * heads * config.head_dim
    assert 1.8 < found.variants[0].fewer < 2


def test_a_format_that_pays_in_long_rows_only_says_from_which_length_on(model):
    ways = [variant("int8"), variant("int4"), variant("int8", "sinks", keep=0.5)]
    found = measure_quality(model, Letters(), ways, {"text": LONG}, length=200)
    from_here = found.pays_from["int4"]["int8"]
    int8, int4 = (cache_config(model, 8192, max_sequences=1, **way.fields) for way in ways[:2])
    for tokens in range(1, 3000):
        fewer = bytes_held(int4, tokens) < bytes_held(int8, tokens)
        assert fewer or tokens < from_here
        assert not fewer or tokens != from_here - 1
    assert "int4 takes fewer bytes a row than the full cache from " in found.lengths[0]
    assert f", than int8 from {from_here:,} tokens on." in found.lengths[0]
    assert len(found.lengths) == 1  # int8 pays from its first token on


def test_a_format_that_pays_in_no_row_has_no_length(model):
    config = cache_config(model, 8192, max_sequences=1, kv_format="int8")
    assert pays_from(config, config) is None


@pytest.mark.parametrize(
    ("kl", "recalled", "verdict"),
    [(0.001, 0.95, GOOD), (0.001, None, GOOD), (0.02, 0.95, VISIBLE), (0.001, 0.8, FORGETS),
     (0.02, 0.0, FORGETS)],
)  # fmt: skip
def test_a_verdict_goes_by_distance_and_recall(kl, recalled, verdict):
    assert measure.verdict_of([kl / 2, kl], recalled) == verdict


def test_the_fewest_bytes_of_what_is_good_are_recommended():
    int8 = measured("int8", 1.94, 0.0009)
    int4 = measured("int4", 2.98, 0.0056)
    forgetful = measured("fifo 10 %", 10.0, 0.5, 0.0, FORGETS)
    assert recommended(int8, int4, forgetful) == (
        "Use int4: 2.98x fewer bytes at a KL of 0.0056 nats; int8 stays closer, 1.94x fewer bytes "
        "at a KL of 0.0009 nats."
    )
    assert recommended(int8, replace(int4, verdict=VISIBLE)) == (
        "Use int8: 1.94x fewer bytes at a KL of 0.0009 nats."
    )


def test_nothing_is_recommended_where_nothing_is_good():
    visible = measured("int4", 2.98, 0.05, verdict=VISIBLE)
    forgetful = measured("keydiff 50 %", 2.0, 0.01, 0.8, FORGETS)
    assert recommended(visible, forgetful) == (
        "Keep the full cache: the closest, int4, has a KL of 0.050 nats."
    )
    assert recommended(forgetful) == (
        "Keep the full cache: the closest, keydiff 50 %, keeps 80% of its recall."
    )


@pytest.mark.parametrize(
    ("variants", "length", "says"),
    [
        ([], 512, "length: expected at most 256, which this model takes, got 512"),
        ([variant(retention="keydiff", budget=16)], 200, "keydiff 16: budget: expected at least"),
        ([Variant("odd", {"kv_format": "int7"})], 200, "odd: kv_format: expected one of"),
    ],
)
def test_what_cannot_be_measured_is_named(model, variants, length, says):
    with pytest.raises(ValueError, match=says):
        measure_quality(model, Letters(), variants, {"text": LONG}, length=length)


def test_a_model_whose_logits_are_no_numbers_is_no_model_to_advise_on():
    """A cache was recommended, and every token said to be the same: the likeliest of NaN."""
    broken = tiny(hidden_size=128, vocab_size=128)
    broken.lm_head.weight.data[5] = torch.nan
    with pytest.raises(ValueError, match="model: its logits for text are no numbers"):
        measure_quality(broken, Letters(), [variant("int8")], {"text": LONG}, length=130)


def test_what_a_full_cache_or_another_finds_all_but_impossible_is_not_recalled():
    """A perplexity of infinity: its logarithm was taken of a quotient of 0."""
    probe = Probe("recall", torch.arange(4), torch.arange(2, 4))

    def read(nats):
        return {"recall": replace(Reading.of(probe), nats=torch.full((4,), nats))}

    assert measure._recalled(read(100.0), read(1.0), unseen=30.0) == 0.0
    assert measure._recalled(read(1.0), read(100.0), unseen=30.0) is None


@pytest.mark.slow
def test_a_window_loses_recall_and_eight_bits_do_not(quality):
    window, int8 = (
        measure_quality(
            quality.model,
            quality.tokenizer,
            [variant(retention="fifo", budget=256, length=512), variant("int8")],
            length=512,
        )
    ).variants
    assert window.verdict == FORGETS
    assert window.recalled < 0.2
    assert int8.verdict == GOOD
    assert int8.recalled > 0.95


def test_no_distance_is_below_zero(model, monkeypatch):
    """Rounding brings sums of a distribution's terms a little below it."""
    note = Reading.note

    def rounded(reading, begin, log_p, full):
        note(reading, begin, log_p, full)
        reading.kl -= 1e-6

    monkeypatch.setattr(Reading, "note", rounded)
    found = measure_quality(model, Letters(), [variant()], {"text": LONG}, length=200)
    assert found.variants[0].kl == found.variants[0].kl_p99 == {"text": 0.0}
