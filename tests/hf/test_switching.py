"""One model, several attentions and caches: ours and others', before, beside, after each other."""

import pytest
import torch
from transformers import StaticCache

from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import PagedCache, attach, attention, detach
from pagedkv.hf.attention import attention_function
from pagedkv.kernels.torch.sdpa import without_cudnn
from tests.effort import each_value
from tests.hf.tiny import (
    WINDOW,
    assert_close,
    assert_same_tokens,
    attention_of,
    dense,
    generate,
    named,
    padded,
    prompts,
    tiny,
)

FAMILIES = ["llama", "gemma2", "gemma3", "gpt2", "gpt_oss", "gemma4", "mimo_v2_flash"]
EAGER = {
    "gemma2",
    "gpt_oss",
    "mimo_v2_flash",
}  # SDPA leaves the softcap out, and has no attention sinks


@pytest.fixture(params=FAMILIES)
def model(request):
    model = tiny(request.param)
    if request.param in EAGER:
        model.set_attn_implementation("eager")
    return model


def paged(model, **fields) -> PagedCache:
    return PagedCache(model, **{"page_size": 4, "max_tokens": 2048, **fields})


def real(logits, batch):
    return logits[batch["attention_mask"].bool()]


# ------------------------------------------------------------------ without our cache


def test_attention_to_the_future_without_a_cache_or_mask():
    # An encoder's: SDPA asks the module.
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    module = torch.nn.Module()
    module.is_causal = False
    out, _ = attention_function(module, q, k, v, None, scaling=1.0)
    assert_close(out, ((q @ k.transpose(2, 3)).softmax(-1) @ v).transpose(1, 2))


def test_attention_without_a_cache_leaves_cudnn_out_on_a_card(monkeypatch):
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    found, attend = [], torch.nn.functional.scaled_dot_product_attention

    def noted(*args, **options):
        found.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    card = without_cudnn(torch.device("cuda"))
    monkeypatch.setattr(attention, "without_cudnn", {q.device: card}.__getitem__)
    attention_function(torch.nn.Module(), q, k, v, None, scaling=1.0)
    assert found == [False]


@pytest.mark.parametrize(
    ("model", "masked"), each_value(FAMILIES, [True, False]), indirect=["model"]
)
@torch.no_grad()
def test_prefill_continued_in_a_dynamic_cache(model, masked):
    # The second stretch has more keys than queries: causal from the last key, not the first.
    batch = padded(prompts(15, 9, 12) if masked else prompts(15, 15))
    mask = batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ids = batch["input_ids"]
    expected = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    attach(model)
    cache, parts, start = dense(model), [], 0
    for stop in (6, 11, 15):
        options = {"attention_mask": mask[:, :stop]} if masked else {}
        places = positions[:, start:stop]
        piece = ids[:, start:stop]
        parts.append(model(piece, **named(cache), position_ids=places, **options).logits)
        start = stop
    detach(model)
    assert_close(real(torch.cat(parts, dim=1), batch), real(expected, batch))


@pytest.mark.parametrize(
    ("model", "cache", "lengths"),
    each_value(FAMILIES, ["dynamic", "static"], [(13, 13), (13, 6, 9)]),
    indirect=["model"],
)
def test_generating_with_another_cache_on_an_attached_model(model, cache, lengths):
    batch = padded(prompts(*lengths))
    expected = generate(model, batch)
    attach(model)
    assert_same_tokens(generate(model, batch, cache_implementation=cache), expected)
    detach(model)


def test_a_static_cache_without_padding_on_an_attached_model_that_skips_queries():
    # Alone finds: a mask for the last queries of Gemma 4 where a static cache has none either.
    model, batch = tiny("gemma4"), padded(prompts(13, 13))
    expected = generate(model, batch)
    with paged(model):
        assert_same_tokens(generate(model, batch, cache_implementation="static"), expected)


def test_drafts_checked_without_a_cache_of_ours_see_what_they_see_on_a_model_alone():
    model, (row,) = tiny("gemma4"), prompts(10)
    with torch.no_grad():
        expected = model(row[None], logits_to_keep=4).logits
        with paged(model):
            assert_close(model(row[None], logits_to_keep=4).logits, expected)


def test_static_cache_kept_over_two_turns_on_an_attached_model():
    model = tiny()
    batch = padded(prompts(13, 6))
    results = []
    for name in ("sdpa", "pagedkv"):
        if name == "pagedkv":
            attach(model)
        cache = StaticCache(config=model.config, max_cache_len=64)
        first = generate(model, batch, cache).sequences
        mask = torch.cat([batch["attention_mask"], torch.ones(2, 10, dtype=torch.long)], dim=1)
        results.append(generate(model, {"input_ids": first, "attention_mask": mask}, cache))
    detach(model)
    assert_same_tokens(results[1], results[0])


# ------------------------------------------------------------------ our cache, other attentions


@pytest.mark.parametrize(
    ("family", "name"),
    [(family, "eager") for family in FAMILIES] + [(f, "sdpa") for f in FAMILIES if f not in EAGER],
)
def test_our_cache_under_another_attention(family, name):
    model = tiny(family)
    batch = padded(prompts(13, 6, 9))
    model.set_attn_implementation(name)
    expected = generate(model, batch)
    with paged(model) as cache:
        model.set_attn_implementation(name)
        assert_same_tokens(generate(model, batch, cache), expected)
        assert cache.get_seq_length() == 22
        cache.kv.check()
    assert attention_of(model) == name


