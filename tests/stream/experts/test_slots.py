"""Experts in slots, as on a card: here on the CPU, whose memory stands for the card's."""

import gc
import weakref
from contextlib import contextmanager, suppress

import pytest
import torch

from pagedkv import plan_memory
from pagedkv.errors import BudgetExceeded, CheckpointError
from pagedkv.stream import placement
from pagedkv.stream.experts import slots
from pagedkv.stream.experts.slots import TRIALS, SlottedExperts, Staging, Trust
from tests.effort import each_value, few
from tests.stream.models import (
    assert_bits,
    decode,
    fail,
    in_memory,
    make,
    on_read,
    placed,
    save,
    stream,
)

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next"]
FOUR = {"mixtral": {"num_local_experts": 4}, "gpt_oss": {"num_local_experts": 4}}


@pytest.fixture(autouse=True)
def in_slots(monkeypatch):
    monkeypatch.setattr(placement, "has_own_memory", lambda device: True)


def experts_of(streamer):
    found = [experts for _, experts in streamer._passes._places.experts]
    assert all(isinstance(experts, SlottedExperts) for experts in found)
    return found


@pytest.mark.parametrize(
    ("family", "implementation", "dtype"),
    each_value(FAMILIES, ["grouped_mm", "batched_mm", "eager"], [torch.float32, torch.bfloat16]),
)
def test_logits_and_tokens_are_those_in_memory(family, implementation, dtype, tmp_path):
    folder = save(make(family, **FOUR.get(family, {})).to(dtype), tmp_path)
    expected = in_memory(folder)
    with stream(folder, expert_slots=2) as streamer:
        for model in (streamer.model, expected):
            model.set_experts_implementation(implementation)
        assert_bits(streamer.model, expected)
        for token in (3, 9, 3):
            mine, theirs = (decode(m, [token])[0] for m in (streamer.model, expected))
            assert torch.equal(mine, theirs)
        assert (streamer.stats().expert_misses > 0) is (implementation != "eager")
        assert experts_of(streamer)


def test_experts_that_have_a_slot_are_not_read_again(wide):
    with stream(wide, expert_slots=4) as streamer:
        first = decode(streamer.model, [5, 5])
        before = streamer.stats()
        again = decode(streamer.model, [5])
        after = streamer.stats()
        assert torch.equal(first[0], again[0])
        assert after.expert_misses == before.expert_misses == 3 * 4
        assert after.expert_hits - before.expert_hits == 3 * 4


def test_a_pass_that_needs_more_than_there_are_slots_evicts_none(wide):
    with stream(wide, expert_slots=4) as streamer:
        decode(streamer.model, [5])
        held = [dict(experts._held) for experts in experts_of(streamer)]
        with torch.no_grad():
            streamer.model(torch.arange(1, 60)[None], use_cache=False)
        assert [dict(experts._held) for experts in experts_of(streamer)] == held
        assert streamer.stats().wide_passes >= 3


@pytest.mark.parametrize("at", few(range(20), 0, 9))
def test_a_read_that_fails_leaves_a_streamer_that_goes_on(at, wide, monkeypatch):
    tokens = [3, 4, 5, 6]
    expected = decode(in_memory(wide), tokens)
    with stream(wide, expert_slots=5) as streamer:
        on_read(streamer, monkeypatch, at, fail, "experts")
        with pytest.raises(CheckpointError, match="a disk fails"):
            decode(streamer.model, tokens)
        assert all(experts._module.num_experts == 32 for experts in experts_of(streamer))
        for mine, theirs in zip(decode(streamer.model, tokens), expected, strict=True):
            assert torch.equal(mine, theirs)


def test_an_implementation_that_computes_other_bits_from_slots_is_not_trusted(wide, monkeypatch):
    expected = decode(in_memory(wide), [3, 4])
    monkeypatch.setattr(SlottedExperts, "_renumbered", lambda self, index: index % self._slots)
    with stream(wide, expert_slots=4) as streamer:
        with pytest.warns(UserWarning, match="grouped_mm computes other bits from slots for 1 tok"):
            found = decode(streamer.model, [3])
        found += decode(streamer.model, [4])
        misses = streamer.stats().expert_misses
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected))
        assert misses == 4  # of the one call that was tried


def test_an_implementation_is_trusted_after_some_calls_that_were_equal(wide):
    """One may be equal by chance; those that gather rows by the index need no trial."""
    with stream(wide, expert_slots=4) as streamer:
        calls = []
        for _ in range(4):
            before = streamer.stats().wide_passes
            decode(streamer.model, [3])
            calls.append(streamer.stats().wide_passes - before)
        assert calls == [3, 3, 2, 0]
        streamer.model.set_experts_implementation("batched_mm")
        decode(streamer.model, [3])
        assert streamer.stats().wide_passes == TRIALS


