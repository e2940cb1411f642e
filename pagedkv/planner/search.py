"""`plan_memory`: checks a request, and searches for a plan of it.

`choice.py` divides the device between weights; the rest becomes pages.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal

from pagedkv.config import DTYPE_BYTES, auto_page_size, format_pair
from pagedkv.errors import UnsupportedModelError
from pagedkv.models.model import Model
from pagedkv.models.names import dtype_name

from .advice import Short, exceeded, with_more
from .byte_sizes import largest, size_in_bytes
from .choice import place
from .costs import Asked, Costs, Given, pages, spread
from .experts import ALONE, can_read_alone, require_slots
from .gpus import GPUS, ORDINARY, find_gpu
from .model_shape import ModelShape, shape_of
from .placement import Placement
from .plan import MemoryPlan
from .ranks import share_of

DEFAULT_LENGTH = 2048
MOST_TOKENS = 1 << 20  # slots of the pool, for a model that names no longest text
# Two cores, if nothing was measured: GB/s of files in memory, GB/s of memory, 10^12 operations/s.
CPU_LINK, CPU_MEMORY, CPU_TFLOPS = 5.0, 20.0, 0.1
CPU_UNPACKS = 1.5  # GB/s of weights that one thread unpacks from mxfp4; measured


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
    pack_weights: bool | Literal["int8"] = False,
    expert_slots: int | None = None,
    expert_gbps: float | None = None,
    device: str = "cuda",
) -> MemoryPlan:
    """Divides memory between a model's weights, its KV pages and what a pass needs.

    Nothing is allocated and nothing but a configuration and headers is read. Headers tell what a
    model weighs; if there are none, transformers builds the model without memory for weights.

    Args:
        model: a configuration (dict or object), a folder, a model's id on the hub, or a model in
            memory.
        device_memory: bytes, or text like `8GiB`; all that weights, pages and passes may use.
            Default nine tenths of what `gpu` has.
        host_memory: bytes that may hold weights and staging on the host. Without it none are held:
            layers that do not stay on the device are read from their files in every pass.
        batch: sequences at once.
        length: tokens of each; default the smaller of 2048 and the model's longest text. Pages for
            `batch` sequences of this length take precedence over resident layers.
        page_size: as in `CacheConfig`.
        kv_format: as in `CacheConfig`.
        kv_dtype: the dtype of K and V; default the one that the model computes in.
        weight_dtype: weights are cast to it, or (`int8`, `int4`, `float8`) assumed packed in it.
        step_tokens: most tokens of one pass; default as many as the link leaves time for.
        max_tokens: token slots of the pool, which take precedence over resident layers; default
            those of `batch` sequences of `length` tokens, and all room beside resident layers.
        growth_step: pages are allocated so many tokens at a time, as in `CacheConfig`; the plan has
            room for all of them.
        images: plan for the class that takes images, as `LayerStreamer.from_pretrained` does. It
            matters only for types that have another class in transformers for text alone.
        link_gbps: the speed of the link to the device; default that of `gpu`, or PCIe 4 x16.
        compute_tflops: the speed of the device; default that of `gpu`, or of an ordinary card.
        gpu: a known card, such as `RTX 4090`; `pagedkv plan --gpu list` names them.
        ranks: processes under `torchrun` among which transformers shares out the model. Each has a
            device of its own, and all sizes are of one of them. Nothing streams then.
        pack_weights: as for `BatchGenerator`, True or `int8`, on a CPU: packed weights are counted,
            and nothing streams.
        expert_slots: experts of a layer that stay while others are read as tokens are routed to
            them; 0 streams whole layers. Default: on a CPU under Linux, the count that decodes
            `batch` sequences fastest; else 0.
        expert_gbps: the speed of reading experts alone, at most the link's; default half of it.
        device: `cuda` or `cpu`.

    Raises:
        BudgetExceeded: it does not fit; the message and `advice` name a change that does.
        UnsupportedModelError: pages cannot serve the model, or it cannot be shared out like this.
        CheckpointError: the folder is no valid checkpoint.
        ImportError: there is a configuration alone, and transformers, which weighs it, is missing.
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
    shape = shape_of(Model.of(model, images), weight_dtype, not on_cuda)
    files = min(CPU_LINK, CPU_UNPACKS) if shape.unpacked else CPU_LINK
    most = shape.settings.max_position_embeddings
    default = min(DEFAULT_LENGTH, most or DEFAULT_LENGTH)
    asked = Asked(
        device_memory=size_in_bytes("device_memory", device_memory),
        host_memory=None if host_memory is None else size_in_bytes("host_memory", host_memory),
        batch=_positive("batch", batch),
        length=default if length is None else _positive("length", length),
        page_size=auto_page_size(page_size, kv_format, chunks=_chunks(shape)),
        kv_dtype=dtype_name("kv_dtype", kv_dtype or shape.dtype, DTYPE_BYTES),
        kv_format=format_pair(kv_format),
        step_tokens=None if step_tokens is None else _positive("step_tokens", step_tokens),
        max_tokens=None if max_tokens is None else _positive("max_tokens", max_tokens),
        growth_step=None if growth_step is None else _positive("growth_step", growth_step),
        link_gbps=_rate("link_gbps", link_gbps, card.link_gbps if on_cuda else files),
        compute_tflops=_rate(
            "compute_tflops", compute_tflops, card.tflops if on_cuda else CPU_TFLOPS
        ),
        memory_gbps=card.memory_gbps if on_cuda else CPU_MEMORY,
        gpu=name,
        cuda=on_cuda,
        ranks=_positive("ranks", ranks),
        pack_weights=pack_weights,
        expert_slots=expert_slots,
        expert_gbps=_rate("expert_gbps", expert_gbps, 0.0),
        least_slots=shape.experts.per_token if shape.experts else 0,
    )
    share = 1.0 if shape.unpacked else ALONE  # unpacking limits both ways of reading
    gbps = min(asked.link_gbps, asked.expert_gbps or share * asked.link_gbps)
    asked = replace(asked, expert_gbps=gbps)
    _require_experts(shape, asked)
    if pack_weights not in (True, False, "int8"):
        raise ValueError(f"pack_weights: expected True, False or 'int8', got {pack_weights!r}")
    if pack_weights == "int8" and shape.dtype != "float32":
        raise ValueError(f"pack_weights: 'int8' expects float32, got weights in {shape.dtype}")
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
    return with_more(plan, asked, _tried)


