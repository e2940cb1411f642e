"""Choosing what stays on the device: the search behind `plan_memory`.

The order is the policy. A ring and the pages that are asked for come first; spare memory then goes
to whatever spares most bytes a pass, the head or whole layers; then to the embedding; what is left
becomes pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

from pagedkv.config import DTYPE_BYTES, auto_page_size, format_pair
from pagedkv.errors import BudgetExceeded

from .costs import Asked, Costs, Placement, pages, size_in_bytes, spread
from .plan import MemoryPlan
from .settings import dtype_name
from .shapes import ModelShape, read_model

DEFAULT_LENGTH = 2048
MOST_TOKENS = 1 << 20  # of the pool, for a model that names no longest text
NARROW, WIDE, RESIDENT = 128, 8192, 1024  # tokens of a pass: least, most, without streaming
VERIFIED = 16  # tokens of a sequence in one pass; what a decode kernel takes at most
ACTIVATION_SHARE = 10  # a wider pass may cost one tenth of the memory
# Where nothing was measured: PCIe 4 x16 and a consumer card; a warm file and two CPU cores.
LINK_GBPS = {"cuda": 25.0, "cpu": 5.0}
COMPUTE_TFLOPS = {"cuda": 100.0, "cpu": 0.1}


def plan_memory(
    model: Any,
    *,
    device_memory: int | str,
    host_memory: int | str | None = None,
    batch: int = 1,
    length: int | None = None,
    page_size: int | str = "auto",
    kv_dtype: str | None = None,
    kv_format: str | tuple[str, str] = "dense",
    weight_dtype: str | None = None,
    step_tokens: int | None = None,
    max_tokens: int | None = None,
    link_gbps: float | None = None,
    compute_tflops: float | None = None,
    growth_step: int | None = None,
    images: bool = False,
    device: str = "cuda",
) -> MemoryPlan:
    """Divides memory between a model's weights, its KV pages and what a pass needs.

    Nothing is allocated and nothing but a configuration and headers is read.

    Args:
        model: a configuration (dict or object), a folder, or a model's id on the hub.
        device_memory: bytes, or text like `8GiB`; all that may be used.
        host_memory: bytes that may hold weights and staging on the host. Without it none are held:
            layers that do not stay on the device are read from their files in every pass.
        batch: sequences at once.
        length: tokens of each; default the smaller of 2048 and the model's longest text. What
            `batch` sequences of this length need comes before resident layers.
        page_size, kv_format: as in `CacheConfig`.
        kv_dtype: of K and V; default what the model computes in.
        weight_dtype: weights are cast to, or (`int8`, `int4`, `float8`) assumed to be packed in.
        step_tokens: most tokens of one pass; default as many as the link leaves time for.
        max_tokens: token slots of the pool; default all that is left beside the resident layers,
            of which there are as many as `batch` sequences of `length` tokens leave room for.
        growth_step: pages come into being so many tokens at a time, as in `CacheConfig`; the plan
            has room for all of them.
        images: plans for the class that takes images, as `LayerStreamer.from_pretrained` does. Only
            types that transformers has another class of, for text alone, differ by it.
        link_gbps, compute_tflops: of the link to the device, and of the device; default an
            ordinary card on PCIe 4 x16.
        device: `cuda` or `cpu`.

    Raises:
        BudgetExceeded: it does not fit; the message and `advice` name a change that does.
        UnsupportedModelError: pages cannot serve the model.
        CheckpointError: the folder is not what it has to be.
    """
    if device not in LINK_GBPS:
        raise ValueError(f"device: expected 'cuda' or 'cpu', got {device!r}")
    shape = read_model(model, weight_dtype, images)
    most = shape.settings.max_position_embeddings
    default = min(DEFAULT_LENGTH, most or DEFAULT_LENGTH)
    asked = Asked(
        device_memory=size_in_bytes("device_memory", device_memory),
        host_memory=None if host_memory is None else size_in_bytes("host_memory", host_memory),
        batch=_positive("batch", batch),
        length=default if length is None else _positive("length", length),
        page_size=auto_page_size(page_size, kv_format),
        kv_dtype=dtype_name("kv_dtype", kv_dtype or shape.dtype, DTYPE_BYTES),
        kv_format=format_pair(kv_format),
        step_tokens=None if step_tokens is None else _positive("step_tokens", step_tokens),
        max_tokens=None if max_tokens is None else _positive("max_tokens", max_tokens),
        growth_step=None if growth_step is None else _positive("growth_step", growth_step),
        link_gbps=_rate("link_gbps", link_gbps, LINK_GBPS[device]),
        compute_tflops=_rate("compute_tflops", compute_tflops, COMPUTE_TFLOPS[device]),
        cuda=device == "cuda",
    )
    if growth_step and max_tokens and growth_step > max_tokens:
        raise ValueError(f"growth_step: expected at most {max_tokens=}, got {growth_step}")
    if most and asked.length > most:
        raise ValueError(f"length: {shape.name} takes at most {most} tokens, got {length}")
    if asked.step_tokens and asked.step_tokens < asked.batch:
        raise ValueError(
            f"step_tokens: expected at least one for each of {batch} sequences, got {step_tokens}"
        )
    return _plan(shape, asked)


def _plan(shape: ModelShape, asked: Asked, advising: bool = True) -> MemoryPlan:
    """The plan, or BudgetExceeded; with advice, unless this is a trial of some."""
    costs = Costs(shape, asked)
    placement = _place(costs, advising)
    tokens = _pool(costs, placement, advising)
    held, head_held = _hold(costs, placement, advising)
    return MemoryPlan(
        shape=shape,
        cache=costs.cache(placement.step_tokens, tokens),
        placement=placement,
        batch=asked.batch,
        length=asked.length,
        host_layers=held,
        head_in_host=head_held,
        ring_slot=costs.slot(placement),
        device="cuda" if asked.cuda else "cpu",
        device_bytes=costs.device(placement, tokens),
        host_bytes=costs.host(placement, held, head_held),
        device_memory=asked.device_memory,
        host_memory=asked.host_memory,
        link_gbps=asked.link_gbps,
        compute_tflops=asked.compute_tflops,
    )


def _place(costs: Costs, advising: bool) -> Placement:
    """Everything resident, if that fits at some width; else a ring and what fits beside it."""
    asked, shape = costs.asked, costs.shape
    everything = tuple(range(len(shape.layers)))
    smallest: dict[str, int] | None = None
    for resident in (everything, ()):
        whole = bool(resident)
        for last, step, verify in _widths(costs, streams=not whole):
            placement = Placement(resident, whole, whole, step, verify)
            items = costs.device(placement, asked.wanted)
            wasteful = ACTIVATION_SHARE * items["activations"] > asked.device_memory
            if sum(items.values()) <= asked.device_memory and (last or not wasteful):
                return placement if whole else _fill(costs, placement)
            if smallest is None or sum(items.values()) < sum(smallest.values()):
                smallest = items
    assert smallest is not None
    _refuse(costs, "device_memory", smallest, advising)


def _widths(costs: Costs, streams: bool) -> Iterator[tuple[bool, int, int]]:
    """Widths of a pass, widest first: whether it is narrow, its tokens, those of one sequence."""
    asked = costs.asked
    least = max(NARROW, asked.batch)
    crossover = _crossover(costs) if streams else RESIDENT
    step = asked.step_tokens or least
    # A state behind a rejected draft cannot be taken back.
    verified = VERIFIED if streams and not costs.has_states else 1
    if not asked.step_tokens:
        enough = min(crossover, WIDE, max(least, asked.batch * asked.length))
        while 2 * step <= enough:
            step *= 2
        # Wide enough for every sequence to have as many tokens verified as there is time for.
        step = max(step, asked.batch * min(verified, crossover // asked.batch) if streams else 0)
    while True:
        verify = max(1, min(verified, crossover // asked.batch, step // asked.batch))
        last = bool(asked.step_tokens) or step == least
        yield last, step, verify
        if last:
            break
        step = max(least, step // 2)
    if verify > 1:
        yield True, step, 1


def _crossover(costs: Costs) -> int:
    """Tokens of a pass whose computation takes as long as the layers take to arrive."""
    seconds = sum(costs.shape.layers) / (1e9 * costs.asked.link_gbps)
    return int(seconds * 1e12 * costs.asked.compute_tflops / (2 * costs.shape.active))


def _fill(costs: Costs, least: Placement) -> Placement:
    """Gives the memory that is left to the head and whole layers, then to the embedding."""
    asked, shape = costs.asked, costs.shape
    fixed = sum(costs.device(least, asked.wanted).values()) - sum(costs.weights(least).values())
    room = asked.device_memory - fixed
    count = len(shape.layers)
    best, spared = least, -1
    for head in (True, False):
        # With tied weights the head is the embedding.
        base = replace(least, head=head, embedding=head and not shape.head)
        for chosen in range(count, -1, -1):
            placement = replace(base, resident=tuple(spread(chosen, count)))
            if sum(costs.weights(placement).values()) > room:
                continue
            kept = sum(shape.layers[i] for i in placement.resident) + head * shape.head_bytes
            if kept > spared:
                best, spared = placement, kept
            break
    full = replace(best, embedding=True)
    fits = shape.head and sum(costs.weights(full).values()) <= room
    return full if fits else best


def _pool(costs: Costs, placement: Placement, advising: bool) -> int:
    """Token slots of the pool: what is asked for, or all that is left."""
    asked, page = costs.asked, costs.asked.page_size
    longest = costs.c.max_position_embeddings or MOST_TOKENS // asked.batch
    most = max(asked.wanted, asked.batch * pages(longest, page))
    # CacheConfig counts slots in 31 bits.
    low, high = asked.wanted // page, min(most, 2**31 - page) // page
    if asked.max_tokens:
        low, high = 0, -(-asked.max_tokens // page)
    if _total(costs, placement, high * page) <= asked.device_memory:
        return high * page
    while high - low > 1:
        middle = (low + high) // 2
        fits = _total(costs, placement, middle * page) <= asked.device_memory
        low, high = (middle, high) if fits else (low, middle)
    if asked.max_tokens:
        items = costs.device(placement, pages(asked.max_tokens, page))
        _refuse(costs, "device_memory", items, advising, {"max_tokens": low * page})
    return low * page


def _total(costs: Costs, placement: Placement, tokens: int) -> int:
    return sum(costs.device(placement, tokens).values())


def _hold(costs: Costs, placement: Placement, advising: bool) -> tuple[tuple[int, ...], bool]:
    """Which of the streamed layers host memory holds for good, and whether the head."""
    memory = costs.asked.host_memory
    streamed = costs.streamed(placement)
    if memory is None:
        return (), False
    for head in (True, False):
        if head and placement.head:
            continue
        for count in range(len(streamed), -1, -1):
            held = tuple(streamed[i] for i in spread(count, len(streamed)))
            if sum(costs.host(placement, held, head).values()) <= memory:
                return held, head
    _refuse(costs, "host_memory", costs.host(placement, (), False), advising)


def _refuse(
    costs: Costs,
    parameter: str,
    items: dict[str, int],
    advising: bool,
    change: dict[str, int] | None = None,
) -> NoReturn:
    """Says what is needed and given, what takes most, and one change that was tried and fits."""
    asked = costs.asked
    needed, available = sum(items.values()), getattr(asked, parameter)
    largest = max(items, key=lambda name: items[name])
    advice = _advice(costs, parameter, needed, largest, change) if advising else {}
    words = ", ".join(f"{name}={value}" for name, value in advice.items())
    tokens = f"{asked.batch} sequences of {asked.length} tokens"
    if asked.max_tokens:
        tokens = f"{asked.max_tokens} tokens"
    raise BudgetExceeded(
        f"{parameter}: {costs.shape.name} with pages for {tokens} needs at least {needed:,} bytes, "
        f"{available:,} are given; the largest item is {largest} ({items[largest]:,}). "
        f"{words} would fit",
        needed=needed,
        available=available,
        largest=largest,
        advice=advice,
    )


def _advice(
    costs: Costs, parameter: str, needed: int, largest: str, change: dict[str, int] | None
) -> dict[str, int | str]:
    """One change that fits. Each is tried: advice that fails is worse than none."""
    asked, page = costs.asked, costs.asked.page_size

    def fits(**changes: Any) -> bool:
        try:
            _plan(costs.shape, replace(asked, **changes), advising=False)
        except BudgetExceeded:
            return False
        return True

    if change and min(change.values()) and fits(**change):
        return dict(change)
    if parameter == "device_memory" and asked.max_tokens:
        if most := _largest(lambda n: fits(max_tokens=n * page), asked.max_tokens // page):
            return {"max_tokens": most * page}
    elif parameter == "device_memory" and largest == "KV pages":
        if most := _largest(lambda n: fits(length=n * page), asked.length // page):
            return {"length": most * page}
        if most := _largest(lambda n: fits(batch=n), asked.batch):
            return {"batch": most}
    elif parameter == "device_memory" and largest == "states":
        if most := _largest(lambda n: fits(batch=n), asked.batch):
            return {"batch": most}
    elif largest == "activations" and asked.step_tokens and fits(step_tokens=asked.batch):
        most = _largest(lambda n: fits(step_tokens=asked.batch * n), asked.step_tokens)
        return {"step_tokens": asked.batch * most}
    while not fits(**{parameter: needed}):
        needed += needed // 8
    return {parameter: needed}


def _largest(fits: Any, below: int) -> int:
    """The largest number from 1 to below `below` that fits, by halving; 0 if not even 1 does."""
    low, high = 0, below
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a positive int, got {value!r}")
    return value


def _rate(name: str, value: Any, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ValueError(f"{name}: expected a positive number, got {value!r}")
    return float(value)
