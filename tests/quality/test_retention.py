"""What forgetting may cost a small model. Budgets are shares of 1,024 tokens.

The gates on running text are those of the slices that `benchmarks/texts/probes.py` takes;
`docs/policies.md` says how far other slices lie from them.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.quality import logits_of, way_of
from benchmarks.texts.probes import Probe
from pagedkv.retention import POLICIES

# Perplexity of the passage that comes again, at half of the text: what a policy that remembers may
# reach. The full cache has 1.3; without a memory of the passage it is beyond 20.
REMEMBERS = {"importance": 12, "keydiff": 4, "semantic": 4}
FORGETS = 20


@pytest.mark.slow
def test_a_window_needs_its_sinks(worse):
    assert worse(way_of(policy="sinks", budget=0.25), "prose") < 0.04
    assert worse(way_of(policy="fifo", budget=0.25), "prose") > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_policy_recalls_from_half_of_the_text(quality, read, policy):
    (recall,) = read(way_of(policy=policy, budget=0.5), "recall")
    if most := REMEMBERS.get(policy):
        assert quality.full["recall"].perplexity < recall.perplexity < most
    else:
        assert recall.perplexity > FORGETS


@pytest.mark.slow
def test_distinct_keys_recall_four_times_better_than_a_window(read):
    (keydiff,) = read(way_of(policy="keydiff", budget=0.5), "recall")
    (window,) = read(way_of(policy="sinks", budget=0.5), "recall")
    assert window.perplexity > 4 * keydiff.perplexity


@pytest.mark.slow
def test_a_quarter_of_the_pages_read_recalls_nearly_all(quality, read):
    (recall,) = read(way_of(read=0.25), "recall")
    assert quality.full["recall"].perplexity < recall.perplexity < 2.5


# Technical text takes the loss of similar pages worse, and is no gate of theirs.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "text"), [("keydiff", "prose"), ("sinks", "prose"), ("sinks", "docs")]
)
def test_running_text_goes_on_from_four_bits_and_half_of_it(worse, policy, text):
    assert worse(way_of("int4", policy, 0.5), text) < 0.05


def test_texts_that_begin_alike_are_forgotten_apart(few_layers):
    # Pages that two sequences share are never evicted: they would serve as each other's sinks.
    way = way_of(policy="fifo", budget=0.25, tokens=few_layers.tokens)
    docs = few_layers.probes["docs"]
    twin = Probe("twin", docs.ids[:200], docs.scored)
    with torch.inference_mode():
        found = [
            torch.cat([part for name, _, part in logits_of(few_layers.model, way, texts)
                       if name == "docs"])
            for texts in ([docs], [docs, twin])
        ]  # fmt: skip
    torch.testing.assert_close(*found, atol=1e-3, rtol=1e-4)
