"""Experts in mxfp4: unpacked as they are read, to the bits that transformers unpacks to."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pagedkv import BatchGenerator, plan_memory
from pagedkv.errors import CheckpointError, CheckpointMismatch, UnsupportedModelError
from pagedkv.hf.fingerprint import fingerprint_of
from pagedkv.models.checkpoint import Checkpoint
from pagedkv.stream.mxfp4 import packed_in, require_on_cpu
from tests.effort import each_value, few
from tests.planner.models import read_model
from tests.stream.models import assert_bits, decode, fail, in_memory, on_read, stream
from tests.stream.packed import save_mxfp4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_mxfp4(tmp_path_factory.mktemp("mxfp4"))


def test_each_byte_below_each_scale_is_what_transformers_makes_of_it(tmp_path):
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 16)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    packed = packed_in(Checkpoint.open(tmp_path))["w"]
    found = torch.empty(packed.shape[1:], dtype=torch.bfloat16)
    packed.unpack([blocks.view(-1), scales.view(-1)], found)
    expected = convert_moe_packed_tensors(blocks, scales)[0]
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize(
    ("slots", "dtype"), each_value([0, 4, 8], [torch.bfloat16, torch.float32, torch.float16])
)
@pytest.mark.parametrize("resident", [0, 2])
def test_logits_and_tokens_are_those_in_memory_to_the_last_bit(slots, dtype, resident, folder):
    expected = in_memory(folder, dtype=dtype)
    with stream(folder, expert_slots=slots, dtype=dtype, resident_layers=resident) as streamer:
        assert_bits(streamer.model, expected)
        assert fingerprint_of(streamer.model) == fingerprint_of(expected) != b""
        assert (streamer.stats().expert_misses > 0) is bool(slots)


def test_only_experts_that_are_routed_to_are_read_and_as_they_are_packed(folder):
    with stream(folder, expert_slots=4) as streamer:
        decode(streamer.model, [5])
        stats = streamer.stats()
    one = 64 * 3 * 32 * 17 // 32 + 2 * (64 + 64)  # two parameters in mxfp4, two biases
    assert stats.expert_misses == 4 * 2
    assert stats.expert_bytes == 4 * 2 * one


def test_pages_and_a_plan_answer_as_in_memory(folder):
    sizes = {"length": 32, "max_tokens": 128, "batch": 2}
    whole = plan_memory(folder, device_memory="1GiB", device="cpu", **sizes)
    budget = sum(whole.device_bytes.values()) - 20_000
    prompts, answers = [[1, 2, 3, 4], [5, 6]], []
    with stream(folder, device_memory=budget, **sizes) as streamer:
        assert streamer.plan.expert_slots
        for model, plan in ((in_memory(folder), None), (streamer.model, streamer.plan)):
            with BatchGenerator(model, **({"plan": plan} if plan else sizes_of(128))) as batched:
                results = batched.generate(prompts, max_new_tokens=8, do_sample=False)
                answers.append([result.tokens for result in results])
    assert answers[0] == answers[1]


def sizes_of(tokens):
    return {"max_tokens": tokens}


def test_a_plan_counts_them_unpacked_on_a_cpu_and_packed_on_a_card(folder):
    model = in_memory(folder)
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers]
    on_cpu, on_card = (read_model(folder, on_cpu=on_cpu) for on_cpu in (True, False))
    assert on_cpu.layers == pytest.approx(layers, rel=0.05)  # tensors begin at aligned places
    assert on_cpu.experts is not None
    assert on_card.experts is None
    assert sum(on_card.layers) < 0.5 * sum(on_cpu.layers)
    sizes = {"device": "cpu", "length": 32, "max_tokens": 64}
    whole = plan_memory(folder, device_memory="1GiB", **sizes)
    assert "weights unpacked at 1.5 GB/s" in str(whole)
    tight = plan_memory(folder, device_memory=sum(whole.device_bytes.values()) - 20_000, **sizes)
    assert tight.streams
    assert tight.rate_in_4_bits is None  # that is what it is stored in


@pytest.mark.parametrize("slots", [0, 4])
@pytest.mark.parametrize("at", few(range(20), 0, 7))
def test_a_read_that_fails_leaves_a_streamer_that_goes_on(at, slots, folder, monkeypatch):
    expected = decode(in_memory(folder), [3, 4, 5])
    with stream(folder, expert_slots=slots) as streamer:
        on_read(streamer, monkeypatch, at, fail)
        with pytest.raises(CheckpointError, match="a disk fails"):
            decode(streamer.model, [3, 4, 5])
        for mine, theirs in zip(decode(streamer.model, [3, 4, 5]), expected, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, n: t.update({n: t[n][:, :-1].contiguous()}), "expected U8 blocks .E, O, G, 16"),
        (lambda t, n: t.update({n: t[n].to(torch.int32)}), r"and I32 \[8"),
        (lambda t, n: t.pop(n), "tensors without a parameter: .*gate_up_proj_blocks"),
    ],
    ids=["too few", "another dtype", "none"],
)
def test_scales_that_do_not_belong_to_their_blocks_are_refused(change, words, tmp_path):
    folder = save_mxfp4(tmp_path)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors, "model.layers.1.mlp.experts.gate_up_proj_scales")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointMismatch, match=words):
        stream(folder)


def test_a_card_is_refused_where_transformers_leaves_them_packed(folder):
    with pytest.raises(UnsupportedModelError, match="weights in mxfp4 stream on CPUs"):
        require_on_cpu(Checkpoint.open(folder), torch.device("cuda"))
