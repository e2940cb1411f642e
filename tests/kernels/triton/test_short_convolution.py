"""The kernel of the short convolution is it, and touches no slot but those of its rows."""

import math

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels.triton import launch
from pagedkv.kernels.triton.short_convolution import convolution_step
from tests.effort import each_value
from tests.kernels.short_convolutions import DTYPES, SHAPES, check, make
from tests.kernels.steps import DEVICE
from tests.kernels.truth import poisoned_outputs


def step(*args, **options):
    with poisoned_outputs():
        return convolution_step(*args, **options)


@pytest.mark.parametrize(("shape", "dtype"), each_value(SHAPES, DTYPES))
def test_a_step_is_the_convolution_in_float64_but_for_rounding(shape, dtype):
    check(step, *make(*SHAPES[shape], dtype, DEVICE))


def test_sums_may_be_taken_as_they_are_and_another_pool_written():
    inputs = make(5, 24, 4, torch.float32, DEVICE)
    into = torch.full_like(inputs[1], math.nan)
    check(step, *inputs, silu=False, into=into)


def test_filters_of_float32_serve_narrower_models():
    x, states, weight, _, *slots = make(3, 24, 4, torch.bfloat16, DEVICE)
    check(step, x, states, weight.float(), None, *slots)


def test_inputs_may_be_columns_of_a_wider_tensor_or_lie_anyhow():
    x, *others = make(3, 24, 4, torch.bfloat16, DEVICE)
    wide = torch.cat([x[:, :7], x, x], 1)
    for view in (wide[:, 7:31], x.T.contiguous().T):
        check(step, view, *(each.clone() for each in others))


def test_no_rows_are_no_work(monkeypatch):
    x, states, weight, bias, source, target = make(3, 24, 4, torch.float32, DEVICE)
    monkeypatch.setattr(launch.Launcher, "__call__", lambda *_: pytest.fail("launched"))
    assert step(x[:0], states, weight, bias, source[:0], target[:0]).shape == (0, 24)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: x.double(), NotImplementedError, "^x: expected one of .*float64"),
        (lambda x: x, ValueError, "^states: expected slots that are one run"),
    ],
    ids=["float64", "states with gaps"],
)
def test_what_the_kernel_cannot_read_is_refused(change, error, message, monkeypatch):
    x, states, *others = make(3, 24, 4, torch.float32, DEVICE)
    monkeypatch.setattr(launch.Launcher, "__call__", lambda *_: pytest.fail("launched"))
    gaps = torch.stack([states] * 2, -1)[..., 0]
    with pytest.raises(error, match=message):
        step(change(x), change(gaps), *others)
