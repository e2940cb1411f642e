"""The arguments of a plan, and the cost of a placement of weights, item by item.

Every number of a plan comes from here, so the search compares the same numbers that a plan shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from pagedkv.config import DTYPE_BYTES, CacheConfig, StateLayer, needs_staging
from pagedkv.models import facts_of, paged_layers, state_tensors

from .model_shape import ModelShape
from .passes import channels_at_once, mixer_bytes
from .placement import Placement

RING_DEPTH = 2  # one slot computes while the next fills; measured, more slots gain nothing
# A CUDA context, and the code and handles that torch and its libraries load into it.
CONTEXT_BYTES = 512 << 20
# Bytes of a block of a streaming head: enough for the link to reach its rate.
HEAD_BLOCK = 32 << 20
# As in kernels/torch/buckets.py: bytes of rows that are gathered together.
BUCKET_BYTES = 8 << 20
# As in hf/latent.py.
EXPANDED_BYTES = 64 << 20


@dataclass(frozen=True)
class Given:
    """The sequences, memory and speeds that a plan is made for; sizes in bytes."""

    batch: int
    length: int
    device_memory: int
    host_memory: int | None
    link_gbps: float
    compute_tflops: float
    memory_gbps: float
    gpu: str | None
    ranks: int
    expert_gbps: float

    @property
    def alone(self) -> float:
        """The rate at which experts are read alone, as a share of the link's."""
        return self.expert_gbps / self.link_gbps


@dataclass(frozen=True)
class Asked(Given):
    """The arguments of `plan_memory`, checked."""

    page_size: int
    kv_dtype: str
    kv_format: str | tuple[str, str]
    step_tokens: int | None
    max_tokens: int | None
    growth_step: int | None
    cuda: bool
    pack_weights: bool | Literal["int8"]
    expert_slots: int | None
    least_slots: int

    @property
    def wanted(self) -> int:
        """Token slots that go before resident layers: those asked for, in whole pages."""
        if self.max_tokens:
            return pages(self.max_tokens, self.page_size)
        return self.batch * pages(self.length, self.page_size)


