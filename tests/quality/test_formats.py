"""Bounds for what each format costs a small model, on both texts: how far predictions move."""

from __future__ import annotations

import pytest

from pagedkv.quality import Variant, variant
from tests.quality.coded import CodedModel

pytestmark = pytest.mark.slow

INT4 = 0.012  # nats


@pytest.mark.parametrize(("format", "most"), [("int8", 0.002), ("fp8", 0.02), ("int4", INT4)])
def test_a_format_stays_close_to_the_full_cache(read, format, most):
    prose, docs = read(variant(format), "prose", "docs")
    assert 0 < prose.mean_kl < most
    assert 0 < docs.mean_kl < most


def test_four_bits_without_channels_and_exact_pages_fail_that_gate(read):
    prose, docs = read(Variant("every token by itself", runner=CodedModel), "prose", "docs")
    assert min(prose.mean_kl, docs.mean_kl) > 4 * INT4


def test_four_bits_forget_nothing(quality, read):
    recall, needles = read(variant("int4"), "recall", "needles")
    assert recall.perplexity < 1.1 * quality.full["recall"].perplexity
    assert needles.found > 0.9
