"""Weights that change between calls: what was computed with others is not found any more."""

import ctypes
from types import MethodType

import pytest
import torch
from torch import nn

from pagedkv import BatchGenerator, PagedCache, plan_memory
from pagedkv.errors import ModelChangedError, WrongModelError
from pagedkv.hf.foreign_hooks import foreign_hook
from pagedkv.hf.samples import bits
from tests.batch.generating import alone, assert_nothing_held, generator, tokens_alone
from tests.hf.tiny import generate, padded, prompts, tiny

OPTIONS = {"max_new_tokens": 6, "do_sample": False}


def found(batched, rows):
    return [result.cached_tokens for result in batched.generate(rows, **OPTIONS)]


def assert_noticed(model, change, rows=None):
    """After a change results are those of a new generator, and nothing of before is found."""
    rows = rows or prompts(9, 13)
    with generator(model) as batched:
        batched.generate(rows, **OPTIONS)
        assert found(batched, rows) == [8, 12]
        change()
        changed = batched.generate(rows, **OPTIONS)
        assert [result.cached_tokens for result in changed] == [0, 0]
        for result, row in zip(changed, rows, strict=True):
            assert result.tokens == tokens_alone(model, row, **OPTIONS)
        assert found(batched, rows) == [8, 12]


# ------------------------------------------------------------------ what is noticed


def through_the_address(weight):
    """As kernels of optimizers write: torch does not hear of it."""
    numbers = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
    for i in range(weight.numel()):
        numbers[i] *= 1.5


def data_replaced(weight):
    weight.data = weight.data.clone()
    weight.data[0, 1] += 3.0


def one_element(weight):
    """Torch counts this write, which no sample shows."""
    before = bits([weight])
    with torch.no_grad():
        weight[0, 1] += 50.0
    assert bits([weight]) == before


@pytest.mark.parametrize("write", [through_the_address, data_replaced, one_element])
def test_a_write_to_a_parameter_is_noticed_however_it_is_made(write):
    model = tiny()
    assert_noticed(model, lambda: write(model.model.layers[0].self_attn.k_proj.weight))


def test_a_write_to_a_buffer_is_noticed():
    model = tiny()
    assert_noticed(model, lambda: model.model.rotary_emb.inv_freq.mul_(0.3))


def test_a_write_to_weights_that_torch_keeps_no_count_of_is_noticed():
    with torch.inference_mode():
        model = tiny()
    assert all(parameter.is_inference() for parameter in model.parameters())

    @torch.inference_mode()
    def change():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1.5)

    assert_noticed(model, change)


def twice(forward):
    return lambda module, hidden: 2 * forward(module, hidden)


def forward_replaced(model, monkeypatch):
    mlp = model.model.layers[0].mlp
    mlp.forward = MethodType(twice(type(mlp).forward), mlp)


def class_replaced(model, monkeypatch):
    norm = model.model.layers[0].input_layernorm
    norm.__class__ = type("Doubled", (type(norm),), {"forward": twice(type(norm).forward)})


def forward_of_a_class_replaced(model, monkeypatch):
    kind = type(model.model.layers[0].mlp)
    monkeypatch.setattr(kind, "forward", twice(kind.forward))


def number_replaced(model, monkeypatch):
    model.model.layers[0].self_attn.scaling *= 3


CODES = [forward_replaced, class_replaced, forward_of_a_class_replaced, number_replaced]


@pytest.mark.parametrize("change", CODES)
def test_code_of_others_and_numbers_of_modules_are_noticed(change, monkeypatch):
    model = tiny()
    assert_noticed(model, lambda: change(model, monkeypatch))


@pytest.mark.filterwarnings("ignore:model. .* has the forward hook")
def test_a_hook_that_comes_or_goes_is_noticed():
    """As whoever steers a model compares it with itself."""
    model, hooks = tiny(), []
    projection = model.model.layers[0].self_attn.k_proj

    def steer():
        hooks.append(projection.register_forward_hook(lambda module, args, out: out * 3))

    assert_noticed(model, steer)
    assert_noticed(model, lambda: hooks.pop().remove())
    before = lambda module, args: (args[0] * 3,)  # noqa: E731
    assert_noticed(model, lambda: projection.register_forward_pre_hook(before))


