"""Models with recurrent states: every row as `generate` would, whatever is in the batch with it."""

from __future__ import annotations

import copy
import sys

import pytest
import torch

from pagedkv import BatchGenerator
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import PagedCache
from pagedkv.hf.mixers import mixers_of
from pagedkv.models import facts_of
from tests.batch.generating import (
    alone,
    assert_like_alone,
    assert_nothing_held,
    assert_same,
    failing,
    generator,
    tokens_alone,
    with_own,
)
from tests.batch.test_threads import run_all
from tests.contents import Boom
from tests.effort import few
from tests.hf.tiny import assert_same_tokens, generate, padded, prompts
from tests.hf.zoo import built
from tests.hybrids import HYBRIDS, STATEFUL, STEPWISE, hybrid, tiny_hybrid

REFUSED = dict.fromkeys(sorted(STEPWISE), r"\(Mamba-1\).*`PagedCache` with `generate` works")
# What packages bring in place of transformers' torch code where they are installed, and what would
# part packed rows in theirs alone.
KERNELS = {
    "causal_conv1d_fn", "causal_conv1d_update",
    "mamba2_chunk_scan", "mamba2_selective_state_update",
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule",
}  # fmt: skip
BORDERS = "cu_seqlens", "cu_seq_lens_q", "seq_idx"
FAMILIES = [family for family in HYBRIDS if family not in REFUSED]


@pytest.fixture
def model():
    return tiny_hybrid()


# ------------------------------------------------------------------ the same tokens as alone


@pytest.mark.parametrize(
    "sizes",
    [{"max_states": 2}, {"max_states": 1}, {"max_tokens": 48}, {"max_sequences": 2}],
    ids=["two slots", "one slot", "few pages", "few places"],
)
def test_where_slots_or_pages_are_few_rows_take_turns_and_are_as_alone(model, sizes):
    rows = [*with_own(prompts(9)[0], 3, 2), *prompts(7, 3)]
    assert_like_alone(model, rows, sizes, max_new_tokens=6)


def test_rows_that_are_put_back_go_on_from_the_state_they_had(model):
    short, long = prompts(5)[0], prompts(*[4] * 5)
    ends = tokens_alone(model, short, seed=3, do_sample=True, max_new_tokens=2)[1]
    options = {"do_sample": True, "max_new_tokens": 24, "seed": 3, "eos_token_id": ends}
    _, batched = assert_like_alone(model, [short] * 9 + long, {"max_tokens": 48}, **options)
    assert batched.stats.preemptions > 0


def test_rows_of_two_threads_are_each_as_alone(model):
    rows, found = with_own(prompts(9)[0], 3, 2, 4), {}
    expected = [alone(model, row, max_new_tokens=6) for row in rows]
    with generator(model, step_tokens=9) as first:
        second = BatchGenerator(model, cache=first.cache, step_tokens=9)

        def job(place, batched):
            found[place] = batched.generate(rows, max_new_tokens=6, do_sample=False)

        run_all(lambda: job(0, first), lambda: job(1, second))
        assert_nothing_held(first)
        second.close()
    for results in found.values():
        for result, single in zip(results, expected, strict=True):
            assert_same(result, single)


def test_the_image_text_class_serves_text():
    assert_like_alone(built("qwen3_5", sees=True), prompts(5, 9), max_new_tokens=4, pad_token_id=0)


# ------------------------------------------------------------------ what is found later


def test_the_next_turn_finds_the_whole_answer_and_another_one_the_prompt(model):
    first, more = prompts(11, 5)
    with generator(model) as batched:
        (one,) = batched.generate([first], max_new_tokens=6)
        turn = torch.cat([first, torch.tensor(one.tokens), more])
        other = torch.cat([first, torch.tensor([one.tokens[0] % 99 + 1]), more])
        for prompt, found in ((turn, 11 + 6 - 1), (other, 11)):
            (result,) = batched.generate([prompt], max_new_tokens=4)
            assert result.cached_tokens == found
            assert_same(result, alone(model, prompt, max_new_tokens=4))


