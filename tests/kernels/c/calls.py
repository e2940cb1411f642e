"""Calls of the C kernel with the steps that the Triton kernels are tried with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedkv.kernels.c import backend
from pagedkv.kernels.scoring import Scoring
from tests.kernels.steps import Step


def attend(step: Step, **more: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    terms = step.options
    scoring = Scoring(terms["scale"], terms["window"], terms["softcap"], terms["sinks"])
    new, lens = np.array(step.rows, np.int64).reshape(-1, 2).T
    pages = step.k_pages, step.v_pages, step.table
    return backend.paged_attention(step.q, *pages, new, lens, scoring, return_lse=True, **more)


def differs(step: Step) -> str:
    """How a row's bits in the step differ from those of the row alone; empty if they do not."""
    whole = attend(step)
    for row, mine in enumerate(step.tokens):
        alone = attend(step.row(row))
        if not all(torch.equal(x, y[mine]) for x, y in zip(alone, whole)):
            return f"row {row} of {step.rows}"
    return ""


def capped_high(step: Step) -> bool:
    """Whether a cap far above all scores changes next to nothing."""
    capped = replace(step, options=step.options | {"softcap": 1e6})
    return all(torch.allclose(x, y, atol=1e-4) for x, y in zip(attend(capped), attend(step)))
