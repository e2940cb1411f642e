"""Compares packed rows of a model that no list knows with the same rows alone."""

from __future__ import annotations

from functools import partial

import torch

from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.cache import PagedCache
from pagedkv.hf.likeness import LENGTHS, NEW, Rows, Truth, compared, recorded
from pagedkv.hf.look import PAGES
from pagedkv.hf.model import named_model, text_config
from pagedkv.models.seen import seen_of

from .packed import PackedModel

FIRST = 7  # tokens before the cut of the prompt that is cut in two
# Tokens of each row in each step. Some scans of transformers differ by 1e-3 from its single steps,
# so answers are computed token by token here, too, as rows alone are.
CUTS = [
    (FIRST, LENGTHS[0] - FIRST, *[1] * (NEW - 1)),
    *((n, *[1] * (NEW - 1), 0) for n in LENGTHS[1:]),
]


@torch.no_grad()
def require_like_alone(packed: PackedModel, unknown: str | None) -> None:
    """Raises if packed rows of a model that no list knows would differ from rows alone.

    Args:
        unknown: "check" tries the model now; None refuses one that was not tried.

    Raises:
        UnsupportedModelError: a layer gives something else, or the model was not tried.
    """
    model = packed.model
    seen = seen_of(text_config(model))
    if seen is None or seen.is_packed:
        return
    if unknown is None:
        raise UnsupportedModelError(
            f"{named_model(model)} cannot run packed rows: no list knows its type, and it was "
            'tried with `PagedCache` alone; `unknown="check"` tries packed rows'
        )
    compared(model, partial(_compare, packed))
    seen.is_packed = True


def _compare(packed: PackedModel, truth: Truth) -> None:
    """Compares packed rows with rows alone; the first prompt is cut in two, the others are not."""

    def give() -> Rows:
        with PagedCache(truth.model, **PAGES) as pages, recorded(truth.model) as truth.last:
            kv = pages.kv
            tried, seqs = packed.over(kv, exact=True), [kv.add() for _ in truth.texts]
            for new in zip(*(text.split(cut) for text, cut in zip(truth.texts, CUTS))):
                rows = {seq: ids.numpy() for seq, ids in zip(seqs, new) if len(ids)}
                with kv.step([*rows], [*rows.values()]) as step:
                    tried.logits(step, torch.arange(step.num_tokens, device=kv.device))
            kv.free(seqs)
        parts = [
            {name: x[0].split([*cut]) for name, x in forward.items()}
            for forward, cut in zip(truth.last, zip(*CUTS))
        ]
        names, every = parts[0], range(len(CUTS))
        return {n: [torch.cat([part[n][i] for part in parts]) for i in every] for n in names}

    truth.require_like("packed rows", give, truth.alone)
