"""What quality is measured with: the texts, the probes, and that nothing is lost by measuring."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.quality import FULL, Way, logits_of, main
from benchmarks.texts import probes
from benchmarks.texts.probes import Probe
from tests.quality.coded import CodedModel


def without_cache(quality, ids):
    """-log p of tokens 1.. as transformers computes them, without any cache."""
    with torch.no_grad():
        logits = quality.model(ids[None], use_cache=False).logits[0]
    return cross_entropy(logits[:-1], ids[1:], reduction="none"), logits


def test_the_full_cache_predicts_what_the_model_predicts_without_one(few_layers):
    reading = few_layers.full["needles"]
    expected, logits = without_cache(few_layers, reading.probe.ids)
    torch.testing.assert_close(reading.nats[1:], expected, atol=1e-4, rtol=1e-4)
    told = logits[:-1].gather(1, reading.probe.ids[1:, None])
    ranks = 1 + (logits[:-1] > told).sum(-1)
    assert (reading.rank[1:] == ranks).float().mean() > 0.99  # ties in rounding may swap


@pytest.mark.slow
def test_thirty_layers_change_perplexity_by_rounding_only(quality):
    reading = quality.full["docs"]
    expected, _ = without_cache(quality, reading.probe.ids)
    perplexity = expected[reading.probe.scored - 1].mean().exp().item()
    assert reading.perplexity == pytest.approx(perplexity, rel=1e-4)


def test_keeping_everything_is_at_no_distance_from_itself(few_layers):
    again = few_layers.read(Way("other steps", {"page_size": 32}), ["docs"])["docs"]
    assert abs(again.mean_kl) < 5e-6
    assert again.perplexity == pytest.approx(few_layers.full["docs"].perplexity, rel=1e-5)


def test_distance_is_that_of_the_whole_distributions(few_layers):
    way = Way("every token by itself", runner=CodedModel)
    there = few_layers.read(way, ["prose"])["prose"]
    probe = few_layers.probes["prose"]
    with torch.inference_mode():
        full, other = (
            torch.cat([part for *_, part in logits_of(few_layers.model, kind, [probe])])
            for kind in (FULL, way)
        )
    full, other = full.log_softmax(-1), other.log_softmax(-1)
    kl = (full.exp() * (full - other)).sum(-1)[:-1]
    assert kl.mean() > 1e-3
    torch.testing.assert_close(there.kl[1:], kl, atol=3e-5, rtol=0.02)


def test_texts_of_different_length_are_read_as_if_each_were_alone(few_layers):
    docs = few_layers.probes["docs"]
    texts = [docs, Probe("short", docs.ids[:100], docs.scored[:0])]
    with torch.inference_mode():
        found = [(name, part) for name, _, part in logits_of(few_layers.model, FULL, texts)]
    long, short = (torch.cat([part for name, part in found if name == text.name]) for text in texts)
    assert len(short) == 100
    torch.testing.assert_close(short, long[:100], atol=1e-3, rtol=1e-4)
    nats = cross_entropy(long[:-1], docs.ids[1:], reduction="none")
    torch.testing.assert_close(nats, few_layers.full["docs"].nats[1:], atol=1e-4, rtol=1e-4)


def test_the_passage_comes_again_and_its_beginning_does_not_count(few_layers):
    probe = few_layers.probes["recall"]
    length = int(probes.PASSAGE * len(probe.ids))
    first, again = probe.ids[:length], probe.ids[-length:]
    assert torch.equal(first, again)
    assert torch.equal(probe.ids[probe.scored], first[length // 8 :])
    assert int(probe.scored[-1]) == len(probe.ids) - 1


def test_every_needle_lies_in_the_text_and_is_asked_for_behind_it(few_layers, smollm2_path):
    from transformers import AutoTokenizer

    tokenizer, probe = AutoTokenizer.from_pretrained(smollm2_path), few_layers.probes["needles"]
    digits = tokenizer.decode(probe.ids[probe.scored]).replace(" ", "")
    assert digits == "".join(map(str, probes.NUMBERS))
    text = tokenizer.decode(probe.ids)
    places = [text.index(city) for city in probes.CITIES]
    assert places == sorted(places)
    assert all(text.count(city) == 2 for city in probes.CITIES)
    assert len(probe.ids) == 256


def test_a_text_that_was_changed_is_refused(monkeypatch, tmp_path):
    (tmp_path / "docs.txt").write_text("something else")
    monkeypatch.setattr(probes, "DATA", tmp_path)
    with pytest.raises(ValueError, match=r"docs\.txt: expected sha256 509e51cf"):
        probes.text.__wrapped__("docs")


def test_a_text_longer_than_there_is_is_refused(smollm2_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    with pytest.raises(ValueError, match=r"tokens: expected 65\.\.74\d\d, got 100000"):
        probes.probes(tokenizer, tokens=100_000)


@pytest.mark.slow
def test_a_table_names_its_model_texts_and_versions(smollm2_path, capsys):
    main(["--model", str(smollm2_path), "--tokens", "320", "--layers", "1", "--format", "int8"])
    out = capsys.readouterr().out
    assert out.startswith("smollm2-135m-instruct, 1 of 30 layers: llama,")
    for part in ("torch ", "transformers ", "docs 509e51cf9925", "prose 05f560ddbd20"):
        assert part in out
    header, _, full, coded = out.splitlines()[-4:]
    assert header.count("|") == full.count("|") == coded.count("|")
    assert full.startswith("| full |")
    assert coded.startswith("| int8 |")
