"""`generate` over pages: the ways of decoding, chunked prefill, turns, and half precision."""

import pytest
import torch
from torch import Tensor

from pagedkv.hf import PagedCache
from tests.effort import each_value, examples, sampled
from tests.hf.tiny import (
    NEW,
    assert_same_tokens,
    dense,
    generate,
    named,
    padded,
    prompts,
    tiny,
)


@pytest.fixture
def model():
    return tiny()


def paged(model, page_size=4, **fields) -> PagedCache:
    return PagedCache(model, page_size=page_size, max_tokens=2048, **fields)


# ------------------------------------------------------------------ ways of decoding


@pytest.mark.parametrize("page_size", [1, 4])
def test_four_beams_of_four_rows_share_pages(model, page_size):
    batch = padded(prompts(13, 5, 9, 16))
    options = {"num_beams": 4, "max_new_tokens": 12}
    expected = generate(model, batch, **options)
    with paged(model, page_size) as cache:
        assert_same_tokens(generate(model, batch, cache, **options), expected)
        cache.kv.check()
        stats = cache.stats()
        alone = sum(-(-cache.kv.length(row) // page_size) for row in cache.rows)
        assert stats.live < alone, "beams of one prompt hold the same pages"
        assert stats.live + stats.cached + stats.free == stats.pages
        cache.reset()
        assert cache.stats().live == 0
        cache.kv.check()


class Crops:
    """A cache that notes how many tokens it was told to forget."""

    def __init__(self, cache: PagedCache, monkeypatch) -> None:
        self.asked: list[int] = []
        crop = cache.crop

        def noted(tokens_to_remove):
            self.asked.append(int(tokens_to_remove))
            crop(tokens_to_remove)

        monkeypatch.setattr(cache, "crop", noted)


@pytest.mark.parametrize("page_size", [1, 4])
def test_prompt_lookup_takes_rejected_tokens_back(model, page_size, monkeypatch):
    batch = padded([prompts(5)[0].repeat(4)])
    expected = generate(model, batch, max_new_tokens=24)
    with paged(model, page_size) as cache:
        crops = Crops(cache, monkeypatch)
        actual = generate(model, batch, cache, max_new_tokens=24, prompt_lookup_num_tokens=5)
        assert_same_tokens(actual, expected)
        assert min(crops.asked) < 0, "no draft token was rejected, so nothing was tested"
        cache.kv.check()


# Each with a window of 8 tokens in some or all of its layers.
WINDOWED = ["mistral", "ministral", "gemma3", "cohere2", "olmo3"]


@sampled
def test_draft_tokens_are_taken_back_behind_windows_too(monkeypatch):
    crops: list[int] = []
    for family in WINDOWED[: examples(5, 2)]:
        model, assistant = tiny(family), tiny()
        batch = padded([prompts(5)[0].repeat(5)])
        expected = generate(model, batch, max_new_tokens=24)
        for options in ({"prompt_lookup_num_tokens": 6}, {"assistant_model": assistant}):
            options = {"max_new_tokens": 24, **options}
            with paged(model, page_size=4) as cache:
                asked = Crops(cache, monkeypatch).asked
                assert_same_tokens(generate(model, batch, cache, **options), expected)
                crops += asked
                cache.kv.check()
                # Pages of the window and of what the last forward may have to give back.
                tokens = 8 + 20 + 1
                most = -(-tokens // 4) + 1
                full = len(cache.kv.config.groups) - 1
                assert cache.stats().live <= most + full * -(-cache.get_seq_length() // 4)
    assert min(crops) < -1, "too few draft tokens were rejected"


def test_generating_from_embeddings(model):
    batch = padded(prompts(9, 5))
    embeds = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    batch["inputs_embeds"] = embeds
    expected = generate(model, batch)
    with paged(model) as cache:
        assert_same_tokens(generate(model, batch, cache), expected)


# ------------------------------------------------------------------ chunks and turns


@pytest.mark.parametrize(("family", "chunk"), [("llama", 6), ("gemma3", 3), ("gpt_oss", 6)])
def test_prefill_in_chunks_beside_the_page_size(family, chunk):
    model = tiny(family)
    batch = padded(prompts(17, 3, 9, 12))  # the first chunks hold nothing of the second row
    expected = generate(model, batch)
    with paged(model) as cache:
        assert_same_tokens(generate(model, batch, cache, prefill_chunk_size=chunk), expected)
        cache.kv.check()


def test_prefill_in_chunks_on_a_used_cache_is_right_or_refused(model):
    # transformers before 5.23 counts the chunks from 0, whatever the cache holds: masks and
    # positions of another place in the text. Only a mask can tell, so some padding is needed.
    batch = padded(prompts(12, 7))
    with paged(model) as cache:
        ids = torch.cat([generate(model, batch, cache).sequences, torch.stack(prompts(9, 9))], 1)
        mask = torch.nn.functional.pad(batch["attention_mask"], (0, 19), value=1)
        longer = {"input_ids": ids, "attention_mask": mask}
        seen, before, reason = cache.get_seq_length(), cache.stats(), None
        try:
            actual = generate(model, longer, cache, prefill_chunk_size=5)
        except ValueError as refusal:
            reason = str(refusal)
        if reason:
            assert "attention_mask: expected [2, 26]" in reason
            assert (cache.get_seq_length(), cache.stats()) == (seen, before)
            actual = generate(model, longer, cache)
    assert_same_tokens(actual, generate(model, longer))


@pytest.mark.parametrize(
    ("family", "given"),
    each_value(["llama", "mistral", "gemma3", "gpt2", "gpt_oss"], ["all ids", "new ids"]),
)
def test_three_turns_on_one_cache(family, given):
    model, options = tiny(family), {"max_new_tokens": NEW}
    text = padded(prompts(9, 4, 13))
    expected, questions = [], prompts(7, 7)
    ids, mask = text["input_ids"], text["attention_mask"]
    for question in (None, *questions):
        if question is not None:
            ids = torch.cat([ids, question.expand(3, -1)], dim=1)
        mask = torch.cat([mask, mask.new_ones(3, ids.shape[1] - mask.shape[1])], dim=1)
        expected.append(
            (ids, mask, generate(model, {"input_ids": ids, "attention_mask": mask}, **options))
        )
        ids = expected[-1][2].sequences
    with paged(model) as cache:
        for ids, mask, result in expected:
            new = ids if given == "all ids" else ids[:, cache.get_seq_length() :]
            actual = generate(model, {"input_ids": new, "attention_mask": mask}, cache, **options)
            actual.sequences = actual.sequences[:, -NEW:]
            result.sequences = result.sequences[:, -NEW:]
            assert_same_tokens(actual, result)
        cache.kv.check()


@pytest.mark.parametrize("inside", ["made", "prefilled", "used"])
def test_cache_touched_in_inference_mode_goes_on_outside(model, inside):
    # `generate` runs under no_grad, hand-written loops often under inference_mode.
    (text,) = prompts(9)
    batch = padded([text])
    expected = generate(model, batch)
    with torch.inference_mode():
        if inside == "prefilled":
            cache = PagedCache.prefill(model, text[:6], page_size=4, max_tokens=256)
        else:
            cache = paged(model)
        if inside == "used":
            generate(model, padded(prompts(5)), cache)
            cache.reset()
    with cache, cache.fork() as twin:
        assert_same_tokens(generate(model, batch, twin), expected)
        assert_same_tokens(generate(model, batch, cache), expected)


# ------------------------------------------------------------------ half precision


def errors_in_bfloat16(family: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns errors of two steps from pages and from transformers' cache, and the true logits."""
    model = tiny(family).bfloat16()
    batch = padded(prompts(14, 14))
    exact = tiny(family).double()
    exact.load_state_dict(model.state_dict())
    truth = exact(**batch).logits

    def run(cache):
        first = model(batch["input_ids"][:, :9], **named(cache)).logits
        rest = model(batch["input_ids"][:, 9:], **named(cache)).logits
        return torch.cat([first, rest], dim=1).double() - truth

    twin = run(dense(model))
    with paged(model) as cache:
        assert cache.kv.config.dtype == "bfloat16"
        return run(cache), twin, truth


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@torch.no_grad()
def test_bfloat16_is_as_accurate_as_sdpa(family):
    error, twin, truth = (x.abs().max() for x in errors_in_bfloat16(family))
    # Both round every product of the model to 8 bits; where they add in another order, the last
    # bit of the largest logit may differ as well.
    assert error <= twin + truth * torch.finfo(torch.bfloat16).eps


@torch.no_grad()
def test_bfloat16_with_sinks_is_as_accurate_as_eager():
    # Other roundings than eager's, which keeps no product in float32, so only their size can be
    # compared: with independent errors a mean says more than the largest of them.
    error, twin, _ = (x.square().mean().sqrt() for x in errors_in_bfloat16("granite_swa"))
    assert error <= 1.5 * twin
