"""Weights that change between calls: what was computed with others is not found any more."""

import ctypes

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from pagedkv import BatchGenerator, PagedCache, plan_memory
from pagedkv.errors import ModelChangedError, WrongModelError
from pagedkv.hf.fingerprint import fingerprint_of
from pagedkv.hf.foreign_hooks import foreign_hook
from pagedkv.hf.samples import SAMPLES, bits
from pagedkv.hf.snapshot import is_stale, snapshot
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


def through_data(weight):
    weight.data.add_(torch.randn_like(weight))


def through_numpy(weight):
    weight.detach().numpy()[...] *= 1.5


def through_the_address(weight):
    """As kernels of optimizers write: torch does not hear of it."""
    numbers = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
    for i in range(weight.numel()):
        numbers[i] *= 1.5


def data_replaced(weight):
    weight.data = weight.data.clone()
    weight.data[0, 1] += 3.0


def low_rank_update(weight):
    """As PEFT merges."""
    rows, columns = weight.shape
    weight.data += torch.randn(rows, 2) @ torch.randn(2, columns)


def one_element(weight):
    """Torch counts this write, which no sample shows."""
    before = bits([weight])
    with torch.no_grad():
        weight[0, 1] += 50.0
    assert bits([weight]) == before


WRITES = [through_data, through_numpy, through_the_address, data_replaced]
WRITES += [low_rank_update, one_element]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_parameter_is_noticed_however_it_is_made(write):
    model = tiny()
    assert_noticed(model, lambda: write(model.model.layers[0].self_attn.k_proj.weight))


@pytest.mark.parametrize("write", [torch.Tensor.mul_, lambda x, by: x.numpy().__imul__(by)])
def test_a_write_to_a_buffer_is_noticed(write):
    model = tiny()
    assert_noticed(model, lambda: write(model.model.rotary_emb.inv_freq, 0.3))


def test_a_write_to_weights_that_torch_keeps_no_count_of_is_noticed():
    with torch.inference_mode():
        model = tiny()
    assert all(parameter.is_inference() for parameter in model.parameters())

    @torch.inference_mode()
    def change():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1.5)

    assert_noticed(model, change)


def test_layers_that_change_places_are_noticed():
    model = tiny()
    layers = model.model.layers

    def change():
        first, second = layers[0].mlp, layers[1].mlp
        layers[0].mlp, layers[1].mlp = second, first

    assert_noticed(model, change)


def test_a_parameter_that_is_added_is_noticed_where_no_adapter_has_it():
    model = tiny()

    def change():
        projection = model.model.layers[0].self_attn.k_proj
        projection.bias = nn.Parameter(torch.randn(projection.out_features) * 3)

    assert_noticed(model, change)


def step_of(make):
    """One step of an optimizer, and no more than it writes."""

    def change(model):
        optimizer = make(model.parameters())
        ids = torch.stack(prompts(12))
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        model.zero_grad()

    return change


FUSED = step_of(lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, fused=True))


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


def test_a_fused_step_of_the_smallest_rate_is_noticed():
    model = tiny()
    assert_noticed(model, lambda: FUSED(model))


def test_a_step_of_bitsandbytes_is_noticed():
    package = pytest.importorskip("bitsandbytes")
    step = step_of(lambda each: package.optim.Adam8bit(each, lr=1e-6, min_8bit_size=1))
    model = tiny()
    assert_noticed(model, lambda: step(model))


def test_four_bits_that_a_first_forward_orders_anew_are_the_same_weights():
    package = pytest.importorskip("bitsandbytes")
    model = tiny(hidden_size=64, intermediate_size=64)
    for name, module in [*model.model.layers.named_modules()]:
        if isinstance(module, nn.Linear):
            four = package.nn.Linear4bit(module.in_features, module.out_features, bias=False)
            four.load_state_dict(module.state_dict())
            model.model.layers.set_submodule(name, four.to("cpu"))
    model.eval()
    (ids,) = prompts(9)
    cache = PagedCache(model)
    for end in (7, 9):
        generate(model, padded([ids[:end]]), cache, **OPTIONS)


def test_log_probabilities_between_fused_steps_are_those_of_a_forward_of_now():
    model, rows = tiny(), prompts(9, 13)
    step = step_of(lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True))
    with generator(model) as batched:
        for _ in range(4):
            for result, row in zip(batched.generate(rows, logprobs=True, **OPTIONS), rows):
                single = alone(model, row, **OPTIONS)
                own = torch.cat(single.logits).log_softmax(-1)[range(6), result.tokens]
                assert torch.allclose(torch.tensor(result.logprobs), own, atol=1e-4)
                assert result.cached_tokens == 0
            step(model)


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


# ------------------------------------------------------------------ a look


class Copies(TorchDispatchMode):
    """How many operations there are, and the most bytes that one of them makes anew."""

    def __init__(self):
        super().__init__()
        self.most, self.calls = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        given = [x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)]
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
            self.most = max(self.most, out.untyped_storage().nbytes())
        return out


class Opaque(torch.Tensor):
    """A tensor of a class of its own, as those of quantised weights are."""

    @staticmethod
    def __new__(cls, low, high):
        shape = (low.shape[0] + high.shape[0], *low.shape[1:])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=low.dtype)

    def __init__(self, low, high):
        self.low, self.high = low, high

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            out = cls(args[0].low.detach(), args[0].high.detach())
            return return_and_correct_aliasing(func, args, kwargs or {}, out)
        raise NotImplementedError(f"{func} of {cls}")


