"""A layer's call in the backend chosen for the cache: write K and V, attend, look at the weights.

What callers can get wrong was checked (`attention.py`); what a backend cannot serve, it refuses
before it writes. After the choice nothing falls back.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pagedkv.kernels.prefixes import find_prefixes
from pagedkv.kernels.torch import backend as gather
from pagedkv.kernels.torch.buckets import Bucket, cut_step, scratch_elements
from pagedkv.kernels.torch.page_mass import page_mass
from pagedkv.step.metadata import StepMetadata
from pagedkv.storage import Storage


def write(k: Tensor, v: Tensor, step: StepMetadata, layer: int) -> None:
    """Writes the step's K and V of one layer into its pages."""
    group = step.group_of(layer)
    storage: Storage = step.storage
    pages = storage.layer(layer)
    storage.calibrate(layer, k, v)
    if direct := step.direct(group):
        storage.kernels.write_pages(k, v, *pages, *direct)
    if storage.backend == "triton":  # which leaves out slots of -1 itself
        storage.kernels.write_kv(k, v, *pages, step.slots(group))
    else:
        slots, tokens = step.written(group)
        if tokens is not None:
            k, v = k[tokens], v[tokens]
        gather.write_kv(k, v, *pages, slots)
    step.wrote.append(layer)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: StepMetadata,
    layer: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Writes and attends; the second tensor means nothing unless asked for."""
    if step.storage.backend == "triton":
        result = _attend_by_triton(q, k, v, step, layer, scale, softcap, sinks)
    else:
        write(k, v, step, layer)
        result = _attend_by_torch(q, k, v, step, layer, scale, softcap, sinks, return_lse)
    if step.queries is not None:
        _observe(q, result[1], step, layer, scale, softcap, sinks)
    return result


def _attend_by_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: StepMetadata,
    layer: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    group = step.group_of(layer)
    storage: Storage = step.storage
    kernels, window = storage.kernels, step.config.groups[group].window
    k_pages, v_pages = storage.layer(layer)
    lens, starts = step.kv_lens(group), step.query_start_loc
    read, size = step.config.pages_read, step.config.page_size
    choosing = window is None and 0 < read < step.page_table(group).shape[1]
    looking = _looking(step, group, q.shape[1])

    def plan() -> Any:
        shared = step.shared.get(group)
        if not step.bounded and looking is None and (work := shared_work(step, group, q.shape[1])):
            shared = kernels.shared_prefix.plan(work, q.device)
        slots = kernels.lens_read(lens, starts, size, read) if choosing else lens
        return kernels.plan(
            *(slots, starts, q, k_pages, v_pages),
            num_new=step.num_new.tolist(),
            max_kv=int(step.kv_lens_of(group).max()),
            window=window,
            shared=shared,
        )

    made = step.memo(("plan", group, q.shape[1]), plan)
    tensors = q, k_pages, v_pages, step.page_table(group), lens, starts
    kernels.check_call(*tensors, made.geometry, softcap, sinks)
    write(k, v, step, layer)
    chosen = None
    if choosing:
        decoding = bool((step.num_new == 1).all())
        bounds, lasting = storage.bounds.of(layer), (size, read, decoding)
        chosen = kernels.chosen_table(q, bounds, step.page_table(group), lens, starts, *lasting)
    scoring = kernels.Scoring(scale, window, softcap, sinks)
    return kernels.attend(*tensors, made, scoring, chosen, looking)


def shared_work(step: StepMetadata, group: int, num_heads: int) -> Any:
    """What rows of a layer group begin with in common, as work for Triton kernels on the host.

    None where that is nothing, or too little to pay.
    """
    storage: Storage = step.storage
    members, kernels = step.config.groups[group], storage.kernels
    if members.window is not None or len(step.num_new) < 2 or step.config.pages_read:
        return None
    k_pages, _ = storage.layer(members.layers[0])
    page_size = step.config.page_size
    token_bytes = step.config.bytes_per_page(group) // (page_size * len(members.layers))
    pages = step.page_table_host(group)
    new, kv_lens = step.num_new, step.kv_lens_of(group)
    prefixes = kernels.find_prefixes(new, kv_lens, pages, page_size, token_bytes)
    if not prefixes:
        return None
    return kernels.cut_prefixes(prefixes, new.tolist(), num_heads, k_pages, storage.dtype)


def _attend_by_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: StepMetadata,
    layer: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    group = step.group_of(layer)
    storage: Storage = step.storage
    config = step.config
    window = config.groups[group].window
    elements = config.num_kv_heads * config.head_dim
    # Parts are merged by sums that only the plain call on a CPU gives.
    plain = softcap is None and sinks is None and not return_lse
    read = 0 if window is not None else config.pages_read
    cut = q.device.type == "cpu" and window is None and plain and not read
    exact = config.formats == ("dense", "dense")

    def plan() -> tuple[list[Bucket], int]:
        shape = step.num_new, step.kv_lens_of(group)
        token_bytes = 2 * elements * storage.dtype.itemsize
        prefixes = []
        if cut:
            pages = step.page_table_host(group)
            prefixes = find_prefixes(*shape, pages, config.page_size, token_bytes)
        buckets = cut_step(*shape, config.page_size, window, token_bytes, prefixes, exact, read)
        return buckets, scratch_elements(buckets, elements, config.page_size)

    buckets, needed = step.memo(("buckets", group, cut), plan)
    return gather.paged_attention(
        *(q, k, v, *storage.layer(layer), step.page_table(group), buckets),
        storage.scratch(needed),
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        return_lse=return_lse,
        bounds=storage.bounds.of(layer) if read else None,
    )


def _observe(
    q: Tensor,
    lse: Tensor,
    step: StepMetadata,
    layer: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Tells who collects statistics how much attention each page got; K of the step is written."""
    assert step.queries is not None
    group = step.group_of(layer)
    if step.config.groups[group].window is not None:
        return
    k_pages, table = step.storage.layer(layer)[0], step.page_table(group)
    queries, mass = step.queries, None
    if looking := _looking(step, group, q.shape[1]):
        queries, mass = looking.left, step.storage.kernels.page_mass(looking, lse)
    if mass is None or queries.any():
        rows = step.num_new, step.kv_lens_of(group), queries
        rest = page_mass(q, k_pages, table, *rows, scale=scale, softcap=softcap, sinks=sinks)
        mass = rest if mass is None else mass + rest
    step.observer.see(step, layer, mass)


def _looking(step: StepMetadata, group: int, num_heads: int) -> Any:
    """What the attention kernels note down for `_observe`; None where they do not look.

    Not at what was chosen to be read: mass is of all pages of a row.
    """
    storage: Storage = step.storage
    if step.queries is None or storage.backend != "triton":
        return None
    columns, read = step.page_table(group).shape[1], step.config.pages_read
    if step.config.groups[group].window is not None or 0 < read < columns:
        return None

    def look() -> Any:
        rows = step.num_new, step.kv_lens_of(group), step.queries
        return storage.kernels.look(
            *rows, columns, num_heads, step.config.page_size, storage.device
        )

    return step.memo(("looking", group, num_heads), look)
