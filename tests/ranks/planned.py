"""Run as ranks: what transformers leaves on each of them of a model, beside what a plan says."""

import tempfile

import torch

from pagedkv import plan_memory
from pagedkv.hf.model import cache_config
from pagedkv.hf.release import shared_out
from tests.hf.zoo import VOCAB, built

BUDGET = 1 << 40


def held(kinds: list[str], **own) -> dict[str, tuple[int, int, bool]]:
    """Bytes on this rank and as planned, and whether pages are alike, of small models by type."""
    return {kind: held_of(kind, **own) for kind in kinds}


def held_of(kind: str, **own) -> tuple[int, int, bool]:
    from torch.distributed.tensor import DTensor

    ranks = torch.distributed.get_world_size()
    model = built(kind, **{"vocab_size": VOCAB // 2 * ranks, **own})
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    model.save_pretrained(folder[0])  # only the first rank writes
    torch.distributed.barrier()
    plan = plan_memory(folder[0], device_memory=BUDGET, ranks=ranks, length=64)
    model = type(model).from_pretrained(folder[0], distributed_config=shared_out(ranks))
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    alike = cache_config(model, plan.max_tokens).shapes == plan.cache.shapes
    return sum(part.nbytes for part in parts), plan.shape.weights, alike
