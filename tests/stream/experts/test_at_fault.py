"""What goes wrong while experts are read: nothing is garbled, nothing hangs, and it goes on."""

import os
import signal
import threading

import pytest
import torch

from pagedkv.errors import CheckpointError, PagedKVError, StreamError
from tests.effort import few
from tests.stream.models import decode, in_memory, make, save, stream


@pytest.fixture
def folder(tmp_path):
    return save(make("qwen3_moe", num_experts=32, num_experts_per_tok=4), tmp_path)


def on_read(streamer, monkeypatch, at, act):
    """Does something in the middle of the n-th read of experts."""
    reader, count = streamer._store.reader, iter(range(10_000))
    read = reader.read

    def acting(name, run, memory):
        if name.startswith("experts") and next(count) == at:
            act(run, memory)
        read(name, run, memory)

    monkeypatch.setattr(reader, "read", acting)


@pytest.mark.parametrize("at", few(range(20), 0, 7))
def test_ctrl_c_within_a_read_leaves_a_streamer_that_goes_on(at, folder, monkeypatch):
    def press(run, memory):
        for part in run.parts:
            memory[part.at : part.at + part.nbytes] = b"\xff" * part.nbytes
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with stream(folder, expert_slots=4) as streamer:
            on_read(streamer, monkeypatch, at, press)
            with pytest.raises(KeyboardInterrupt):
                decode(streamer.model, [3, 4, 5])
            expected = decode(in_memory(folder), [3, 4, 5])
            for mine, theirs in zip(decode(streamer.model, [3, 4, 5]), expected):
                assert torch.equal(mine, theirs)
    finally:
        signal.signal(signal.SIGINT, before)


def test_close_from_another_thread_waits_for_the_pass_that_reads(folder, monkeypatch):
    expected = decode(in_memory(folder), [3])[0]
    streamer = stream(folder, expert_slots=4)
    closing = threading.Thread(target=streamer.close)
    on_read(streamer, monkeypatch, 1, lambda *_: closing.start())
    assert torch.equal(decode(streamer.model, [3])[0], expected)
    closing.join(30)
    assert not closing.is_alive()
    with pytest.raises(StreamError, match="closed"):
        decode(streamer.model, [3])


def test_close_within_a_pass_ends_the_pass_with_an_error(folder, monkeypatch):
    streamer = stream(folder, expert_slots=4)
    on_read(streamer, monkeypatch, 1, lambda *_: streamer.close())
    with pytest.raises(PagedKVError):
        decode(streamer.model, [3])


def test_two_threads_compute_the_bits_of_one(folder):
    tokens = list(range(1, 13))
    expected = decode(in_memory(folder), tokens)
    found: dict[int, list] = {}
    with stream(folder, expert_slots=4) as streamer:
        threads = [
            threading.Thread(target=lambda i=i: found.update({i: decode(streamer.model, tokens)}))
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(found) == [0, 1]
    for each in found.values():
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(each, expected))


def test_a_file_that_shrinks_is_an_error_that_names_the_tensor(folder, monkeypatch):
    def shrink(run, memory):
        for file in folder.glob("*.safetensors"):
            os.truncate(file, 1000)

    with stream(folder, expert_slots=4) as streamer:
        on_read(streamer, monkeypatch, 2, shrink)
        with pytest.raises(CheckpointError, match=r"experts of layer 0: tensor .*experts"):
            decode(streamer.model, [3])


@pytest.mark.parametrize("expert", [32, 10**6, -1])
def test_a_router_that_names_an_expert_beyond_them_fails_as_in_memory(expert, folder):
    index = torch.tensor([[0, 1, 2, expert]])
    weights, hidden = torch.ones(1, 4), torch.randn(1, 32)
    outcomes = []
    with stream(folder, expert_slots=4) as streamer:
        streamer.model.set_experts_implementation("eager")
        expected = in_memory(folder)
        expected.set_experts_implementation("eager")
        for model in (expected, streamer.model):
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
def test_a_routing_that_is_no_index_is_refused_by_name(index, folder):
    with stream(folder, expert_slots=4) as streamer, torch.no_grad():
        module = streamer.model.model.layers[0].mlp.experts
        with pytest.raises(PagedKVError, match="experts: expected an index"):
            module(torch.zeros(1, 32), index, torch.ones(1, 4))
