"""Calls without pages while a model is attached: to the bit what it computes when it is not."""

import copy
import pickle
from threading import Thread

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

from pagedkv import BatchGenerator
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import PagedCache, attach, detach, register
from pagedkv.hf.attach import _attaching, detach_later
from pagedkv.hf.attention import attention_function
from tests.batch.letters import tokens
from tests.effort import each_value
from tests.hf.own import own_model
from tests.hf.tiny import attention_of, generate, padded, prompts, tiny

DROPS = {
    "llama": {"attention_dropout": 0.1},
    "gpt2": {},  # 0.1 by default
    "mistral": {"attention_dropout": 0.1},
    "gemma3": {"attention_dropout": 0.1},
}
SIZES = {"page_size": 4, "max_tokens": 256}


def computed(model, batch, **options):
    """Logits, weights of attention where they are asked for, and gradients."""
    torch.manual_seed(3)
    model.zero_grad()
    out = model(**batch, labels=batch["input_ids"], use_cache=False, **options)
    out.loss.backward()
    weights = [x for x in getattr(out, "attentions", None) or () if x is not None]
    return [
        out.logits,
        *weights,
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
    ]


def assert_same(model, batch, **options):
    expected = computed(model, batch, **options)
    with PagedCache(model, **SIZES) as cache, BatchGenerator(model, cache=cache.kv) as generator:
        assert attention_of(model) == "pagedkv"
        actual = computed(model, batch, **options)
        model.eval()
        generator.generate([[5, 6, 7]], max_new_tokens=2)
        generate(model, padded(prompts(5)), cache, max_new_tokens=2)
    assert len(actual) == len(expected)
    assert all(map(torch.equal, actual, expected))


CASES = [*each_value(DROPS, ["sdpa", "eager"]), ("gemma2", "eager"), ("gpt_oss", "eager")]
CASES += [("gemma4", "sdpa"), ("mimo_v2_flash", "eager")]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_training_with_dropout_and_its_gradients(family, name):
    model = tiny(family, **DROPS.get(family, {})).train()
    model.set_attn_implementation(name)
    assert_same(model, padded(prompts(13, 6)))


OWN_MASK = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
OWN_MASK[..., 6:, 1] = False
OTHERS = {
    "weights": ({"output_attentions": True}, "eager"),
    "packed texts": ({"cu_seq_lens_q": torch.tensor([0, 7, 12]), "max_length_q": 7}, "sdpa"),
    "numbers of texts": ({"seq_idx": torch.tensor([[0] * 7 + [1] * 5])}, "eager"),
    "both ways": ({"is_causal": False}, "sdpa"),
    "a mask of its own": ({"attention_mask": OWN_MASK}, "sdpa"),
    "a mask that is added": ({"attention_mask": OWN_MASK.float().log().clamp(min=-1e9)}, "eager"),
    "unheard of": ({"temperature_tuning": 0.5}, "sdpa"),
}


@pytest.mark.parametrize(("family", "case"), each_value(["llama", "gpt2"], OTHERS))
def test_arguments_that_pages_do_not_take(family, case):
    options, name = OTHERS[case]
    model = tiny(family)
    model.set_attn_implementation(name)
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    assert_same(
        model, {"input_ids": torch.cat(prompts(7, 5))[None], "position_ids": positions}, **options
    )


def test_weights_of_an_attention_are_given_in_evaluation_too():
    model = tiny()
    model.set_attn_implementation("eager")
    ids = torch.stack(prompts(6, 6))
    with torch.no_grad(), PagedCache(model, **SIZES):
        weights = model(ids, use_cache=False, output_attentions=True).attentions
    assert [x.shape for x in weights] == [(2, 4, 6, 6)] * 2


def test_attention_of_ones_own_by_any_name():
    model, asked = own_model(), []

    def attend(module, query, key, value, mask, **terms):
        asked.append((mask, terms))
        return torch.zeros_like(query).transpose(1, 2), None

    AttentionInterface.register("nothing", attend)
    model.set_attn_implementation("nothing")
    ids = prompts(6)[0][None]
    expected = model(ids, use_cache=False).logits
    count = len(asked)
    attach(model)
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    detach(model)
    assert asked[count:] == asked[:count] == [(None, {"scaling": 8**-0.5})] * 4
    model.set_attn_implementation("eager")
    expected = model(ids, use_cache=False).logits
    attach(model)
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    detach(model)


def doubled(module, query, *args, **terms):
    return sdpa_attention_forward(module, 2 * query, *args, **terms)


