"""Experts that are read alone, in whatever generates text: bits, and memory over many passes."""

import mmap

import pytest
import torch
from safetensors.torch import save_file

from pagedkv import BatchGenerator
from pagedkv.hf import PagedCache
from tests.effort import each_value
from tests.hf import zoo
from tests.hf.tiny import generate
from tests.stream.experts.residency import resident
from tests.stream.models import in_memory, make, ragged, save, stream

SPARSE = {"num_experts": 16, "num_experts_per_tok": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(make("qwen3_moe", **SPARSE), tmp_path_factory.mktemp("sparse"))


def fused(model, folder):
    """Saves a model with experts stacked, as its modules have them."""
    model.config.save_pretrained(folder)
    tied = model.all_tied_weights_keys
    tensors = {k: v.contiguous() for k, v in model.state_dict().items() if k not in tied}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


ALIKE = [
    "glm4_moe",
    "deepseek_v3",
    "granitemoe",
    "olmoe",
    "phimoe",
    "qwen3_next",
    "qwen3_5_moe_text",
]
KINDS = ["qwen3_moe", "mixtral", "gpt_oss", *ALIKE]
# What the types without a width of their own for experts call it.
BY_THE_LAYER = {"mixtral", "gpt_oss", "granitemoe", "olmoe", "phimoe"}
IMPLEMENTATIONS = ["eager", "grouped_mm", "batched_mm"]


def computed(model, ids):
    """Logits; or what is refused, as grouped products of rows that are no whole 16 bytes are."""
    try:
        return model(torch.tensor(ids), use_cache=False).logits
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "layout", "inner", "dtype"),
    each_value(KINDS, [save, fused], [16, 20, 36], [torch.float32, torch.bfloat16]),
)
def test_types_layouts_widths_and_implementations_compute_the_bits_of_memory(
    kind, layout, inner, dtype, tmp_path
):
    """Also at inner widths that no vector divides: by those remapped indices had other bits."""
    width = "intermediate_size" if kind in BY_THE_LAYER else "moe_intermediate_size"
    folder = layout(zoo.built(kind, **{width: inner}).to(dtype), tmp_path)
    expected = in_memory(folder)
    with stream(folder, expert_slots=2) as streamer, torch.no_grad():
        streamer._passes._most_alone = 1.0
        for implementation in IMPLEMENTATIONS:
            for model in (streamer.model, expected):
                model.set_experts_implementation(implementation)
            for ids in ([[3]], [[5, 6, 7], [8, 9, 10]], [[3]], [[7], [9], [11], [13]]):
                mine, theirs = (computed(m, ids) for m in (streamer.model, expected))
                assert torch.equal(mine, theirs) if torch.is_tensor(theirs) else mine == theirs
        assert streamer.stats().expert_misses > 0


@pytest.mark.parametrize(
    ("slots", "options"),
    each_value([4, 16], [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"do_sample": True}]),
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
def test_memory_does_not_grow_over_many_passes_with_prompts_between(inner, tmp_path):
    sizes = {"hidden_size": 128, "moe_intermediate_size": inner, "num_experts": 64}
    folder = save(make("qwen3_moe", **sizes, num_experts_per_tok=4, vocab_size=512), tmp_path)
    generator = torch.Generator().manual_seed(0)
    with stream(folder, expert_slots=8) as streamer, torch.no_grad():
        for number in range(40):
            shape = (1, 60) if number % 10 == 9 else (1 + number % 3, 1)
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
