"""Calls of the C kernels: attention, with the steps of the Triton kernels, products and norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pagedkv.kernels.c import backend, eight_bits, select_pages
from pagedkv.kernels.c.packed_product import pack, product
from pagedkv.kernels.c.rms_norm import rms_norm
from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.torch import select_pages as twin
from pagedkv.kernels.torch.rms_norm import bounds
from tests.kernels.shapes import page_choice
from tests.kernels.steps import Step


def attend(step: Step, **more: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    scoring = Scoring(**step.options)
    new, lens = np.array(step.rows, np.int64).reshape(-1, 2).T
    pages, more = (step.k_pages, step.v_pages, step.table), more | {"causal": step.causal}
    return backend.paged_attention(step.q, *pages, new, lens, scoring, return_lse=True, **more)


def differs(step: Step) -> str:
    """How a row's bits in the step differ from those of the row alone, or cut otherwise.

    Empty if they do not.
    """
    whole = attend(step)
    for row, mine in enumerate(step.tokens):
        new, length = step.rows[row]
        alone = step.row(row)
        for begin, end in {(0, new), (0, min(1, new)), (new // 2, new), (max(0, new - 1), new)}:
            if length - new + end <= 0:  # of tokens that see nothing, and have no place
                continue
            rows = [(end - begin, length - new + end)]
            some = slice(begin, end)
            part = replace(alone, rows=rows, q=alone.q[some], options=alone.options_of(some))
            found = attend(part)
            if not all(torch.equal(x, y[mine][begin:end]) for x, y in zip(found, whole)):
                return f"row {row} of {step.rows}, tokens {begin} to {end}"
    return ""


def capped_high(step: Step) -> bool:
    """Whether a cap far above all scores changes next to nothing."""
    capped = replace(step, options=step.options | {"softcap": 1e6})
    return all(torch.allclose(x, y, atol=1e-4) for x, y in zip(attend(capped), attend(step)))


KINDS = torch.bfloat16, torch.float16, torch.float32  # of weights
SHAPES = (1, 1), (33, 70), (64, 5), (97, 33)  # outputs and inputs, of whole panels and of parts


def check_products(kept: torch.dtype) -> None:
    """Products with matrices that are kept in a dtype, of rows alone and among others."""
    draw = torch.Generator().manual_seed(0)
    for outputs, inputs in SHAPES:
        weight, bias = torch.randn(outputs, inputs, generator=draw), torch.randn(outputs)
        if kept == torch.float16:
            weight[0, 0] = 1 + 2**-10  # which bfloat16 does not hold
        weight = weight.to(kept).float()
        packed, x = pack(weight), torch.randn(40, inputs, generator=draw)
        assert packed.panels.dtype == kept
        assert packed.nbytes <= kept.itemsize * (inputs + 1) * (outputs + 31)
        for added in (None, bias):
            out = product(x, packed, added)
            exact = functional.linear(
                x.double(), weight.double(), None if added is None else added.double()
            )
            size = functional.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
            assert ((out.double() - exact).abs() <= (inputs + 2) * 2.0**-24 * size).all()
            for rows in range(1, 27):
                assert torch.equal(product(x[3:][:rows], packed, added), out[3:][:rows])
        strided = x.T.contiguous().T.view(2, 20, inputs)
        assert torch.equal(product(strided, packed, bias).flatten(0, 1), out)


def check_pairs() -> None:
    """Products of rows and matrices of bfloat16, of rows alone and among others."""
    draw = torch.Generator().manual_seed(0)
    for outputs, inputs in SHAPES:
        weight, x = torch.randn(outputs, inputs, generator=draw), torch.randn(40, inputs)
        bias, weight, x = torch.randn(outputs).bfloat16(), weight.bfloat16(), x.bfloat16()
        packed = pack(weight)
        assert torch.equal(packed.panels, pack(weight.float()).panels)
        for added in (None, bias):
            out = product(x, packed, added)
            exact = functional.linear(
                x.double(), weight.double(), None if added is None else added.double()
            )
            size = functional.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
            # The instruction rounds twice a pair; the sum is rounded once.
            bound = (inputs + 2) * 2.0**-23 * size + 2.0**-8 * exact.abs()
            assert out.dtype == torch.bfloat16
            assert ((out.double() - exact).abs() <= bound).all()
            for rows in range(1, 27):
                assert torch.equal(product(x[3:][:rows], packed, added), out[3:][:rows])
        beside = x.index_fill(0, torch.tensor([20]), torch.nan)
        assert torch.equal(product(beside, packed, bias)[:20], out[:20])


GROUPS = (1, 32), (33, 96), (64, 32), (97, 160)  # outputs and inputs, of whole groups


def rounded_weight(weight: Tensor) -> Tensor:
    """What 8 bits make of a matrix, in float64."""
    groups = weight.unflatten(1, (-1, 32))
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    whole = (groups / scales.clamp_min(2.0**-80)).round().clamp(-127, 127)
    return (whole.double() * scales.double()).flatten(1)


def rounded_rows(x: Tensor) -> Tensor:
    """What 8 bits make of rows, in float64; `round` goes to the even one of two."""
    groups = x.unflatten(1, (-1, 32))
    top = groups.abs().amax(-1, keepdim=True)
    whole = (groups * torch.where(top < 2.0**-80, 0.0, 127 / top)).round()
    return (whole.double() * (top / 127).double()).flatten(1)


def check_eight_bits() -> None:
    """Products with 8 bits a weight, of rows alone and among others."""
    draw = torch.Generator().manual_seed(0)
    for outputs, inputs in GROUPS:
        weight, bias = torch.randn(outputs, inputs, generator=draw), torch.randn(outputs)
        weight *= torch.logspace(1, -4, inputs // 32).repeat_interleave(32)
        weight[1:2] = 0.0
        x = torch.randn(40, inputs, generator=draw) * torch.logspace(-30, 4, 40)[:, None]
        x[7, :32] = 0.0
        x[8] = torch.arange(-1, 1, 2 / inputs) * 127  # halves among them
        x[8, ::32] = 127
        assert eight_bits.holds(weight)
        packed = eight_bits.pack(weight)
        assert packed.nbytes <= 34 * inputs // 32 * (outputs + 15)
        exact_weight, rows = rounded_weight(weight), rounded_rows(x)
        for added in (None, bias):
            out = eight_bits.product(x, packed, added)
            exact = rows @ exact_weight.T + (0 if added is None else added.double())
            terms = [
                a @ b.T for a, b in zip(rows.split(32, 1), exact_weight.split(32, 1), strict=True)
            ]
            size = sum(term.abs() for term in terms) + (0 if added is None else added.abs())
            assert ((out.double() - exact).abs() <= (len(terms) + 4) * 2.0**-24 * size).all()
            for count in range(1, 19):
                assert torch.equal(
                    eight_bits.product(x[3:][:count], packed, added), out[3:][:count]
                )
        strided = x.T.contiguous().T.view(2, 20, inputs)
        assert torch.equal(eight_bits.product(strided, packed, bias).flatten(0, 1), out)


def check_numbers(dtype: torch.dtype, flushed: bool = False) -> None:
    """Every finite number of 16 bits is kept, and multiplied as it is."""
    weight = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float()
    weight = torch.where(weight.isfinite(), weight, 0).view(512, 128)
    torch.set_flush_denormal(flushed)
    try:
        packed = pack(weight)
        found = product(torch.eye(128), packed, None).T
    finally:
        torch.set_flush_denormal(False)
    assert packed.panels.dtype == dtype
    if flushed:  # those of bfloat16 are subnormal as floats, too, which no product has then
        weight = torch.where(weight.abs() < torch.finfo(torch.float32).tiny, 0, weight)
    assert torch.equal(found, weight)


def check_norms(dtype: torch.dtype) -> None:
    """Norms are within what float32 may give, and a row has the bits that it has alone."""
    draw = torch.Generator().manual_seed(0)
    for width in (1, 31, 64, 577):
        x = torch.randn(21, width, generator=draw) * torch.logspace(-5, 4, 21)[:, None]
        x[3, width // 2 :] = 0.0
        x, weight = x.to(dtype), torch.randn(width, generator=draw).to(dtype)
        for how in (
            (eps, added, rounds)
            for eps in (1e-6, 1e-2)
            for added in (0.0, 1.0)
            for rounds in (True, False)
        ):
            out, (least, most) = rms_norm(x, weight, *how), bounds(x, weight, *how)
            assert ((least <= out) & (out <= most)).all()
            for row in (0, 4, 20):
                assert torch.equal(rms_norm(x[row:][:2], weight, *how), out[row:][:2])


def check_choice(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    """Scores and choices are those of the twin, and of rows alone."""
    q, bounds, ids, lens, size = page_choice(heads, kv_heads, dim, dtype, columns=150)
    lens = lens.long()
    mine = select_pages.score_columns(q, bounds, ids, lens, size)
    theirs = twin.score_columns(q, bounds, ids, lens, size)
    largest = twin.score_columns(q.abs(), bounds.abs(), ids, lens, size)
    near = (mine - theirs).abs() <= (2 * dim + 3) * 2.0**-23 * largest  # roundings of either
    assert (near | (mine == theirs)).all()
    for rows, count in ((slice(3, 5), 4), (slice(4, 5), 40), (slice(3, 5), 21)):
        chosen = select_pages.choose_columns(mine[rows], count)
        assert torch.equal(chosen, twin.choose_columns(theirs[rows], count).int())
    for row in range(5):
        one = slice(row, row + 1)
        alone = select_pages.score_columns(q[one], bounds, ids[one], lens[one], size)
        assert torch.equal(alone, mine[one])
