"""The answer of a search, and the numbers that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pagedkv.config import CacheConfig

from .byte_sizes import largest
from .costs import RING_DEPTH, Given
from .model_shape import ModelShape
from .placement import Placement
from .speed import Machine, seconds_of_pass, streamed_bytes


@dataclass(frozen=True)
class Outcome(Given):
    """The fields and numbers of a `MemoryPlan`, which adds only how to print them."""

    shape: ModelShape
    cache: CacheConfig
    placement: Placement
    host_layers: tuple[int, ...]
    head_in_host: bool
    embedding_in_host: bool
    ring_slot: int
    device: str
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    largest_batch: int = field(default=0, compare=False)
    rate_in_4_bits: float | None = field(default=None, compare=False)
    rate_by_slots: tuple[int, float] | None = field(default=None, compare=False)

    @property
    def model(self) -> str:
        """The model's name."""
        return self.shape.name

    @property
    def streams(self) -> bool:
        """Whether anything but KV pages and activations moves in a pass."""
        ends = self.head_resident and self.embedding_resident and self.tables_resident
        return bool(self.streamed_layers or self.expert_slots) or not ends

    @property
    def resident_layers(self) -> tuple[int, ...]:
        """Layers that stay on the device."""
        return self.placement.resident

    @property
    def streamed_layers(self) -> tuple[int, ...]:
        """Layers that pass through the ring."""
        return tuple(self.placement.streamed(len(self.shape.layers)))

    @property
    def expert_slots(self) -> int:
        """Experts of a layer that stay; 0 where experts come with their layer."""
        return self.placement.expert_slots

    @property
    def embedding_resident(self) -> bool:
        """Whether the embedding is on the device; else its rows are gathered on the host."""
        return self.placement.embedding

    @property
    def tables_resident(self) -> bool:
        """Whether larger tables, if there are some, are on the device."""
        return self.placement.tables or not self.shape.tables

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
        """The most tokens of one pass, for which activations are planned."""
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
        """Bytes that cross the link in each pass, without experts that are read alone."""
        return streamed_bytes(self.shape, self.placement)

    def expert_bytes(self, tokens: int) -> int:
        """Returns the bytes of experts that a pass of `tokens` reads, if they are read alone."""
        if not self.expert_slots or self.shape.experts is None:
            return 0
        experts = self.shape.experts
        return int(experts.total * experts.read(tokens, self.expert_slots, self.alone))

    @property
    def disk_bytes(self) -> int:
        """Bytes of streamed layers and head that host memory does not hold."""
        return self.streamed_bytes - self.host_bytes["held layers"] - self.host_bytes["held head"]

    @property
    def unused(self) -> int:
        """Bytes of the device's budget that nothing uses."""
        return self.device_memory - sum(self.device_bytes.values())

    def seconds(
        self,
        tokens: int,
        link_gbps: float | None = None,
        disk_gbps: float | None = None,
        compute_tflops: float | None = None,
    ) -> float:
        """Returns the seconds of a pass: the slowest of link, disk, memory and arithmetic."""
        machine = Machine(
            link_gbps or self.link_gbps,
            self.memory_gbps,
            compute_tflops or self.compute_tflops,
            self.alone,
        )
        held = self.host_bytes.get("held experts", 0)
        return seconds_of_pass(
            self.shape, self.placement, tokens, machine, self.disk_bytes, disk_gbps, held
        )

    def predict(
        self,
        link_gbps: float | None = None,
        disk_gbps: float | None = None,
        batch: int | None = None,
        accepted: float = 1.0,
        compute_tflops: float | None = None,
    ) -> float:
        """Returns the generated tokens a second of all sequences together.

        Args:
            link_gbps: the speed of the link; default the plan's.
            disk_gbps: the speed of the disk, read at the same time; default as fast as the link.
            batch: sequences that decode at once; default the plan's.
            accepted: tokens a sequence gains in a pass; above 1 if drafts are verified.
        """
        batch = batch or self.batch
        tokens = batch * (self.verify_width if accepted > 1 else 1)
        return batch * accepted / self.seconds(tokens, link_gbps, disk_gbps, compute_tflops)

    def max_length(self, batch: int | None = None) -> int:
        """Returns how many tokens each of `batch` sequences may have in this plan's pages."""
        batch = batch or self.batch
        page, config = self.cache.page_size, self.cache
        if batch > config.max_sequences or (config.states and batch >= config.max_states):
            return 0
        most: int = self.cache.max_sequence_length
        for group, layers in enumerate(config.groups):
            # A text's first page is a staging page, of which each sequence has its own.
            each = config.num_pages(group) // batch + config.staged
            enough = layers.window and -(-(layers.window + config.rollback) // page) + 2
            if not enough or each < enough:
                most = min(most, each * page)
        return most

    def max_batch(self, length: int | None = None) -> int:
        """Returns how many sequences of `length` tokens this plan's pages hold at once."""
        length = length or self.length
        return largest(lambda n: self.max_length(n) >= length, 0, self.cache.max_sequences + 1)

    def recompute_or_restore(
        self, tokens: int, link_gbps: float | None = None
    ) -> Literal["recompute", "restore"]:
        """Returns the faster way back for a preempted sequence: compute it again, or restore it."""
        link = link_gbps or self.link_gbps
        whole, left = divmod(tokens, self.step_tokens)
        recompute = whole * self.seconds(self.step_tokens, link)
        recompute += self.seconds(left, link) if left else 0.0
        return "restore" if self._kept(tokens) / (1e9 * link) <= recompute else "recompute"

    def _kept(self, tokens: int) -> int:
        """Counts the bytes of K, V and the recurrent state of one sequence."""
        config, total = self.cache, self.cache.bytes_per_state
        for group, layers in enumerate(config.groups):
            held = min(tokens, (layers.window or tokens) + config.rollback)
            total += -(-held // config.page_size) * config.bytes_per_page(group)
        return total