@pytest.mark.filterwarnings("ignore:model. every module has the forward hook")
def test_a_hook_of_every_module_is_noticed_as_it_comes_and_goes():
    """As torch's `register_module_forward_hook` puts it: into no module, and called in each."""
    model, hooks = tiny(), []

    def scale(module, args, out):
        return out * 3 if isinstance(module, nn.Linear) else None

    def before(module, args):
        return (args[0] * 3,) if isinstance(module, nn.Linear) else None

    every = nn.modules.module
    try:
        assert_noticed(model, lambda: hooks.append(every.register_module_forward_hook(scale)))
        assert_noticed(model, lambda: hooks.pop().remove())
        assert_noticed(model, lambda: hooks.append(every.register_module_forward_pre_hook(before)))
        assert foreign_hook(model)  # so no store gets what it computes
    finally:
        for hook in hooks:
            hook.remove()


class OrdersAnew(nn.Linear):
    """A layer that lays its weight out anew in the first forward, as those of bitsandbytes do."""

    __module__ = "bitsandbytes.nn"
    is_ordered = False

    def forward(self, x):
        if not self.is_ordered:
            self.weight.data, self.is_ordered = self.weight.data.T.contiguous(), True
        return x @ self.weight


def test_weights_that_a_first_forward_orders_anew_are_the_same():
    model, (ids,) = tiny(), prompts(9)
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = OrdersAnew

    def decompress(model, args):  # as compressed-tensors does
        model.model.layers[0].mlp.gate_proj.weight.mul_(2)
        model.ct_decompress_hook.remove()
        del model.ct_decompress_hook

    model.ct_decompress_hook = model.register_forward_pre_hook(decompress)
    with torch.inference_mode():
        cache = PagedCache(model)
    assert not any(weight.is_inference() for weight in model.parameters())
    for end in (7, 9):
        generate(model, padded([ids[:end]]), cache, **OPTIONS)


