"""The torch twin of the gated delta rule is transformers' own, out of slots and into slots."""

import math
from dataclasses import replace

import pytest
import torch

from pagedkv.kernels.torch.delta_rule import delta_rule_step
from tests.kernels.delta_rules import Sizes, check, make

SIZES = {
    "one row": Sizes(1, 2, 2, 16, 16),
    "grouped heads": Sizes(5, 2, 6, 16, 24),
    "odd sizes": Sizes(9, 1, 3, 7, 5),
    "a gate for each key": Sizes(4, 2, 4, 12, 20, channels=True),
    "as Qwen3-Next has them": Sizes(2, 2, 4, 128, 128),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_step_is_the_rule_in_float64_but_for_rounding(size, dtype):
    check(delta_rule_step, make(SIZES[size], dtype))


def test_keys_may_be_taken_as_they_are():
    check(delta_rule_step, make(SIZES["grouped heads"], torch.float32), normalize=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
@pytest.mark.parametrize("normalize", [True, False])
def test_a_step_gives_the_bits_of_transformers_own_rule(normalize, dtype):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    token = make(SIZES["grouped heads"], dtype)
    begins = (token.source < 0)[:, None, None, None]
    before = token.states[token.source.clamp(min=0)].masked_fill(begins, 0)
    q, k = (x.repeat_interleave(3, 1) for x in (token.q, token.k))
    wanted, after = modeling.torch_recurrent_gated_delta_rule(
        *(x.unsqueeze(1) for x in (q, k, token.v)),
        g=token.gate.unsqueeze(1),
        beta=token.beta.unsqueeze(1),
        initial_state=before,
        output_final_state=True,
        use_qk_l2norm_in_kernel=normalize,
    )
    out = delta_rule_step(*token.arguments(), normalize=normalize)
    kept = token.target >= 0
    assert torch.equal(out, wanted[:, 0])
    assert torch.equal(token.states[token.target[kept]], after[kept])


def test_a_row_alone_has_the_bits_it_has_among_others():
    token = make(Sizes(6, 2, 4, 16, 40), torch.bfloat16)
    before = token.states.clone()
    out = delta_rule_step(*token.arguments())
    for row in range(6):
        alone = replace(token.row(row), states=before.clone())
        assert torch.equal(delta_rule_step(*alone.arguments()), out[row : row + 1])
        if (slot := int(alone.target)) >= 0:
            assert torch.equal(alone.states[slot], token.states[slot])


def test_another_pool_may_be_written():
    token = make(SIZES["grouped heads"], torch.float32)
    check(delta_rule_step, token, into=torch.full_like(token.states, math.nan))


def test_rows_without_a_state_need_no_slot_to_read():
    token = make(Sizes(2, 1, 1, 8, 8), torch.float32)
    nothing = torch.full_like(token.source, -1)
    begun = replace(token, source=nothing, target=nothing, states=token.states[:0])
    assert delta_rule_step(*begun.arguments()).isfinite().all()


def test_no_rows_are_no_work():
    token = make(Sizes(3, 2, 4, 8, 8), torch.float32)
    none = replace(token, **{n: getattr(token, n)[:0] for n in vars(token) if n != "states"})
    assert delta_rule_step(*none.arguments()).shape == (0, 4, 8)


REFUSED = {
    "q of other heads": ({"q": lambda t: t.q[:, :1]}, ValueError, r"^q: expected \[5, 2, 16\]"),
    "k without heads": ({"k": lambda t: t.k[:, 0]}, ValueError, r"^k: expected \[B, Hk, Dk\]"),
    "heads that do not divide": (
        {"v": lambda t: t.v[:, :5]}, ValueError, "^v: expected a multiple of 2 heads, got 5"),
    "a gate for each value": (
        {"gate": lambda t: t.gate[..., None].expand(-1, -1, 24)}, ValueError,
        r"^gate: expected \[5, 6, 16\], got \[5, 6, 24\]"),
    "beta of fewer rows": ({"beta": lambda t: t.beta[1:]}, ValueError, r"^beta: expected \[5, 6\]"),
    "states transposed": (
        {"states": lambda t: t.states.mT}, ValueError, r"^states: expected \[14, 6, 16, 24\]"),
    "states of half": ({"states": lambda t: t.states.half()}, TypeError, "^states: .*float32"),
    "slots of int32": ({"source": lambda t: t.source.int()}, TypeError, "^source: .*int64"),
    "too few targets": ({"target": lambda t: t.target[:4]}, ValueError, r"^target: expected \[5\]"),
    "another device": (
        {"beta": lambda t: t.beta.to("meta")}, ValueError, "^beta: expected the device of v, cpu"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(case):
    change, error, message = REFUSED[case]
    token = make(SIZES["grouped heads"], torch.float32)
    before = token.states.clone()
    wrong = replace(token, **{name: make_it(token) for name, make_it in change.items()})
    with pytest.raises(error, match=message):
        delta_rule_step(*wrong.arguments())
    assert torch.equal(token.states.view(torch.int32), before.view(torch.int32))