def test_the_second_prompt_that_parts_from_a_path_keeps_a_state_for_the_third(model):
    rows = with_own(prompts(13)[0], 3, 4, 2)
    with generator(model) as batched:
        results = [batched.generate([row], max_new_tokens=4)[0] for row in rows]
    assert [result.cached_tokens for result in results] == [0, 0, 13]
    for row, result in zip(rows, results):
        assert_same(result, alone(model, row, max_new_tokens=4))


@pytest.mark.parametrize("name", few(["A_log", "dt_bias", "conv1d.weight"], "A_log"))
def test_states_are_not_found_again_once_a_weight_of_a_mixer_has_changed(model, name):
    (row,) = prompts(13)
    with generator(model) as batched:
        found = [batched.generate([row], max_new_tokens=4)[0].cached_tokens for _ in range(3)]
        assert found[-1] == 12
        with torch.no_grad():
            model.get_parameter(f"model.layers.1.linear_attn.{name}").mul_(1.5)
        (result,) = batched.generate([row], max_new_tokens=4)
    assert result.cached_tokens == 0
    assert_same(result, alone(model, row, max_new_tokens=4))


# ------------------------------------------------------------------ nothing silently wrong


@pytest.mark.parametrize("at_call", [0, 1, 4])
def test_a_mixer_that_dies_leaves_nothing_and_rows_are_right_afterwards(model, at_call):
    rows = prompts(5, 12, 9)
    (mixer,) = mixers_of(model)[3]
    with generator(model, step_tokens=9) as batched:
        with failing(mixer, at_call, Boom()), pytest.raises(Boom):
            batched.generate(rows, max_new_tokens=4)
        assert_nothing_held(batched)
        results = batched.generate(rows, max_new_tokens=4)
    for row, result in zip(rows, results):
        assert_same(result, alone(model, row, max_new_tokens=4))


def test_a_mixer_is_never_called_on_rows_behind_one_another(model):
    (mixer,) = mixers_of(model)[0]
    shapes = []
    with generator(model, step_tokens=16) as batched:
        hook = mixer.in_proj_ba.register_forward_hook(lambda _, args, __: shapes.append(args[0]))
        batched.generate(prompts(5, 5, 9), max_new_tokens=3)
        hook.remove()
    assert [tuple(x.shape[:2]) for x in shapes] == [(2, 5), (1, 6), (2, 1), (1, 3), (3, 1), (1, 1)]


@pytest.mark.parametrize("family", few(sorted({*FAMILIES} - {"zaya"}), "qwen3_next", "nemotron_h"))
def test_kernels_get_rows_side_by_side_and_no_borders_of_packed_ones(family, monkeypatch):
    model, batches = tiny_hybrid(family), set()
    module = sys.modules[type(model).__module__]

    def watched(kernel):
        def call(*args, **kwargs):
            assert not [name for name in BORDERS if kwargs.get(name) is not None]
            batches.add(len(args[0] if args else next(iter(kwargs.values()))))
            return kernel(*args, **kwargs)

        return call

    for name in KERNELS & set(vars(module)):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    with generator(model) as batched:
        batched.generate(prompts(5, 5, 9), max_new_tokens=2)
    assert batches == {1, 2, 3}  # the long prompt, the short ones, all that decode


def test_a_state_layer_that_a_forward_leaves_out_is_an_error_that_names_it(model, monkeypatch):
    with generator(model) as batched:
        monkeypatch.setattr(model.model.layers[1], "forward", lambda hidden, **_: hidden)
        with pytest.raises(UnsupportedModelError, match="no state in the layers 1"):
            batched.generate(prompts(5), max_new_tokens=2)
        assert_nothing_held(batched)


def test_a_state_that_is_computed_twice_is_an_error_that_names_its_layer(model, monkeypatch):
    layer = model.model.layers[1]
    forward = layer.forward

    def twice(hidden, **options):
        return forward(forward(hidden, **options), **options)

    with generator(model) as batched:
        monkeypatch.setattr(layer, "forward", twice)
        with pytest.raises(UnsupportedModelError, match="layer 1: Qwen3NextGatedDeltaNet"):
            batched.generate(prompts(5), max_new_tokens=2)


def test_a_module_that_asks_for_states_and_is_no_mixer_is_an_error(model):
    with generator(model) as batched:
        (mixer,) = mixers_of(model)[0]
        mixer._forward_pre_hooks.clear()
        with pytest.raises(UnsupportedModelError, match="layer 0: a module other than its mixer"):
            batched.generate(prompts(5), max_new_tokens=2)


