"""Caches that evict under `generate` and `BatchGenerator`: true positions, fewer tokens stored."""

import pytest
import torch

from pagedkv import BatchGenerator, PagedKVCache
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import PagedCache
from pagedkv.hf.model import cache_config
from pagedkv.retention import Fifo, KeyDiff, Sinks
from tests.hf.tiny import assert_close, assert_same_tokens, generate, named, padded, prompts, tiny

POLICY = Sinks(KeyDiff(recent=8), 1)
SIZES = {"retention": POLICY, "budget": 24, "page_size": 4, "max_tokens": 512}


def manual(model, ids, steps, **sizes):
    """Greedy tokens and logits of a loop of one's own, with positions counted by it."""
    with PagedCache(model, **sizes) as cache, torch.no_grad():
        logits, tokens, position = [], [], 0
        fed = ids[None]
        for _ in range(steps):
            at = torch.arange(position, position + fed.shape[1])[None]
            out = model(input_ids=fed, position_ids=at, **named(cache), use_cache=True)
            logits.append(out.logits[0, -1])
            position += fed.shape[1]
            fed = logits[-1].argmax()[None, None]
            tokens.append(int(fed))
        kept = [cache.kv.positions(cache.rows[0], layer).tolist() for layer in range(2)]
    return tokens, torch.stack(logits), kept


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generate_under_a_budget_equals_a_loop_of_ones_own(family):
    model, (ids,) = tiny(family), prompts(37)
    expected, logits, kept = manual(model, ids, 30, **SIZES)
    with PagedCache(model, **SIZES) as cache:
        got = generate(model, {"input_ids": ids[None]}, cache, max_new_tokens=30)
        assert got.sequences[0, 37:].tolist() == expected
        assert_close(torch.stack(got.logits)[:, 0], logits)
        for layer in range(2):
            assert cache.kv.positions(cache.rows[0], layer).tolist() == kept[layer]
            assert 24 <= len(kept[layer]) < 28
        assert cache.get_seq_length() == 37 + 29


def test_a_budget_that_is_never_reached_changes_nothing():
    model, rows = tiny(), prompts(9, 23)
    plain = generate(model, padded(rows))
    with PagedCache(model, **{**SIZES, "budget": 64}) as cache:
        assert_same_tokens(generate(model, padded(rows), cache), plain)


def test_a_policy_that_keeps_what_a_window_shows_equals_the_window():
    """The first layer of a model, whose keys do not depend on what was evicted before."""
    model = tiny(num_hidden_layers=1)
    window = tiny("mistral", num_hidden_layers=1, sliding_window=16)
    window.load_state_dict(model.state_dict())
    (ids,) = prompts(21)
    sizes = {"retention": Fifo(), "budget": 15, "page_size": 1, "max_tokens": 128}
    expected = generate(window, {"input_ids": ids[None]}, max_new_tokens=20)
    with PagedCache(model, **sizes) as cache, torch.no_grad():
        logits = []
        tokens = expected.sequences[0]
        for i in range(40):  # one at a time: a chunk would see what is evicted behind it
            out = model(input_ids=tokens[None, i : i + 1], **named(cache), use_cache=True)
            logits.append(out.logits[0, -1])
    ours = torch.stack(logits[20:])
    assert (ours - torch.stack(expected.logits)[:, 0]).abs().max() < 1e-4


def test_rows_padded_differently_evict_each_for_itself():
    model, rows = tiny(), prompts(40, 13, 29)
    alone = []
    for row in rows:
        with PagedCache(model, **SIZES) as cache:
            alone.append(generate(model, {"input_ids": row[None]}, cache, max_new_tokens=16))
    with PagedCache(model, **SIZES) as cache:
        together = generate(model, padded(rows), cache, max_new_tokens=16)
        lengths = [len(cache.kv.positions(row, 0)) for row in cache.rows]
    assert max(lengths) < 28
    for i, one in enumerate(alone):
        assert together.sequences[i, -16:].tolist() == one.sequences[0, -16:].tolist()


def test_a_fork_goes_on_as_its_source_does():
    model, (ids,) = tiny(), prompts(50)
    with PagedCache.prefill(model, ids[:-1], **SIZES) as cache, cache.fork(2) as twins:
        one = generate(model, {"input_ids": ids[None]}, cache, max_new_tokens=12)
        two = generate(model, {"input_ids": ids[None].repeat(2, 1)}, twins, max_new_tokens=12)
    assert two.sequences.tolist() == one.sequences.repeat(2, 1).tolist()


def test_cropping_behind_what_was_evicted_goes_on_and_into_it_is_refused():
    model, (ids,) = tiny(), prompts(60)
    with PagedCache.prefill(model, ids, **SIZES) as cache:
        with pytest.raises(ValueError, match="were evicted"):
            cache.crop(20)
        cache.crop(-4)
        assert cache.get_seq_length() == 56
        assert cache.kv.length(cache.rows[0]) == 56


