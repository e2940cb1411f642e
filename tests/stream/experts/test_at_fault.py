"""Errors while experts are read: nothing is garbled, nothing hangs, and it goes on."""

import os
import shutil
import sys
import threading

import pytest
import torch

from pagedkv.errors import CheckpointError, PagedKVError, StreamError
from pagedkv.stream.experts.memory import PAGE
from pagedkv.stream.ring import Ring
from tests.effort import ALL, each_value, sampled
from tests.stream.experts.residency import pages_of, resident
from tests.stream.models import decode, in_memory, make, on_read, save, stream


def test_close_from_another_thread_waits_for_the_pass_that_reads(wide, monkeypatch):
    expected = decode(in_memory(wide), [3])[0]
    streamer = stream(wide, expert_slots=4)
    closing = threading.Thread(target=streamer.close)
    on_read(streamer, monkeypatch, 1, lambda *_: closing.start(), "experts")
    assert torch.equal(decode(streamer.model, [3])[0], expected)
    closing.join(600)
    assert not closing.is_alive()
    with pytest.raises(StreamError, match="closed"):
        decode(streamer.model, [3])


def test_close_within_a_pass_ends_the_pass_with_an_error(wide, monkeypatch):
    streamer = stream(wide, expert_slots=4)
    on_read(streamer, monkeypatch, 1, lambda *_: streamer.close(), "experts")
    with pytest.raises(PagedKVError):
        decode(streamer.model, [3])


def test_two_threads_compute_the_bits_of_one(wide):
    tokens = list(range(1, 13))
    expected = decode(in_memory(wide), tokens)
    found: dict[int, list] = {}
    with stream(wide, expert_slots=4) as streamer:
        threads = [
            threading.Thread(target=lambda i=i: found.update({i: decode(streamer.model, tokens)}))
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
    assert sorted(found) == [0, 1]
    for each in found.values():
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(each, expected))


def test_a_file_that_shrinks_is_an_error_that_names_the_tensor(wide, tmp_path, monkeypatch):
    folder = shutil.copytree(wide, tmp_path / "copy")

    def shrink(run, memory):
        for file in folder.glob("*.safetensors"):
            os.truncate(file, 1000)

    with stream(folder, expert_slots=4) as streamer:
        on_read(streamer, monkeypatch, 2, shrink, "experts")
        with pytest.raises(CheckpointError, match=r"experts of layer 0: tensor .*experts"):
            decode(streamer.model, [3])


BIG = {"hidden_size": 128, "moe_intermediate_size": 96, "num_experts": 32, "num_experts_per_tok": 4}


@pytest.mark.parametrize("memory", ["of rows that stay", "of a call of more"])
def test_a_read_that_fails_leaves_no_memory_to_what_did_not_come(memory, tmp_path, monkeypatch):
    folder = save(make("qwen3_moe", **BIG), tmp_path)
    expected = logits(in_memory(folder), 8)

    def fail(run, memory):
        raise OSError("this disk is gone")

    with stream(folder, expert_slots=8) as streamer:
        streamer._passes._most_alone = 1.0
        with monkeypatch.context() as patched:
            on_read(streamer, patched, 3, fail, "experts")
            with pytest.raises(OSError, match="this disk is gone"):
                logits(streamer.model, 1 if memory == "of rows that stay" else 8)
        for _, experts in streamer._passes._places.experts:
            kept = pages_of(experts._places, experts._held)
            assert resident(experts._memory) == PAGE * len(kept)
        assert streamer._passes._places._wide._arena is None
        assert torch.equal(logits(streamer.model, 8), expected)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
@pytest.mark.parametrize("expert", [32, 10**6, -1])
def test_a_router_that_names_an_expert_beyond_them_fails_as_in_memory(expert, implementation, wide):
    index = torch.tensor([[0, 1, 2, expert]])
    weights, hidden = torch.ones(1, 4), torch.randn(1, 32)
    outcomes = []
    with stream(wide, expert_slots=4) as streamer:
        expected = in_memory(wide)
        for model in (expected, streamer.model):
            model.set_experts_implementation(implementation)
            module = model.model.layers[0].mlp.experts
            with torch.no_grad():
                try:
                    outcomes.append(module(hidden, index, weights))
                except Exception as error:  # whatever transformers makes of it
                    outcomes.append(type(error))
        if isinstance(outcomes[0], torch.Tensor):
            assert torch.equal(*outcomes)
        else:
            assert outcomes[0] is outcomes[1]
        assert torch.equal(decode(streamer.model, [3])[0], decode(expected, [3])[0])