def test_log_probabilities_between_fused_steps_are_those_of_a_forward_of_now():
    """Torch does not count what a fused step writes."""
    model, rows, ids = tiny(), prompts(9, 13), torch.stack(prompts(12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    with generator(model) as batched:
        for _ in range(4):
            for result, row in zip(batched.generate(rows, logprobs=True, **OPTIONS), rows):
                single = alone(model, row, **OPTIONS)
                own = torch.cat(single.logits).log_softmax(-1)[range(6), result.tokens]
                assert torch.allclose(torch.tensor(result.logprobs), own, atol=1e-4)
                assert result.cached_tokens == 0
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            model.zero_grad()


# ------------------------------------------------------------------ what is not


def test_what_changes_no_weight_keeps_the_prefixes():
    model, rows = tiny(), prompts(9, 13)
    with generator(model) as batched:
        batched.generate(rows, **OPTIONS)
        model.requires_grad_(False).train().eval()
        model(torch.stack(prompts(7)))
        assert found(batched, rows) == [8, 12]


def test_a_write_of_one_element_behind_torchs_back_is_unseen_until_prefixes_are_cleared():
    model, rows = tiny(), prompts(9, 13)
    weight = model.model.layers[0].self_attn.k_proj.weight
    with generator(model) as batched:
        batched.generate(rows, **OPTIONS)
        weight.data.view(-1)[1] += 50.0
        assert found(batched, rows) == [8, 12]
        batched.cache.clear_prefixes()
        cleared = batched.generate(rows, **OPTIONS)
        assert [result.cached_tokens for result in cleared] == [0, 0]
        assert [result.tokens for result in cleared] == [
            tokens_alone(model, row, **OPTIONS) for row in rows
        ]


@pytest.mark.filterwarnings("ignore:model. .* has the forward hook")
def test_what_a_hook_is_told_is_unseen_until_prefixes_are_cleared():
    model, rows, factor = tiny(), prompts(9, 13), [1.0]
    projection = model.model.layers[0].self_attn.k_proj
    projection.register_forward_hook(lambda module, args, out: out * factor[0])
    with generator(model) as batched:
        batched.generate(rows, **OPTIONS)
        factor[0] = 3.0
        assert found(batched, rows) == [8, 12]
        batched.cache.clear_prefixes()
        for result, row in zip(batched.generate(rows, **OPTIONS), rows):
            assert result.tokens == tokens_alone(model, row, **OPTIONS)


# ------------------------------------------------------------------ whose pages they are


@pytest.mark.parametrize("planned", [False, True])
def test_a_file_belongs_to_the_weights_it_was_computed_with(tmp_path, planned):
    model = tiny()
    sizes = {"max_tokens": 256, "page_size": 4}
    batch = padded(prompts(9))
    if planned:
        sized = {"device_memory": "64MiB", "device": "cpu", "batch": 8, "length": 40}
        sizes = {"plan": plan_memory(model.config, **sized)}
    with PagedCache(model, **sizes) as before, PagedCache(model, **sizes) as after:
        generate(model, batch, before)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        generate(model, batch, after)
        before.kv.save(before.rows[0], tmp_path / "before")
        before.kv.save(before.kv.fork(before.rows[0])[0], tmp_path / "fork")
        after.kv.save(after.rows[0], tmp_path / "after")
        for name in ("before", "fork"):
            with pytest.raises(WrongModelError):
                after.kv.load(tmp_path / name)
        again = after.kv.load(tmp_path / "after")
        after.kv.save(again, tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == (tmp_path / "after").read_bytes()


def test_what_a_file_brought_is_forgotten_when_weights_change(tmp_path):
    model, rows = tiny(), prompts(9, 13)
    with BatchGenerator(model, max_tokens=512, page_size=4) as batched:
        kv = batched.cache
        seq = kv.add(rows[0])
        batched._packed.forget_stale()
        with torch.inference_mode(), kv.step([seq]) as step:
            batched._packed.logits(step)
        kv.save(seq, tmp_path / "x")
        kv.free(seq)
        kv.clear_prefixes()
        kv.load(tmp_path / "x")
        model.model.layers[0].self_attn.k_proj.weight.data.mul_(2.0)
        changed = batched.generate(rows, **OPTIONS)
        assert [result.cached_tokens for result in changed] == [0, 0]
        assert changed[0].tokens == tokens_alone(model, rows[0], **OPTIONS)


def test_a_model_in_another_dtype_than_its_generator_was_made_for_is_refused_by_name():
    model, rows = tiny(), prompts(9)
    with generator(model) as batched:
        batched.generate(rows, **OPTIONS)
        model.to(torch.bfloat16)
        message = "dtype has changed from torch.float32 to torch.bfloat16.*new BatchGenerator"
        with pytest.raises(ModelChangedError, match=message):
            batched.stream(rows, **OPTIONS)
        model.float()
        stream = batched.stream(rows, **OPTIONS)
        model.half()
        with pytest.raises(ModelChangedError, match=r"float32 to torch\.float16"):
            next(stream)
        model.float()
        stream = batched.stream([*rows, *rows], max_new_tokens=[1, 6], do_sample=False)
        next(stream)
        model.half()
        with pytest.raises(ModelChangedError, match=r"float32 to torch\.float16"):
            next(stream)
        assert_nothing_held(batched)
        model.float()
        assert batched.generate(rows, **OPTIONS)[0].error is None


def test_a_model_in_another_dtype_than_its_cache_was_made_for_is_refused_by_name():
    model, batch = tiny(), padded(prompts(9))
    with PagedCache(model, max_tokens=256) as cache:
        model.to(torch.bfloat16)
        with pytest.raises(ModelChangedError, match=r"from torch\.float32 to .*new PagedCache"):
            generate(model, batch, cache)
        with pytest.raises(ModelChangedError):
            generate(model, batch, cache.fork())
        model.float()
        generate(model, batch, cache)
        cache.kv.check()