@pytest.mark.parametrize("door", [PagedCache, BatchGenerator])
@pytest.mark.parametrize("name", ["doubled", "sdpa", "eager", "masks"])
def test_attention_of_others_is_refused_where_ours_would_take_its_place(name, door, monkeypatch):
    """Pages gave what the model would compute without it, and said nothing."""
    model = tiny()
    if name == "eager":
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", doubled)
    elif name == "masks":
        plain = AttentionInterface._global_mapping["sdpa"]
        monkeypatch.setitem(AttentionInterface._global_mapping, name, plain)
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, doubled)
    else:
        monkeypatch.setitem(AttentionInterface._global_mapping, name, doubled)
    model.set_attn_implementation(name)
    said = f"attn_implementation: '{name}' of LlamaAttention calls {__name__}.doubled"
    with pytest.raises(UnsupportedModelError, match=said):
        door(model, **SIZES)
    assert attention_of(model) == name
    monkeypatch.undo()
    model.set_attn_implementation("sdpa")
    door(model, **SIZES).close()


@torch.no_grad()
def test_eager_attention_is_found_through_a_class_of_ones_own_or_missed_by_name():
    model, ids = tiny(), prompts(6)[0][None]
    model.set_attn_implementation("eager")
    expected = model(ids, use_cache=False).logits
    plain = type(model.model.layers[0].self_attn)

    class Mine(plain):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class Nobodys(torch.nn.Module):
        config = model.config

    model.model.layers[0].self_attn.__class__ = Mine
    attach(model)
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    with pytest.raises(UnsupportedModelError, match="Nobodys does not name its eager attention"):
        attention_function(Nobodys(), *torch.randn(3, 1, 2, 5, 8), None)
    detach(model)


@torch.no_grad()
def test_terms_that_sdpa_leaves_out_are_refused_where_nothing_was_before():
    model = tiny("gpt_oss")
    register()
    model.set_attn_implementation("pagedkv")
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(UnsupportedModelError, match=r"s_aux: .* `attach\(model\)`"):
        model(ids, use_cache=False)
    attach(model)
    found = model(ids, use_cache=False).logits
    detach(model)
    assert attention_of(model) == "pagedkv"
    model.set_attn_implementation("eager")
    assert torch.equal(found, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_copies_of_an_attached_model_are_what_the_model_was(family, copied):
    """Copies under our attention for good: nobody knew what they had before, nor detached them."""
    model, batch = tiny(family), padded(prompts(9, 5))
    model.set_attn_implementation("eager")
    expected = computed(model, batch)
    with PagedCache(model, **SIZES):
        other = copied(model)
    assert attention_of(other) == "eager"
    parts = [*model.modules(), *other.modules()]
    hooks = [of for part in parts for name, of in vars(part).items() if "forward" in name]
    assert not any(hooks)
    assert all(map(torch.equal, computed(other, batch), expected))
    assert_same(other, batch)
    model.config._attn_implementation = "flex_attention"  # after it was detached
    assert attention_of(copied(model)) == "flex_attention"


@pytest.mark.parametrize("attached_before", [False, True])
def test_a_finalizer_amid_a_switch_of_another_model_does_not_wait_and_is_not_forgotten(
    attached_before,
):
    model, other = tiny(), tiny()
    before = attention_of(model)
    attach(model)
    if attached_before:
        attach(other)
    with _attaching:
        finalizer = Thread(target=detach_later, args=(model,), daemon=True)
        finalizer.start()
        finalizer.join(60)
        assert not finalizer.is_alive()
        assert attention_of(model) == "pagedkv"
    (detach if attached_before else attach)(other)
    assert attention_of(model) == before


def test_models_of_one_configuration_compute_what_they_did_while_one_is_attached():
    """The second to attach took our attention for the one before, and took that along."""
    first = tiny("gemma2")
    first.set_attn_implementation("eager")
    second, batch = type(first)(first.config), padded(prompts(9, 5))
    assert second.config is first.config
    expected = computed(first, batch)
    with PagedCache(first, **SIZES):
        assert_same(second, batch)
        assert all(map(torch.equal, computed(first, batch), expected))
    assert attention_of(first) == "eager"


@pytest.mark.parametrize("first_closed", ["the one", "the other"])
@pytest.mark.parametrize("same", [False, True], ids=["two configurations", "one"])
def test_two_heads_on_one_decoder_are_switched_back_with_the_last(same, first_closed):
    """The first that was closed switched the decoder back under the other."""
    one, rows = tiny(), prompts(9, 5)
    config = one.config if same else copy.deepcopy(one.config)
    other = type(one)(config).eval()
    other.model = one.model
    heads = {"the one": one, "the other": other}
    expected = {name: tokens_of(head, rows) for name, head in heads.items()}
    before = attention_of(one)
    generators = {name: BatchGenerator(head, **SIZES) for name, head in heads.items()}
    assert {name: tokens_of(head, rows) for name, head in heads.items()} == expected
    generators.pop(first_closed).close()
    ((name, last),) = generators.items()
    assert tokens(last.generate(rows, max_new_tokens=3)) == [
        text[len(row) :] for text, row in zip(expected[name], rows)
    ]
    last.close()
    assert attention_of(one) == attention_of(other) == attention_of(one.model) == before


def tokens_of(model, rows):
    return [generate(model, padded([row]), max_new_tokens=3).sequences[0].tolist() for row in rows]