class Costs:
    """Counts the bytes of everything, for one model and one request."""

    def __init__(self, shape: ModelShape, asked: Asked) -> None:
        self.shape, self.asked = shape, asked
        self.c = shape.settings
        self.wide = DTYPE_BYTES[shape.dtype]

    def cache(self, step_tokens: int, max_tokens: int) -> CacheConfig:
        """Returns the pool of a plan: exactly its bytes are allocated for pages."""
        longest = self.c.max_position_embeddings or max_tokens
        step = self.asked.growth_step
        return replace(
            self._cache,
            max_tokens=max_tokens,
            growth_step=step and min(step, max_tokens),
            max_sequence_length=longest,
            max_step_tokens=step_tokens,
        )

    @cached_property
    def _cache(self) -> CacheConfig:
        batch = self.asked.batch
        windowed = any(kind.window for kind in self.c.kinds)
        staged = needs_staging(self.asked.kv_format)
        return CacheConfig(
            **paged_layers(self.c.kinds, self.c.shapes),
            max_tokens=self.asked.page_size,
            page_size=self.asked.page_size,
            dtype=self.asked.kv_dtype,
            kv_format=self.asked.kv_format,
            # Pools of sliding layers and of staging pages grow with this number. One sequence more
            # holds a shared prefix.
            max_sequences=batch + 1 if windowed or staged else max(256, batch + 1),
            states=tuple(StateLayer(x) for x in state_tensors(self.c, self.shape.dtype)),
            max_states=batch + 1,  # one for each sequence, and one for a shared prefix
        )

    @property
    def most_tokens(self) -> int:
        """The most token slots of a pool: with staging pages, slots have to count in 31 bits."""
        page = self.asked.page_size
        return 2**31 - page * (1 + self._cache.num_staging_pages())

    def streamed(self, placement: Placement) -> list[int]:
        """Lists the layers that pass through the ring."""
        return placement.streamed(len(self.shape.layers))

    def away(self, placement: Placement) -> list[int]:
        """Lists the layers that come through the ring, or whose experts come to slots."""
        experts = self.slotted(placement)
        streamed = set(self.streamed(placement))
        return [i for i, nbytes in enumerate(experts) if i in streamed or nbytes]

    def slotted(self, placement: Placement) -> Sequence[int]:
        """Counts the bytes of each layer's experts that come to slots of a card."""
        experts = self.shape.experts
        if experts is None or not placement.expert_slots or not experts.in_slots:
            return [0] * len(self.shape.layers)
        return experts.layers

    def layer(self, index: int, placement: Placement) -> int:
        """Counts the bytes of a layer that stream or stay with it, perhaps without experts."""
        return self.shape.layer(index, placement.expert_slots)

    @property
    def has_states(self) -> bool:
        """Whether layers keep a recurrent state."""
        return any(kind.state is not None for kind in self.c.kinds)

    @cached_property
    def _latent(self) -> bool:
        """Whether pages keep latents."""
        return bool(self.c.shapes[0].v_is_k)

    def slot(self, placement: Placement) -> int:
        """Counts the bytes of one slot of the ring; 0 if nothing streams."""
        layers = [self.layer(i, placement) for i in self.streamed(placement)]
        head = 0 if placement.head else min(self.shape.head_bytes, HEAD_BLOCK)
        return max([*layers, head], default=0)

    def weights(self, placement: Placement) -> dict[str, int]:
        """Counts the bytes of weights on the device."""
        shape = self.shape
        glue = shape.rest + (shape.embedding if placement.embedding else 0)
        glue += shape.head if placement.head else 0
        glue += shape.tables if placement.tables else 0
        return {
            "glue": glue,
            "resident layers": sum(self.layer(i, placement) for i in placement.resident),
            **self.experts(placement),
            "ring": RING_DEPTH * self.slot(placement),
            **self.packed(),
        }

    def experts(self, placement: Placement) -> dict[str, int]:
        """Counts the bytes of experts that stay, and those that a wide pass needs beside them."""
        experts, slots = self.shape.experts, placement.expert_slots
        if experts is None or not slots:
            return {}
        alone = self.asked.alone
        return {
            "expert slots": sum(slots * nbytes // experts.count for nbytes in experts.layers),
            "widest layer": experts.wide(placement.step_tokens, slots, alone, RING_DEPTH),
        }

    def packed(self) -> dict[str, int]:
        """Counts a second copy of the weights that a CPU packs for its products.

        Experts are not packed, so this is somewhat too much for a mixture.
        """
        shape, c = self.shape, self.c
        if not self.asked.pack_weights or shape.packed:
            return {}
        whole = shape.active
        if self.asked.pack_weights == "int8":  # without the head; 16 bits of scale for 32 weights
            whole = min(whole, c.vocab_size * c.hidden_size)
        return {"packed weights": self.wide * whole + (shape.active - whole) * 34 // 32}

    def device(self, placement: Placement, max_tokens: int) -> dict[str, int]:
        """Counts the bytes on the device, in the order of the table."""
        cache = self.cache(placement.step_tokens, max_tokens)
        return {
            "device context": CONTEXT_BYTES if self.asked.cuda else 0,
            **self.weights(placement),
            "KV pages": cache.nbytes,
            **self.states(cache),
            "activations": self.activations(placement),
            "workspace": self.workspace(placement, cache),
        }

    def activations(self, placement: Placement) -> int:
        """Counts the widest moment of one layer for a whole pass, and the logits of its rows."""
        c = self.c
        dim, kv = c.head_dim, c.num_key_value_heads * c.head_dim
        for shape in () if self._latent else self._cache.shapes:
            widest = max(shape.head_dim, shape.v_head_dim)
            dim, kv = max(dim, shape.head_dim), max(kv, shape.num_kv_heads * widest)
        q = c.num_attention_heads * dim
        # A token has the embedding, the layer's input, the residual and its norm. Beside these it
        # has q, k, v, the rotated q and k with temporaries and the output, or the channels behind
        # attention. tests/hf/test_planner.py measures it.
        widest = max(5 * q + 4 * kv, channels_at_once(c))
        token = self.wide * (4 * c.hidden_size + 2 * dim + widest)
        # Rows of a second embedding, which has a part for each layer: as looked up, and as added.
        by_layer = getattr(c, "hidden_size_per_layer_input", None) or 0
        token += self.wide * 2 * by_layer * c.num_hidden_layers
        # Norms compute in float32: the input and its square.
        token = max(token, (3 * self.wide + 8) * c.hidden_size)
        # Logits as computed, and once more in float32 for choosing tokens.
        logits = self.asked.batch * placement.verify_width * c.vocab_size * (self.wide + 4)
        widths = placement.step_tokens * token
        if self.has_states:
            widths = max(widths, mixer_bytes(c, self.wide, placement.step_tokens))
        return widths + logits

    def workspace(self, placement: Placement, cache: CacheConfig) -> int:
        """Counts page tables, a step's integers, and what attention holds beside the pages."""
        c, longest, tokens = self.c, cache.max_sequence_length, placement.step_tokens
        columns = -(-longest // cache.page_size)
        tables = 2 * 4 * len(cache.groups) * cache.max_sequences * columns
        integers = 64 * tokens
        if self.asked.cuda:
            rows = self.asked.batch * placement.verify_width
            attention = (
                4
                * rows
                * c.num_attention_heads
                * sum(
                    2 * most_parts(longest, shape.num_kv_heads) * (shape.v_head_dim + 1)
                    for shape in cache.shapes  # parts of a shared prefix, and of the rest
                )
            )
        else:
            # Rows are gathered, and decoded on the way.
            slot = max(shape.elements for shape in cache.shapes) * DTYPE_BYTES[cache.dtype]
            attention = max(BUCKET_BYTES, pages(longest, cache.page_size) * slot)
            scores = min(tokens, longest) * longest
            attention += scores * self.wide  # a chunk's mask
            facts, terms = facts_of(c.model_type), ("attn_logit_softcapping", "rel_extent")
            told = any(getattr(c, name, None) for name in terms)
            if told or facts.sinks or facts.written:
                attention += 3 * 4 * c.num_attention_heads * scores  # explicit products
        if self._latent:  # K and V made of a block of latents
            token = c.num_attention_heads * (c.head_dim + c.v_head_dim) * self.wide
            attention += min(EXPANDED_BYTES, pages(longest, cache.page_size) * token)
        unpacked = 0
        if self.shape.packed:  # one matrix at a time, in the dtype of its product
            size = max(c.intermediate_size, c.num_attention_heads * c.head_dim)
            unpacked = self.wide * c.hidden_size * size
        return tables + integers + attention + unpacked

    def states(self, cache: CacheConfig) -> dict[str, int]:
        """Counts state slots, and copies of a pass: its rows' old states and their new ones."""
        count = cache.max_states + 2 * self.asked.batch
        return {"states": count * cache.bytes_per_state} if cache.states else {}

    def table_rows(self, placement: Placement) -> int:
        """Counts the bytes of rows that the tokens of a pass look up in larger tables."""
        c = self.c
        by_layer = getattr(c, "hidden_size_per_layer_input", None) or 0
        grams = len(getattr(c, "ple_layer_ids", None) or ())
        width = by_layer * c.num_hidden_layers
        width += grams * (getattr(c, "ple_embed_dim", None) or c.hidden_size)
        return placement.step_tokens * width * self.wide

    def host(
        self, placement: Placement, held: Sequence[int], head_held: bool, embedding_held: bool
    ) -> dict[str, int]:
        """Counts the bytes in host memory: weights held there, and buffers for the others."""
        streamed, slotted = set(self.streamed(placement)), self.slotted(placement)
        reads = bool(streamed - set(held)) or not (placement.head or head_held)
        pinned = sum(self.layer(i, placement) for i in held if i in streamed)
        rows = placement.step_tokens * self.c.hidden_size * self.wide
        passing = {}
        if widest := max(slotted):
            # Room for the experts that a layer lacks, and for all of two layers in wider passes.
            assert self.shape.experts is not None
            through = placement.expert_slots * widest // self.shape.experts.count
            through += RING_DEPTH * widest
            all_held = sum(slotted[i] for i in held) == sum(slotted)
            passing = {
                "held experts": sum(slotted[i] for i in held),
                "staging of experts": 0 if all_held else through,
            }
        return {
            "held layers": pinned,
            "held head": self.shape.head_bytes if head_held else 0,
            # One that is tied to the head is held with it.
            "held embedding": self.shape.embedding if embedding_held and self.shape.head else 0,
            # On a CPU, files are read directly into the ring.
            "staging": RING_DEPTH * self.slot(placement) if reads and self.asked.cuda else 0,
            **passing,
            "embedding rows": (0 if placement.embedding else rows)
            + (0 if placement.tables or not self.shape.tables else self.table_rows(placement)),
        }


def spread(chosen: int, of: int) -> list[int]:
    """Returns `chosen` indices below `of`, evenly spread, so that streamed layers are, too."""
    return [i for i in range(of) if (i + 1) * chosen // of > i * chosen // of]


def most_parts(length: int, num_kv_heads: int) -> int:
    """Returns the most parts into which kernels cut a row, as in kernels/triton/decode.py."""
    most = min(max(32, 256 // num_kv_heads), 128)
    shares = min(max(8, 64 // num_kv_heads), 16)
    return min(most, max(min(shares, -(-length // 256)), -(-length // 1024)))


def pages(tokens: int, page_size: int) -> int:
    """Rounds tokens up to whole pages."""
    return -(-tokens // page_size) * page_size
