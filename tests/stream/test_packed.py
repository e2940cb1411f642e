"""Packed checkpoints: those of compressed-tensors stream packed, others are refused by name."""

import json

import pytest
import torch
import transformers

from pagedkv import BatchGenerator, LayerStreamer, PagedCache, plan_memory
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.foreign_hooks import foreign_hook
from tests.hf.tiny import named
from tests.stream.models import CPU, assert_bits, make, save, stream
from tests.stream.packed import SCHEMES, save_packed

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def packed(folder, scheme, **fields):
    torch.manual_seed(0)
    return save_packed(make("llama", **WIDE, **fields), folder, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_weights_stream_packed_and_compute_as_in_memory(scheme, tmp_path):
    folder = packed(tmp_path, scheme)
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with stream(folder, resident_layers=1) as streamer:
        before = {n: t.dtype for n, t in streamer.model.state_dict().items()}
        assert_bits(streamer.model, expected)
        after = {n: t.dtype for n, t in streamer.model.state_dict().items()}
        stats = streamer.stats()
    assert before == after  # nothing stays unpacked
    layers = plan_memory(folder, device_memory="1GiB", device="cpu").shape.layers
    assert stats.bytes_read / stats.passes == pytest.approx(sum(layers[1:]), rel=0.1)


def test_a_model_that_unpacks_itself_takes_later_turns_forks_and_prefixes_of_others(tmp_path):
    """In its first forward it gets other weights, which are no change of the model."""
    folder, store = packed(tmp_path / "model", "W4A16", vocab_size=100), tmp_path / "store"
    ids, options = torch.arange(130)[None] % 90 + 3, {"max_new_tokens": 3, "do_sample": False}
    for found in (0, 128):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        with PagedCache.prefill(model, ids, max_tokens=512, prefix_store=store) as shared:
            assert shared.stats().tokens_from_store == found
            fork = shared.fork()
            longer = torch.cat([ids, ids[:, :3]], 1)
            for _ in range(2):
                longer = model.generate(longer, **named(fork), **options)
    alone = model.generate(longer[:, :133], **options | {"max_new_tokens": 6})
    assert longer.tolist() == alone.tolist()


def test_four_bits_are_planned_streamed_and_generated_from_with_pages(tmp_path):
    folder = packed(tmp_path, "W4A16", num_hidden_layers=12, vocab_size=100)
    sizes = {"max_tokens": 64, "length": 40, "step_tokens": 32, "batch": 2}
    whole = plan_memory(folder, device_memory="1GiB", device="cpu", **sizes)
    assert (whole.shape.packed, whole.shape.exact, whole.streams) == (True, True, False)
    needed = sum(whole.device_bytes.values()) - sum(whole.shape.layers) // 2
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert foreign_hook(expected) is None  # its own unpacks it in its first forward
    prompts, options = [[5, 6, 7], [8, 9]], {"max_new_tokens": 5, "do_sample": False}
    with BatchGenerator(expected, max_tokens=256) as generator:
        known = [result.tokens for result in generator.generate(prompts, **options)]
    with LayerStreamer.from_pretrained(
        folder, device=CPU, device_memory=needed, **sizes
    ) as streamer:
        assert streamer.plan.streams
        with BatchGenerator(streamer.model, plan=streamer.plan) as generator:
            found = [result.tokens for result in generator.generate(prompts, **options)]
        assert found == known
        cache = PagedCache(streamer.model, plan=streamer.plan)
        ids = torch.tensor([prompts[0]])
        out = streamer.model.generate(ids, **named(cache), **options)
        assert out[0, 3:].tolist() == known[0]


def test_an_error_in_a_packed_module_leaves_it_packed(tmp_path):
    folder = packed(tmp_path, "W4A16")
    ids = torch.tensor([[5, 6, 7]])
    with stream(folder) as streamer, torch.no_grad():
        known = streamer.model(ids).logits
        module = streamer.model.model.layers[1].mlp.up_proj
        with pytest.raises(RuntimeError):
            streamer.model(inputs_embeds=torch.zeros(1, 3, 63))
        assert "weight" not in module._parameters
        assert torch.equal(streamer.model(ids).logits, known)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "torchao", "quant_type": {"default": "int8"}},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    ],
    ids=lambda config: config["quant_method"],
)
def test_weights_that_do_not_stream_packed_are_refused_by_name(config, tmp_path):
    folder = save(make("llama", **WIDE), tmp_path)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"quantization_config": config}))
    named = f"weights packed by {config['quant_method']} do not stream here; those of compressed-te"
    with pytest.raises(UnsupportedModelError, match=named):
        stream(folder)
