"""Queries for the last new tokens of each row alone, where how pages are read goes by all of them.

A row of one new token chooses the pages it reads, and no row of several. Triton's kernel for rows
of few new tokens looks for staging pages where these are. A page that fills in this step has no
bounds yet by which it could be chosen, and may be a staging page in front of coded ones.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from pagedkv.kernels.sending import sent
from pagedkv.step.metadata import StepMetadata

from .call import Call


def among_all(call: Call, whole: StepMetadata) -> tuple[Call, Tensor | None]:
    """The call with queries for all new tokens, zeros but for its own, and the places of these.

    Args:
        call: checked, perhaps in a narrowed step; where nothing goes by its rows it stays as it is.
        whole: the step that this was made of.
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
