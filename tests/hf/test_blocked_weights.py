"""`pack_weights=`: the same tokens, by a model that is in between what it was."""

import copy
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from pagedkv import BatchGenerator, plan_memory
from pagedkv.hf import blocked_weights as module
from pagedkv.hf.blocked_weights import PackedForward, packed_weights, why_rows_differ
from pagedkv.hf.model import cache_config
from tests.batch.generating import assert_like_alone, ragged
from tests.effort import few
from tests.hf.adapted import adapted, add
from tests.hf.doors import OPTIONS, rows_of_tokens
from tests.hf.tiny import FAMILIES, prompts, tiny
from tests.hf.zoo import built

SHORT = {"max_new_tokens": 6, "do_sample": False}
SIZES = {"max_tokens": 512, "page_size": 4}


@pytest.fixture
def products(monkeypatch):
    """The packed matrices that were multiplied with, one after another."""
    used, product = [], module.product

    def watched(x, packed, bias):
        used.append(packed)
        return product(x, packed, bias)

    monkeypatch.setattr(module, "product", watched)
    return used


def packing(model, **fields):
    return BatchGenerator(model, pack_weights=True, **{**SIZES, **fields})


def tokens_of(batched, rows, **options):
    return [result.tokens for result in batched.generate(rows, **{**SHORT, **options})]


def linears(model):
    return [part for part in model.modules() if type(part) is nn.Linear]


def assert_as_before(model):
    assert not any("forward" in vars(part) for part in model.modules())


# ------------------------------------------------------------------ the same tokens


@pytest.mark.parametrize("family", few(FAMILIES, "llama", "qwen2", "gemma3"))
def test_rows_get_the_tokens_that_they_get_unpacked(family, products):
    model = tiny(family)
    results, _ = assert_like_alone(model, ragged(), {"pack_weights": True})
    assert results
    assert products or not linears(model)
    assert_as_before(model)


# Of all types one for each sort of layers that are multiplied with, or are not.
SORTS = {
    "plain": "exaone4",
    "a bias, the head's too": "phi",
    "the head is the embedding": "cohere2",
    "tokens without rows": "qwen2_moe",
    "tokens without rows, a bias": "opt",
    "four dimensions": "deepseek_v3",
    "a class of their own": "gpt2",
    "a class that is made of nn.Linear": "phimoe",
    "layers of images, which nobody calls": "llava",
    "beside convolutions and scans": "falcon_h1",
    "beside convolutions, tokens without rows": "qwen3_next",
    "beside convolutions, four dimensions": "kimi_linear",
    "beside convolutions, a bias": "zaya",
}


FEW = "plain", "a bias, the head's too", "tokens without rows, a bias", "a class of their own"


@pytest.mark.parametrize("sort", few(SORTS, *FEW, "beside convolutions, four dimensions"))
def test_layers_of_every_sort_generate_packed_what_they_do_unpacked(sort, products):
    rows = [row.tolist() for row in rows_of_tokens()]
    model = built(SORTS[sort])
    with BatchGenerator(model, **SIZES, pack_weights=False) as plain:
        expected = plain.generate(rows, do_sample=False, logprobs=True, **OPTIONS)
    assert not products
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with packing(model) as batched:
        batched.cache.clear_prefixes()
        results = batched.generate(rows, do_sample=False, logprobs=True, **OPTIONS)
    assert products
    for got, wanted in zip(results, expected, strict=True):
        same = [a == b for a, b in zip(got.tokens, wanted.tokens)]
        upto = same.index(False) if False in same else len(same)
        close = torch.tensor(got.logprobs[:upto]) - torch.tensor(wanted.logprobs[:upto])
        assert got.error is wanted.error is None
        assert not upto or close.abs().max() < 1e-3
        if upto < len(same):  # both are nearly as likely
            assert abs(got.logprobs[upto] - wanted.logprobs[upto]) < 1e-3
    assert_as_before(model)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_under_adapters_layers_are_packed_and_adapters_are_not(products):
    model = adapted(tiny())
    add(model, "two")
    rows = prompts(9, 13)
    with BatchGenerator(model, **SIZES, pack_weights=False) as plain:
        expected = tokens_of(plain, rows)
    with packing(model) as batched:
        batched.cache.clear_prefixes()
        assert tokens_of(batched, rows) == expected
        shapes = {tuple(packed.shape) for packed in products}
        assert shapes == {tuple(layer.weight.shape) for layer in linears(tiny())}
        model.set_adapter("two")
        other = tokens_of(batched, rows)
    with BatchGenerator(model, **SIZES, pack_weights=False) as plain:
        plain.cache.clear_prefixes()
        assert tokens_of(plain, rows) == other != expected