def test_a_difference_in_a_later_trial_is_not_trusted_either(wide, monkeypatch):
    renumbered, count = SlottedExperts._renumbered, iter(range(100))

    def wrong_once(self, index):
        found = renumbered(self, index)
        return found.flip(1) if next(count) == TRIALS - 1 else found

    monkeypatch.setattr(SlottedExperts, "_renumbered", wrong_once)
    expected = decode(in_memory(wide), [3, 4, 5, 6])
    with stream(wide, expert_slots=4) as streamer:
        with pytest.warns(UserWarning, match="grouped_mm computes other bits from slots for 1 tok"):
            found = decode(streamer.model, [3, 4, 5, 6])
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected))


@pytest.mark.parametrize("expert", [32, 10**6, -1])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_a_call_that_names_no_expert_computes_from_all_of_them(implementation, expert, wide):
    index, weights = torch.tensor([[0, 1, 2, expert]]), torch.ones(1, 4)
    with stream(wide, expert_slots=4) as streamer, torch.no_grad():
        streamer.model.set_experts_implementation(implementation)
        before = streamer.stats()
        with suppress(RuntimeError, IndexError):  # whatever transformers makes of it
            streamer.model.model.layers[0].mlp.experts(torch.randn(1, 32), index, weights)
        assert streamer.stats().expert_misses == before.expert_misses


def test_a_failing_forward_leaves_the_module_with_all_its_experts(wide, monkeypatch):
    with stream(wide, expert_slots=4) as streamer:
        decode(streamer.model, [3])
        module = experts_of(streamer)[0]._module
        monkeypatch.setattr(type(module), "_apply_gate", lambda self, x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            decode(streamer.model, [3])
        monkeypatch.undo()
        assert module.num_experts == 32


class Recorded:
    """A card's streams and events, which only note what is asked of them, and in which order."""

    def __init__(self, monkeypatch):
        self.log = log = []

        class Event:
            def __init__(self):
                self.name = f"event {len([x for x in log if x[0] == 'made'])}"
                log.append(("made", self.name))

            def record(self, stream):
                log.append(("record", self.name, stream.name))

            def synchronize(self):
                log.append(("host waits", self.name))

        class Stream:
            def __init__(self, name):
                self.name = name

            def synchronize(self):
                log.append(("host waits", self.name))

            def wait_event(self, event):
                log.append(("wait", event.name, self.name))

            def wait_stream(self, stream):
                log.append(("wait", stream.name, self.name))

        @contextmanager
        def within(stream):
            log.append(("begin", stream.name))
            yield
            log.append(("end", stream.name))

        self.compute = Stream("compute")
        self.another = Stream("another")
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "Event", Event)
        monkeypatch.setattr(cuda, "Stream", lambda device: Stream("copies"))
        monkeypatch.setattr(cuda, "stream", within)
        monkeypatch.setattr(cuda, "current_stream", lambda device: self.compute)
        arena = slots.HostArena
        monkeypatch.setattr(slots, "HostArena", lambda nbytes, pin: arena(nbytes))


FILLED = "event 0"
CARRIED = [
    ("wait", "compute", "copies"),
    ("begin", "copies"),
    ("record", FILLED, "copies"),
    ("end", "copies"),
    ("wait", FILLED, "compute"),
]


def test_copies_wait_for_computation_and_computation_and_the_host_for_copies(monkeypatch):
    recorded = Recorded(monkeypatch)
    staging = Staging(torch.device("cuda"))
    staging.reserve(64)
    target = torch.zeros(8, dtype=torch.uint8)
    del recorded.log[:]
    source = staging.writable().tensor[:8]
    source.fill_(7)
    staging.carry([(source, target)])
    staging.writable()
    staging.close()
    waits = ("host waits", "copies")
    assert recorded.log == [waits, *CARRIED, waits, waits]
    assert target.tolist() == [7] * 8


def test_computation_on_another_stream_waits_for_that_before(monkeypatch):
    """Also where nothing is copied: it may find in a slot what arrives for the other."""
    recorded = Recorded(monkeypatch)
    staging = Staging(torch.device("cuda"))
    del recorded.log[:]
    staging.follow()
    staging.follow()
    assert recorded.log == []
    recorded.compute = recorded.another
    staging.follow()
    staging.follow()
    assert recorded.log == [("wait", "compute", "another")]


@pytest.mark.parametrize("value", [-0.0, float("nan")])
def test_what_is_tried_is_compared_bit_by_bit(value):
    trust, key = Trust(), ("grouped_mm", 1)
    expected = torch.tensor([0.0, value])
    for _ in range(TRIALS):
        trust.note(key, expected, expected.clone())
    assert trust[key] is True
    with pytest.warns(UserWarning, match="other bits"):
        trust.note(("grouped_mm", 2), torch.tensor([0.0]), torch.tensor([-0.0]))


@pytest.mark.parametrize("host", [(), (0, 1, 2)])
def test_events_of_a_whole_pass_come_in_that_order_for_each_layer(host, wide, monkeypatch):
    """The host waits before it reads into the memory that copies leave from, and only then."""
    recorded = Recorded(monkeypatch)
    staging = Staging(torch.device("cuda"))
    staging.device = torch.device("cpu")  # where its memory is, and computes
    monkeypatch.setattr(placement, "Staging", lambda device: staging)
    with placed(wide, resident=(0, 1, 2), host=host, expert_slots=4) as streamer:
        streamer.model.set_experts_implementation("batched_mm")  # which is not tried
        for tokens in ([3], [9]):
            del recorded.log[:]
            decode(streamer.model, tokens)
        log = list(recorded.log)
    waits = [] if host else [("host waits", "copies")]
    assert log == 3 * [*waits, *CARRIED]


