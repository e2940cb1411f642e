"""The attention function that transformers' continuous batching calls: `paged|pagedkv`.

`generate_batch` packs the new tokens of many requests into one row and keeps K and V in a cache of
its own. Its sdpa function copies what all requests see, repeats it for every query head and sends
it under one mask of all queries by all keys, most of it products that are thrown away. Here the
same slots are read by the torch backend of `kernels/`, request by request, as pages of one token.
Cache, scheduler and sharing remain transformers'; `cache.py` and `layer.py` have no part in it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pagedkv.errors import UnsupportedModelError
from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.torch import backend as gather
from pagedkv.kernels.torch.buckets import Bucket, cut_step, scratch_elements

from .attention import refuse_strange, refuse_strange_sinks
from .forward import NAME

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

CONTINUOUS = f"paged|{NAME}"

# Arguments of continuous batching that are not about attention, or that follow from the lengths.
_IGNORED = {"logits_indices", "logits_processor_args", "max_seqlen_k", "max_seqlen_q"}


@dataclass
class _Plan:
    """One step as the layers of one group attend it.

    Attributes:
        source: the tensors that the plan was made from, kept alive so that no other tensor gets
            the id of one of them.
        marks: a mark of each of these tensors, by which a later step's is told apart (`_mark`).
        tokens: packed tokens that belong to a request; padding follows them.
        buckets: the requests, as they are attended together.
    """

    source: tuple[Tensor, ...]
    marks: tuple[Any, ...]
    tokens: int
    buckets: list[Bucket]


@dataclass
class _State:
    """State of one cache of transformers.

    Attributes:
        scratch: memory that pages are gathered into.
        plans: the last plan of each group; all groups with a window have the key None.
    """

    scratch: Tensor
    plans: dict[int | None, _Plan] = field(default_factory=dict)


_STATES: weakref.WeakKeyDictionary[PagedAttentionCache, _State] = weakref.WeakKeyDictionary()


# Planning is Python over values, which a compiler would specialise on.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def continuous_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    cache: PagedAttentionCache | None = None,
    read_index: Any = None,
    write_index: Any = None,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Writes the step's K and V into transformers' paged cache and attends, causal per request.

    Args:
        query, key, value: `[1, H, T, D]` and `[1, G, T, D]`, the packed new tokens.
        read_index, write_index: slots of the cache, one tensor per group of layers.
        cu_seq_lens_q, cu_seq_lens_k: `[B + 1]` cumulative lengths, the latter by kind of layer if
            the model has two. Tokens behind the last length are padding.
        s_aux: `[H]`, attention sinks.

    Returns:
        `[1, T, H, D]`, zeros for padding tokens; no weights.
    """
    if cache is None:
        raise UnsupportedModelError(
            f"cache: {CONTINUOUS} serves generate_batch only, which passes one; use {NAME} instead"
        )
    if attention_mask is not None:
        raise UnsupportedModelError(f"attention_mask: {CONTINUOUS} is causal and takes none")
    causal = {"is_causal": getattr(module, "is_causal", None)}
    refuse_strange(dropout, causal | {n: x for n, x in kwargs.items() if n not in _IGNORED})
    refuse_strange_sinks(module, s_aux)
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        # The host plans each step by its lengths; a graph would repeat those it was recorded with.
        raise UnsupportedModelError(
            "use_cuda_graph: pagedkv cannot be recorded, pass "
            "ContinuousBatchingConfig(use_cuda_graph=False)"
        )
    layer: Any = module.layer_idx
    window = None if cache.sliding_windows[layer] == 1 else cache.sliding_windows[layer]
    if sliding_window is not None and sliding_window != window:
        raise UnsupportedModelError(
            f"sliding_window: layer {layer} uses {sliding_window}, "
            f"its cache keeps {window or 'all'}"
        )
    if isinstance(cu_seq_lens_k, dict):
        cu_seq_lens_k = cu_seq_lens_k["sliding_attention" if window else "full_attention"]
    group, index = cache.layer_index_to_group_indices[layer]
    source: tuple[Tensor, ...] = (cu_seq_lens_q, cu_seq_lens_k)
    if window is None:
        # Read from where it lies: without slots to read, `update` writes and copies nothing.
        source = (*source, read_index[group])
        cache.update(key, value, layer, [x[:0] for x in read_index], write_index)
        k_slots, v_slots = cache.key_cache[index], cache.value_cache[index]
    else:
        # A window's slots are a ring: what this step sees is copied before it is overwritten.
        k_slots, v_slots = cache.update(key, value, layer, read_index, write_index)
    state = _STATES.get(cache)
    if state is None:
        state = _STATES[cache] = _State(k_slots.new_empty(2, 0))
    plan = _plan(state, None if window else group, source, window, k_slots)
    q, k, v = (x[0, :, : plan.tokens].transpose(0, 1) for x in (query, key, value))
    pages = k_slots.unsqueeze(2), v_slots.unsqueeze(2)  # of one token: [slots, G, 1, D]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out, _ = gather.paged_attention(
        # Lengths in place of a page table: the buckets know their pages.
        *(q, k, v, *pages, cu_seq_lens_k, plan.buckets, state.scratch),
        Scoring(scale, window, softcap, s_aux),
    )
    padding = query.shape[2] - plan.tokens
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padding))[None], None


def _mark(x: Tensor) -> Any:
    """A mark that differs between steps, even if their tensors share a buffer.

    On the CPU it is the content, which costs little compared to attention. On other devices reading
    the content would make every layer wait, so there it is the object, which is a new view in each
    step, and the version of its buffer, which counts writes: the host waits once a step.
    """
    return x.numpy().tobytes() if x.device.type == "cpu" else (id(x), x._version)


def _plan(
    state: _State, group: int | None, source: tuple[Tensor, ...], window: int | None, k: Tensor
) -> _Plan:
    """The plan of this step for a group, made by the first of its layers.

    Args:
        source: cumulative lengths of queries and keys, and the slots of `k` that are seen, request
            by request; left out where they are all of `k` in order.
    """
    marks = tuple(map(_mark, source))
    plan = state.plans.get(group)
    if plan is not None and plan.marks == marks:
        return plan
    ends_q, ends_k = torch.stack(source[:2]).cpu().numpy().astype(np.int64)
    real = np.flatnonzero(np.diff(ends_q))  # a padded step ends in requests without tokens
    new, seen, begin = np.diff(ends_q)[real], np.diff(ends_k)[real], ends_k[real]
    token_elements = k[0].numel()
    buckets = cut_step(new, seen, 1, window, 2 * token_elements * k.element_size())
    for bucket in buckets:
        if not bucket.fresh:
            place = (begin[bucket.rows] + bucket.first_page)[:, None] + np.arange(bucket.num_pages)
            # In a ragged bucket places run on behind the last request; nobody sees what is there.
            ids = torch.from_numpy(place.clip(max=ends_k[-1] - 1).ravel()).to(k.device)
            bucket.page_ids = ids if len(source) == 2 else source[2][ids]
    needed = scratch_elements(buckets, token_elements, 1)
    if state.scratch.shape[1] < needed:
        state.scratch = k.new_empty(2, needed)
    plan = state.plans[group] = _Plan(source, marks, int(ends_q[-1]), buckets)
    return plan
