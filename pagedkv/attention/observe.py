"""Adds the attention that each page got in a step to the statistics that policies rank by."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagedkv.kernels.sending import sent
from pagedkv.step.metadata import StepMetadata


def observe(step: StepMetadata, layer: int, mass: Tensor) -> None:
    """Adds the attention of one layer.

    Args:
        mass: `[B, columns]` float32, the attention weight that each page got from its row's last
            `step.queries` queries: the sum over queries, the mean over heads.
    """
    group, statistics = step.group_of(layer), step.observer
    mass = mass.to(step.positions.device)  # from the layer's device to home
    new, queries = step.num_new, step.queries
    assert queries is not None

    def place() -> tuple[Tensor, Tensor, Tensor]:
        columns = -(-step.kv_lens_of(group) // step.config.page_size)
        weight, decay = statistics.weights(new, queries, len(step.config.groups[group].layers))
        rows = np.stack([columns, weight, decay, np.maximum(queries, 1) / columns])
        on_device = sent(rows.astype(np.float32), mass.device)
        count, weights, decays, shares = on_device.unsqueeze(-1)  # [B, 1] each
        table = step.page_table(group)
        held = torch.arange(table.shape[1], device=mass.device) < count
        pages = statistics.places(group, table, held)
        statistics.fade(pages, decays.expand_as(table).flatten())
        return pages, weights, shares

    pages, weight, share = step.memo(("pages seen", group), place)
    statistics.add(pages, (mass * weight).flatten(), (mass > share).flatten())
