"""Pages that a plan sizes."""

import pytest

pytest.importorskip("transformers")

from pagedkv import PagedCache, plan_memory
from tests.hf.tiny import generate, padded, prompts, tiny


def plan_for(model, **options):
    options = {"device_memory": "64MiB", "device": "cpu", "length": 40, "page_size": 4, **options}
    return plan_memory(model.config, **options)


def test_a_plan_sizes_the_pages_and_changes_no_token():
    model = tiny()
    plan = plan_for(model, batch=2)
    cache = PagedCache(model, plan=plan)
    assert cache.kv.config == plan.cache
    batch = padded(prompts(5, 9))
    expected = generate(model, batch, max_new_tokens=6)
    got = generate(model, batch, max_new_tokens=6, past_key_values=cache)
    assert got.sequences.tolist() == expected.sequences.tolist()


def test_caches_of_one_plan_share_their_pages():
    model = tiny()
    plan = plan_for(model)
    one, other = PagedCache(model, plan=plan), PagedCache(model, plan=plan)
    assert one.kv is other.kv


def test_a_plan_beside_other_sizes_or_pages_is_refused():
    model = tiny()
    plan = plan_for(model)
    pages = PagedCache(model, plan=plan).kv
    with pytest.raises(ValueError, match="plan: expected no other sizes"):
        PagedCache(model, plan=plan, max_tokens=64)
    with pytest.raises(ValueError, match="cache: expected no other sizes"):
        PagedCache(model, plan=plan, cache=pages)


def test_a_plan_of_another_model_is_refused_by_what_differs():
    model, other = tiny(), tiny("gemma3")
    with pytest.raises(ValueError, match=r"plan: expected \w+ .* for this model, got"):
        PagedCache(model, plan=plan_for(other))
