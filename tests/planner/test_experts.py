"""Plans with experts that are read alone: formulas, rows, choice, bad input."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest

from pagedkv.errors import BudgetExceeded, UnsupportedModelError
from pagedkv.planner import plan_memory
from pagedkv.planner.experts import RoutedExperts
from tests.effort import few
from tests.planner.models import GIB, LLAMA_8B, llama

QWEN_30B = llama(
    2048, 6144, 48, 32, 4, 151936, 40960,
    model_type="qwen3_moe", head_dim=128, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768, decoder_sparse_step=1,
)  # fmt: skip
EXPERT = 3 * 768 * 2048 * 2  # bytes


def plan(memory="16GiB", model=QWEN_30B, **fields):
    return plan_memory(model, device_memory=memory, **{"device": "cpu", **fields})


@pytest.fixture
def experts():
    return RoutedExperts((0, 128 * EXPERT), 128, 8)


@pytest.mark.parametrize(
    ("tokens", "share"), [(1, 8 / 128), (4, 0.2275), (16, 0.6439), (64, 0.9839)]
)
def test_a_pass_touches_what_random_routing_does(experts, tokens, share):
    assert experts.touched(tokens) == pytest.approx(share, abs=1e-4)
    assert experts.lacking(tokens, 32) == pytest.approx(0.75 * share, abs=1e-4)
    assert experts.lacking(tokens, 128) == 0


@pytest.mark.parametrize("alone", [0.3, 0.5, 0.9])
def test_a_pass_reads_all_experts_where_those_it_lacks_would_take_longer(experts, alone):
    for tokens in (1, 4, 16, 64, 256):
        lacking = experts.lacking(tokens, 8)
        assert experts.read(tokens, 8, alone) == (lacking if lacking <= alone else 1)


def test_the_widest_layer_is_what_a_pass_can_need_beside_the_slots(experts):
    assert experts.wide(1, 8, 0.5, 2) == 8 * EXPERT
    assert experts.wide(8, 16, 0.5, 2) == 64 * EXPERT
    assert experts.wide(8, 100, 0.5, 2) == 28 * EXPERT  # there are no more
    assert experts.wide(9, 16, 0.5, 2) == 2 * 128 * EXPERT
    assert experts.wide(9, 63, 0.5, 2) == 2 * 128 * EXPERT
    assert experts.wide(9, 64, 0.5, 2) == 128 * EXPERT  # no pass lacks more than half
    assert experts.wide(9, 128, 0.5, 2) == 0
    slotted = replace(experts, in_slots=True)
    assert slotted.wide(9, 128, 0.5, 2) == 2 * 128 * EXPERT  # what is tried has all of them


def test_one_row_decodes_soonest_with_experts_that_are_asked_for():
    by_experts, whole = plan(), plan(expert_slots=0)
    assert by_experts.expert_slots >= 8
    assert by_experts.device_bytes["expert slots"] == 48 * by_experts.expert_slots * EXPERT
    assert by_experts.device_bytes["widest layer"] == 2 * 128 * EXPERT
    assert by_experts.unused >= 0
    assert by_experts.predict() > 4 * whole.predict()
    assert by_experts.streams


def test_many_rows_decode_soonest_with_whole_layers():
    assert plan(batch=64, length=256).expert_slots == 0


@pytest.mark.parametrize("batch", few([1, 2, 4, 8, 16, 32, 64], 1, 8, 64))
def test_no_count_of_experts_is_predicted_to_be_faster_than_the_chosen_one(batch):
    chosen = plan(batch=batch, length=256)
    for slots in (0, 8, 12, 16, 20, 24, 28):
        try:
            other = plan(batch=batch, length=256, expert_slots=slots)
        except BudgetExceeded:
            continue
        assert other.predict() <= 1.001 * chosen.predict()


def test_a_card_streams_whole_layers_where_no_slots_are_asked_for():
    assert plan(device="cuda").expert_slots == 0
    assert plan(device="cuda", expert_slots=16).expert_slots == 16


def test_cpus_of_other_systems_stream_whole_layers_and_slots_are_refused_there(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert plan().expert_slots == 0
    with pytest.raises(UnsupportedModelError, match="read alone under Linux only"):
        plan(expert_slots=16)
    assert plan(device="cuda", expert_slots=16).expert_slots == 16


def test_a_plan_says_what_passes_read():
    text = str(plan(expert_slots=16))
    assert "16 of 128 in 48 layers" in text
    assert "of the experts 5.5% for 1 row, 19.9% for 4 rows, whole layers for 16" in text
    assert "experts at 2.5" in text
    found = json.loads(plan(expert_slots=16).to_json())
    assert found["expert_slots"] == 16
    assert found["expert_bytes"] == int(48 * 128 * EXPERT * (8 / 128) * (1 - 16 / 128))


def test_the_file_of_a_drive_is_read_at_its_rate():
    found = plan(expert_slots=16)
    waits = found.expert_bytes(1) / (0.5e9 * 2)
    assert found.seconds(1, disk_gbps=2.0) >= waits
    assert found.seconds(1, disk_gbps=2.0) < 1.5 * waits


@pytest.mark.parametrize("slots", [True, -1, 1.5, "8", 7, 129])
def test_slots_that_cannot_be_are_refused_by_name(slots):
    with pytest.raises(ValueError, match="expert_slots: expected"):
        plan(expert_slots=slots)


def test_a_model_without_experts_is_refused_and_zero_is_not():
    with pytest.raises(UnsupportedModelError, match="expert_slots: llama has no experts"):
        plan(model=LLAMA_8B, expert_slots=8)
    assert plan(model=LLAMA_8B, expert_slots=0).expert_slots == 0


@pytest.mark.parametrize("field", [{"ranks": 2}, {"pack_weights": True}])
def test_slots_are_refused_where_nothing_streams(field):
    with pytest.raises(ValueError, match="expert_slots: expected none beside"):
        plan("200GiB", expert_slots=8, **field)


def test_a_budget_below_the_slots_names_how_many_fit():
    with pytest.raises(BudgetExceeded, match="the largest item is expert slots") as raised:
        plan(expert_slots=64)
    fits = raised.value.advice["expert_slots"]
    assert plan(expert_slots=fits).unused >= 0
    with pytest.raises(BudgetExceeded):
        plan(expert_slots=fits + 1)


@pytest.mark.parametrize("value", [0, -1.0, True, "fast"])
def test_a_rate_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match="expert_gbps: expected a positive number"):
        plan(expert_gbps=value)


def test_where_room_is_short_passes_are_so_narrow_that_no_layer_is_needed_whole():
    wide, narrow = plan("9GiB", expert_slots=8), plan("5.5GiB", expert_slots=8)
    assert wide.step_tokens >= 128
    assert narrow.step_tokens == 8  # half of 128 experts, 8 a token
    assert narrow.device_bytes["widest layer"] == 64 * EXPERT
    assert narrow.expert_bytes(narrow.step_tokens) < 0.5 * 48 * 128 * EXPERT


def test_a_plan_keeps_to_its_budget_for_every_count():
    for memory in (6 * GIB, 10 * GIB, 40 * GIB):
        for slots in (None, 8, 16, 64, 128):
            try:
                found = plan(memory, expert_slots=slots)
            except BudgetExceeded:
                continue
            assert found.unused >= 0
            assert replace(found, largest_batch=0) == found  # which is not compared


def test_experts_of_a_token_are_counted_under_every_name():
    for name in ("num_experts_per_tok", "moe_topk", "top_k_experts"):
        config = {k: v for k, v in QWEN_30B.items() if k != "num_experts_per_tok"} | {name: 8}
        assert plan(model=config, expert_slots=16).expert_slots == 16


def test_a_plan_for_a_card_names_the_slots_that_would_be_sooner():
    whole = plan("8GiB", device="cuda")
    assert whole.expert_slots == 0
    slots, rate = whole.rate_by_slots
    told = plan("8GiB", device="cuda", expert_slots=slots)
    assert rate == told.predict() > 2 * whole.predict()
    assert f"{rate:.3g} with --expert-slots {slots}" in str(whole)
    for other in (slots - 1, slots + 1):
        with suppress(BudgetExceeded, ValueError):
            assert plan("8GiB", device="cuda", expert_slots=other).predict() <= rate
    assert told.rate_by_slots is None
    assert plan("8GiB", device="cuda", model=LLAMA_8B).rate_by_slots is None
    assert plan("8GiB").rate_by_slots is None  # a CPU takes them by itself


def test_fewer_bits_are_named_where_they_are_sooner_under_the_same_options():
    whole = plan("8GiB", device="cuda")
    assert whole.rate_in_4_bits > whole.predict()
    slots, _ = whole.rate_by_slots
    told = plan("8GiB", device="cuda", expert_slots=slots)
    assert told.rate_in_4_bits is None or told.rate_in_4_bits > told.predict()


def test_experts_that_a_card_cannot_read_alone_are_said_to_be_read_so_by_a_cpu():
    packed = QWEN_30B | {"model_type": "gpt_oss", "num_local_experts": 128, "head_dim": 64}
    packed |= {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(UnsupportedModelError, match="read alone; on a CPU, which unpacks them"):
        plan(model=packed, device="cuda", expert_slots=8)
    assert plan("64GiB", model=packed, expert_slots=8).expert_slots == 8
