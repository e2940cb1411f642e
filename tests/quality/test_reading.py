"""Reading side by side: figures are those of whole distributions, whatever the steps are."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from pagedkv.quality import Variant, reading, variant
from pagedkv.quality.probes import Probe
from pagedkv.quality.reading import FULL, Reader, compare
from tests.hf.tiny import tiny
from tests.quality.coded import CodedModel

ONE_BY_ONE = Variant("every token by itself", runner=CodedModel)


@pytest.fixture(scope="module")
def model():
    """Heads as wide as formats need, and a context of 256 tokens."""
    return tiny(hidden_size=128).eval()


def random(name, tokens, running=True):
    return Probe(name, torch.randint(1, 101, (tokens,)), torch.arange(64, tokens), running)


def without_cache(model, ids):
    """Logits as transformers computes them, without any cache."""
    with torch.inference_mode():
        return model(ids[None], use_cache=False).logits[0]


def through(model, way, probe):
    """Log-probabilities of a whole text that a variant predicts, read alone."""
    with torch.inference_mode(), Reader(model, way, [probe]) as reader:
        return torch.cat([part for *_, part in reader.read(len(probe.ids))])


@pytest.mark.parametrize("way", [variant("int8"), variant("int4"), ONE_BY_ONE, variant(read=64)])
def test_distance_is_that_of_the_whole_distributions(model, way):
    probe = random("text", 200)
    (found,) = compare(model, [way], [probe])
    full = without_cache(model, probe.ids).double().log_softmax(-1)
    other = through(model, way, probe).double()
    kl = (full.exp() * (full - other)).sum(-1)[:-1]
    assert kl[64:].mean() > 1e-4
    torch.testing.assert_close(found["text"].kl[1:].double(), kl, atol=2e-5, rtol=1e-3)
    same = full.argmax(-1) == other.argmax(-1)
    assert torch.equal(found["text"].same[1:].bool(), same[:-1])


@pytest.mark.parametrize("page_size", [16, 24, 128])
def test_keeping_everything_is_at_no_distance_from_itself(model, page_size):
    probe = random("text", 200)
    way = variant(page_size=page_size)
    full, again = compare(model, [FULL, way], [probe])
    assert again["text"].kl[1:].abs().max() < 1e-6
    assert again["text"].same[1:].all()
    torch.testing.assert_close(again["text"].nats[1:], full["text"].nats[1:], atol=1e-5, rtol=1e-5)
    assert torch.equal(full["text"].kl[1:], torch.zeros(199))


def test_the_full_cache_predicts_what_the_model_predicts_without_one(few_layers):
    found = few_layers.full["needles"]
    ids = found.probe.ids
    logits = without_cache(few_layers.model, ids)
    expected = cross_entropy(logits[:-1], ids[1:], reduction="none")
    torch.testing.assert_close(found.nats[1:], expected, atol=1e-4, rtol=1e-4)
    told = logits[:-1].gather(1, ids[1:, None])
    ranks = 1 + (logits[:-1] > told).sum(-1)
    assert (found.rank[1:] == ranks).float().mean() > 0.99  # ties in rounding may swap


@pytest.mark.slow
def test_thirty_layers_change_perplexity_by_rounding_only(quality):
    found = quality.full["docs"]
    ids = found.probe.ids
    logits = without_cache(quality.model, ids)
    nats = cross_entropy(logits[:-1], ids[1:], reduction="none")
    expected = nats[found.probe.scored - 1].mean().exp().item()
    assert found.perplexity == pytest.approx(expected, rel=1e-4)


def test_texts_of_different_length_are_read_as_if_each_were_alone(model):
    texts = [random("long", 200), random("short", 100), random("asked", 70, running=False)]
    (found,) = compare(model, [variant("int8")], texts)
    for text in texts:
        (alone,) = compare(model, [variant("int8")], [text])
        torch.testing.assert_close(
            found[text.name].nats[1:], alone[text.name].nats[1:], atol=1e-3, rtol=1e-3
        )
        assert found[text.name].kl[1:].isfinite().all() == text.running


def test_texts_that_begin_alike_are_forgotten_apart(model):
    # Pages that two sequences share are never evicted: they would serve as each other's sinks.
    way = variant(retention="fifo", budget=80)
    text = random("text", 200)
    twin = Probe("twin", text.ids[:160], text.scored[:10])
    (alone,), (beside,) = (compare(model, [way], texts) for texts in ([text], [text, twin]))
    torch.testing.assert_close(
        alone["text"].nats[1:], beside["text"].nats[1:], atol=1e-3, rtol=1e-3
    )


def test_variants_that_do_not_fit_together_are_read_one_after_the_other(model, monkeypatch):
    text = random("text", 150)
    variants = [FULL, variant("int8"), variant(retention="sinks", budget=80)]
    together = compare(model, variants, [text])
    told = []
    monkeypatch.setattr(reading, "available_memory", lambda device: 0)
    apart = compare(model, variants, [text], lambda done, total: told.append((done, total)))
    for one, other in zip(together, apart):
        torch.testing.assert_close(one["text"].nats[1:], other["text"].nats[1:])
        torch.testing.assert_close(one["text"].kl[1:], other["text"].kl[1:])
    assert told[-1] == (600, 600)  # the full cache beside each of the two


def test_progress_counts_up_to_what_was_announced(model):
    texts = [random("long", 200), random("asked", 90, running=False)]
    told = []
    compare(model, [variant("int8")], texts, lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert {total for _, total in told} == {200 + 290}
    assert told[-1] == (490, 490)


def test_the_model_has_its_own_attention_back_after_an_error(model):
    before = model.config._attn_implementation

    def stop(done, total):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        compare(model, [variant("int8")], [random("text", 150)], stop)
    assert model.config._attn_implementation == before