def _tried(shape: ModelShape, asked: Asked) -> MemoryPlan | None:
    """Returns the plan of this request, if there is one."""
    try:
        return _plan(shape, asked)
    except (Short, ValueError, UnsupportedModelError):  # pools have no more than 2**31 slots
        return None


def _plan(shape: ModelShape, asked: Asked) -> MemoryPlan:
    """Makes the plan of a request.

    Raises:
        Short: there is none.
        UnsupportedModelError: so many processes cannot share out the model.
    """
    shape = share_of(shape.whole or shape, asked.ranks)
    costs = Costs(shape, asked)
    placement = place(costs)
    tokens = _pool(costs, placement)
    held, head_held, embedding_held = _hold(costs, placement)
    return MemoryPlan(
        shape=shape,
        cache=costs.cache(placement.step_tokens, tokens),
        placement=placement,
        host_layers=held,
        head_in_host=head_held,
        embedding_in_host=embedding_held,
        ring_slot=costs.slot(placement),
        device="cuda" if asked.cuda else "cpu",
        device_bytes=costs.device(placement, tokens),
        host_bytes=costs.host(placement, held, head_held, embedding_held),
        **{field.name: getattr(asked, field.name) for field in fields(Given)},
    )


def _pool(costs: Costs, placement: Placement) -> int:
    """Returns the token slots of the pool: those asked for, or all that have room."""
    asked, page = costs.asked, costs.asked.page_size
    if asked.max_tokens:
        return asked.wanted
    longest = costs.c.max_position_embeddings or MOST_TOKENS // asked.batch
    most = max(asked.wanted, asked.batch * pages(longest, page))

    def fits(count: int) -> bool:
        return sum(costs.device(placement, count * page).values()) <= asked.device_memory

    high = min(most, costs.most_tokens) // page
    return page * (high if fits(high) else largest(fits, asked.wanted // page, high))


def _hold(costs: Costs, placement: Placement) -> tuple[tuple[int, ...], bool, bool]:
    """Returns which streamed layers host memory holds, and whether the head and the embedding.

    The embedding comes last: a pass reads all of each layer, but few rows of the embedding. One
    that is tied is the head.
    """
    memory = costs.asked.host_memory
    away = costs.away(placement)
    if memory is None:
        return (), False, False

    def fits(held: tuple[int, ...], head: bool, embedding: bool = False) -> bool:
        return sum(costs.host(placement, held, head, embedding).values()) <= memory

    for head in (True, False):
        if head and placement.head:
            continue
        for count in range(len(away), -1, -1):
            held = tuple(away[i] for i in spread(count, len(away)))
            if fits(held, head):
                all_held = count == len(away) and head != placement.head
                embedding = all_held and not placement.embedding and fits(held, head, True)
                return held, head, embedding if costs.shape.head else head
    raise Short("host_memory", costs.host(placement, (), False, False))


def _chunks(shape: ModelShape) -> list[int]:
    """Lists the tokens of a chunk of each layer that has chunks."""
    return [kind.window for kind in shape.settings.kinds if kind.chunked]


def _require_experts(shape: ModelShape, asked: Asked) -> None:
    """Raises for slots of experts that the model or the other arguments do not allow."""
    slots, experts = asked.expert_slots, shape.experts
    if slots is None:
        return
    require_slots(slots, *((experts.per_token, experts.count) if experts else (0, slots)))
    if slots and experts is None:
        unpacks = asked.cuda and shape.model.method == "mxfp4"
        where = "; on a CPU, which unpacks them, they can" if unpacks else ""
        raise UnsupportedModelError(
            f"expert_slots: {shape.name} has no experts that can be read alone{where}; 0 streams "
            "whole layers"
        )
    if slots and not can_read_alone(on_cpu=not asked.cuda):
        raise UnsupportedModelError(
            "expert_slots: on a CPU experts are read alone under Linux only; 0 streams whole layers"
        )
    if slots and (asked.ranks > 1 or asked.pack_weights):
        name = "ranks" if asked.ranks > 1 else "pack_weights"
        raise ValueError(f"expert_slots: expected none beside {name}, with which nothing streams")


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