def test_drafts_are_refused_by_name_and_a_plans_width_is_not_used(model):
    with pytest.raises(ValueError, match="verify_width: expected 1 for a model with recurrent"):
        BatchGenerator(model, max_tokens=64, verify_width=2)


def test_assisted_decoding_is_refused_with_the_reason(model):
    with (
        generator(model) as batched,
        pytest.raises(ValueError, match="drafts cannot be taken back"),
    ):
        batched.generate(prompts(5), prompt_lookup_num_tokens=2)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_packed_rows_would_get_wrong_is_refused_by_name(family):
    with pytest.raises(UnsupportedModelError, match=REFUSED[family]):
        BatchGenerator(hybrid(family), max_tokens=64)


@pytest.mark.parametrize("kind", ["minimax"])
def test_a_type_whose_states_are_strange_is_refused_by_name(kind):
    with pytest.raises(UnsupportedModelError, match=f"states of {kind} are not known"):
        BatchGenerator(built(kind), max_tokens=64)


def test_a_layer_of_which_one_convolution_of_four_did_not_run_is_named():
    model = tiny_hybrid("inkling_text")
    given = torch.nn.Identity()
    given.forward = lambda x, **_: x
    with generator(model) as batched:
        model.model.layers[2].attn_sconv = given
        with pytest.raises(UnsupportedModelError, match="computed no state in the layers 2"):
            batched.generate(prompts(5), max_new_tokens=2)


def test_every_form_of_state_that_is_served_is_tested():
    """Types of one form are alike to us; the table of `docs/compat.md` is made of all of them."""
    kinds = {hybrid(name).config.get_text_config(decoder=True).model_type for name in FAMILIES}
    served, tested = ({facts_of(kind).states for kind in some} for some in (STATEFUL, kinds))
    assert tested == served - {facts_of(kind).states for kind in STEPWISE}


# ------------------------------------------------------------------ other forwards of the model


def test_generate_with_another_cache_is_what_it_was_and_close_leaves_no_hook(model):
    (row,) = prompts(9)
    expected = tokens_alone(model, row)
    with generator(model) as batched:
        batched.generate(prompts(3, 5), max_new_tokens=2)
        assert tokens_alone(model, row) == expected
        again = BatchGenerator(model, cache=batched.cache)
        again.close()
        batched.generate([row], max_new_tokens=2)
    hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in model.modules()]
    assert not any(len(some) for both in hooks for some in both)
    assert tokens_alone(model, row) == expected


def test_a_paged_cache_on_the_same_pages_goes_on_beside_a_generator(model):
    (row,) = prompts(9)
    with generator(model) as batched, PagedCache(model, cache=batched.cache) as cache:
        batched.generate(with_own(row, 3, 2), max_new_tokens=2)
        actual = generate(model, padded([row]), cache)
        (result,) = batched.generate([row], max_new_tokens=10)
    expected = alone(model, row)
    assert_same_tokens(actual, expected)
    assert_same(result, expected)


def test_a_copy_of_an_attached_model_computes_with_its_own_weights(model):
    rows = prompts(3, 9)
    with generator(model) as batched:
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.25)
        before = batched.generate(rows, max_new_tokens=4)
        assert_like_alone(other, rows, max_new_tokens=4)
        after = batched.generate(rows, max_new_tokens=4)
    assert [r.tokens for r in before] == [r.tokens for r in after]


@pytest.mark.slow
def test_a_compiled_model_computes_the_same(model):
    rows = prompts(3, 9)
    expected = [alone(model, row, max_new_tokens=3) for row in rows]
    model.compile(backend="eager")
    with generator(model) as batched:
        results = batched.generate(rows, max_new_tokens=3)
    torch._dynamo.reset()
    for result, single in zip(results, expected):
        assert_same(result, single)


def test_a_model_with_adapters_in_its_mixers_is_as_alone(model):
    import peft

    config = peft.LoraConfig(target_modules=["in_proj_qkvz", "out_proj", "q_proj"], r=2)
    config.init_lora_weights = False
    assert_like_alone(peft.get_peft_model(model, config).eval(), prompts(3, 9), max_new_tokens=3)
