"""The choice of pages by their bounds on a device, held to the torch functions."""

from __future__ import annotations

import torch

from pagedkv.kernels import choose, sparse

from .steps import Rows, Shape, make_step


def score(shape: Shape, device: str, rows: Rows) -> None:
    """Scores of pages for rows of one new token are those that torch computes."""
    step = make_step(shape, rows, device)
    bounds = torch.rand(len(step.k_pages), shape.groups, shape.dim, 2, device=device).half()
    bounds[..., 1] -= 0.5  # minima, of both signs
    rest = step.table, step.kv_lens, shape.page
    found = choose.score_columns(step.q, bounds, *rest)
    if device == "meta":
        return
    wanted = sparse.score_columns(step.q, bounds, *rest)
    always = wanted.isinf()  # read in any case, or behind a row's end
    assert torch.equal(found.where(always, 0), wanted.where(always, 0)), "other pages are infinite"
    # A sum of so many products; of 16-bit queries, both factors are rounded to bfloat16.
    slack = shape.dim * 2.0**-23 + (2.0**-7 if shape.dtype != torch.float32 else 0)
    size = sparse.score_columns(step.q.abs(), bounds.abs(), *rest)
    worst = ((found - wanted).abs() / size).masked_fill(always, 0).max().item()
    assert worst <= slack, f"scores are off by {worst:.3g} of their terms, more than {slack:.3g}"
