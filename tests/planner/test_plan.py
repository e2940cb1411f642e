"""A plan's table, its JSON, its cache."""

import json
from pathlib import Path

import pytest

from pagedkv import BudgetExceeded, CacheConfig, MemoryPlan, plan_memory
from tests.planner.models import LLAMA_8B, LLAMA_70B


def test_a_plan_prints_every_item_and_adds_up():
    plan = plan_memory(LLAMA_70B, device_memory="8GiB", host_memory="16GiB")
    printed = str(plan)
    items = (plan.device_bytes | plan.host_bytes).items()
    names = [name for name, nbytes in items if nbytes]
    for words in (*names, "unused", "budget", "2 of 80", "PCIe"):
        assert words in printed
    device = printed.split("\n\n")[2].splitlines()[1:]
    shown = [float(line[17:26]) for line in device]
    assert sum(shown[:-1]) == pytest.approx(shown[-1], abs=0.04)
    assert shown[-1] == 8
    assert max(map(len, printed.splitlines())) <= 100


def test_json_has_what_the_table_has():
    plan = plan_memory(LLAMA_70B, device_memory="8GiB", host_memory="16GiB")
    found = json.loads(plan.to_json())
    assert found["device_bytes"] == plan.device_bytes
    assert found["max_tokens"] == plan.max_tokens
    assert found["resident_layers"] == list(plan.resident_layers)
    assert found["weights"] == "from the config"


def test_the_cache_of_a_plan_is_what_from_model_makes():
    plan = plan_memory(LLAMA_8B, device_memory="8GiB")
    assert isinstance(plan, MemoryPlan)
    assert isinstance(plan.cache, CacheConfig)
    assert plan.cache.max_step_tokens == plan.step_tokens
    assert plan.cache.max_sequence_length == min(8192, plan.max_tokens)


def test_the_documentation_shows_a_plan_as_it_is_printed():
    page = (Path(__file__).resolve().parents[2] / "docs" / "streaming.md").read_text()
    model = LLAMA_70B | {"_name_or_path": "Llama-3-70B"}
    assert str(plan_memory(model, device_memory="8GiB", host_memory="64GiB")) in page
    with pytest.raises(BudgetExceeded) as refused:
        plan_memory(model, device_memory="8GiB", batch=8)
    assert str(refused.value) in " ".join(page.split())
