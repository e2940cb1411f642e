"""Adapters that are switched: each has prefixes and files of its own, on one generator."""

import gc
import weakref

import peft
import pytest
import torch
from torch import nn

from pagedkv import BatchGenerator, PagedCache
from pagedkv.errors import ModelChangedError, UnsupportedModelError, WrongModelError
from pagedkv.hf.adapters import salted, state_of
from pagedkv.hf.fingerprint import fingerprint_of
from tests.batch.generating import assert_nothing_held, generator, tokens_alone
from tests.batch.test_graphs import PROMPTS, Recorder, llama
from tests.batch.test_graphs import generator as capturing
from tests.effort import few
from tests.hf.adapted import adapted, add, lora
from tests.hf.tiny import attention_of, generate, named, padded, prompts, tiny

OPTIONS = {"max_new_tokens": 6, "do_sample": False}
SIZES = {"max_tokens": 256, "page_size": 4}


@pytest.fixture
def model():
    """Adapters "one", which acts, and "two"."""
    made = adapted(tiny())
    add(made, "two")
    return made


def tokens_of(model, rows):
    """Generates by the model itself, without our pages."""
    found = []
    for row in rows:
        batch = padded([row])
        options = {"pad_token_id": 0, "eos_token_id": None, **OPTIONS}
        found.append(model.generate(**batch, **options)[0, len(row) :].tolist())
    return found


def assert_right(batched, model, rows):
    """Each row has the tokens the model has alone; how many of its prompts' were found."""
    results = batched.generate(rows, **OPTIONS)
    assert [result.tokens for result in results] == tokens_of(model, rows)
    return [result.cached_tokens for result in results]


# ------------------------------------------------------------------ prefixes


def test_adapters_in_turn_are_each_right_and_find_their_own_prefixes(model):
    rows = prompts(9, 13)
    with generator(model) as batched:
        assert assert_right(batched, model, rows) == [0, 0]
        one = tokens_of(model, rows)
        model.set_adapter("two")
        assert assert_right(batched, model, rows) == [0, 0]
        assert tokens_of(model, rows) != one
        model.set_adapter("one")
        assert assert_right(batched, model, rows) == [8, 12]
        with model.disable_adapter():
            assert assert_right(batched, model, rows) == [0, 0]
        model.set_adapter("two")
        assert assert_right(batched, model, rows) == [8, 12]
        with model.disable_adapter():
            assert assert_right(batched, model, rows) == [8, 12]
        model.merge_adapter(["two"])
        assert assert_right(batched, model, rows) == [0, 0]
        assert assert_right(batched, model, rows) == [8, 12]
        assert_nothing_held(batched)


def test_adapters_of_experts_parameters_change_nothing_by_acting_and_are_each_noticed():
    """PEFT puts two layers around one module, and parametrizes it in every forward."""
    experts = [f"mlp.experts.{name}_proj" for name in ("gate_up", "down")]
    made = tiny("qwen3_moe")
    model = peft.get_peft_model(made, lora(target_parameters=experts), adapter_name="one").eval()
    (row,) = prompts(9)
    with generator(model) as batched:
        assert assert_right(batched, model, [row]) == [0]
        assert assert_right(batched, model, [row]) == [8]
        for layer in [part for part in model.modules() if hasattr(part, "parameter_name")][:2]:
            layer.lora_B["one"].weight.data.neg_()
            assert assert_right(batched, model, [row]) == [0]
    with PagedCache(model, **SIZES) as cache:
        first = generate(model, padded([row]), cache=cache).sequences[0]
        turn = padded([torch.cat([first, row])])
        expected = generate(model, turn).sequences
        assert torch.equal(generate(model, turn, cache=cache).sequences, expected)


