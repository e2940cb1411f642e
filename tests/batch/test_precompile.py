"""`BatchGenerator.warm_up`: what it lists is what jobs launch, and pages stay as they were."""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from pagedkv import BatchGenerator, PagedKVCache
from pagedkv.batch import precompile
from pagedkv.hf.model import cache_config
from pagedkv.kernels.triton.launch import noted
from tests.effort import few
from tests.hf.tiny import tiny
from tests.hf.zoo import built

LLAMA = {"head_dim": 32, "vocab_size": 320}
PAGES = {
    "dense": {},
    "int4": {"kv_format": "int4"},
    "fp8": {"kv_format": "fp8", "page_size": 8},
    "chosen": {"read_tokens": 64},
    "watched": {"retention": "importance", "budget": 96},
}
MODELS = {
    "windows and softcaps": ("gemma2", {"head_dim": 16}),
    "sinks": ("gpt_oss", {"head_dim": 16}),
    "latents": ("deepseek_v3", {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 16}),
    "states": ("qwen3_next", {"head_dim": 16}),
    "states beside": ("falcon_h1", {"head_dim": 16}),
}


def over_triton(model, **fields):
    """A generator over pages that Triton's kernels attend to."""
    config = cache_config(model, 2048, **fields)
    return BatchGenerator(model, cache=PagedKVCache(config, device="cpu", backend="triton"))


def launched(generator):
    """Returns the launches of a job whose rows share a prefix, fork, wait and verify."""
    shared = list(range(5, 105))
    prompts = [[*shared, 7, 8], [*shared, 9], [*shared, 10, 11], [3, 4, 5] * 9, [4]]
    options = {"max_new_tokens": 18, "num_return_sequences": 2, "do_sample": True}
    # Kernels that are launched would take minutes here; what they do not write is zeros.
    with noted(only=True) as launches, mock.patch.object(torch, "empty", torch.zeros):
        results = generator.generate(prompts, **options)
    assert not any(result.error for result in results)
    return {launcher for launcher, _, _ in launches}


def assert_listed(model, **fields):
    with over_triton(model, **fields) as generator:
        before = generator.cache.stats()
        listed = precompile.launches_of(generator._packed)
        assert generator.cache.stats() == before
        generator.cache.check()
        missing = launched(generator) - {launcher for launcher, _, _ in listed}
        assert not [(one.kernel.fn.__name__, one.static) for one in missing]
        assert generator.warm_up() == 0  # nothing compiles what is interpreted


@pytest.mark.parametrize("pages", PAGES)
def test_what_is_listed_is_what_a_job_launches(pages):
    assert_listed(tiny(**LLAMA), **PAGES[pages])


@pytest.mark.parametrize("kind", few(MODELS, "windows and softcaps", "latents"))
def test_the_model_says_which_terms_and_layers_there_are(kind):
    name, fields = MODELS[kind]
    assert_listed(built(name, **fields))


def test_a_width_of_several_tokens_launches_nothing_else():
    model = tiny(**LLAMA)
    pages = PagedKVCache(cache_config(model, 2048), device="cpu", backend="triton")
    with BatchGenerator(model, cache=pages, verify_width=6) as generator:
        listed = {launcher for launcher, _, _ in precompile.launches_of(generator._packed)}
        assert launched(generator) <= listed
        assert generator.stats.drafted > 0


def test_a_draft_model_is_warmed_up_with_its_own_pages(monkeypatch):
    model, draft, asked = tiny(**LLAMA), tiny(**LLAMA), []
    monkeypatch.setattr(
        "pagedkv.batch.generator.compile_for",
        lambda packed, workers: asked.append((packed.model, workers)) or 3,
    )
    with BatchGenerator(model, max_tokens=256, draft=draft) as generator:
        assert generator.warm_up(workers=2) == 6
    assert asked == [(model, 2), (draft, 2)]


def test_nothing_is_to_be_done_where_torch_attends():
    with BatchGenerator(tiny(), max_tokens=64) as generator:
        assert generator.warm_up() == 0
    with pytest.raises(ValueError, match="closed"):
        generator.warm_up()


PROGRAM = """
from triton import knobs
from pagedkv import BatchGenerator, PagedKVCache
from pagedkv.hf.model import cache_config
from pagedkv.kernels.triton.card import absent_card
from tests.hf.tiny import tiny

model = tiny(head_dim=32, vocab_size=320)
with absent_card(90):
    pages = PagedKVCache(cache_config(model, 2048), device="cpu", backend="triton")
    with BatchGenerator(model, cache=pages) as generator:
        assert generator.warm_up(workers=2) > 5
        assert generator.warm_up(workers=1) == 0
        found = []
        knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
        generator.generate([list(range(5, 60)), list(range(5, 50)), [4]], max_new_tokens=3)
        assert len(found) > 4, found
        assert all(found), found
"""


@pytest.mark.slow
def test_a_job_finds_in_the_cache_what_was_compiled(tmp_path, forked):
    forked(PROGRAM, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
