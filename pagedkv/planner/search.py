"""Choosing what stays on the device: the search behind `plan_memory`.

The order is the policy. A ring and the pages that are asked for come first; spare memory then goes
to whatever spares most bytes a pass, the head or whole layers; then to the embedding; what is left
becomes pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pagedkv.config import DTYPE_BYTES, auto_page_size, format_pair
from pagedkv.errors import UnsupportedModelError

from .advice import Short, exceeded
from .costs import Asked, Costs, Placement, pages, spread
from .gpus import GPUS, ORDINARY, find_gpu
from .plan import MemoryPlan
from .ranks import share_of
from .settings import dtype_name
from .shapes import ModelShape, read_model
from .sizes import size_in_bytes

DEFAULT_LENGTH = 2048
MOST_TOKENS = 1 << 20  # of the pool, for a model that names no longest text
NARROW, WIDE, RESIDENT = 128, 8192, 1024  # tokens of a pass: least, most, without streaming
VERIFIED = 16  # tokens of a sequence in one pass; what a decode kernel takes at most
ACTIVATION_SHARE = 10  # a wider pass may cost one tenth of the memory
MOST_BATCH = 1 << 16  # where the search for the largest batch ends
# Of two cores, where nothing was measured: GB/s of a file in memory, of memory, operations.
CPU_LINK, CPU_MEMORY, CPU_TFLOPS = 5.0, 20.0, 0.1


def plan_memory(
    model: Any,
    *,
    device_memory: int | str | None = None,
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
    gpu: str | None = None,
    ranks: int = 1,
    pack_weights: bool = False,
    device: str = "cuda",
) -> MemoryPlan:
    """Divides memory between a model's weights, its KV pages and what a pass needs.

    Nothing is allocated and nothing but a configuration and headers is read.

    Args:
        model: a configuration (dict or object), a folder, or a model's id on the hub.
        device_memory: bytes, or text like `8GiB`; all that weights, pages and passes may use.
            Default nine tenths of what `gpu` has.
        host_memory: bytes that may hold weights and staging on the host. Without it none are held:
            layers that do not stay on the device are read from their files in every pass.
        batch: sequences at once.
        length: tokens of each; default the smaller of 2048 and the model's longest text. What
            `batch` sequences of this length need comes before resident layers.
        page_size: as in `CacheConfig`.
        kv_format: as in `CacheConfig`.
        kv_dtype: of K and V; default what the model computes in.
        weight_dtype: weights are cast to, or (`int8`, `int4`, `float8`) assumed to be packed in.
        step_tokens: most tokens of one pass; default as many as the link leaves time for.
        max_tokens: token slots of the pool, which come before resident layers; default those of
            `batch` sequences of `length` tokens, and all that is left beside the resident layers.
        growth_step: pages come into being so many tokens at a time, as in `CacheConfig`; the plan
            has room for all of them.
        images: plans for the class that takes images, as `LayerStreamer.from_pretrained` does. Only
            types that transformers has another class of, for text alone, differ by it.
        link_gbps: of the link to the device; default that of `gpu`, or PCIe 4 x16.
        compute_tflops: of the device; default that of `gpu`, or an ordinary card.
        gpu: a known card, such as `RTX 4090`; `pagedkv plan --gpu list` names them.
        ranks: processes under `torchrun` among which transformers shares out the model. Each has a
            device of its own, and all sizes are of one of them. Nothing streams then.
        pack_weights: as for `BatchGenerator`, on a CPU: packed weights take their room, and nothing
            streams.
        device: `cuda` or `cpu`.

    Raises:
        BudgetExceeded: it does not fit; the message and `advice` name a change that does.
        UnsupportedModelError: pages cannot serve the model, or it cannot be shared out like this.
        CheckpointError: the folder is not what it has to be.
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device: expected 'cuda' or 'cpu', got {device!r}")
    name = None if gpu is None else find_gpu(gpu)
    if name and device == "cpu":
        raise ValueError(f"gpu: expected none with device='cpu', got {gpu!r}")
    card = GPUS[name] if name else ORDINARY
    if device_memory is None:
        if not name:
            raise ValueError("device_memory: expected text like '8GiB', or a gpu, got none")
        device_memory = card.device_memory
    on_cuda = device == "cuda"
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
        link_gbps=_rate("link_gbps", link_gbps, card.link_gbps if on_cuda else CPU_LINK),
        compute_tflops=_rate(
            "compute_tflops", compute_tflops, card.tflops if on_cuda else CPU_TFLOPS
        ),
        memory_gbps=card.memory_gbps if on_cuda else CPU_MEMORY,
        gpu=name,
        cuda=on_cuda,
        ranks=_positive("ranks", ranks),
        pack_weights=bool(pack_weights),
    )
    if pack_weights and on_cuda:
        raise ValueError(f"pack_weights: expected none with {device=}, got {pack_weights!r}")
    if ranks > 1:
        for option, value in (("host_memory", host_memory), ("growth_step", growth_step)):
            if value is not None:
                raise ValueError(f"{option}: expected none with {ranks=}, got {value!r}")
    if growth_step and max_tokens and growth_step > max_tokens:
        raise ValueError(f"growth_step: expected at most {max_tokens=}, got {growth_step}")
    if most and asked.length > most:
        raise ValueError(f"length: {shape.name} takes at most {most} tokens, got {length}")
    if asked.step_tokens and asked.step_tokens < asked.batch:
        raise ValueError(
            f"step_tokens: expected at least one for each of {batch} sequences, got {step_tokens}"
        )
    try:
        plan = _plan(shape, asked)
    except Short as short:
        raise exceeded(short, shape.name, asked, lambda a: _tried(shape, a) is not None) from None
    in_4_bits = None
    if plan.streams and not shape.packed:
        other = _tried(read_model(model, "int4", images), asked)
        in_4_bits = None if other is None else other.predict()
    return replace(plan, largest_batch=_largest_batch(plan, asked), rate_in_4_bits=in_4_bits)


