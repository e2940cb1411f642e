"""The torch twin of the short convolution is transformers' own, out of slots and into slots."""

import math

import pytest
import torch

from pagedkv.kernels.torch.short_convolution import convolution_step
from tests.kernels.short_convolutions import DTYPES, SHAPES, check, make


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_is_the_convolution_in_float64_but_for_rounding(shape, dtype):
    check(convolution_step, *make(*SHAPES[shape], dtype))


def test_sums_may_be_taken_as_they_are_and_another_pool_written():
    inputs = make(5, 24, 4, torch.float32)
    into = torch.full_like(inputs[1], math.nan)
    check(convolution_step, *inputs, silu=False, into=into)


@pytest.mark.slow
def test_a_step_is_transformers_own_convolution():
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x, states, weight, bias, source, target = make(5, 24, 4, torch.float32)
    before = states[source.clamp(min=0)].masked_fill((source < 0)[:, None, None], 0)
    wanted = modeling.causal_conv1d_update(x.unsqueeze(-1), before, weight, bias, "silu")
    out = convolution_step(x, states, weight, bias, source, target)
    torch.testing.assert_close(out, wanted.squeeze(-1), rtol=1e-6, atol=1e-6)
    kept = target >= 0
    assert torch.equal(states[target[kept]], before[kept])  # it was written in place


REFUSED = {
    "x of three axes": ({0: lambda x: x[:, None]}, ValueError, r"^x: expected \[B, C\]"),
    "a filter of one axis": ({2: lambda w: w[:, 0]}, ValueError, r"^weight: expected \[C, F\]"),
    "another filter": (
        {2: lambda w: w[:, 1:]}, ValueError, r"^states: expected \[14, 24, 3\], got \[14, 24, 4\]"),
    "another dtype": ({1: torch.Tensor.half}, TypeError, "^states: expected torch.float32"),
    "a short bias": ({3: lambda b: b[1:]}, ValueError, r"^bias: expected \[24\], got \[23\]"),
    "slots of int32": ({4: torch.Tensor.int}, TypeError, "^source: .*int64"),
    "another device": ({5: lambda t: t.to("meta")}, ValueError, "^target: .*the device of x"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(case):
    change, error, message = REFUSED[case]
    inputs = make(5, 24, 4, torch.float32)
    before = inputs[1].clone()
    wrong = [change.get(i, lambda x: x)(each) for i, each in enumerate(inputs)]
    with pytest.raises(error, match=message):
        convolution_step(*wrong)
    assert torch.equal(inputs[1].view(torch.int32), before.view(torch.int32))
