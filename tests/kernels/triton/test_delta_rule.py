"""The kernel of the gated delta rule is the rule, and touches no slot but those of its rows."""

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels.triton import launch
from pagedkv.kernels.triton.delta_rule import delta_rule_step
from tests.effort import each_value
from tests.kernels.delta_rules import Sizes, check, make
from tests.kernels.steps import DEVICE
from tests.kernels.truth import poisoned_outputs

SIZES = {
    "64 x 64": Sizes(1, 2, 2, 64, 64),
    "128 x 128": Sizes(3, 1, 2, 128, 128),
    "256 x 256": Sizes(1, 1, 1, 256, 256),
    "keys that are no power of two": Sizes(2, 1, 1, 96, 192),
    "odd sizes": Sizes(9, 2, 6, 7, 5),
    "a gate for each key": Sizes(4, 2, 4, 24, 40, channels=True),
    "many rows": Sizes(40, 1, 1, 8, 33),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def step(*args, **options):
    with poisoned_outputs():
        return delta_rule_step(*args, **options)


@pytest.mark.parametrize(("size", "dtype"), each_value(SIZES, DTYPES))
def test_a_step_is_the_rule_in_float64_but_for_rounding(size, dtype):
    check(step, make(SIZES[size], dtype, DEVICE))


def test_keys_may_be_taken_as_they_are():
    check(step, make(SIZES["odd sizes"], torch.float32, DEVICE), normalize=False)


@pytest.mark.parametrize("size", ["128 x 128", "a gate for each key"])
def test_a_row_alone_has_the_bits_it_has_among_others(size):
    token = make(SIZES[size], torch.bfloat16, DEVICE)
    before = token.states.clone()
    out = step(*token.arguments())
    for row in range(SIZES[size].rows):
        alone = replace(token.row(row), states=before.clone())
        assert torch.equal(step(*alone.arguments()), out[row : row + 1])
        if (slot := int(alone.target)) >= 0:
            assert torch.equal(alone.states[slot], token.states[slot])


def test_another_pool_may_be_written_and_its_slots_may_lie_apart():
    token = make(SIZES["a gate for each key"], torch.float32, DEVICE)
    wide = torch.full((len(token.states), 5000), math.nan, device=DEVICE)
    size = token.states[0].numel()
    into = wide[:, :size].unflatten(1, token.states.shape[1:])
    check(step, token, into=into)
    assert wide[:, size:].isnan().all()


def test_slots_beyond_2_to_the_31_elements_are_reached():
    token = make(Sizes(1, 1, 1, 64, 64), torch.float32, DEVICE)
    count = 2**31 // 64**2 + 9
    states = torch.empty(count, 1, 64, 64, device=DEVICE)  # touched in two slots
    states[count - 2] = token.states[token.source[0]]
    far = replace(token, states=states, source=token.source * 0 + count - 2)
    far = replace(far, target=far.source + 1)
    near = step(*token.arguments())
    assert torch.equal(step(*far.arguments()), near)
    assert torch.equal(states[count - 1], token.states[token.target[0]])


@pytest.mark.parametrize("name", ["q", "v", "gate", "beta", "source", "target"])
def test_inputs_may_lie_anyhow(name):
    token = make(SIZES["a gate for each key"], torch.float32, DEVICE)
    spread = torch.stack([getattr(token, name)] * 2, -1)[..., 1]
    assert not spread.is_contiguous()
    check(step, replace(token, **{name: spread}))


def test_inputs_whose_negation_is_not_done_yet_are_not_read_as_they_lie():
    token = make(SIZES["a gate for each key"], torch.float32, DEVICE)
    pairs = torch.view_as_complex(torch.stack([torch.zeros_like(token.k), token.k], -1))
    negated = pairs.conj().imag
    assert negated.is_neg()
    check(step, replace(token, k=negated))


def test_no_rows_are_no_work(monkeypatch):
    token = make(Sizes(3, 2, 4, 8, 8), torch.float32, DEVICE)
    none = replace(token, **{n: getattr(token, n)[:0] for n in vars(token) if n != "states"})
    monkeypatch.setattr(launch.Launcher, "__call__", lambda *_: pytest.fail("launched"))
    assert step(*none.arguments()).shape == (0, 4, 8)


REFUSED = {
    "keys too long": (
        lambda t: make(Sizes(1, 1, 1, 257, 8), torch.float32, DEVICE),
        NotImplementedError, "^k: expected at most 256"),
    "float64": (lambda t: replace(t, q=t.q.double()), NotImplementedError, "^q: .*float64"),
    "slots with gaps": (
        lambda t: replace(t, states=torch.stack([t.states] * 2, 2)[:, :, 0]), ValueError,
        "^states: expected slots that are one run"),
    "misaligned": (
        lambda t: replace(t, states=torch.cat([t.states[0, 0, 0, :1], t.states.flatten()])[1:]
                          .view(t.states.shape)), ValueError, "^states: .*multiple of 16 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernel_cannot_read_is_refused(case, monkeypatch):
    change, error, message = REFUSED[case]
    wrong = change(make(SIZES["a gate for each key"], torch.float32, DEVICE))
    monkeypatch.setattr(launch.Launcher, "__call__", lambda *_: pytest.fail("launched"))
    with pytest.raises(error, match=message):
        step(*wrong.arguments())
