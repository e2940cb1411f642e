"""Jobs that Hypothesis draws for `BatchGenerator`: few letters, so that rows share and repeat."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor


@st.composite
def any_job(draw: Any, widths: list[int]) -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:
    """Rows, sizes of pages and steps, and options of `generate`.

    Args:
        widths: of `verify_width`.
    """
    letters = st.lists(st.integers(2, 4), min_size=1, max_size=20)
    rows = [torch.tensor(row) for row in draw(st.lists(letters, min_size=1, max_size=5))]
    new = draw(st.lists(st.integers(1, 16), min_size=len(rows), max_size=len(rows)))
    sizes = {
        "max_tokens": max(map(len, rows)) + 16 + draw(st.integers(0, 24)),
        "page_size": draw(st.sampled_from([1, 4, 16])),
        "step_tokens": draw(st.sampled_from([1, 5, 64])),
        "max_sequences": draw(st.integers(1, 8)),
        "verify_width": draw(st.sampled_from(widths)),
    }
    options: dict[str, Any] = {"max_new_tokens": new}
    options["eos_token_id"] = draw(st.none() | st.just(list(range(2, 20))))
    if draw(st.booleans()):  # few tokens to draw from, so that drafts are right at times
        options |= {"do_sample": True, "seed": 5, "temperature": 0.5, "top_k": 3}
        options["num_return_sequences"] = draw(st.integers(1, 3))
    if draw(st.booleans()):
        options["repetition_penalty"] = 1.3
    return rows, sizes, options
