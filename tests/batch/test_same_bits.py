"""`batch_invariant`: log-probabilities have the same bits alone and beside any others.

What these tests alone find: an operation of a step whose last bits depend on what else is in it, or
on how a text is cut into steps. A tolerance elsewhere lets it pass.
"""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from pagedkv import BatchGenerator
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import blocked_weights
from pagedkv.hf.activations import in_whole_vectors
from pagedkv.hf.blocked_weights import SAME_BITS
from pagedkv.kernels.c.library import missing
from tests.effort import examples, few, sampled
from tests.hf.tiny import tiny

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a library")

FAMILIES = "cohere", "gemma2", "gemma3", "gpt_neox", "granite", "llama", "mistral", "olmo2"
FAMILIES += "phi", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2"
WIDE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 101}
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "logprobs": True}
# Sizes of a batch, each of which once changed last bits.
WAYS = {"step_tokens": 7}, {"step_tokens": 64, "page_size": 1}, {"verify_width": 4, "page_size": 4}


def rows(vocab, long):
    """Prompts of which some share more than a page, and one is longer than a part of a text."""
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(2, vocab, (n,), generator=draw).tolist() for n in (1, 9, 30, long, 3, 7)]
    return [*ids, ids[2] + ids[4], ids[2] + ids[5]]


def made(model, prompts, **fields):
    """Of each prompt its tokens and their log-probabilities."""
    fields = {"max_tokens": 4096, "batch_invariant": True, **fields}
    with BatchGenerator(model, **fields) as batched:
        batched.cache.clear_prefixes()
        results = batched.generate(prompts, **OPTIONS)
    assert all(result.error is None for result in results)
    return [(result.tokens, result.logprobs) for result in results]


def assert_same_bits(model, long, ways):
    prompts = rows(model.config.vocab_size, long)
    alone = [made(model, [prompt])[0] for prompt in prompts]
    for fields in ways:
        assert made(model, prompts, **fields) == alone, fields
    assert made(model, prompts[::-1]) == alone[::-1]
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        assert made(model, prompts) == alone
    finally:
        torch.set_num_threads(threads)
    with BatchGenerator(model, max_tokens=4096, batch_invariant=True) as batched:
        scores = batched.score(prompts, [[tokens] for tokens, _ in alone])
    assert [(score.tokens, score.logprobs) for (score,) in scores] == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_its_bits_in_any_batch(dtype):
    assert_same_bits(tiny("llama", **WIDE).to(dtype), 40, WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_a_language_model_have_their_bits_in_any_batch(dtype, smollm2_path):
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=dtype).eval()
    assert_same_bits(model, 1100, WAYS)


@pytest.mark.parametrize("threads", [1, 3])
def test_no_width_has_an_end_that_is_rounded_otherwise(threads):
    """Torch computes the end of a tensor, or of a thread's share, number by number."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for module in (nn.SiLU(), nn.GELU(approximate="tanh")):
            for dtype, width in ((torch.float32, 96), (torch.bfloat16, 96), (torch.float32, 77)):
                x = torch.randn(1, 777, width).mul(4).to(dtype)
                out = in_whole_vectors(module, x)
                torch.testing.assert_close(out, module(x))
                for row in range(0, 777, 7):
                    alone = in_whole_vectors(module, x[:, row : row + 1])
                    assert torch.equal(alone, out[:, row : row + 1])
    finally:
        torch.set_num_threads(before)


def test_a_product_that_depends_on_its_rows_is_found(monkeypatch):
    model, product = tiny("llama", **WIDE), blocked_weights.product

    def planted(x, packed, bias):
        out = product(x, packed, bias)
        return out if x.numel() > x.shape[-1] else out * (1 + 2**-22)

    monkeypatch.setattr(blocked_weights, "product", planted)
    with pytest.raises(AssertionError):
        assert_same_bits(model, 40, WAYS[:1])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pack_weights": False}, "pack_weights is False"),
        ({"kv_format": "int8"}, "kv_format"),
    ],
    ids=str,
)
def test_what_would_change_bits_is_refused(fields, reason):
    with pytest.raises(UnsupportedModelError, match=f"batch_invariant: expected False, .*{reason}"):
        BatchGenerator(tiny("llama", head_dim=16), max_tokens=512, batch_invariant=True, **fields)


@sampled
@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16], torch.bfloat16), ids=str)
@pytest.mark.parametrize("family", few(FAMILIES, "gemma3", "phi3"))
def test_every_family_that_is_not_refused_has_its_bits(family, dtype):
    odd = {"hidden_size": 48, "intermediate_size": 77}
    assert_same_bits(tiny(family, **odd).to(dtype), 40, WAYS[: examples(3, 1)])


def test_families_that_no_test_holds_are_refused():
    assert {tiny(family).config.get_text_config().model_type for family in FAMILIES} == SAME_BITS
    with pytest.raises(UnsupportedModelError, match="no test holds the same bits for stablelm"):
        BatchGenerator(tiny("stablelm"), max_tokens=512, batch_invariant=True)


def test_an_activation_that_is_unknown_is_refused():
    model = tiny("llama")
    for layer in model.model.layers:
        layer.mlp.act_fn = type("Own", (nn.SiLU,), {})()
    with pytest.raises(UnsupportedModelError, match="its activation is no module of"):
        BatchGenerator(model, max_tokens=512, batch_invariant=True)


def test_experts_that_torch_multiplies_are_refused():
    with pytest.raises(UnsupportedModelError, match="which torch multiplies"):
        BatchGenerator(tiny("mixtral"), max_tokens=512, batch_invariant=True)
