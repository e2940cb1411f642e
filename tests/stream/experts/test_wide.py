"""Calls that need more experts than stay: where they compute, and when whole layers are read."""

import gc
import mmap
import os
import weakref

import pytest
import torch

from pagedkv.errors import StreamError
from pagedkv.planner import plan_memory
from pagedkv.stream import forwards
from pagedkv.stream.experts import memory as memory_module
from pagedkv.stream.experts.memory import WideMemory
from pagedkv.stream.placement import Wanted
from tests.effort import each_value
from tests.hf import zoo
from tests.stream.experts.residency import pages_of, resident
from tests.stream.experts.test_experts import FAMILIES, FOUR
from tests.stream.models import assert_bits, decode, in_memory, make, save, stream

WIDE = {"num_experts": 32, "num_experts_per_tok": 4}


def prompt(model, count):
    with torch.no_grad():
        return model(torch.arange(1, 1 + count)[None], use_cache=False).logits


def wide_memory(streamer) -> WideMemory:
    return streamer._passes._places._wide


@pytest.mark.parametrize(
    ("family", "implementation"), each_value(FAMILIES, ["eager", "grouped_mm", "batched_mm"])
)
def test_rows_of_experts_that_a_call_is_not_routed_to_are_not_looked_at(
    family, implementation, tmp_path, monkeypatch
):
    """Memory for wide calls holds whatever the layer before left there: here NaN."""
    folder = save(make(family, **FOUR.get(family, {})), tmp_path)
    expected = in_memory(folder)
    expected.set_experts_implementation(implementation)
    writable = WideMemory.writable

    def poisoned(self):
        arena = writable(self)
        arena.tensor.fill_(0xFF)
        return arena

    monkeypatch.setattr(WideMemory, "writable", poisoned)
    with stream(folder, expert_slots=2) as streamer:
        streamer._passes._most_alone = 1.0
        streamer.model.set_experts_implementation(implementation)
        for count in (2, 3, 5):
            assert torch.equal(prompt(streamer.model, count), prompt(expected, count))
        assert streamer.stats().wide_passes > 0


def test_experts_stay_also_where_every_call_needs_most_of_a_layer(wide):
    with stream(wide, expert_slots=32, resident_layers=3) as streamer:
        streamer._passes._most_alone = 0.3
        for _ in range(2):
            prompt(streamer.model, 40)
        before = streamer.stats()
        prompt(streamer.model, 40)
        after = streamer.stats()
    assert after.bytes_read == before.bytes_read
    assert after.expert_hits - before.expert_hits > 60


def test_memory_for_wide_calls_goes_with_the_next_narrow_one(wide):
    with stream(wide, expert_slots=4) as streamer:
        streamer._passes._most_alone = 1.0
        prompt(streamer.model, 20)
        assert wide_memory(streamer)._arena is not None
        decode(streamer.model, [5])
        assert wide_memory(streamer)._arena is None


def test_memory_for_wide_calls_goes_where_whole_layers_are_read(wide):
    with stream(wide, expert_slots=4) as streamer:
        prompt(streamer.model, 4)
        assert wide_memory(streamer)._arena is not None
        prompt(streamer.model, 60)
        assert wide_memory(streamer)._arena is None
        assert streamer._passes._all_experts is not None


def test_memory_made_within_inference_mode_is_filled_outside_of_it(wide):
    """As the thread that copies to a card does, which has no such mode: found on one."""
    with stream(wide, expert_slots=4) as streamer, torch.inference_mode():
        prompt(streamer.model, 60)
        assert not any(slot.is_inference() for slot in streamer._passes._all_experts.ring.slots)


def test_layers_at_the_edge_do_not_take_turns_within_a_pass(wide, monkeypatch):
    made, ring = [], forwards.Ring
    monkeypatch.setattr(forwards, "Ring", lambda *a, **k: made.append(ring(*a, **k)) or made[-1])
    generator = torch.Generator().manual_seed(0)
    expected = in_memory(wide)
    with stream(wide, expert_slots=4, resident_layers=3) as streamer:
        streamer._passes._most_alone = 0.55
        modes = []
        for _ in range(12):
            ids = torch.randint(1, 60, (8, 1), generator=generator)
            count, before = len(made), streamer.stats().expert_misses
            with torch.no_grad():
                found = streamer.model(ids, use_cache=False).logits
                assert torch.equal(found, expected(ids, use_cache=False).logits)
            assert len(made) - count <= 1
            modes.append((len(made) > count, streamer.stats().expert_misses > before))
    assert any(whole for whole, _ in modes)
    assert any(alone for _, alone in modes)


def test_a_pass_behind_a_prompt_is_not_read_ahead_for_but_further_wide_ones_are(wide, monkeypatch):
    made, ring = [], forwards.Ring

    def eager(*args, **kwargs):
        made.append(ring(*args, **kwargs))
        made[-1]._always = made[-1].ahead = True  # as from a disk
        return made[-1]

    def settled():
        with made[0]._changed:
            assert made[0]._changed.wait_for(lambda: not made[0]._busy, timeout=60)
        return streamer.stats().bytes_read

    with stream(wide, expert_slots=4, resident_layers=3) as streamer:
        monkeypatch.setattr(forwards, "Ring", eager)
        opened = streamer.stats().bytes_read
        prompt(streamer.model, 60)
        sizes = [unit.file_bytes for unit in made[0].units]
        assert settled() - opened == sum(sizes)
        prompt(streamer.model, 60)
        with made[0]._changed:
            assert made[0]._changed.wait_for(lambda: made[0]._filled == 3 + 3 + 2, timeout=60)
        assert settled() - opened == 2 * sum(sizes) + sum(sizes[:2])