# Families with windows are left out of the holes: to ours they take no room in a window.
SWITCHED = [(family, padding) for family in FAMILIES for padding in ("none", "left")]
SWITCHED += [(family, padding) for family in ("llama", "gpt2") for padding in ("right", "hole")]


@pytest.mark.parametrize(("family", "padding"), SWITCHED)
@torch.no_grad()
def test_switching_the_attention_between_steps(family, padding):
    model = tiny(family)
    if family in EAGER:
        model.set_attn_implementation("eager")
    other = attention_of(model)
    ids = torch.stack(prompts(21, 21, 21))
    mask = torch.ones_like(ids)
    place = {"none": slice(0), "left": slice(5), "right": slice(9, 13), "hole": slice(4, 7)}
    mask[1, place[padding]] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    with paged(model) as cache:
        start = 0
        for size, name in [
            (13, "pagedkv"), (1, other), (2, other), (1, "pagedkv"), (3, "pagedkv"), (1, other),
        ]:  # fmt: skip
            model.set_attn_implementation(name)
            new = slice(start, start + size)
            start += size
            logits = model(
                ids[:, new],
                attention_mask=mask[:, :start],
                position_ids=positions[:, new],
                **named(cache),
            ).logits
            kept = mask[:, new].bool()
            assert_close(logits[kept], expected[:, new][kept])
        cache.kv.check()


@torch.no_grad()
def test_padding_stored_by_another_attention_is_not_attended_later():
    # Nobody tells a cache the mask there, so padding got into the pages.
    model = tiny()
    batch = padded(prompts(9, 5))
    plain = padded(prompts(9, 9))
    new = torch.full((2, 1), 7)
    for given, fine in ((plain, True), (batch, False)):
        mask = torch.cat([given["attention_mask"], torch.ones_like(new)], dim=1)
        with paged(model) as cache:
            model.set_attn_implementation("sdpa")
            model(**given, **named(cache))
            model.set_attn_implementation("pagedkv")
            if fine:
                whole = torch.cat([given["input_ids"], new], dim=1)
                expected = model(whole, use_cache=False).logits[:, -1:]
                logits = model(new, attention_mask=mask, **named(cache)).logits
                assert_close(logits, expected)
            else:
                with pytest.raises(UnsupportedModelError, match="which are cached, has changed"):
                    model(new, attention_mask=mask, **named(cache))


# ------------------------------------------------------------------ no dense K and V


@pytest.mark.gpu
@torch.no_grad()
def test_sixteen_answers_to_a_long_prefix_need_a_fraction_of_the_memory():
    # Dense: 16 x (4096 + 8) tokens and one layer twice, while it is concatenated. Paged: 4096 +
    # 16 x 8 tokens and scratch for at most 16 rows of one layer of 4, a quarter of dense.
    model = tiny(num_hidden_layers=4, head_dim=64, max_position_embeddings=8192).to("cuda")
    (prefix,) = prompts(4096)
    ids = torch.full((16, 1), 7, device="cuda")

    def peak(make) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        cache = make()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(8):
            model(ids, **named(cache))
        return torch.cuda.max_memory_allocated() - before

    def repeated():
        cache = dense(model)
        model(prefix[None].cuda(), **named(cache), logits_to_keep=1)
        cache.batch_repeat_interleave(16)
        return cache

    expected = peak(repeated)
    sizes = {"max_tokens": 4096 + 17 * 16}
    assert peak(lambda: PagedCache.prefill(model, prefix, **sizes).fork(16)) < expected / 2


# ------------------------------------------------------------------ windows


def test_window_layers_hold_a_window_and_a_page_at_most(monkeypatch):
    window, page_size, length = 64, 16, 300
    model = tiny("gemma3", sliding_window=window, max_position_embeddings=2048)
    batch = padded(prompts(length, 200))
    options = {"max_new_tokens": 40}
    expected = generate(model, batch, **options)
    with PagedCache(model, page_size=page_size, max_tokens=4096) as cache:
        held: list[tuple[int, int]] = []
        commit = cache.kv.commit

        def watched(step, **options):
            commit(step, **options)
            held.extend(
                (len(cache.kv.gather(row, layer)[0]), cache.kv.length(row) if full else 0)
                for row in cache.rows
                for layer, full in ((0, False), (1, True))
            )

        monkeypatch.setattr(cache.kv, "commit", watched)
        actual = generate(model, batch, cache, prefill_chunk_size=120, **options)
        assert_same_tokens(actual, expected)
        sliding, full = held[::2], held[1::2]
        assert max(size for size, _ in sliding) <= window + page_size
        assert all(size == stored for size, stored in full)
        assert full[-2][0] == length + 39
        cache.kv.check()


@pytest.mark.parametrize(
    ("family", "length"),
    each_value(["mistral", "gemma3", "qwen2_window"], [WINDOW - 1, WINDOW, WINDOW + 1, 35]),
)
def test_prompts_around_the_length_of_a_window(family, length):
    model = tiny(family)
    batch = padded(prompts(length, length - 4))
    expected = generate(model, batch, max_new_tokens=2 * WINDOW)
    for page_size in (1, 4, 16):
        with paged(model, page_size=page_size) as cache:
            actual = generate(model, batch, cache, max_new_tokens=2 * WINDOW)
            assert_same_tokens(actual, expected)
