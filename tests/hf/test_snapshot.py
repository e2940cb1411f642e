"""Looks at weights, and what a look tells from one before: tensors of any kind, at little cost."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from pagedkv.hf.fingerprint import fingerprint_of
from pagedkv.hf.samples import SAMPLES, bits
from pagedkv.hf.snapshot import is_stale, snapshot
from tests.hf.tiny import tiny


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


class Sealed(Opaque):
    """One that no operation is told of."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} of {cls}")


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
    module.register_buffer("sealed", Sealed(torch.randn(3, 2), torch.randn(3, 2)))
    before = snapshot(module)
    assert {seen.bits for name, seen in before.items()} == {b""}
    assert not is_stale(before, snapshot(module))
    module.more = nn.Parameter(torch.empty(3, device="meta"))
    after = snapshot(module)
    assert is_stale(before, after)
    module.elsewhere = nn.Parameter(torch.empty(9, 9, device="meta"))
    assert is_stale(after, snapshot(module))
    del module.elsewhere
    assert is_stale(after, snapshot(module))


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


@pytest.mark.parametrize("size", [576, 64])
def test_samples_of_a_matrix_lie_in_many_rows_and_columns(size):
    weight = torch.arange(size * size, dtype=torch.int64).view(size, size)
    (some,) = bits([weight])
    at = torch.frombuffer(bytearray(some), dtype=torch.int64)
    assert len(set((at // size).tolist())) >= SAMPLES - 1
    assert len(set((at % size).tolist())) == SAMPLES
    spread = (at % size).sort().values.diff()
    assert spread.max() < 3 * size / SAMPLES


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
