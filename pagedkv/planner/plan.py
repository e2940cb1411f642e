"""`MemoryPlan`: the answer, and what follows from it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from pagedkv.config import CacheConfig

from .costs import RING_DEPTH, Placement
from .shapes import ModelShape

# What a device reads of its own memory, where nobody says: a mid-range card, two CPU cores.
MEMORY_GBPS = {"cuda": 400.0, "cpu": 20.0}
PCIE, NVME = 25.0, 7.0  # GB/s: PCIe 4 x16 from pinned memory, a PCIe 4 drive


@dataclass(frozen=True)
class MemoryPlan:
    """Where a model's bytes are, and what fits beside them. `print` it.

    Attributes:
        shape: what the model weighs.
        cache: the pool; `CacheConfig` of a `PagedKVCache` that keeps to the plan.
        placement: what stays on the device, and how wide a pass is.
        batch, length: the sequences it was made for.
        host_layers: streamed layers that host memory holds for good; the others are read from disk
            in every pass.
        head_in_host: whether it holds the head as well.
        ring_slot: bytes of a slot of the ring; 0 without one.
        device_bytes, host_bytes: bytes by item.
        device_memory, host_memory: the budgets.
        link_gbps, compute_tflops: what widths were chosen for.
    """

    shape: ModelShape
    cache: CacheConfig
    placement: Placement
    batch: int
    length: int
    host_layers: tuple[int, ...]
    head_in_host: bool
    ring_slot: int
    device: str
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    device_memory: int
    host_memory: int | None
    link_gbps: float
    compute_tflops: float

    @property
    def model(self) -> str:
        """The model's name."""
        return self.shape.name

    @property
    def streams(self) -> bool:
        """Whether anything but KV pages and activations moves in a pass."""
        return bool(self.streamed_layers) or not (self.head_resident and self.embedding_resident)

    @property
    def resident_layers(self) -> tuple[int, ...]:
        """Layers that stay on the device."""
        return self.placement.resident

    @property
    def streamed_layers(self) -> tuple[int, ...]:
        """Layers that pass through the ring."""
        held = set(self.resident_layers)
        return tuple(i for i in range(len(self.shape.layers)) if i not in held)

    @property
    def embedding_resident(self) -> bool:
        """Whether the embedding is on the device; else its rows are gathered on the host."""
        return self.placement.embedding

    @property
    def head_resident(self) -> bool:
        """Whether the head is on the device; else blocks of its rows pass through the ring."""
        return self.placement.head

    @property
    def head_rows(self) -> int:
        """Rows of the head that fit a slot of the ring; 0 if it is resident."""
        vocabulary: int = self.shape.settings.vocab_size
        if self.head_resident:
            return 0
        return min(vocabulary, max(1, self.ring_slot * vocabulary // self.shape.head_bytes))

    @property
    def ring_depth(self) -> int:
        """Slots of the ring."""
        return RING_DEPTH if self.ring_slot else 0

    @property
    def step_tokens(self) -> int:
        """Tokens of one pass, at most: what activations are planned for."""
        return self.placement.step_tokens

    @property
    def verify_width(self) -> int:
        """Tokens of one sequence that a decoding pass computes, drafts included."""
        return self.placement.verify_width

    @property
    def max_tokens(self) -> int:
        """Token slots of the pool."""
        return self.cache.max_tokens

    @property
    def bytes_per_token(self) -> int:
        """K and V bytes of a token over all layers."""
        return self.cache.bytes_per_token

    @property
    def states(self) -> int:
        """State slots, of a model with recurrent states: one a sequence, one for a prefix."""
        return self.cache.max_states

    @property
    def bytes_per_state(self) -> int:
        """Bytes of the recurrent state of one sequence over all layers."""
        return self.cache.bytes_per_state

    @property
    def streamed_bytes(self) -> int:
        """Bytes that cross the link in a pass."""
        head = 0 if self.head_resident else self.shape.head_bytes
        return sum(self.shape.layers[i] for i in self.streamed_layers) + head

    @property
    def disk_bytes(self) -> int:
        """Those that host memory does not hold."""
        return self.streamed_bytes - self.host_bytes["held layers"] - self.host_bytes["held head"]

    @property
    def unused(self) -> int:
        """Bytes of the device's budget without a use."""
        return self.device_memory - sum(self.device_bytes.values())

    def seconds(
        self,
        tokens: int,
        link_gbps: float = 25.0,
        disk_gbps: float | None = None,
        compute_tflops: float | None = None,
    ) -> float:
        """A pass over so many tokens: the slowest of link, disk, device memory and arithmetic."""
        flops = 1e12 * (compute_tflops or self.compute_tflops)
        return max(
            self.streamed_bytes / (1e9 * link_gbps),
            self.disk_bytes / (1e9 * disk_gbps) if disk_gbps else 0.0,
            (sum(self.shape.layers) + self.shape.head_bytes) / (1e9 * MEMORY_GBPS[self.device]),
            2 * self.shape.active * tokens / flops,
        )

    def predict(
        self,
        link_gbps: float = 25.0,
        disk_gbps: float | None = None,
        batch: int | None = None,
        accepted: float = 1.0,
        compute_tflops: float | None = None,
    ) -> float:
        """Generated tokens a second, all sequences together.

        Args:
            disk_gbps: of the disk, read at the same time; default as fast as the link.
            batch: sequences that decode at once; default the plan's.
            accepted: tokens a sequence gains by a pass, above 1 if drafts are verified.
        """
        batch = batch or self.batch
        tokens = batch * (self.verify_width if accepted > 1 else 1)
        return batch * accepted / self.seconds(tokens, link_gbps, disk_gbps, compute_tflops)

    def max_length(self, batch: int | None = None) -> int:
        """Tokens that each of so many sequences may have in this plan's pages."""
        batch = batch or self.batch
        page, config = self.cache.page_size, self.cache
        if batch > config.max_sequences or (config.states and batch >= config.max_states):
            return 0
        most: int = self.cache.max_sequence_length
        for group, layers in enumerate(config.groups):
            each = config.num_pages(group) // batch
            enough = layers.window and -(-(layers.window + config.rollback) // page) + 2
            if not enough or each < enough:
                most = min(most, each * page)
        return most

    def max_batch(self, length: int | None = None) -> int:
        """Sequences of so many tokens that this plan's pages hold at once."""
        length = length or self.length
        low, high = 0, self.cache.max_sequences + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.max_length(middle) >= length else (low, middle)
        return low

    def recompute_or_restore(
        self, tokens: int, link_gbps: float | None = None
    ) -> Literal["recompute", "restore"]:
        """How a preempted sequence comes back sooner: computed again, or copied from the host."""
        link = link_gbps or self.link_gbps
        whole, left = divmod(tokens, self.step_tokens)
        recompute = whole * self.seconds(self.step_tokens, link)
        recompute += self.seconds(left, link) if left else 0.0
        return "restore" if self._kept(tokens) / (1e9 * link) <= recompute else "recompute"

    def _kept(self, tokens: int) -> int:
        """Bytes of K, V and the recurrent state of one sequence."""
        config, total = self.cache, self.cache.bytes_per_state
        for group, layers in enumerate(config.groups):
            held = min(tokens, (layers.window or tokens) + config.rollback)
            total += -(-held // config.page_size) * config.bytes_per_page(group)
        return total

    def to_json(self) -> str:
        """The plan as JSON text, sizes in bytes."""
        return json.dumps(self.to_dict(), indent=2)

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain values, sizes in bytes."""
        names = (
            "model streams device device_memory host_memory device_bytes unused host_bytes batch "
            "length max_tokens bytes_per_token states bytes_per_state step_tokens verify_width "
            "ring_depth ring_slot head_rows embedding_resident head_resident resident_layers "
            "host_layers head_in_host streamed_bytes disk_bytes link_gbps compute_tflops"
        )
        return {
            **{name: getattr(self, name) for name in names.split()},
            "tower": self.shape.tower,
            "weights": "exact" if self.shape.exact else "from the config",
            "page_size": self.cache.page_size,
            "kv_dtype": self.cache.dtype,
            "max_length": self.max_length(),
            "max_batch": self.max_batch(),
            "tokens_per_second": {"pcie4_x16": self.predict(25), "nvme": self.predict(25, 7)},
        }

    def __str__(self) -> str:
        return _render(self)


# ------------------------------------------------------------------ as text


def _render(plan: MemoryPlan) -> str:
    """What `print(plan)` shows."""
    source = "exact" if plan.shape.exact else "from the config"
    lines = [
        f"{plan.model}: {_gib(plan.shape.weights)} GiB of weights ({source}), {plan.shape.dtype}",
        _how(plan),
        "",
        *_rows("device", plan.device_memory, plan.device_bytes, _device_notes(plan)),
    ]
    if plan.streams:
        lines += ["", *_rows("host", plan.host_memory, plan.host_bytes, _host_notes(plan))]
    return "\n".join([*lines, "", *_answers(plan)])


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"


def _how(plan: MemoryPlan) -> str:
    if not plan.streams:
        return "nothing streams: all weights stay on the device"
    return f"streams {_gib(plan.streamed_bytes)} GiB a pass of up to {plan.step_tokens:,} tokens"


def _rows(
    title: str, budget: int | None, items: dict[str, int], notes: dict[str, str]
) -> list[str]:
    """The items of one budget, their sum or what is left."""
    total = sum(items.values())
    whole = total if budget is None else budget
    lines = [f"{title:<17}{'GiB':>8}{'share':>8}"]
    rows = [(name, nbytes, notes.get(name, "")) for name, nbytes in items.items()]
    if budget is not None:
        rows.append(("unused", budget - total, ""))
    for name, nbytes, note in [*rows, ("budget" if budget else "total", whole, "")]:
        share = f"{nbytes / whole:.1%}" if whole else "-"
        lines.append(f"  {name:<15}{_gib(nbytes):>8}{share:>8}  {note}".rstrip())
    return lines


def _device_notes(plan: MemoryPlan) -> dict[str, str]:
    count, resident = len(plan.shape.layers), len(plan.resident_layers)
    glue = ["embedding", "head"]
    there = [plan.embedding_resident, plan.head_resident]
    tower = [f"tower for images ({_gib(plan.shape.tower)} GiB)"] if plan.shape.tower else []
    here = ["norms", *tower, *(name for name, is_here in zip(glue, there) if is_here)]
    away = {"embedding": "gathered on the host", "head": f"{plan.head_rows} rows at a time"}
    gone = [f"{name} {away[name]}" for name, is_here in zip(glue, there) if not is_here]
    config = plan.cache
    sliding = sum(len(group.layers) for group in config.groups if group.window)
    kept = [config.dtype if name == "dense" else name for name in dict.fromkeys(config.kv_format)]
    token = f"{round(plan.bytes_per_token / 1024, 2):g} KiB"
    pages = f"{plan.max_tokens:,} tokens x {token}, {' and '.join(kept)}"
    return {
        "device context": "CUDA itself" if plan.device == "cuda" else "none on a CPU",
        "glue": "; ".join([", ".join(here), *gone]),
        "resident layers": f"{resident} of {count}",
        "ring": f"{plan.ring_depth} slots of {_gib(plan.ring_slot)} GiB" if plan.ring_slot else "",
        "KV pages": pages + (f"; {sliding} of {count} layers slide" if sliding else ""),
        "states": f"{plan.states} x {plan.bytes_per_state / 2**20:.3g} MiB, one a sequence and one "
        "for a prefix; copies of a pass",
        "activations": f"{plan.step_tokens} tokens a pass, logits of {plan.batch} x "
        f"{plan.verify_width}",
        "workspace": "attention's parts, page tables",
    }


def _host_notes(plan: MemoryPlan) -> dict[str, str]:
    streamed = len(plan.streamed_layers)
    return {
        "held layers": f"{len(plan.host_layers)} of {streamed} that stream"
        + ("; the rest is read from disk" if plan.disk_bytes else ""),
        "held head": "" if plan.head_in_host or plan.head_resident else "read from disk",
        "staging": "what is read lands here" if plan.host_bytes["staging"] else "",
        "embedding rows": "of one pass" if not plan.embedding_resident else "on the device",
    }


def _answers(plan: MemoryPlan) -> list[str]:
    fast, slow = plan.predict(PCIE), plan.predict(PCIE, NVME)
    lines = [
        f"longest context     {plan.max_length():,} tokens each for a batch of {plan.batch}",
        f"largest batch       {plan.max_batch():,} x {plan.length:,} tokens",
    ]
    if plan.streams:
        rows = f"a batch of {plan.batch}"
        lines.append(f"tokens a second     {fast:.3g} over PCIe 4 x16 ({PCIE:g} GB/s), {rows}")
        lines.append(f"                    {slow:.3g} from NVMe ({NVME:g} GB/s)")
    else:
        lines.append(f"tokens a second     {fast:.3g}, a batch of {plan.batch}")
    return lines