class Halves(Opaque):
    """One that says what it is made of."""

    def __tensor_flatten__(self):
        return ["low", "high"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Halves(inner["low"], inner["high"])


def holding(**tensors):
    module = nn.Module()
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            setattr(module, name, nn.Parameter(tensor, requires_grad=False))
        else:
            module.register_buffer(name, tensor)
    return module


def of_every_kind():
    big = torch.randn(40, 70)
    return holding(
        contiguous=torch.randn(50, 30),
        transposed=torch.randn(30, 50).T,
        cut=big[:, 3:33],
        strided=torch.randn(4, 6, 100)[:, ::2, ::3].permute(2, 0, 1),
        row=torch.randn(999),
        scalar=torch.tensor(3.0),
        binary16=torch.randn(64, 9).half(),
        brain=torch.randn(7, 65).bfloat16(),
        eighth=torch.randn(9, 9).to(torch.float8_e4m3fn),
        integers=torch.arange(300).view(3, 100),
        flags=torch.arange(100) % 3 == 0,
        imaginary=torch.randn(8, 20, dtype=torch.complex64),
        conjugate=torch.randn(8, 20, dtype=torch.complex64).conj(),
        expanded=torch.arange(5)[:, None].expand(5, 40),
        quantised=Halves(torch.randn(30, 20), torch.randn(10, 20)),
    )


SEEN = list(dict(of_every_kind().named_parameters()) | dict(of_every_kind().named_buffers()))


@pytest.mark.parametrize("name", SEEN)
def test_a_change_of_a_tensor_of_any_kind_is_seen_by_its_bits(name):
    module = of_every_kind()
    before = snapshot(module)
    assert not is_stale(before, snapshot(module))
    tensor = getattr(module, name).data
    if isinstance(tensor, Halves):
        tensor = getattr(module, name).high
    if name == "expanded":
        tensor = tensor[:, :1]
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        wide = tensor.float() if name == "eighth" else tensor
        tensor.copy_(wide * 3 + 1)
    after = snapshot(module)
    assert is_stale(before, after)
    assert any(before[key].bits != seen.bits for key, seen in after.items())


def test_tensors_that_have_no_elements_here_are_passed_over():
    module = holding(
        empty=torch.empty(0, 5),
        elsewhere=torch.empty(9, 9, device="meta"),
        sparse=torch.eye(5).to_sparse(),
        opaque=Opaque(torch.randn(3, 2), torch.randn(3, 2)),
    )
    before = snapshot(module)
    assert {seen.bits for name, seen in before.items()} == {b""}
    assert not is_stale(before, snapshot(module))
    module.elsewhere = nn.Parameter(torch.empty(9, 9, device="meta"))
    module.more = nn.Parameter(torch.empty(3, device="meta"))
    assert is_stale(before, snapshot(module))
    del module.elsewhere
    assert is_stale(before, snapshot(module))


def test_another_tensor_at_the_address_of_one_that_is_gone_is_seen():
    """Its first elements are the same, and it was written to as often."""
    memory = bytearray(4 * 500)
    module = holding(weight=torch.frombuffer(memory, dtype=torch.float32))
    before = snapshot(module)
    memory[4] = 1
    module.weight = nn.Parameter(torch.frombuffer(memory, dtype=torch.float32))
    after = snapshot(module)
    assert before[".weight"][1:] == after[".weight"][1:]
    assert is_stale(before, after)


def test_a_look_copies_a_few_elements_of_a_tensor_that_lies_anyhow():
    for tensor in (torch.randn(300, 400).T, torch.randn(300, 400)[:, 5:], torch.randn(500, 300)):
        with Copies() as copies:
            (some,) = bits([tensor])
        assert 0 < len(some) <= SAMPLES * 4
        assert 0 < copies.most <= SAMPLES * 4


def test_samples_of_a_matrix_lie_in_many_rows_and_columns():
    weight = torch.arange(576 * 576, dtype=torch.int64).view(576, 576)
    (some,) = bits([weight])
    at = torch.frombuffer(bytearray(some), dtype=torch.int64)
    assert len(set((at // 576).tolist())) == len(set((at % 576).tolist())) == SAMPLES
    spread = (at % 576).sort().values.diff()
    assert spread.max() < 3 * 576 / SAMPLES


def test_a_tie_is_one_change_and_parameters_in_one_storage_are_two():
    storage = torch.randn(2, 200)
    module = holding(first=storage[0], second=storage[1])
    module.tied = module.first
    before = snapshot(module)
    module.second.data.add_(1.0)
    after = snapshot(module)
    assert [name for name in before if not before[name].is_same(after[name])] == [".second"]
    module.first.data.add_(1.0)
    last = snapshot(module)
    assert [name for name in after if not after[name].is_same(last[name])] == [".first", ".tied"]


def test_a_thousand_small_parameters_are_read_together():
    module = holding(**{f"p{i}": torch.randn(3) for i in range(1000)})
    with Copies() as copies:
        before = snapshot(module)
    assert len(before) == 1000
    assert copies.calls < 2 * 1000 + 10  # a view of each and a constant number of others
    module.p777.data.add_(1.0)
    assert is_stale(before, snapshot(module))


def test_nan_is_equal_to_itself_and_minus_zero_is_not_zero():
    module = holding(weight=torch.tensor([float("nan"), 0.0, 1.0]))
    before = snapshot(module)
    assert not is_stale(before, snapshot(module))
    module.weight.data[1] = -0.0
    assert is_stale(before, snapshot(module))


def test_a_fingerprint_is_made_of_weights_of_any_kind():
    model = tiny()
    whole = fingerprint_of(model)
    projection = model.model.layers[0].self_attn.k_proj
    weight = projection.weight.detach()
    projection.weight = nn.Parameter(Halves(weight[:5], weight[5:]), requires_grad=False)
    quantised = fingerprint_of(model)
    assert quantised != whole
    projection.weight.high.mul_(2.0)
    assert fingerprint_of(model) != quantised