def test_prefixes_of_a_model_outlive_the_adapters_it_is_given():
    base, rows = tiny(), prompts(9, 13)
    with generator(base) as batched:
        batched.generate(rows, **OPTIONS)
        model = adapted(base)
        assert assert_right(batched, model, rows) == [0, 0]
        add(model, "two")
        assert assert_right(batched, model, rows) == [8, 12]
        with model.disable_adapter():
            assert assert_right(batched, model, rows) == [8, 12]


def layers_of(model):
    return [module for module in model.modules() if isinstance(getattr(module, "scaling", 0), dict)]


def test_a_scale_that_changes_is_another_adapter(model):
    rows = prompts(9, 13)
    with generator(model) as batched:
        batched.generate(rows, **OPTIONS)
        for layer in layers_of(model):
            layer.scaling["one"] *= -2
        assert assert_right(batched, model, rows) == [0, 0]
        for layer in layers_of(model):
            layer.scaling["two"] *= -2  # which does not act
        assert assert_right(batched, model, rows) == [8, 12]


def test_an_adapter_that_is_trained_is_noticed(model):
    rows = prompts(9, 13)
    with generator(model) as batched:
        batched.generate(rows, **OPTIONS)
        for name, parameter in model.named_parameters():
            if "lora_B.one" in name:
                parameter.data.mul_(-3.0)
        assert assert_right(batched, model, rows) == [0, 0]


def test_an_adapter_of_the_same_name_finds_nothing_of_the_one_before(model):
    rows = prompts(9, 13)
    with generator(model) as batched:
        batched.generate(rows, **OPTIONS)
        model.set_adapter("two")
        model.delete_adapter("one")
        assert assert_right(batched, model, rows) == [0, 0]
        add(model, "one")
        model.set_adapter("one")
        assert assert_right(batched, model, rows) == [0, 0]


def test_a_switch_between_the_results_of_a_stream_ends_it_and_leaves_no_mixed_prefix(model):
    rows = prompts(9, 13)
    limits = {"max_new_tokens": [2, 6], "do_sample": False}
    with generator(model) as batched:
        stream = batched.stream(rows, **limits)
        next(stream)
        model.set_adapter("two")
        with pytest.raises(ModelChangedError, match="adapters were switched while rows"):
            next(stream)
        assert_nothing_held(batched)
        for name in ("one", "two"):
            model.set_adapter(name)
            texts = zip(rows, tokens_of(model, rows))
            longer = [torch.tensor([*row, *tokens]) for row, tokens in texts]
            assert_right(batched, model, longer)


def test_a_switch_leaves_no_mixed_prefix_where_an_error_comes_before_the_next_result(model):
    rows, texts = prompts(9, 9), []

    def stops(ids, scores):
        texts.append(ids)
        if ids.shape[1] == 25:
            raise KeyboardInterrupt
        return scores

    limits = {"max_new_tokens": [2, 20], "do_sample": False}
    with generator(model) as batched:
        stream = batched.stream(rows, logits_processor=[stops], **limits)
        next(stream)
        model.set_adapter("two")
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        assert_nothing_held(batched)
        model.set_adapter("one")
        assert assert_right(batched, model, [texts[-1][0]]) == [0]


def test_decoding_steps_are_captured_anew_when_other_adapters_act():
    model = adapted(llama())
    add(model, "two")
    recorder = Recorder()
    with capturing(model.get_base_model(), recorder) as batched:
        for name in ("one", "two", "one"):
            model.set_adapter(name)
            before = recorder.captures
            batched.generate(PROMPTS[:1], max_new_tokens=3)
            assert recorder.captures > before
        before = recorder.captures
        batched.generate(PROMPTS[:1], max_new_tokens=3)
        assert recorder.captures == before


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")  # adapters upon adapters
def test_the_adapters_of_transformers_own_interface_are_told_apart(monkeypatch):
    # transformers 5.24 asks for a PEFT newer than any published one; that of constraints.txt works.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.18.0")
    model, rows = tiny(), prompts(9, 13)
    for name in ("one", "two"):
        model.add_adapter(lora(), name)
    model.eval()
    with generator(model) as batched:
        found = []
        for name in ("one", "two", "one", "two"):
            model.set_adapter(name)
            found.append(assert_right(batched, model, rows))
        model.disable_adapters()
        found.append(assert_right(batched, model, rows))
    assert found == [[0, 0], [0, 0], [8, 12], [8, 12], [0, 0]]