@pytest.mark.parametrize("index", [None, torch.ones(1, 4), [[0, 1, 2, 3]]])
def test_a_routing_that_is_no_index_is_refused_by_name(index, wide):
    with stream(wide, expert_slots=4) as streamer, torch.no_grad():
        module = streamer.model.model.layers[0].mlp.experts
        with pytest.raises(PagedKVError, match="experts: expected an index"):
            module(torch.zeros(1, 32), index, torch.ones(1, 4))


def logits(model, count):
    with torch.no_grad():
        return model(torch.arange(1, 1 + count)[None], use_cache=False).logits


def experts_called(layer, count):
    def call(model):
        index = torch.stack([torch.arange(4 * i, 4 * i + 4) % 32 for i in range(count)])
        model.model.layers[layer].mlp.experts(torch.randn(count, 32), index, torch.ones(count, 4))

    return call


INNER = {
    "the model": lambda model: logits(model, 1),
    "the same experts": experts_called(0, 1),
    "the next layer's": experts_called(1, 3),
    "the next layer's, many": experts_called(1, 8),
}


@pytest.mark.parametrize(
    ("inner", "pass_", "resident"),
    each_value(INNER, [(1, 1.0), (6, 1.0), (59, -1.0)], [0, 3]),
)
def test_what_is_called_while_experts_compute_is_refused_and_the_pass_goes_on(
    inner, pass_, resident, wide
):
    expected, refused = in_memory(wide), []
    count, most = pass_

    def hook(*_):
        if not refused:
            with pytest.raises(PagedKVError, match=r"called while .* computes") as error:
                refused.append(INNER[inner](streamer.model))
            refused.append(error)

    with stream(wide, expert_slots=4, resident_layers=resident) as streamer:
        streamer._passes._most_alone = most
        gate = streamer.model.model.layers[0].mlp.experts.act_fn
        handle = gate.register_forward_pre_hook(hook)
        found = logits(streamer.model, count)
        handle.remove()
        assert len(refused) == 1
        assert torch.equal(found, logits(expected, count))
        assert torch.equal(logits(streamer.model, count), logits(expected, count))


class Interrupted:
    """Raises KeyboardInterrupt where the n-th function of the streamer is entered.

    There Python handles signals, as it does where functions of C return.
    """

    def __init__(self, at):
        self.at, self.count = at, 0

    def __call__(self, frame, event, arg):
        name = frame.f_code.co_filename
        ours = "/pagedkv/stream/" in name or name.endswith(("/contextlib.py", "/threading.py"))
        if ours and frame.f_code.co_name != "<genexpr>":  # what those raise is not seen
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt

    def run(self, model, count):
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return logits(model, count)
        finally:
            sys.settrace(before)


def readers():
    """Threads of rings."""
    return {thread for thread in threading.enumerate() if thread.name == "pagedkv"}


@sampled
@pytest.mark.parametrize(
    ("pass_", "ahead"),
    each_value([(0, 1, 0), (4, 1, 1.0), (4, 6, 1.0), (4, 20, -1.0)], [False, True]),
)
def test_an_interrupt_at_any_function_leaves_a_streamer_that_goes_on(
    pass_, ahead, tmp_path, monkeypatch
):
    """By whole layers, and with experts in their rows, in wide memory and in the ring.

    Also where a thread reads ahead, as it does from a disk.
    """
    make_ring, others, (slots, count, most) = Ring.__init__, readers(), pass_

    def reading_ahead(self, *args, **kwargs):
        make_ring(self, *args, **kwargs)
        self._always = self.ahead = ahead

    monkeypatch.setattr(Ring, "__init__", reading_ahead)
    sizes = {"num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 2}
    folder = save(make("qwen3_moe", **sizes), tmp_path)
    expected = {n: logits(in_memory(folder), n) for n in (count, 2)}
    with stream(folder, expert_slots=slots) as streamer:
        streamer._passes._most_alone = most
        logits(streamer.model, 2)
        whole = Interrupted(-1)
        whole.run(streamer.model, count)
        step = 1 if ALL else 11
        kept = []  # tracebacks, whose frames may hold what is to be taken back
        for at in range(1, whole.count, step):
            try:
                Interrupted(at).run(streamer.model, count)
            except KeyboardInterrupt as error:
                kept.append(error)
            for n, logits_of_n in expected.items():
                assert torch.equal(logits(streamer.model, n), logits_of_n), at
            for _, experts in streamer._passes._places.experts:
                assert len(experts._held) <= slots
        assert len(kept) > 0.5 * whole.count / step  # later passes find more, and call less
        assert len(readers() - others) <= 2  # the ring's of layers, and that of all experts
        for file in folder.glob("*.safetensors"):
            os.utime(file)
        with pytest.raises(CheckpointError, match="written to"):
            logits(streamer.model, 1)
