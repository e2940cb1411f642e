"""Bounds for what forgetting costs a small model. Budgets are tokens of 1,024.

The gates on running text are those of the slices that `pagedkv/quality/probes.py` takes;
`docs/policies.md` says how far other slices lie from them.
"""

from __future__ import annotations

import pytest

from pagedkv.quality import variant
from pagedkv.retention import POLICIES

# Perplexity of the passage that comes again, at half of the text: what a policy that remembers may
# reach. The full cache has 1.3; without a memory of the passage it is beyond 20.
REMEMBERS = {"importance": 12, "keydiff": 4, "semantic": 4}
FORGETS = 20


@pytest.mark.slow
def test_a_window_needs_its_sinks(worse):
    assert worse(variant(retention="sinks", budget=256), "prose") < 0.04
    assert worse(variant(retention="fifo", budget=256), "prose") > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_policy_recalls_from_half_of_the_text(quality, read, policy):
    (recall,) = read(variant(retention=policy, budget=512), "recall")
    if most := REMEMBERS.get(policy):
        assert quality.full["recall"].perplexity < recall.perplexity < most
    else:
        assert recall.perplexity > FORGETS


@pytest.mark.slow
def test_distinct_keys_recall_four_times_better_than_a_window(read):
    (keydiff,) = read(variant(retention="keydiff", budget=512), "recall")
    (window,) = read(variant(retention="sinks", budget=512), "recall")
    assert window.perplexity > 4 * keydiff.perplexity


@pytest.mark.slow
def test_a_quarter_of_the_pages_read_recalls_nearly_all(quality, read):
    (recall,) = read(variant(read=0.25), "recall")
    assert quality.full["recall"].perplexity < recall.perplexity < 2.5


# Technical text takes the loss of similar pages worse, and is no gate of theirs.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "text"), [("keydiff", "prose"), ("sinks", "prose"), ("sinks", "docs")]
)
def test_running_text_goes_on_from_four_bits_and_half_of_it(worse, policy, text):
    assert worse(variant("int4", policy, 512), text) < 0.05