def test_a_plan_for_passes_of_few_tokens_has_no_memory_for_wide_ones(wide):
    sizes = {"device": "cpu", "length": 16, "expert_slots": 4, "device_memory": "1GiB"}
    few = plan_memory(wide, step_tokens=3, **sizes)
    many = plan_memory(wide, step_tokens=64, **sizes)
    assert few.device_bytes["widest layer"] < many.device_bytes["widest layer"]
    for plan in (few, many):
        assert Wanted.by(plan).all_fit is (plan is many)
        with stream(wide, plan=plan) as streamer:
            assert (wide_memory(streamer) is None) is (plan is few)
            assert_bits(streamer.model, in_memory(wide))
            prompt(streamer.model, 60)
            assert (streamer._passes._all_experts is None) is (plan is few)


@pytest.mark.parametrize("interrupted", [False, True])
def test_experts_that_only_pass_leave_with_their_memory_where_wide_calls_have_none(
    interrupted, tmp_path, monkeypatch
):
    """Also those whose leaving was interrupted, behind the next wide call."""
    wide = {"hidden_size": 128, "moe_intermediate_size": 96, "num_experts": 32}
    folder = save(make("qwen3_moe", **wide, num_experts_per_tok=2), tmp_path)
    sizes = {"device": "cpu", "length": 16, "expert_slots": 2, "device_memory": "1GiB"}
    with stream(folder, plan=plan_memory(folder, step_tokens=5, **sizes)) as streamer:
        streamer._passes._most_alone = 1.0
        every = [experts for _, experts in streamer._passes._places.experts]
        if interrupted:
            with monkeypatch.context() as patched:
                patched.setattr(memory_module.RowMemory, "give_back", press)
                with pytest.raises(KeyboardInterrupt):
                    prompt(streamer.model, 5)
            assert len(every[0]._held) > 2
        prompt(streamer.model, 5)
        assert wide_memory(streamer) is None
        assert streamer.stats().wide_passes > 0
        for experts in every:
            assert len(experts._held) == 2
            kept = pages_of(experts._places, experts._held)
            assert resident(experts._memory) == mmap.PAGESIZE * len(kept)


def press(*_):
    raise KeyboardInterrupt


def test_a_plan_for_smaller_experts_is_refused(wide, tmp_path):
    small = save(make("qwen3_moe", **WIDE, moe_intermediate_size=8), tmp_path)
    sizes = {"device": "cpu", "length": 16, "expert_slots": 4, "device_memory": "1GiB"}
    with pytest.raises(
        ValueError, match=r"plan: expected one for this model .* experts of at most"
    ):
        stream(wide, plan=plan_memory(small, **sizes))


@pytest.mark.parametrize("slots", [0, 4])
def test_autocast_computes_what_it_computes_in_memory(slots, wide):
    expected = in_memory(wide)
    with stream(wide, expert_slots=slots) as streamer:
        for count in (7, 1, 30):
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(prompt(streamer.model, count), prompt(expected, count))


def test_no_addresses_for_experts_are_named(wide, monkeypatch):
    def none_left(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory_module.mmap, "mmap", none_left)
    with pytest.raises(OSError, match=r"expert_slots: no .* bytes of addresses .* whole layers"):
        stream(wide, expert_slots=4)


def test_close_frees_experts_and_the_ring_while_the_model_is_kept(wide):
    streamer = stream(wide, expert_slots=4)
    prompt(streamer.model, 60)
    decode(streamer.model, [3])
    maps = [each._memory._map for _, each in streamer._passes._places.experts]
    assert all(isinstance(each, mmap.mmap) for each in maps)
    memory = [weakref.ref(streamer._passes._ring.ring.staging), *map(weakref.ref, maps)]
    del maps
    streamer.close()
    gc.collect()
    assert [each() for each in memory] == [None] * len(memory)
    streamer.close()


def test_files_of_a_streamer_that_nobody_closed_are_closed(wide):
    def opened():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = opened()
    streamer = stream(wide, expert_slots=4)
    decode(streamer.model, [3])
    assert opened() > before
    del streamer
    assert opened() == before


def test_close_while_experts_are_cast_is_said(wide):
    with stream(wide, expert_slots=4, dtype=torch.bfloat16) as streamer:
        module = streamer._passes._places.experts[0][0]
        module.register_forward_hook(lambda *_: streamer.close())
        with pytest.raises(StreamError):
            decode(streamer.model, [3])


@pytest.mark.parametrize("slots", [0, 2])
def test_experts_of_a_token_may_be_a_list_with_one_for_each_layer(slots, tmp_path):
    folder = save(zoo.built("hunyuan_v1_moe", moe_topk=[2, 2]), tmp_path)
    expected = in_memory(folder)
    with stream(folder, expert_slots=slots) as streamer:
        assert torch.equal(prompt(streamer.model, 5), prompt(expected, 5))
    plan = plan_memory(folder, device_memory="1GiB", device="cpu", length=16)
    assert plan.shape.experts is None or plan.shape.experts.per_token == 2
