"""A wish: the smallest way whose KL stays below it on texts that nothing was chosen by."""

from __future__ import annotations

import pytest
import torch

from pagedkv.kernels.torch import page_coding
from pagedkv.quality import Variant, measure_quality, promise
from pagedkv.quality.promise import (
    DRAWS,
    ENOUGH,
    LEAST_WINDOWS,
    MOST_WINDOWS,
    judge,
    share_held,
    windows_of,
)
from tests.hf.tiny import tiny
from tests.quality.coded import CodedModel
from tests.quality.test_probes import LONG, Letters

WISH, WINDOWS = 0.01, 16
# Planted: what each takes, and its KL over all texts there are.
PLANTED = {"exact": (100, 0.0), "near": (60, 0.004), "at the edge": (40, WISH), "far": (30, 0.02)}


def planted(n, generator):
    """Windows of each way: their KL is the way's, times what a window has more than others."""
    spread = 0.5
    found = {}
    for name, (_, kl) in PLANTED.items():
        normal = torch.randn(n, generator=generator, dtype=torch.double)
        found[name] = kl * (spread * normal - spread**2 / 2).exp()
    return found


def test_a_way_at_the_edge_of_the_wish_is_seldom_promised_and_the_smallest_below_it_nearly_always():
    generator, size = torch.Generator().manual_seed(0), {n: each[0] for n, each in PLANTED.items()}
    chosen = []
    for _ in range(200):
        held_out = planted(WINDOWS, generator)
        read = lambda names, held_out=held_out: {name: held_out[name] for name in names}  # noqa: E731
        chosen.append(judge(planted(WINDOWS // 2, generator), read, size, WISH).chosen)
    assert chosen.count("far") == 0
    assert chosen.count("at the edge") <= 0.08 * len(chosen)
    assert chosen.count("near") >= 0.9 * len(chosen)
    assert chosen.count(None) + chosen.count("exact") <= 0.01 * len(chosen)


def test_what_few_windows_have_most_of_is_promised_no_oftener_for_it(monkeypatch):
    """Alone finds a plain bootstrap of means, by which one in six at the edge is promised here."""
    monkeypatch.setattr(promise, "DRAWS", 200)
    source = torch.Generator().manual_seed(2)
    normal = 0.8 * torch.randn(400, WINDOWS, generator=source, dtype=torch.double)
    edge = WISH * (normal - 0.8**2 / 2).exp()
    assert sum(share_held(kl, WISH) >= ENOUGH for kl in edge) <= 0.125 * 400


def test_ways_are_judged_from_the_closest_on_until_one_fails():
    kl = {"a": 0.001, "b": 0.02, "c": 0.003, "d": 0.004}
    near = {name: torch.full((8,), kl[name] if name != "b" else 0.002) for name in kl}
    asked = []

    def read(names):
        asked.extend(names)
        return {name: torch.full((16,), kl[name]) for name in names}

    size = {"a": 4, "b": 3, "c": 2, "d": 1}
    found = judge(near, read, size, 0.0035)
    assert asked == ["a", "b", "c"]  # what is too far already reads no more
    assert (found.held, found.chosen) == ({"a": 1.0, "b": 0.0}, "a")
    assert judge(near, read, size, 0.0001).sentence.startswith(
        "Nothing stays below 0.0001 nats: the nearest, a, has a KL of 0.0010 nats on 16 held-out "
    )
    assert "all that was tried loses recall" in judge({}, read, {}, 1.0).sentence


def test_windows_are_cut_of_long_texts_and_short_texts_are_one_each():
    texts = {"long": LONG[: 140 * 28 + 7], "short": LONG[:130]}
    lengths = [len(window.ids) for window in windows_of(Letters(), 140, texts)]
    assert lengths == [140] * 28 + [130]
    assert len(windows_of(Letters(), 128, {"one": LONG, "other": LONG[::-1]})) == MOST_WINDOWS
    with pytest.raises(ValueError, match="24 windows of 140 tokens, got 3; give 2,940 more"):
        windows_of(Letters(), 140, {"text": LONG[:430]})


@pytest.fixture
def model():
    return tiny(hidden_size=128, vocab_size=128).eval()


def test_a_wish_is_granted_by_the_smallest_that_holds_and_progress_ends_where_it_said(model):
    ways = [Variant("int8", {"kv_format": "int8"}), Variant("coded", runner=CodedModel)]
    told, text = [], {"text": LONG[: 128 * LEAST_WINDOWS]}
    wish = {"length": 128, "at_most": 0.05, "tell": lambda *read: told.append(read)}
    found = measure_quality(model, Letters(), ways, text, **wish)
    assert found.promise.chosen == "int8"
    assert found.promise.held["int8"] >= ENOUGH
    assert [*found.promise.near] == ["int8", "coded"]
    assert found.recommendation.startswith("Use int8: a KL of 0.0")
    assert f"{DRAWS:,} draws" in found.recommendation
    assert told == sorted(told, key=lambda read: read[0])
    assert told[-1][0] == told[-1][1]
    nothing = measure_quality(model, Letters(), ways, text, length=128, at_most=1e-9)
    assert nothing.promise.chosen is None
    assert {each.verdict for each in nothing.variants} != {"good"}


def test_a_way_without_any_distance_holds_in_all_draws():
    assert share_held(torch.zeros(16), 1e-9) == 1.0


def test_predictions_that_are_no_numbers_are_neither_good_nor_promised(model, monkeypatch):
    """As where float16 overflows; a maximum with 0 would make a KL of 0 of them."""
    decode = page_coding.decode

    def spoilt(words, scales, *form):
        return decode(words, torch.nan * scales, *form)

    monkeypatch.setattr(page_coding, "decode", spoilt)
    monkeypatch.setattr("pagedkv.cache.cache.choose_backend", lambda *_: "torch")
    text, ways = {"text": LONG[: 128 * LEAST_WINDOWS]}, [Variant("int8", {"kv_format": "int8"})]
    found = measure_quality(model, Letters(), ways, text, length=128, at_most=0.05)
    assert found.promise.chosen is None
    assert [each.verdict for each in found.variants] != ["good"]