# ------------------------------------------------------------------ salts


def test_a_salt_and_an_adapter_never_pass_for_another_pair(model):
    rows = prompts(9)
    with generator(model) as batched:
        for name in ("one", "two"):
            model.set_adapter(name)
            for salt in (b"", b"a", b"ab", name.encode()):
                (result,) = batched.generate(rows, salt=salt, **OPTIONS)
                assert result.cached_tokens == 0
    states = b"", b"b", b"ab", bytes(32), b"\0" * 31
    pairs = {salted(state, salt) for state in states for salt in (b"", b"a", b"ab", b"bab", b"\0")}
    assert len(pairs) == 25


def test_the_state_is_none_where_no_adapter_acts(model):
    one = state_of(model.get_base_model())
    model.set_adapter("two")
    two = state_of(model.get_base_model())
    assert len({one, two, b""}) == 3
    with model.disable_adapter():
        assert state_of(model.get_base_model()) == b""
    assert state_of(tiny()) == b""


# ------------------------------------------------------------------ files


def test_a_file_belongs_to_the_adapter_it_was_computed_with(model, tmp_path):
    batch = padded(prompts(9))
    with PagedCache(model, **SIZES) as cache:
        generate(model.get_base_model(), batch, cache)
        model.set_adapter("two")
        cache.kv.save(cache.rows[0], tmp_path / "x")
        with pytest.raises(WrongModelError, match="expected K and V of the model"):
            cache.kv.load(tmp_path / "x")
        with model.disable_adapter(), pytest.raises(WrongModelError):
            cache.kv.load(tmp_path / "x")
        model.set_adapter("one")
        assert cache.kv.length(cache.kv.load(tmp_path / "x")) == cache.seen


def test_a_file_of_the_model_alone_is_one_of_the_model_whose_adapters_rest():
    base = tiny()
    before = fingerprint_of(base)
    model = adapted(base)
    acting = fingerprint_of(base)
    add(model, "two")
    assert fingerprint_of(base) == acting != before
    with model.disable_adapter():
        assert fingerprint_of(base) == before


def test_what_a_file_brought_is_found_by_its_adapter_alone(model, tmp_path):
    rows = prompts(9)
    with BatchGenerator(model, max_tokens=512, page_size=4) as batched:
        kv = batched.cache
        seq = kv.add(rows[0])
        with torch.inference_mode(), kv.step([seq]) as step:
            batched._packed.logits(step)
        kv.save(seq, tmp_path / "x")
        kv.clear_prefixes()
        kv.free(kv.load(tmp_path / "x", salt=b"tenant"))
        for name, salt, found in (
            ("two", b"tenant", 0),
            ("one", b"", 0),
            ("one", b"tenant", 8),
        ):
            model.set_adapter(name)
            (result,) = batched.generate(rows, salt=salt, **OPTIONS)
            assert result.cached_tokens == found
            assert [result.tokens] == tokens_of(model, rows)


# ------------------------------------------------------------------ PEFT models


def test_a_peft_model_is_taken_for_the_model_in_it(model):
    rows = prompts(9, 13)
    base = model.get_base_model()
    before = attention_of(base)
    with BatchGenerator(model, **SIZES) as batched:
        assert batched.model is base
        assert attention_of(base) != before
        assert_right(batched, model, rows)
        with PagedCache(model, **SIZES) as cache:
            assert cache.kv is batched.cache
            batch = padded(rows)
            got = model.generate(**batch, **named(cache), pad_token_id=0, **OPTIONS)
            plain = model.generate(**batch, pad_token_id=0, **OPTIONS)
            assert got.tolist() == plain.tolist()
        prefix = PagedCache.prefill(model, rows[1], **SIZES)
        assert prefix.seen == 13
        prefix.close()
    assert attention_of(base) == before


