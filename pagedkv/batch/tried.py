"""Compares packed rows of a model that nobody has read with the same rows alone.

That is a model in which code of others runs, whatever this code does, or one that no list knows.
"""

from __future__ import annotations

import sys
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from pagedkv.config import field_of
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.cache import PagedCache
from pagedkv.hf.foreign_code import Code, foreign_code, unmarked
from pagedkv.hf.likeness import LENGTHS, LOGITS, NEW, Rows, Truth, compared, recorded
from pagedkv.hf.look import PAGES
from pagedkv.hf.model import named_model, text_config
from pagedkv.models.seen import seen_of
from pagedkv.ranks import ranks_of

from .packed import Inputs, PackedModel

FIRST = 7  # tokens before the cut of the prompt that is cut in two
# Tokens of each row in each step. Some scans of transformers differ by 1e-3 from its single steps,
# so answers are computed token by token here, too, as rows alone are.
CUTS = [
    (FIRST, LENGTHS[0] - FIRST, *[1] * (NEW - 1)),
    *((n, *[1] * (NEW - 1), 0) for n in LENGTHS[1:]),
]
NEAR, FAR = 1, 2  # the rows of the second comparison
# What was found right, by model: its dtype, and the code of others that ran in it.
_right: weakref.WeakKeyDictionary[PreTrainedModel, tuple[torch.dtype, Code]]
_right = weakref.WeakKeyDictionary()
# Threads try a model one after another: each would take back what the other's forwards change.
_trying: weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock]
_trying = weakref.WeakKeyDictionary()


@torch.no_grad()
def require_like_alone(packed: PackedModel) -> None:
    """Raises if packed rows of a model that nobody has read would differ from rows alone.

    A model of transformers' own code costs a look at its modules; another one is tried once.

    Raises:
        UnsupportedModelError: a layer gives something else; the error names it, and the code.
    """
    model = packed.model
    with _trying.setdefault(model, threading.RLock()):
        code = foreign_code(model)
        tried = model.dtype, frozenset(code)
        is_right = _right.get(model) == tried or not (code or seen_of(text_config(model)))
        every = ranks_of(model).gather((is_right, next(iter(code.values()), "")))
        if all(right for right, _ in every):
            return  # on all ranks, which run a forward together
        runs = next((name for _, name in every if name), "")
        with unmarked(model), _uncompiled():
            compared(model, partial(_compare, packed), partial(_refusal, runs))
        _right[model] = tried


def _uncompiled() -> AbstractContextManager[Any]:
    """Runs compiled code of a model as it was written.

    What records layers would be compiled into it, and use up how often it may be compiled.
    """
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def _refusal(runs: str, model: PreTrainedModel, why: str) -> UnsupportedModelError:
    what = f"{runs}, which is not transformers' own" if runs else "no list knows its type"
    return UnsupportedModelError(
        f"{named_model(model)} cannot run packed rows: {what}, and held against rows alone {why}. "
        "`PagedCache` may serve it: its forwards are those of `generate`."
    )


def _compare(packed: PackedModel, truth: Truth) -> None:
    truth.require_like("packed rows", partial(_in_steps, packed, truth), truth.alone)
    near = {LOGITS: truth.alone[LOGITS][NEAR : NEAR + 1]}
    truth.require_like("a row beside one far ahead", partial(_beside, packed, truth), near)


def _in_steps(packed: PackedModel, truth: Truth) -> Rows:
    """Computes all rows in steps; the first prompt is cut in two, the others are not."""
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


def _beside(packed: PackedModel, truth: Truth) -> Rows:
    """Computes the last logits of a row behind another whose positions are as far as they may be.

    The other row's own logits say nothing. What goes by the longest row would change this one's.
    """
    longest = field_of(text_config(truth.model), "max_position_embeddings") or 0
    ahead = max(0, longest - LENGTHS[FAR] - NEW)
    texts, found = [truth.texts[row] for row in (FAR, NEAR)], []
    with PagedCache(truth.model, **PAGES) as pages, recorded(truth.model) as truth.last:
        kv = pages.kv
        tried, seqs = packed.over(kv, exact=True), [kv.add(), kv.add()]
        for new in zip(*(text.split([len(text) - NEW + 1, *[1] * (NEW - 1)]) for text in texts)):
            with kv.step(seqs, [ids.numpy() for ids in new]) as step:
                positions = step.positions.clone()
                positions[: len(new[0])] += ahead
                inputs = Inputs(step.tokens[None], positions[None])
                found.append(tried.logits(step, inputs=inputs)[1].float().cpu())
        kv.free(seqs)
    return {LOGITS: [torch.stack(found)]}