def test_a_draft_is_packed_as_well(products):
    model, draft = tiny(), tiny()
    with packing(model, draft=draft) as batched:
        packed = tokens_of(batched, prompts(9, 13))
        assert {id(one) for one in products} == {
            id(forward.packed)
            for weights in (packed_weights(model), packed_weights(draft))
            for forward in weights._forwards.values()
        }
    assert [len(tokens) for tokens in packed] == [6, 6]


# ------------------------------------------------------------------ the model is what it was


def test_the_model_is_as_it_was_between_steps(tmp_path):
    model = tiny()
    before, kind = copy.deepcopy(model.state_dict()), type(model)
    with packing(model) as batched:
        stream = batched.stream(prompts(5, 7), **{**SHORT, "max_new_tokens": [2, 6]})
        next(stream)  # in the middle of a call
        assert_as_before(model)
        assert type(model) is kind
        copied = copy.deepcopy(model)
        model.save_pretrained(tmp_path)
        batch = prompts(7)[0][None]
        model(batch, labels=batch).loss.backward()
        grads = [weight.grad for weight in model.parameters()]
        stream.close()
    assert_as_before(model)
    copied_batch = copied(batch, labels=batch)
    copied_batch.loss.backward()
    for grad, weight in zip(grads, copied.parameters(), strict=True):
        assert torch.equal(grad, weight.grad)
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert torch.equal(loaded[name], before[name])


def test_two_generators_share_the_packing_and_the_last_one_takes_it_along():
    model = tiny()
    one, two = packing(model), packing(model, max_tokens=256)
    assert one._packed._weights is two._packed._weights
    sizes = [module.pack(layer.weight).nbytes for layer in linears(model)]
    assert packed_weights(model).nbytes == sum(sizes)
    expected = tokens_of(one, prompts(9, 5))
    one.close()
    assert [len(tokens) for tokens in tokens_of(two, prompts(9, 5))] == [6, 6]
    assert len(expected) == 2
    two.close()
    assert not module._kept(model)


def test_a_head_that_is_the_embedding_is_packed_and_stays_the_embedding(products):
    model = tiny(tie_word_embeddings=True)
    results, _ = assert_like_alone(model, prompts(5, 9), {"pack_weights": True})
    assert len(results) == 2
    assert (101, 32) in {tuple(packed.shape) for packed in products}
    assert model.lm_head.weight is model.model.embed_tokens.weight


# ------------------------------------------------------------------ weights that change


def in_place(weight):
    with torch.no_grad():
        weight.mul_(-1.5)


def replaced(weight):
    weight.data = -1.5 * weight.data