def test_another_attention_is_refused_where_tokens_are_missing():
    model, (ids,) = tiny(), prompts(40)
    with PagedCache(model, **SIZES) as cache:
        model.set_attn_implementation("sdpa")
        with pytest.raises(UnsupportedModelError, match=r"retention: .*paged attention"):
            generate(model, {"input_ids": ids[None]}, cache)


def test_a_model_with_windows_keeps_them_and_evicts_in_the_other_layers():
    model, (ids,) = tiny("gemma3"), prompts(40)
    with PagedCache(model, **SIZES) as cache:
        generate(model, {"input_ids": ids[None]}, cache, max_new_tokens=20)
        windows = cache.kv.config.windows
        stored = [cache.kv.positions(cache.rows[0], layer).tolist() for layer in range(4)]
    for window, places in zip(windows, stored):
        if window is None:
            assert 24 <= len(places) < 28
        else:
            assert places == list(range(places[0], 59))


def test_pages_of_groups_of_ones_own_serve_a_model():
    model, (ids,) = tiny(), prompts(40)
    one_group = cache_config(model, 512).groups
    config = cache_config(model, groups=one_group, **SIZES)
    with PagedCache(model, cache=PagedKVCache(config, device="cpu")) as cache:
        generate(model, {"input_ids": ids[None]}, cache, max_new_tokens=20)
        first, second = (cache.kv.positions(cache.rows[0], layer) for layer in range(2))
        assert first.tolist() == second.tolist()
        assert len(first) < 28


# ------------------------------------------------------------------ BatchGenerator


AS_MUCH = pytest.mark.parametrize(
    "fields", [{}, {"budget": None, "keep": 0.5}], ids=["budget", "share"]
)


@AS_MUCH
def test_a_batch_that_forgets_gives_the_tokens_of_generate(fields):
    model, sizes = tiny(), SIZES | fields
    rows = [row.tolist() for row in prompts(40, 7, 29, 55)]
    expected = []
    for row in rows:
        with PagedCache(model, **sizes) as cache:
            ids = torch.tensor([row])
            one = generate(model, {"input_ids": ids}, cache, max_new_tokens=20)
            expected.append(one.sequences[0, len(row) :].tolist())
    with BatchGenerator(model, **sizes) as generator:
        results = generator.generate(rows, max_new_tokens=20)
    assert [result.tokens for result in results] == expected


@AS_MUCH
def test_more_rows_run_than_the_texts_would_that_they_forget(fields):
    model = tiny()
    rows = [row.tolist() for row in prompts(*[40] * 8)]
    sizes = {**SIZES, **fields, "max_tokens": 256}
    with BatchGenerator(model, **sizes) as generator:
        results = generator.generate(rows, max_new_tokens=30)
        assert generator.stats.preemptions == 0
        assert generator.stats.steps < 8 * 30 / 3  # four at a time and more
    assert all(len(result.tokens) == 30 and result.error is None for result in results)


def test_pressure_evicts_before_it_puts_rows_back():
    model = tiny()
    (row,) = prompts(20)
    sizes = {"retention": "sinks", "page_size": 4, "max_tokens": 64}
    with BatchGenerator(model, **sizes) as generator:
        (result,) = generator.generate([row.tolist()], max_new_tokens=70)
        assert len(result.tokens) == 70
        assert generator.cache.stats().evicted > 0


@pytest.mark.parametrize("fields", [{"budget": 24}, {"budget": 44}, {"keep": 0.1}, {}], ids=str)
def test_prompts_longer_than_the_pool_are_computed_in_steps_that_fit(fields):
    model = tiny(max_position_embeddings=512)
    rows = [row.tolist() for row in prompts(9, 300, 20, 170)]
    sizes = {"retention": POLICY, "page_size": 4, "max_tokens": 48, **fields}
    with BatchGenerator(model, **sizes) as generator:
        results = generator.generate(rows, max_new_tokens=5)
        assert [(result.error, len(result.tokens)) for result in results] == [(None, 5)] * 4
        assert generator.cache.stats().live == 0


def test_a_prompt_longer_than_the_pool_gets_the_tokens_of_a_larger_pool():
    model = tiny(max_position_embeddings=512)
    (row,) = (row.tolist() for row in prompts(300))
    tokens = []
    for max_tokens in (48, 2048):
        with BatchGenerator(model, step_tokens=8, **{**SIZES, "max_tokens": max_tokens}) as one:
            tokens.append(one.generate([row], max_new_tokens=12)[0].tokens)
    assert tokens[0] == tokens[1]