def test_a_plan_for_a_card_has_slots_where_they_are_asked_for(wide):
    sizes = {"device_memory": "1GiB", "length": 16}
    none, four = (plan_memory(wide, expert_slots=n, **sizes) for n in (None, 4))
    assert none.expert_slots == 0
    assert four.expert_slots == 4
    experts = four.shape.experts
    assert four.device_bytes["expert slots"] == 4 * experts.total // 32
    assert four.device_bytes["widest layer"] == 2 * experts.widest
    assert four.host_bytes["staging of experts"] == experts.widest // 8 + 2 * experts.widest
    assert "staging of experts" in str(four)
    assert four.expert_bytes(1) == pytest.approx(experts.total / 8 * 28 / 32, rel=0.01)
    assert four.expert_bytes(2) == experts.total  # two tokens need more than four


@pytest.mark.parametrize("host", [(0, 1, 2), (1,)])
def test_experts_in_host_memory_are_copied_from_there_and_read_once(host, wide):
    tokens = [3, 9, 3, 14, 15]
    with placed(wide, resident=(0, 1, 2), host=host, expert_slots=5) as streamer:
        opened = streamer.stats()
        found = decode(streamer.model, tokens)
        with torch.no_grad():  # all experts of a layer, from the same memory
            wider = streamer.model(torch.arange(1, 60)[None], use_cache=False).logits
        after = streamer.stats()
        sizes = [unit.file_bytes for unit, _ in streamer._passes._places.expert_units]
    expected = in_memory(wide)
    for mine, theirs in zip(found, decode(expected, tokens), strict=True):
        assert torch.equal(mine, theirs)
    with torch.no_grad():
        assert torch.equal(wider, expected(torch.arange(1, 60)[None], use_cache=False).logits)
    assert after.expert_misses > 3 * 5
    each = sizes[0] // 32
    whole = after.expert_bytes - each * after.expert_misses  # calls that had all of a layer
    assert whole == (after.wide_passes) * sizes[0]
    read = after.bytes_read - opened.bytes_read
    assert (read == 0) is (len(host) == 3)


def test_close_gives_back_host_memory_that_a_ring_of_all_experts_borrowed(wide):
    streamer = placed(wide, resident=(0, 1, 2), host=(0, 1, 2), expert_slots=4)
    places = streamer._passes._places
    held = [weakref.ref(memory) for memory in places.held_experts.values()]
    for count in (60, 1, 60, 1):  # the ring of all of them comes and goes
        with torch.no_grad():
            streamer.model(torch.arange(1, 1 + count)[None], use_cache=False)
    assert len(held) == 3
    assert all(memory() is not None for memory in held)
    streamer.close()
    gc.collect()
    assert all(memory() is None for memory in held)


def test_a_plan_for_a_card_holds_as_many_experts_in_host_memory_as_fit(wide):
    sizes = {"device_memory": "1GiB", "length": 16, "expert_slots": 4}
    none = plan_memory(wide, **sizes)
    total = none.shape.experts.total
    all_of_them = plan_memory(wide, host_memory=2 * total, **sizes)
    assert all_of_them.host_layers == (0, 1, 2)
    assert all_of_them.host_bytes["held experts"] == total
    assert all_of_them.host_bytes["staging of experts"] == 0
    assert "those of 3 of 3 layers" in str(all_of_them)
    assert all_of_them.seconds(1, disk_gbps=1.0) < 0.1 * none.seconds(1, disk_gbps=1.0)
    assert all_of_them.seconds(60, disk_gbps=1.0) < none.seconds(60, disk_gbps=1.0)


def test_where_host_memory_is_short_other_experts_are_read_through_it(tmp_path):
    sparse = {"num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 8}
    folder = save(make("qwen3_moe", **sparse), tmp_path)
    sizes = {"device_memory": "1GiB", "length": 16, "expert_slots": 4}
    none = plan_memory(folder, **sizes)
    through, layer = none.host_bytes["staging of experts"], none.shape.experts.widest
    some = plan_memory(folder, host_memory=through + 5 * layer // 2, **sizes)
    assert len(some.host_layers) == 2
    assert some.host_bytes["held experts"] == 2 * layer
    assert some.host_bytes["staging of experts"] == through
    with pytest.raises(BudgetExceeded, match=r"host_memory: .* staging of experts"):
        plan_memory(folder, host_memory=through - 1, **sizes)


def test_whole_layers_and_experts_of_a_cpu_have_nothing_pinned(wide):
    sizes = {"device_memory": "1GiB", "length": 16, "host_memory": "1GiB"}
    for options in ({"expert_slots": 0}, {"expert_slots": 4, "device": "cpu"}):
        assert plan_memory(wide, **sizes, **options).host_bytes.get("held experts", 0) == 0