CHANGES = {
    "in place": lambda model: in_place(model.model.layers[0].mlp.down_proj.weight),
    "through data": lambda model: model.model.layers[0].mlp.down_proj.weight.data.mul_(-1.5),
    "replaced": lambda model: replaced(model.model.layers[0].mlp.down_proj.weight),
    "another layer": lambda model: setattr(model, "lm_head", nn.Linear(32, 101, bias=True).eval()),
    "a pruned bias": lambda model: prune.l1_unstructured(  # which leaves the layer to itself
        model.model.layers[0].self_attn.v_proj, "bias", 1.0
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_packed_anew(change, products):
    model, rows = tiny("qwen2"), prompts(9, 13)
    nn.init.normal_(model.model.layers[0].self_attn.v_proj.bias)
    with packing(model) as batched:
        first = tokens_of(batched, rows)
        CHANGES[change](model)
        second = tokens_of(batched, rows)
        assert products
    with BatchGenerator(model, **SIZES, pack_weights=False) as plain:
        plain.cache.clear_prefixes()
        assert second == tokens_of(plain, rows) != first


@pytest.mark.parametrize("change", [in_place, replaced])
@torch.no_grad()
def test_weights_that_change_in_the_middle_of_a_call_are_not_served_stale(change):
    model = tiny()
    layer = model.lm_head
    weights, x = packed_weights(model), torch.randn(3, 32)
    with weights.acting():
        assert isinstance(vars(layer)["forward"], PackedForward)
        change(layer.weight)
        assert torch.equal(layer(x), x @ layer.weight.T)


# ------------------------------------------------------------------ what packing is not for


def test_other_ways_of_calling_a_layer_are_the_layers_own(products):
    model = tiny()
    layer, x = model.lm_head, torch.randn(3, 32)
    weights = packed_weights(model)
    expected = layer(x)
    found = {}

    def elsewhere():
        with torch.no_grad():
            found["thread"] = layer(x)

    with weights.acting():
        found["gradients"] = layer(x)
        with torch.no_grad():
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            found["a row alone"] = layer(x[0])[None]
            found["no rows"] = layer(x[:0])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found["autocast"] = layer(x)
            assert not products
            layer(x)
            assert len(products) == 1
        copied = copy.deepcopy(model)
        saved = pickle.loads(pickle.dumps(model))
    assert torch.equal(saved.lm_head(x), expected)
    assert torch.equal(found["thread"], expected)
    assert torch.equal(found["gradients"], expected)
    assert found["gradients"].requires_grad
    assert found["autocast"].dtype == torch.bfloat16
    assert found["no rows"].shape == (0, 101)
    torch.testing.assert_close(found["a row alone"], expected[:1])
    in_place(copied.lm_head.weight)
    torch.testing.assert_close(copied.lm_head(x), -1.5 * expected)


def test_layers_with_a_forward_of_somebody_elses_are_left_alone(products):
    model = tiny()
    layer, called = model.lm_head, []

    def own(x):
        called.append(x)
        return nn.Linear.forward(layer, x)

    with packing(model) as batched:
        batched.generate(prompts(5), **SHORT)
        assert any(packed.shape[0] == 101 for packed in products)
        products.clear()
        layer.forward = own
        batched.generate(prompts(5), **SHORT)
    assert called
    assert not any(packed.shape[0] == 101 for packed in products)
    assert layer.forward is own


def compiled():
    model = tiny()
    model._compiled_call_impl = model._call_impl  # what `model.compile()` sets
    return model


def with_convolutions_alone():
    model = tiny("gpt2")  # whose products are of another class, but for the head's
    model.lm_head.forward = model.lm_head.forward
    return model


UNPACKED = {
    "no plain linear layers": with_convolutions_alone,
    "expected float32 or bfloat16, got float16": lambda: tiny().half(),
    "it is compiled": compiled,
}


@pytest.mark.parametrize("reason", UNPACKED)
def test_what_cannot_be_packed_runs_unpacked_with_one_warning(reason):
    model = UNPACKED[reason]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with packing(model) as batched:
            results = batched.generate(prompts(5, 6), **SHORT)
            assert not batched._packed._weights.nbytes
    assert [result.error for result in results] == [None, None]
    (said,) = [str(one.message) for one in caught if "pack_weights" in str(one.message)]
    assert said.startswith(f"pack_weights: {type(model).__name__} runs unpacked: ")
    assert said.endswith(reason)


# ------------------------------------------------------------------ by themselves


def test_weights_are_packed_by_themselves_while_a_generator_is_open(products):
    model, rows = tiny(), prompts(9, 13)
    with BatchGenerator(model, **SIZES) as batched:
        assert len(tokens_of(batched, rows)) == 2
        assert products
        assert batched.packed_bytes == packed_weights(model).nbytes > 0
        in_place(model.lm_head.weight)
        changed = tokens_of(batched, rows)
    with BatchGenerator(model, **SIZES, pack_weights=False) as plain:
        plain.cache.clear_prefixes()
        assert plain.packed_bytes == 0
        assert tokens_of(plain, rows) == changed
    assert not module._kept(model)
    assert_as_before(model)


@pytest.mark.parametrize("missing", [0, 2])
def test_they_take_half_of_what_pages_leave_free(missing, monkeypatch):
    model = tiny()
    needed = sum(layer.weight.nbytes for layer in linears(model))
    pages = cache_config(model, **SIZES).nbytes
    free = pages + 2 * needed - missing
    monkeypatch.setattr(module, "available_memory", lambda device: free)
    with BatchGenerator(model, **SIZES) as batched:
        assert bool(batched.packed_bytes) == (not missing)


@pytest.mark.parametrize("counted", [False, True])
def test_with_a_plan_they_are_packed_if_it_counts_them(counted):
    model = tiny()
    sizes = {"device": "cpu", "device_memory": "1GiB", "max_tokens": 512}
    plan = plan_memory(model.config, pack_weights=counted, **sizes)
    with BatchGenerator(model, plan=plan) as batched:
        assert bool(batched.packed_bytes) == counted


@pytest.mark.parametrize("reason", UNPACKED)
def test_by_themselves_nothing_is_said_of_what_cannot_be_packed(reason):
    model = UNPACKED[reason]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with BatchGenerator(model, **SIZES) as batched:
            batched.generate(prompts(5, 6), **SHORT)
            assert batched.packed_bytes == 0


def test_where_an_allocation_fails_after_all_it_runs_unpacked_and_says_so(monkeypatch):
    def fail(weight, by_c):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(module, "pack", fail)
    model = tiny()
    with pytest.warns(UserWarning, match="runs unpacked: DefaultCPUAllocator"):
        generator = BatchGenerator(model, max_tokens=64)
    with generator:
        assert generator.packed_bytes == 0
        assert generator.generate([[1, 2, 3]], max_new_tokens=2)[0].error is None


def test_another_word_than_auto_is_refused():
    with pytest.raises(ValueError, match="expected True, False, 'auto' or 'int8', got 'yes'"):
        BatchGenerator(tiny(), **SIZES, pack_weights="yes")


def test_dynamic_quantization_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: it is to move elsewhere
        model = torch.ao.quantization.quantize_dynamic(tiny(), {nn.Linear})
    with pytest.warns(UserWarning, match="quantize_dynamic"):
        BatchGenerator(model, **SIZES).close()


@torch.no_grad()
def test_a_step_goes_on_as_it_began_while_weights_are_looked_at_again(monkeypatch):
    """A generator that is begun beside it does so, in another thread."""
    model = tiny()
    weights = packed_weights(model)
    parts = [part for part in model.modules() if part in {*weights._forwards, *weights._norms}]
    seen, snapshot = [], module.snapshot

    def watched(model):
        seen.append([vars(part).get("forward") for part in parts])
        return snapshot(model)

    with weights.acting():
        before = [vars(part)["forward"] for part in parts]
        monkeypatch.setattr(module, "snapshot", watched)
        assert packed_weights(model) is weights
        assert why_rows_differ(model) is None
        assert seen == [before] == [[vars(part)["forward"] for part in parts]]
        model.lm_head.weight.mul_(2)
        weights.refresh()
        x = torch.randn(3, 32)
        torch.testing.assert_close(model.lm_head(x), x @ model.lm_head.weight.T)
        assert vars(model.lm_head)["forward"] is weights._forwards[model.lm_head]
    assert not any("forward" in vars(part) for part in parts)


@torch.no_grad()
def test_weights_of_two_kinds_act_each_in_its_own_thread():
    """Of bfloat16 `batch_invariant` has its own, beside those of torch's operators."""
    model = tiny().to(torch.bfloat16)
    kinds = [packed_weights(model, by_c=by_c) for by_c in (False, True)]
    layer, x = model.lm_head, torch.randn(3, 32).bfloat16()
    wanted = [module.product(x, kind._forwards[layer].packed, None) for kind in kinds]
    for one, other in ((0, 1), (1, 0)):
        found, turns = [], threading.Barrier(2)

        @torch.no_grad()
        def beside(other=other, found=found, turns=turns):
            with kinds[other].acting():
                found.append(layer(x))
                turns.wait()
                turns.wait()
                found.append(layer(x))

        thread = threading.Thread(target=beside)
        with kinds[one].acting():
            thread.start()
            turns.wait()
            assert torch.equal(layer(x), wanted[one])
        turns.wait()
        thread.join()
        assert torch.equal(found[0], wanted[other])
        assert torch.equal(found[1], wanted[other])
        assert "forward" not in vars(layer)
