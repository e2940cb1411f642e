"""Experts that are read alone, in whatever generates text: bits, and memory over many passes."""

import mmap

import pytest
import torch
from safetensors.torch import save_file

from pagedkv import BatchGenerator
from pagedkv.hf import PagedCache
from tests.effort import each_value
from tests.hf.tiny import generate
from tests.stream.experts.residency import resident
from tests.stream.models import assert_bits, in_memory, make, ragged, save, stream

SPARSE = {"num_experts": 16, "num_experts_per_tok": 4}


@pytest.fixture
def folder(tmp_path):
    return save(make("qwen3_moe", **SPARSE), tmp_path)


def fused(model, folder):
    """Saves a model with experts stacked, as its modules have them."""
    model.config.save_pretrained(folder)
    tied = model.all_tied_weights_keys
    tensors = {k: v.contiguous() for k, v in model.state_dict().items() if k not in tied}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("layout", "family", "inner"),
    each_value([save, fused], ["qwen3_moe", "mixtral", "gpt_oss"], [16, 20, 36]),
)
def test_layouts_and_inner_widths_compute_the_same_bits(layout, family, inner, tmp_path):
    """Widths that no vector divides: by those remapped indices had other bits."""
    width = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
    counts = SPARSE if family == "qwen3_moe" else {"num_local_experts": 16}
    folder = layout(make(family, **{width: inner}, **counts), tmp_path)
    with stream(folder, expert_slots=4) as streamer:
        assert_bits(streamer.model, in_memory(folder))


@pytest.mark.parametrize("slots", [4, 16])
@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"do_sample": True}]
)
def test_generation_on_pages_has_the_bits_of_the_model_in_memory(slots, options, folder):
    expected = in_memory(folder)
    batch = ragged()
    if "prompt_lookup_num_tokens" in options:
        batch = {"input_ids": torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])}
    found = []
    with stream(folder, expert_slots=slots) as streamer:
        for model in (expected, streamer.model):
            torch.manual_seed(0)
            with PagedCache(model, max_tokens=512, page_size=4) as cache:
                found.append(generate(model, dict(batch), cache, **options))
    assert torch.equal(found[0].sequences, found[1].sequences)
    for mine, theirs in zip(found[1].logits, found[0].logits, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("fields", [{"verify_width": 4}, {"step_tokens": 4}])
def test_a_batch_generator_with_drafts_or_narrow_steps_answers_as_in_memory(fields, folder):
    prompts = [[5, 6, 7, 8] * 3, [5, 6], [9, 9, 9, 9, 9]]
    answers = []
    with stream(folder, expert_slots=4) as streamer:
        for model in (in_memory(folder), streamer.model):
            with BatchGenerator(model, max_tokens=256, page_size=4, **fields) as batched:
                results = batched.generate(prompts, max_new_tokens=12, do_sample=False)
                answers.append([result.tokens for result in results])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("inner", [16, 12])  # whole pages, and such that neighbours share some
def test_memory_does_not_grow_over_a_hundred_passes_with_prompts_between(inner, tmp_path):
    sizes = {"hidden_size": 128, "moe_intermediate_size": inner, "num_experts": 64}
    folder = save(make("qwen3_moe", **sizes, num_experts_per_tok=4, vocab_size=512), tmp_path)
    generator = torch.Generator().manual_seed(0)
    with stream(folder, expert_slots=8) as streamer, torch.no_grad():
        for number in range(100):
            shape = (1, 60) if number % 25 == 24 else (1 + number % 3, 1)
            ids = torch.randint(1, 500, shape, generator=generator)
            streamer.model(ids, use_cache=False)
        streamer.model(ids[:1, :1], use_cache=False)
        for _, experts in streamer._passes._places.experts:
            widths = [place.row_bytes for place in experts._places]
            held = len(experts._held)
            least = held * sum(widths)
            slack = 0 if inner == 16 else 2 * mmap.PAGESIZE * held * len(widths)
            assert 4 <= held <= 8
            assert least <= resident(experts._memory) <= least + slack