def test_pages_do_not_keep_a_peft_model():
    model = adapted(tiny())
    cache = PagedCache(model, **SIZES)
    generate(model.get_base_model(), padded(prompts(5)), cache)
    pool, held = cache.kv, weakref.ref(model.get_base_model())
    del cache, model
    gc.collect()
    assert held() is None
    assert pool.stats().sequences == 0


REFUSED = {
    "PROMPT_TUNING": "puts virtual tokens before the prompt",
    "PREFIX_TUNING": "puts virtual tokens before the prompt",
    "P_TUNING": "puts virtual tokens before the prompt",
    "aLoRA": r"acts from some token of each prompt on \(aLoRA\)",
    "ADAPTION_PROMPT": "has a forward of its own around the model's",
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_do_more_than_sit_in_layers_are_refused_by_name(name):
    virtual = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    config = {
        "PROMPT_TUNING": lambda: peft.PromptTuningConfig(**virtual),
        "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(**virtual),
        "P_TUNING": lambda: peft.PromptEncoderConfig(**virtual, encoder_hidden_size=8),
        "aLoRA": lambda: lora(alora_invocation_tokens=[5]),
        "ADAPTION_PROMPT": lambda: peft.AdaptionPromptConfig(
            task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1
        ),
    }[name]()
    base, kind = tiny(), "LORA" if name == "aLoRA" else name
    before = attention_of(base)
    model = peft.get_peft_model(base, config)
    for make in (BatchGenerator, PagedCache):
        with pytest.raises(UnsupportedModelError, match=f"its {kind} adapter {REFUSED[name]}"):
            make(model)
    assert attention_of(base) == before


class Nothing(nn.Module):
    def get_base_model(self):
        return nn.Linear(2, 2)


def test_a_wrapper_of_no_transformers_model_is_refused():
    wrapper = Nothing()
    with pytest.raises(TypeError, match="model: expected a transformers model, got Linear"):
        PagedCache(wrapper)


KINDS = {
    "embedding": lambda: lora(target_modules=["embed_tokens", "v_proj"]),
    "saved module": lambda: lora(modules_to_save=["embed_tokens"]),
    "tokens": lambda: lora(trainable_token_indices=[5, 6, 7]),
    "DoRA": lambda: lora(use_dora=True),
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
        task_type="CAUSAL_LM",
    ),
    "AdaLoRA": lambda: peft.AdaLoraConfig(
        target_modules=["k_proj", "v_proj"], total_step=9, task_type="CAUSAL_LM"
    ),
    "OFT": lambda: peft.OFTConfig(
        target_modules=["k_proj"], r=0, oft_block_size=4, init_weights=False, task_type="CAUSAL_LM"
    ),
}


WORDS = "lora_", "ia3", "oft", "modules_to_save", "trainable_tokens"  # in names of theirs


@pytest.mark.parametrize("name", few(KINDS, "embedding", "tokens", "DoRA"))
def test_adapters_of_other_kinds_have_the_tokens_of_peft_as_well(name):
    model = peft.get_peft_model(tiny(), KINDS[name]()).eval()
    torch.manual_seed(5)
    for key, parameter in model.named_parameters():
        if "base_layer" not in key and any(word in key for word in WORDS):
            parameter.data += torch.randn_like(parameter) * 0.5
    rows = [torch.tensor([5, 6, 7, 8, 5, 9, 10, 11, 5]), *prompts(13)]
    with generator(model) as batched:
        assert_right(batched, model, rows)
        acting = tokens_of(model, rows)
        with model.disable_adapter():
            assert assert_right(batched, model, rows) == [0, 0]
            assert tokens_of(model, rows) != acting
        assert assert_right(batched, model, rows)[1] == 12
        assert tokens_alone(model.get_base_model(), rows[1], **OPTIONS) == acting[1]