def _tried(shape: ModelShape, asked: Asked) -> MemoryPlan | None:
    """The plan of this request, if there is one."""
    try:
        return _plan(shape, asked)
    except (Short, ValueError, UnsupportedModelError):  # pools have no more than 2**31 slots
        return None


def _largest_batch(plan: MemoryPlan, asked: Asked) -> int:
    """Sequences of this length for which there is room at once, if they are planned for."""

    def fits(batch: int) -> bool:
        if asked.step_tokens and asked.step_tokens < batch:
            return False
        other = _tried(plan.shape, replace(asked, batch=batch))
        return other is not None and other.max_length() >= asked.length

    if plan.max_length() < asked.length:
        return plan.max_batch()
    low, high = asked.batch, 2 * asked.batch
    while high <= MOST_BATCH and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _plan(shape: ModelShape, asked: Asked) -> MemoryPlan:
    """The plan.

    Raises:
        Short: there is none.
        UnsupportedModelError: so many processes cannot share out the model.
    """
    shape = share_of(shape.of or shape, asked.ranks)
    costs = Costs(shape, asked)
    placement = _place(costs)
    tokens = _pool(costs, placement)
    held, head_held = _hold(costs, placement)
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
        memory_gbps=asked.memory_gbps,
        gpu=asked.gpu,
        ranks=asked.ranks,
    )


def _place(costs: Costs) -> Placement:
    """Everything resident, if that fits at some width; else a ring and what fits beside it."""
    asked, shape = costs.asked, costs.shape
    everything = tuple(range(len(shape.layers)))
    smallest: dict[str, int] | None = None
    may_stream = asked.ranks == 1 and not asked.pack_weights
    for resident in (everything, ()) if may_stream else (everything,):
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
    raise Short("device_memory", smallest)


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


def _pool(costs: Costs, placement: Placement) -> int:
    """Token slots of the pool: what is asked for, or all that is left."""
    asked, page = costs.asked, costs.asked.page_size
    if asked.max_tokens:
        return asked.wanted
    longest = costs.c.max_position_embeddings or MOST_TOKENS // asked.batch
    most = max(asked.wanted, asked.batch * pages(longest, page))
    # CacheConfig counts slots in 31 bits.
    low, high = asked.wanted // page, min(most, 2**31 - page) // page
    if _total(costs, placement, high * page) <= asked.device_memory:
        return high * page
    while high - low > 1:
        middle = (low + high) // 2
        fits = _total(costs, placement, middle * page) <= asked.device_memory
        low, high = (middle, high) if fits else (low, middle)
    return low * page


def _total(costs: Costs, placement: Placement, tokens: int) -> int:
    return sum(costs.device(placement, tokens).values())


def _hold(costs: Costs, placement: Placement) -> tuple[tuple[int, ...], bool]:
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
    raise Short("host_memory", costs.host(placement, (), False))


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
