"""Pages that a plan sizes."""

from dataclasses import replace

import pytest
import torch

from pagedkv import BatchGenerator, PagedCache, PagedKVCache, plan_memory
from pagedkv.hf.fingerprint import fingerprint_of
from pagedkv.hf.model import cache_config
from pagedkv.retention import KeyDiff, Sinks
from pagedkv.storage import memory
from pagedkv.storage.memory import tokens_that_fit
from tests.hf.tiny import generate, named, padded, prompts, tiny
from tests.hybrids import tiny_hybrid


def plan_for(model, **options):
    options = {"device_memory": "64MiB", "device": "cpu", "length": 40, "page_size": 4, **options}
    return plan_memory(model.config, **options)


def planned_for(model, plan):
    """The pages of a plan, which know whose they are."""
    return replace(plan.cache, fingerprint=fingerprint_of(model))


def test_a_plan_sizes_the_pages_and_changes_no_token():
    model = tiny()
    plan = plan_for(model, batch=2)
    cache = PagedCache(model, plan=plan)
    assert cache.kv.config == planned_for(model, plan)
    batch = padded(prompts(5, 9))
    expected = generate(model, batch, max_new_tokens=6)
    got = generate(model, batch, max_new_tokens=6, **named(cache))
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


def test_a_batch_takes_its_widths_and_pages_from_the_plan():
    model = tiny()
    plan, rows = plan_for(model, batch=2, step_tokens=24), prompts(5, 30)
    with BatchGenerator(model) as own, BatchGenerator(model, plan=plan) as planned:
        assert planned.cache.config == planned_for(model, plan)
        assert planned.step_tokens == plan.step_tokens == 24
        assert planned.verify_width == plan.verify_width
        options = {"max_new_tokens": 6, "do_sample": False}
        expected, got = (g.generate(rows, **options) for g in (own, planned))
    assert [r.tokens for r in got] == [r.tokens for r in expected]
    with BatchGenerator(model, plan=plan, step_tokens=7, verify_width=3) as chosen:
        assert (chosen.step_tokens, chosen.verify_width) == (7, 3)


def test_pages_grow_under_a_model_and_change_no_token():
    model, batch = tiny(), padded(prompts(5, 9, 40))
    cache = PagedCache(model, max_tokens=4096, growth_step=32, page_size=4)
    expected = generate(model, batch, max_new_tokens=20)
    got = generate(model, batch, max_new_tokens=20, **named(cache))
    assert got.sequences.tolist() == expected.sequences.tolist()
    stats = cache.stats()
    assert stats.growths > 1
    assert stats.pages < stats.reserved == 1024
    assert PagedCache(model, growth_step=32).kv.config.growth_step == 32


def test_a_plan_passes_the_growth_step_to_the_pages():
    model = tiny()
    cache = PagedCache(model, plan=plan_for(model, growth_step=16))
    assert cache.kv.config.growth_step == 16
    assert cache.stats().pages == 4 < cache.stats().reserved
    assert plan_for(model, growth_step=512, max_tokens=512).cache.growth_step == 512
    with pytest.raises(ValueError, match="growth_step: expected at most max_tokens=64, got 65"):
        plan_for(model, growth_step=65, max_tokens=64)
    with pytest.raises(ValueError, match="growth_step: expected a positive int"):
        plan_for(model, growth_step=0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("kv_format", ["dense", "int8", "int4", ("int8", "int4")])
@pytest.mark.parametrize("room", [3_000_001, 50_000_001])
def test_pages_of_a_size_nobody_said_fit_and_leave_little_room(
    family, kv_format, room, monkeypatch
):
    model = tiny(family, head_dim=32)
    monkeypatch.setattr(memory, "available_memory", lambda device: room)

    def config_of(tokens):
        return cache_config(model, tokens, kv_format=kv_format)

    tokens = tokens_that_fit(config_of, torch.device("cuda"))
    assert config_of(tokens).nbytes <= room < config_of(tokens + 1).nbytes


@pytest.mark.parametrize(("room", "states"), [(1 << 40, 512), (800_000, 16), (10_000, 1)])
def test_states_nobody_counted_are_two_a_row_where_half_of_the_room_holds_them(
    room, states, monkeypatch
):
    model = tiny_hybrid()
    monkeypatch.setattr(memory, "available_memory", lambda device: room)
    with PagedCache(model, max_tokens=64) as cache:
        config = cache.kv.config
        assert config.max_states == states
        assert states in (1, 512) or states == room // 8 // config.bytes_per_state
    with PagedCache(model, max_tokens=64, max_states=3) as cache:
        assert cache.kv.config.max_states == 3

    def config_of(tokens):
        return cache_config(model, tokens)

    tokens = tokens_that_fit(config_of, torch.device("cpu"))
    assert config_of(tokens).nbytes <= max(room // 8, config_of(1).nbytes)


@pytest.mark.parametrize("states", ["none", "fewer", "others"])
def test_pages_for_other_states_are_refused(states):
    model, own = tiny_hybrid(), cache_config(tiny_hybrid(), 64)
    got = {
        "none": (),
        "fewer": own.states[1:],
        "others": cache_config(tiny_hybrid("lfm2"), 64).states,
    }
    pages = PagedKVCache(replace(own, states=got[states], max_states=0), device="cpu")
    for door in (PagedCache, BatchGenerator):
        with pytest.raises(ValueError, match=r"cache: expected states of 3 layers, .* got"):
            door(model, cache=pages)


class Mine(KeyDiff):
    """A policy that cannot be hashed, as dataclasses that are not frozen cannot."""

    __hash__ = None


def test_fields_that_cannot_be_hashed_name_pages_as_well():
    model, policy = tiny(head_dim=32), Sinks(Mine())
    sizes = {"max_tokens": 512, "kv_format": ["int8", "int4"], "retention": policy, "budget": 192}
    one, other = PagedCache(model, **sizes), PagedCache(model, **sizes)
    assert one.kv is other.kv
    assert one.kv.config.kv_format == ("int8", "int4")
    assert PagedCache(model, **{**sizes, "retention": Sinks(Mine())}).kv is not one.kv
