"""Computes the pages and bytes of a cache, and the formats of its pages, from its fields."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from operator import mul
from typing import Self

from pagedkv.kernels.formats import DENSE, Format
from pagedkv.models import DTYPE_BYTES, KVShape
from pagedkv.models.kinds import Sight

from .fields import Fields
from .formats import formats_of

BOOKS_BYTES = 48  # per page: references, slots, versions, stamps, columns; ids come on top


class Sizes(Fields):
    """Sizes that follow from the checked fields of a cache."""

    def part(self, layers: Collection[int] | None) -> Self:
        """Returns the part of this cache for some layers: the same groups with fewer layers.

        Args:
            layers: the layers; None for all.
        """
        if layers is None:
            return self
        groups = (tuple(x for x in group.layers if x in layers) for group in self.groups)
        fewer = tuple(replace(group, layers=mine) for group, mine in zip(self.groups, groups))
        part = copy(self)
        for name in ("group_of", "larger_than_int8"):  # computed from all layers
            vars(part).pop(name, None)
        vars(part)["groups"] = fewer  # a group may be empty here, which a cache's own may not
        return part

    @property
    def budget_pages(self) -> int | None:
        """Whole pages of a sequence that stay in each group."""
        return None if self.budget is None else -(-self.budget // self.page_size)

    def num_pages(self, group: int = 0) -> int:
        """Counts the pages of a group's pool, without staging pages."""
        full = -(-self.max_tokens // self.page_size)
        if self.staged:  # the first page of a text is always a staging page
            texts = 1 if self.budget_pages is None else full // self.budget_pages
            full = max(1, full - min(max(texts, 1), self.max_sequences))
        return min(full, self._window_pages(group) or full)

    def pages_at_once(self, group: int = 0) -> int:
        """Counts pages with which a group's pool begins and by which it grows; all if fixed."""
        if self.growth_step is None:
            return self.num_pages(group)
        return min(-(-self.growth_step // self.page_size), self.num_pages(group))

    def reserves(self, group: int) -> bool:
        """Whether this group can run out of pages, so that it needs reservations.

        A window group whose pool holds every sequence's window plus one step cannot run out.
        """
        enough = self._window_pages(group)
        return enough is None or enough > self.num_pages(group)

    def _window_pages(self, group: int) -> int | None:
        window = self.groups[group].window
        if window is None:
            return None
        # A window that starts inside a page touches one page more, and so does a step's end.
        held = -(-(window + self.rollback) // self.page_size) + 2
        return self.max_sequences * held + -(-self.max_step_tokens // self.page_size)

    @cached_property
    def shapes(self) -> tuple[KVShape, ...]:
        """The shape of K and V in every group."""
        shapes = []
        for group in self.groups:
            dim = group.head_dim or self.head_dim
            heads = group.num_kv_heads or self.num_kv_heads
            shapes.append(KVShape(heads, dim, group.v_head_dim or dim, group.v_is_k))
        return tuple(shapes)

    @cached_property
    def formats(self) -> tuple[Format, Format]:
        """The formats of K and V pages."""
        return formats_of(self.kv_format)

    @property
    def dense(self) -> bool:
        """Whether K and V are kept in `dtype`."""
        return all(format.dense for format in self.formats)

    @property
    def staged(self) -> bool:
        """Whether pages are written in `dtype` first and coded once they are complete."""
        return any(format.staged for format in self.formats)

    def num_staging_pages(self, group: int = 0) -> int:
        """Counts staging pages of a group: two a sequence, for its first page and the newest.

        A step that completes a sequence's newest page and begins another holds both until it is
        committed; half of all sequences can do so at once.
        """
        return (5 * self.max_sequences + 1) // 2 if self.staged else 0

    @property
    def pages_read(self) -> int:
        """How many pages of a text a decoding query reads; 0 for all."""
        return (self.read_tokens or 0) // self.page_size

    def keeps_bounds(self, group: int) -> bool:
        """Whether a group keeps key bounds beside its pages; scales of K may contain them."""
        chosen = self.read_tokens and self.groups[group].window is None
        return bool(chosen) and not self.formats[0].says_bounds

    def num_host_pages(self, group: int = 0) -> list[int]:
        """Counts host pages of a group; with staging pages also how many of these there are."""
        pages = -(-self.host_tokens // self.page_size)
        return [pages, min(pages, self.num_staging_pages(group))] if self.staged else [pages]

    def bytes_per_page(self, group: int = 0) -> int:
        """Returns K and V bytes of a page over the layers of its group, with scales and bounds."""
        shape = self.shapes[group]
        page = self._head_bytes(shape, self.formats)
        page += 4 * shape.head_dim * self.keeps_bounds(group)
        return page * shape.num_kv_heads * len(self.groups[group].layers)

    def bytes_per_staging_page(self, group: int = 0) -> int:
        """Returns K and V bytes of one staging page over the layers of its group."""
        shape = self.shapes[group]
        page = self._head_bytes(shape, (DENSE, DENSE))
        return page * shape.num_kv_heads * len(self.groups[group].layers)

    def _head_bytes(self, shape: KVShape, formats: tuple[Format, Format]) -> int:
        """Returns K and V bytes of one page and head."""
        sides = [(formats[0], shape.head_dim)]
        if not shape.v_is_k:
            sides.append((formats[1], shape.v_head_dim))
        wide = DTYPE_BYTES[self.dtype]
        return sum(format.nbytes(self.page_size, dim, wide) for format, dim in sides)

    @cached_property
    def group_of(self) -> dict[int, int]:
        """The group of every layer."""
        return {layer: g for g, group in enumerate(self.groups) for layer in group.layers}

    @property
    def windows(self) -> list[int | None]:
        """The window of every layer."""
        return [sight.window for sight in self.sights]

    @property
    def sights(self) -> list[Sight]:
        """How far the queries of every layer see."""
        groups = (self.groups[self.group_of[layer]] for layer in range(self.num_layers))
        return [Sight(group.window, group.chunked) for group in groups]

    @property
    def bytes_per_token(self) -> int:
        """K and V bytes of one token over all layers, without staging pages."""
        pages = sum(self.bytes_per_page(group) for group in range(len(self.groups)))
        return -(-pages // self.page_size)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one state slot over all state layers."""
        return sum(layer.nbytes for layer in self.states)

    @property
    def nbytes(self) -> int:
        """K and V bytes of all pools at their largest, with staging pages and static scales."""
        return self._nbytes([self.num_pages(g) for g in range(len(self.groups))])

    @property
    def nbytes_at_once(self) -> int:
        """K and V bytes of all pools as they begin, with staging pages and static scales."""
        return self._nbytes([self.pages_at_once(g) for g in range(len(self.groups))])

    @property
    def nbytes_of_books(self) -> int:
        """A lower bound of the host bytes of page tables and of the records of pages."""
        groups = range(len(self.groups))
        pages = [self.num_pages(g) + self.num_staging_pages(g) for g in groups]
        columns = -(-self.max_sequence_length // self.page_size)
        if not any(group.window for group in self.groups):
            columns = min(columns, max(pages))
        tables = 8 * len(pages) * self.max_sequences * columns
        return tables + sum(pages) * (BOOKS_BYTES + 4 * self.page_size)

    @property
    def nbytes_of_scales(self) -> int:
        """Bytes of static scales, which are one for each head of a layer."""
        static = sum(format.static for format in self.formats)
        quads = (-(-shape.num_kv_heads // 4) for shape in self.shapes)
        layers = (len(group.layers) for group in self.groups)
        return 16 * static * sum(map(mul, layers, quads))

    def _nbytes(self, pages: Sequence[int]) -> int:
        total = self.nbytes_of_scales
        for g, count in enumerate(pages):
            total += count * self.bytes_per_page(g)
            total += self.num_staging_pages(g) * self.bytes_per_staging_page(g)
        return total

    @cached_property
    def larger_than_int8(self) -> str:
        """A sentence if int8 would take less memory because of staging pages; else empty.

        A difference of less than 4 MiB is not mentioned.
        """
        if not self.staged:
            return ""
        int8, most = replace(self, kv_format="int8").nbytes, self.max_sequences
        if self.nbytes - int8 < 4 << 20:
            return ""
        fitting = [n for n in range(1, most) if replace(self, max_sequences=n).nbytes < int8]
        fewer = f"max_sequences={fitting[-1]}, or int8," if fitting else "int8"
        names = " and ".join(dict.fromkeys(self.kv_format))
        return (
            f"{names} takes {self.nbytes / 2**20:,.1f} MiB here, int8 {int8 / 2**20:,.1f}: each of "
            f"{most} sequences has staging pages in {self.dtype}; {fewer} takes less"
        )
