"""Spreads queries of a row's last new tokens among all of them, if all decide how pages are read.

A row with one new token chooses the pages that it reads; a row with several reads all pages. So one
query of a longer step must not choose: pages that fill in this step have no bounds yet. Triton's
kernel for few new tokens looks for staging pages only at a row's end, and a longer step may have
filled one before coded pages.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from pagedkv.kernels.sending import sent
from pagedkv.step.metadata import StepMetadata

from .call import Call


def among_all(call: Call, whole: StepMetadata) -> tuple[Call, Tensor | None]:
    """Returns the call with zero queries for the other new tokens, and the places of its own.

    Args:
        call: a checked call, perhaps in a narrowed step; it is returned as it is, with None, if the
            number of new tokens does not matter to it.
        whole: the step that the call's step was narrowed from.
    """
    step, config = call.step, call.step.config
    by_rows = call.reads or (config.staged and step.backend == "triton")
    if step.num_tokens == whole.num_tokens or not by_rows:
        return call, None

    def build() -> Tensor:
        ends = whole.num_new.cumsum()[np.isin(whole.seqs, step.seqs)]
        first = np.repeat(ends - step.num_new.cumsum(), step.num_new)
        return sent(first + np.arange(step.num_tokens), step.query_start_loc.device)

    places: Tensor = step.memo(("places",), build)

    def spread(x: Tensor) -> Tensor:
        every = x.new_zeros(whole.num_tokens, *x.shape[1:])
        every[places] = x
        return every

    scoring, bias = call.scoring, call.scoring.distance_bias
    if bias is not None:
        scoring = scoring._replace(distance_bias=spread(bias))
    return call._replace(q=spread(call.q), step=whole, scoring=scoring), places
