"""Norms that C computes in a step are proved to be the module's own; all others are left alone."""

import pytest
import torch
from torch import nn

from pagedkv.hf import norms as module
from pagedkv.hf.blocked_weights import packed_weights
from pagedkv.hf.norms import how_it_norms
from pagedkv.kernels.c.library import missing
from pagedkv.kernels.torch.rms_norm import bounds, rms_norm
from tests.hf.tiny import tiny

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a library")
EPS = 1e-5


class Norm(nn.Module):
    """An RMS norm whose arithmetic a test gives."""

    def __init__(self, how, width=72):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) / 4)
        self.variance_epsilon = EPS
        self.how, self.calls = how, 0

    def forward(self, x):
        return self.how(self, x)


def llamas(self, x):
    return rms_norm(x, self.weight, EPS, 0.0, True)


def gemmas(self, x):
    return rms_norm(x, self.weight, EPS, 1.0, False)


def olmos(self, x):
    return rms_norm(x, self.weight, EPS, 0.0, False)


def without_the_cast(self, x):
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def eps_behind_the_root(self, x):
    wide = x.float()
    return (self.weight * wide / (wide.square().mean(-1, keepdim=True).sqrt() + EPS)).to(x.dtype)


def another_eps(self, x):
    return rms_norm(x, self.weight, EPS * 1.01, 0.0, True)


def around_the_mean(self, x):
    return nn.functional.layer_norm(x, x.shape[-1:], self.weight, None, EPS)


def of_one_number_less(self, x):
    wide = x.float()
    mean = wide.square().sum(-1, keepdim=True) / (x.shape[-1] - 1)
    return (wide * torch.rsqrt(mean + EPS)).to(x.dtype) * self.weight


def of_all_rows(self, x):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean() + EPS)).to(x.dtype) * self.weight


def with_a_limit(self, x):
    return rms_norm(x.clamp(-1e5, 1e5), self.weight, EPS, 0.0, True)


def with_a_far_limit(self, x):
    return llamas(self, x.clamp(-1e7, 1e7))


def of_numbers_alone(self, x):
    return llamas(self, x.nan_to_num(0.0, 0.0, 0.0))


def another_for_one_token(self, x):
    return llamas(self, x) * (2 if x.shape[-2] == 1 else 1)


def another_for_three_dims(self, x):
    return llamas(self, x) * (2 if x.dim() == 3 else 1)


def counted(self, x):
    self.calls += 1
    return llamas(self, x)


def two_of_them(self, x):
    return llamas(self, x), x


def failing(self, x):
    raise RuntimeError("not in this mode")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("how", "added", "rounds"), [(llamas, 0.0, True), (gemmas, 1.0, False), (olmos, 0.0, False)]
)
def test_every_arithmetic_of_norms_is_told_apart(how, added, rounds, dtype):
    found = how_it_norms(Norm(how).to(dtype))
    assert found == (EPS, added, rounds or dtype == torch.float32)  # which is the same in float32


OTHERS = eps_behind_the_root, another_eps, around_the_mean, of_one_number_less, of_all_rows
OTHERS += with_a_limit, counted, two_of_them, failing, with_a_far_limit, of_numbers_alone
OTHERS += another_for_one_token, another_for_three_dims


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", OTHERS)
def test_what_is_nearly_a_norm_is_left_alone(how, dtype):
    module = Norm(how).to(dtype)
    assert how_it_norms(module) is None
    assert module.calls == 0  # copies are tried


def test_a_norm_that_rounds_on_its_way_is_left_alone():
    assert how_it_norms(Norm(without_the_cast)) == (EPS, 0.0, True)
    assert how_it_norms(Norm(without_the_cast).bfloat16()) is None


def test_bounds_of_float64_are_narrow():
    x, weight = torch.randn(5, 72), torch.randn(72)
    least, most = bounds(x, weight, EPS, 0.0, False)
    assert (most - least <= 2**-17 * most.abs()).all()


@pytest.fixture
def calls(monkeypatch):
    """The rows that C was given."""
    given, in_c = [], module.rms_norm

    def watched(x, *how):
        given.append(x)
        return in_c(x, *how)

    monkeypatch.setattr(module, "rms_norm", watched)
    return given


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
@torch.no_grad()
def test_norms_of_models_are_computed_as_float64_says(family, calls):
    """Those of heads as well, whose rows have four dimensions."""
    model = tiny(family)
    weights = packed_weights(model)
    parts = dict(model.named_modules())
    assert {name for name in parts if "norm" in name} == {
        name for name, part in parts.items() if part in weights._norms
    }
    for part in weights._norms:
        nn.init.normal_(part.weight)
    weights.refresh()
    for part, norm in weights._norms.items():
        x = torch.randn(1, 5, 2, len(part.weight))
        with weights.acting():
            out = part(x)
        assert calls.pop() is x
        least, most = bounds(x, part.weight, *norm.how)
        assert ((least <= out) & (out <= most)).all()


@torch.no_grad()
def test_other_ways_of_calling_a_norm_are_its_own(calls):
    model = tiny()
    norm, x = model.model.norm, torch.randn(2, 3, 32)
    weights = packed_weights(model)
    with weights.acting():
        with torch.enable_grad():
            assert norm(x).requires_grad
        norm(x.double())
        norm(hidden_states=x)
        norm(x[:0])
        norm.weight.mul_(2)
        assert torch.equal(norm(x), type(norm).forward(norm, x))
    assert not calls


@torch.no_grad()
def test_hooks_of_a_norm_do_what_they_did(calls):
    model = tiny()
    norm, x = model.model.norm, torch.randn(2, 3, 32)
    weights = packed_weights(model)
    with weights.acting():
        plain = norm(x)
        norm.register_forward_hook(lambda norm, args, out: out + 1)
        assert torch.equal(norm(x), plain + 1)
    assert len(calls) == 2


@torch.no_grad()
def test_a_norm_is_looked_at_anew_when_it_has_changed(calls):
    model = tiny()
    norm, weights = model.model.norm, packed_weights(model)
    before = weights._norms[norm]
    weights.refresh()
    assert weights._norms[norm] is before
    norm.variance_epsilon = 0.5
    weights.refresh()
    assert weights._norms[norm].how[0] == 0.5
    norm.forward = lambda x: x
    weights.refresh()
    assert norm not in weights._norms


@pytest.mark.parametrize("held", [[], {}, torch.ones(1), (1, [])], ids=str)
def test_a_norm_that_holds_what_may_change_in_place_is_left_alone(held):
    """It may record what passes, or depend on what it holds: no sign would tell that it changed."""
    model = tiny()
    norm = model.model.norm
    vars(norm)["held"] = held
    weights = packed_weights(model)
    assert norm not in weights._norms
    assert model.model.layers[0].input_layernorm in weights._norms


def test_a_norm_is_looked_at_anew_when_a_method_of_its_class_has_changed(monkeypatch):
    class Divided(type(tiny().model.norm)):
        def forward(self, x):
            return self.how(x)

        def how(self, x):
            return super().forward(x)

    model = tiny()
    model.model.norm.__class__ = Divided
    weights = packed_weights(model)
    assert model.model.norm in weights._norms
    monkeypatch.setattr(Divided, "how", lambda self, x: 2 * x)
    weights.refresh()
    assert model.model.norm not in weights._norms
