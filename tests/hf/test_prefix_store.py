"""Prefixes that last, of models: found by the same weights alone; results are as without."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedkv import BatchGenerator, PagedCache, PagedKVCache, PrefixStore
from pagedkv.hf.fingerprint import fingerprint_of
from pagedkv.hf.model import cache_config
from tests.batch.generating import alone, tokens_alone
from tests.effort import few
from tests.hf.adapted import adapted, add
from tests.hf.tiny import FAMILIES, generate, named, padded, prompts, tiny
from tests.hybrids import HYBRIDS, STEPWISE, tiny_hybrid

OPTIONS = {"max_new_tokens": 6, "do_sample": False}
SIZES = {"max_tokens": 1024, "page_size": 4}
SOME = ("llama", "gemma2", "mistral", "deepseek_v3", "gpt2")


def found(model, folder, rows, **fields):
    """Prompt tokens that were found, by a generator with pages of its own, and the answers."""
    store = PrefixStore(folder)
    with BatchGenerator(model, prefix_store=store, **{**SIZES, **fields}) as batched:
        results = batched.generate(rows, **OPTIONS)
        batched.cache.check()
    assert all(result.error is None for result in results)
    return [result.cached_tokens for result in results], [result.tokens for result in results]


def in_another_process(model):
    """The model as it would be in a process of its own: equal weights, other objects."""
    return copy.deepcopy(model)


@pytest.mark.parametrize("family", few([f for f in FAMILIES if f in SOME], "llama", "gemma2"))
def test_another_model_of_the_same_weights_finds_them(family, tmp_path):
    model = tiny(family)
    (row,) = prompts(140)
    expected = tokens_alone(model, row, **OPTIONS)
    assert found(model, tmp_path, [row]) == ([0], [expected])
    again, tokens = found(in_another_process(model), tmp_path, [row])
    assert (again, tokens) == ([128], [expected])


@pytest.mark.slow
def test_a_process_finds_what_another_left(tmp_path):
    script = (
        "import sys, torch\n"
        "from tests.hf.test_prefix_store import found\n"
        "from tests.hf.tiny import prompts, tiny\n"
        "torch.manual_seed(0)\n"
        "model = tiny()\n"
        "torch.manual_seed(1)\n"
        "print(found(model, sys.argv[1], prompts(140)))\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", script, tmp_path / "store"],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": "."},
        ).stdout
        for _ in range(2)
    ]  # fmt: skip
    assert said[0].startswith("([0], ")
    assert said[1] == said[0].replace("([0], ", "([128], ")


@torch.no_grad()
def test_other_weights_find_nothing_however_little_they_differ(tmp_path):
    model = tiny()
    (row,) = prompts(140)
    found(model, tmp_path, [row])
    for parameter in model.parameters():  # a training step of a small rate: no bfloat16 changes
        parameter.mul_(1 + 2**-22)
    assert found(model, tmp_path, [row])[0] == [0]


@torch.no_grad()
def test_weights_that_change_between_calls_have_prefixes_of_their_own(tmp_path):
    model = tiny()
    (row,) = prompts(140)
    before = in_another_process(model)
    with BatchGenerator(model, prefix_store=tmp_path, **SIZES) as batched:
        batched.generate([row], **OPTIONS)
        model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.5)
        (changed,) = batched.generate([row], **OPTIONS)
    assert (changed.cached_tokens, changed.tokens) == (0, tokens_alone(model, row, **OPTIONS))
    expected = [tokens_alone(each, row, **OPTIONS) for each in (before, model)]
    assert found(before, tmp_path, [row]) == ([128], [expected[0]])
    assert found(in_another_process(model), tmp_path, [row]) == ([128], [expected[1]])


@torch.no_grad()
def test_a_change_that_misses_all_samples_finds_nothing_of_before(tmp_path):
    model = tiny()
    (row,) = prompts(140)
    with BatchGenerator(model, prefix_store=tmp_path, **SIZES) as batched:
        batched.generate([row], **OPTIONS)
        before, table = fingerprint_of(model), model.get_input_embeddings().weight
        for column in range(table.shape[1]):
            table[row[0], column] += 1  # noticed by its version
            if fingerprint_of(model) == before:
                break
            table[row[0], column] -= 1
        assert fingerprint_of(model) == before
        (changed,) = batched.generate([row], **OPTIONS)
        assert (changed.cached_tokens, changed.tokens) == (0, tokens_alone(model, row, **OPTIONS))
        model.lm_head.weight.data.mul_(2)  # now they can be told apart
        left = len(list(tmp_path.iterdir()))
        assert batched.generate([row], **OPTIONS)[0].cached_tokens == 0
        assert len(list(tmp_path.iterdir())) == left + 1


@torch.no_grad()
def test_what_was_computed_before_a_change_is_not_stored_as_of_after_it(tmp_path):
    model = tiny()
    short, row = prompts(2, 200)
    with BatchGenerator(model, prefix_store=tmp_path, step_tokens=8, **SIZES) as batched:
        stream = batched.stream([short, row], max_new_tokens=[2, 6], do_sample=False)
        assert next(stream).index == 0
        assert batched.cache.stats().tokens < 100  # the other prompt is not computed yet
        model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.5)
        list(stream)
    assert not list(tmp_path.iterdir())


def test_adapters_have_prefixes_of_their_own(tmp_path):
    base = tiny()
    model = adapted(in_another_process(base))
    add(model, "two")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    (row,) = prompts(140)
    for name in ("one", "two"):
        model.set_adapter(name)
        cached, tokens = found(model, tmp_path, [row])
        assert cached == [0]
        assert found(model, tmp_path, [row]) == ([128], tokens)
    assert found(base, tmp_path, [row])[0] == [0]
    with torch.no_grad():  # trained on, under the same name
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(2**-20)
    model.set_adapter("one")
    assert found(model, tmp_path, [row])[0] == [0]


@torch.no_grad()
@pytest.mark.parametrize("way", ["by 1", "swapped"])
def test_weights_that_differ_in_one_element_do_not_find_them(tmp_path, way):
    model = tiny()
    (row,) = prompts(140)
    found(model, tmp_path, [row])
    changed = copy.deepcopy(model)
    table = changed.get_input_embeddings().weight
    if way == "by 1":
        table.view(-1)[12345 % table.numel()] += 1
    else:
        table[[5, 6]] = table[[6, 5]]
    assert found(changed, tmp_path, [row])[0] == [0]
    assert found(in_another_process(changed), tmp_path, [row])[0] == [128]


def test_a_streamed_model_finds_what_one_that_streamed_left_and_nothing_else(tmp_path):
    from tests.stream.models import in_memory, make, save, stream

    torch.manual_seed(0)
    folder = save(make("llama"), tmp_path / "model")
    (row,) = prompts(140)
    model, store = in_memory(folder), tmp_path / "store"
    _, tokens = found(model, store, [row])
    for cached in (0, 128):  # its elements are not all looked at
        with stream(folder) as streamer:
            assert fingerprint_of(streamer.model) == fingerprint_of(model)
            assert found(streamer.model, store, [row]) == ([cached], tokens)


def test_prefill_loads_what_is_stored_and_stores_the_rest(tmp_path):
    model = tiny()
    prefix, *rows = prompts(150, 7, 9)
    whole = [torch.cat([prefix, row]) for row in rows]
    expected = [tokens_alone(model, row, **OPTIONS) for row in whole]
    for cached in (0, 128):
        store = PrefixStore(tmp_path)
        with PagedCache.prefill(model, prefix, prefix_store=store, **SIZES) as first:
            stats = first.stats()
            assert (stats.tokens_from_store, stats.tokens_computed) == (cached, 150 - cached)
            with first.fork(2) as both:
                out = generate(model, padded(whole), **named(both), **OPTIONS).sequences
            first.kv.check()
        model = in_another_process(model)
        assert [row[-6:].tolist() for row in out] == expected


def test_an_own_cache_takes_the_weights_into_account(tmp_path):
    """Two models on caches of the same given fingerprint do not meet."""
    one, two = tiny(), tiny()
    (row,) = prompts(140)
    for model in (one, two):
        config = cache_config(model, fingerprint=b"the same", **SIZES)
        cache = PagedKVCache(config, device="cpu", prefix_store=tmp_path)
        with BatchGenerator(model, cache=cache) as batched:
            (result,) = batched.generate([row], **OPTIONS)
        assert (result.cached_tokens, result.tokens) == (0, tokens_alone(model, row, **OPTIONS))


def test_a_store_beside_a_cache_is_refused(tmp_path):
    model = tiny()
    cache = PagedKVCache(cache_config(model, **SIZES), device="cpu")
    with pytest.raises(ValueError, match="prefix_store: expected none beside a cache"):
        PagedCache(model, cache=cache, prefix_store=tmp_path)


HYBRID = sorted({*HYBRIDS} - STEPWISE)


@pytest.mark.parametrize("family", few(HYBRID, "qwen3_next", "zaya"))
def test_another_hybrid_of_the_same_weights_finds_pages_and_states(family, tmp_path):
    model = tiny_hybrid(family)
    head, *tails = prompts(137, 6, 5)
    rows = [torch.cat([head, tail]) for tail in tails]
    expected = [tokens_alone(model, row, **OPTIONS) for row in rows]
    assert found(model, tmp_path, rows) == ([0, 137], expected)
    again, tokens = found(in_another_process(model), tmp_path, rows[::-1])
    assert (again, tokens) == ([137, 137], expected[::-1])
    (follow,) = prompts(3)
    turn = torch.cat([rows[0], follow])
    assert found(in_another_process(model), tmp_path, [turn])[0] == [137]


def test_a_hybrids_prompt_that_comes_again_leaves_a_state_for_the_third(tmp_path):
    model = tiny_hybrid("lfm2")
    (row,) = prompts(150)
    expected = tokens_alone(model, row, **OPTIONS)
    for cached in (0, 0, 128):
        assert found(in_another_process(model), tmp_path, [row]) == ([cached], [expected])


@pytest.mark.parametrize("family", few(HYBRID, "lfm2", "falcon_h1"))
def test_a_hybrids_prefix_is_loaded_by_prefill(family, tmp_path):
    model = tiny_hybrid(family)
    prefix, tail = prompts(139, 4)
    whole = [torch.cat([prefix, tail])]
    expected = tokens_alone(model, whole[0], **OPTIONS)
    for cached in (0, 138):
        with PagedCache.prefill(model, prefix, prefix_store=tmp_path, **SIZES) as first:
            assert first.stats().tokens_from_store == cached
            with first.fork(1) as one:
                out = generate(model, padded(whole), **named(one), **OPTIONS).sequences
            first.kv.check()
        model = in_another_process(model)
        assert out[0, -6:].tolist() == expected


def test_what_prefill_stores_stands_where_the_model_counts_from_0(tmp_path):
    """Positions that a model makes by itself, without asking the cache how far it is."""
    model = tiny_hybrid("bamba")
    (prefix,) = prompts(139)
    with PagedCache.prefill(model, prefix, **SIZES) as plain:
        k, v = plain.kv.gather(plain.rows[0], 0)
    for _ in range(2):
        with PagedCache.prefill(model, prefix, prefix_store=tmp_path, **SIZES) as first:
            for one, other in zip(first.kv.gather(first.rows[0], 0), (k, v), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
        model = in_another_process(model)


def test_a_job_of_prompts_that_share_a_beginning_is_as_without(tmp_path):
    model = tiny()
    head, *tails = prompts(130, *[20] * 12)
    rows = [torch.cat([head, tail]) for tail in tails]
    expected = [alone(model, row, **OPTIONS).sequences[0, 150:].tolist() for row in rows]
    cached, tokens = found(model, tmp_path, rows, max_tokens=512)
    assert tokens == expected
    assert cached[0] == 0
    assert min(cached[1:]) >= 128
    cached, tokens = found(in_another_process(model), tmp_path, rows, max_tokens=512)
    assert tokens == expected
    assert min(cached) >= 128


@pytest.mark.slow
def test_a_real_model_computes_one_token_of_a_stored_prompt(smollm2_path, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    row = torch.randint(1000, 40_000, (1024,))
    answers = []
    for computed in (1024, 1):
        with BatchGenerator(model, max_tokens=2048, prefix_store=PrefixStore(tmp_path)) as batched:
            (result,) = batched.generate([row], max_new_tokens=1, do_sample=False, logprobs=True)
            assert batched.stats.computed == computed
        answers.append(result)
    assert answers[0].tokens == answers[1].tokens
    assert abs(answers[0].logprobs[0] - answers[1].logprobs[0]) < 1e-4


@pytest.mark.filterwarnings("ignore")  # torch has another way to quantize now
def test_weights_that_a_library_packed_away_have_no_store(tmp_path):
    model = torch.ao.quantization.quantize_dynamic(tiny(), {torch.nn.Linear}, dtype=torch.qint8)
    assert (
        fingerprint_of(model) == b""
    )  # they are neither parameters nor buffers, so all look alike
    with pytest.raises(ValueError, match="prefix_store: not for a cache with no fingerprint"):
        BatchGenerator(model, prefix_store=tmp_path, **SIZES)


def test_a_store_is_what_its_name_means(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert PrefixStore("~/store").folder == tmp_path / "store"
    with pytest.raises(ValueError, match=r"prefix_store: expected a folder, got \[1\]"):
        BatchGenerator(tiny(), prefix_store=[1], **SIZES)
