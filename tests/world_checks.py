"""Checks that hold the sequences of a `World`, and its cache, to what must be true of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from pagedkv import CacheConfig, OutOfPagesError, PagedKVCache, attend_again, paged_attention
from tests.cases import SLACK, can_run_out, pages_for, pages_of
from tests.contents import hash_on, kv_of_hashes, roots


@dataclass
class Text:
    """A sequence as it must be."""

    salt: bytes
    limit: int | None  # reservation in tokens
    dropped: list[int]  # leading pages each group no longer has
    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)  # prompt ids not committed yet
    # The first `known` tokens were committed with ids after the last clear_prefixes: they may be
    # found; of these the first `sure` ones must be, as long as the sequence lives. `stale` texts
    # had tokens when prefixes were cleared. What comes after need not be findable for texts that
    # were alive then, nor for those once fed without ids: these are `lost`.
    known: int = 0
    sure: int = 0
    stale: bool = False
    lost: bool = False
    void: bool = False  # a truncate may have given up the reservation
    evicted: dict[int, set[int]] = field(default_factory=dict)  # by group: pages of the text
    bare: dict[int, set[int]] = field(default_factory=dict)  # by layer: what it did not write
    told: bool = True  # ids were told, and prefixes not cleared since
    state: int = 0  # a number for the recurrent state; 0: none
    marks: dict[int, int] = field(default_factory=dict)  # kept states, by length

    def held(self, group: int, page_size: int) -> list[int]:
        """Positions that a group must hold."""
        first, gone = self.dropped[group] * page_size, self.evicted.get(group, ())
        return [i for i in range(first, len(self.tokens)) if i // page_size not in gone]

    def after(self, ids: Sequence[int]) -> list[int]:
        return self.hashes + hash_on(self.hashes[-1] if self.hashes else roots(self.salt), ids)

    def cut(self, n: int) -> None:
        del self.tokens[n:], self.hashes[n:]
        self.known, self.sure = min(self.known, n), min(self.sure, n)
        self.bare = {layer: {i for i in gone if i < n} for layer, gone in self.bare.items()}
        if n == 0:
            self.stale = False
            self.evicted = {}

    def copy(self) -> Text:
        lists = {name: list(getattr(self, name)) for name in ("tokens", "hashes", "pending")}
        return Text(
            self.salt, None, list(self.dropped), **lists,
            known=self.known, sure=self.sure, stale=self.stale, lost=self.lost,
            evicted={group: set(gone) for group, gone in self.evicted.items()},
            bare={layer: set(gone) for layer, gone in self.bare.items()},
            told=self.told, state=self.state, marks=dict(self.marks),
        )  # fmt: skip


def without_growth(stats: Any) -> Any:
    """Returns the stats that a failed call leaves alone: it may have let the pool grow."""
    return replace(stats, pages=0, free=0, bytes=0, growths=0)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


class Checks:
    """Compares a `World` with its cache; its operations fill in the expected values."""

    config: CacheConfig
    cache: PagedKVCache
    texts: dict[int, Text]
    computed: int
    reused: int
    everything: bool
    in_step: set[int]
    away: set[int]  # offloaded
    extra: int
    injected: bool
    quiet: bool
    ran_out: int
    turn: int
    states: Any  # `StateBooks`, where there are states

    def snapshot(self) -> tuple[Any, ...]:
        lengths = {seq: self.cache.length(seq) for seq in self.texts}
        states = None if self.states is None else self.states.snapshot()
        return self.cache.stats(), lengths, self.computed, self.reused, states

    def unchanged(self, before: tuple[Any, ...]) -> None:
        after = self.snapshot()
        if self.states is not None:  # for want of a slot, after the pool grew
            before, after = ((without_growth(x[0]), *x[1:]) for x in (before, after))
        assert after == before, "a call that failed changed something"
        self.verify(all_of_them=True)

    def restored(self, before: tuple[Any, ...]) -> None:
        """After abort: as before, but cached pages that were reused do not come back."""
        after = self.snapshot()
        assert after[1:4] == before[1:4]  # checkpoints that gave way do not come back either
        names = ("shared", "tokens", "tokens_computed", "tokens_reused")
        for name in (*names, "promised") if self.config.policy is None else names:
            assert getattr(after[0], name) == getattr(before[0], name), name
        # What room was made for stays evicted.
        assert after[0].live == before[0].live - (after[0].evicted - before[0].evicted)
        assert after[0].cached <= before[0].cached
        self.verify(all_of_them=True)

    def refused(
        self,
        kind: type[Exception] | tuple[type[Exception], ...],
        before: tuple[Any, ...],
        call: Any,
        *args: Any,
    ) -> None:
        try:
            call(*args)
        except kind:
            return self.unchanged(before)
        raise AssertionError(f"{call.__name__}{args}: expected {kind}")

    def exhausted(
        self,
        error: OutOfPagesError,
        before: tuple[Any, ...],
        joining: list[tuple[int, int]],
        growing: dict[int, int] | None = None,
        slots: int = 0,
        asking: Sequence[int] = (),
    ) -> None:
        """Nothing changed, and pages were really short: not even all disjoint would it fit.

        slots, asking: slots of states that the call needs, and the sequences that ask for them.
        """
        self.unchanged(before)
        self.ran_out += 1
        if self.injected:
            return
        if "state slots" in str(error):
            return self.states.short(error, slots, asking, len(self.in_step))
        assert error.pages_needed > error.pages_free >= 0
        grown = growing or {}
        here = [(s, t) for s, t in self.texts.items() if s not in self.away]
        demands = joining + [(len(t.tokens) + grown.get(s, 0), t.limit or 0) for s, t in here]
        spare = 1 + bool(self.in_step)
        wanted = sum(pages_for(max(d), self.config) + spare for d in demands)
        wanted += self.extra
        if self.config.staged and 5 * len(demands) > 2 * self.config.num_staging_pages():
            return  # half of the sequences, and those that were cut, need one more at once
        assert any(
            can_run_out(self.config, g) and wanted > self.config.num_pages(g)
            for g in range(len(self.config.groups))
        ), f"there was room: {error}"

    def note_evictions(self) -> None:
        """Learns which pages are gone, and that they were such as may go."""
        if self.config.policy is None:
            return
        P, recent = self.config.page_size, self.config.policy.recent
        for seq, text in self.texts.items():
            for group, info in enumerate(self.config.groups if seq not in self.away else ()):
                stored = self.cache.positions(seq, info.layers[0]).tolist()
                gone = set(text.held(group, P)) - set(stored)
                pages = {position // P for position in gone}
                assert len(gone) == len(pages) * P, "a page was evicted before it was full"
                assert all((page + 1) * P <= len(text.tokens) - recent for page in pages)
                assert not gone or info.window is None
                if pages:
                    text.evicted.setdefault(group, set()).update(pages)
                    text.stale = text.lost = True  # what follows is not to be found

    def evicting_would_not_do(self, error: OutOfPagesError) -> bool:
        """Whether in some group all that may go, and what is free, is less than was needed."""
        if self.config.policy is None or "staging" in str(error) or "state slots" in str(error):
            return True
        tables, P = self.cache._tables, self.config.page_size
        least = 1 << 30
        for group, info in enumerate(self.config.groups):
            spare = 0
            for row in tables.live_rows().tolist() if info.window is None else ():
                length = int(tables.lengths[row])
                whole = length // P - int(tables.evicted[group, row])
                pages = tables.tables[group, row, :whole]
                newest = (length - self.config.policy.recent) // P
                columns = tables.column_of[pages]
                may_go = (tables.pool.refcount[pages] == 1) & (columns < newest)
                may_go &= columns * P >= getattr(self.config.policy, "tokens", 0)  # of sinks
                may_go &= pages < tables.first_staging[group]
                limit = int(tables.reservations.limit[row])
                held = int((pages < tables.first_staging[group]).sum())
                spare += min(int(may_go.sum()), max(0, held - limit) if limit else whole)
            least = min(least, spare)
        return error.pages_free + least < error.pages_needed

    def verify(self, all_of_them: bool = False) -> None:
        """Checks what must hold at any time, seen from outside."""
        if self.quiet:
            return
        cache, stats = self.cache, self.cache.stats()
        cache.check()
        groups = range(len(self.config.groups))
        assert stats.live + stats.cached + stats.free == stats.pages
        assert stats.reserved == sum(pages_of(self.config, g) for g in groups) >= stats.pages
        at_once = sum(
            self.config.pages_at_once(g) + self.config.num_staging_pages(g) for g in groups
        )
        assert stats.pages >= at_once
        assert self.config.growth_step or stats.pages == at_once
        assert 0 <= stats.promised <= stats.cached + stats.free
        assert 0 <= stats.shared <= stats.live
        assert stats.sequences == len(self.texts)
        assert stats.tokens == sum(len(text.tokens) for text in self.texts.values())
        assert (stats.tokens_computed, stats.tokens_reused) == (self.computed, self.reused)
        P, entries, distinct = self.config.page_size, 0, 0
        for g in groups:
            here = [t for s, t in self.texts.items() if s not in self.away]
            held = [(t, t.held(g, P)) for t in here]
            entries += sum(pages_for(len(places), self.config) for _, places in held)
            distinct += len({t.hashes[i] for t, places in held for i in places})
        if not self.in_step:
            assert stats.live <= entries, "a page is held that no sequence needs"
        assert stats.live * P - stats.wasted_slots >= 0
        assert stats.live * P >= distinct
        chosen = sorted(self.texts)
        if not (self.everything or all_of_them) and chosen:
            chosen = [chosen[self.turn % len(chosen)]]
            self.turn += 1
        if self.states is not None and not self.in_step:
            self.states.verify()
        for seq in chosen:
            self.verify_contents(seq)

    def verify_contents(self, seq: int) -> None:
        text, P = self.texts[seq], self.config.page_size
        assert self.cache.length(seq) == len(text.tokens)
        assert self.cache.uncached(seq).tolist() == text.pending
        if seq in self.away:
            return
        if self.states is not None:
            self.states.verify_contents(seq)
        for group, info in enumerate(self.config.groups):
            places = text.held(group, P)
            held = [text.hashes[i] for i in places]
            for layer in info.layers:
                assert self.cache.positions(seq, layer).tolist() == places
                actual = [x.cpu() for x in self.cache.gather(seq, layer)]
                expected = kv_of_hashes(held, layer, self.config)
                for name, x, y in zip("kv", actual, expected, strict=True):
                    assert x.shape == y.shape, (seq, layer, name, x.shape, y.shape)
                    slack = SLACK[self.config.kv_format[name == "v"]]
                    wrong = f"sequence {seq}, layer {layer}: wrong {name}"
                    if gone := text.bare.get(layer):
                        there = [i for i, place in enumerate(places) if place not in gone]
                        x, y = x[there], y[there]
                    assert torch.equal(x, y) or ((x - y).abs() <= slack).all(), wrong
                    if self.config.staged and places[:1] == [0]:
                        assert torch.equal(x[:P], y[:P]), f"{wrong} in the first page"

    def verify_step(self, step: Any, seqs: list[int], news: list[list[int]], mode: str) -> None:
        P = self.config.page_size
        starts = [len(self.texts[s].tokens) for s in seqs]
        sizes = list(map(len, news))
        ends = [a + b for a, b in zip(starts, sizes, strict=True)]
        assert list(step.seqs) == seqs
        assert step.num_new.tolist() == sizes
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        assert step.query_start_loc.tolist() == bounds.tolist()
        assert step.last_rows.tolist() == (bounds[1:] - 1).tolist()
        positions = [p for a, b in zip(starts, ends, strict=True) for p in range(a, b)]
        assert step.positions.tolist() == positions
        if mode in ("tokens", "uncached"):
            assert step.tokens.tolist() == list(chain(*news))
        for group in range(len(self.config.groups)):
            table, slots = (x(group).cpu().numpy() for x in (step.page_table, step.slots))
            gone = [len(self.texts[s].evicted.get(group, ())) for s in seqs]
            stored = [end - P * pages for end, pages in zip(ends, gone, strict=True)]
            assert step.kv_lens(group).tolist() == stored
            assert step.kv_lens_of(group).tolist() == stored
            written = slots[slots >= 0]
            assert np.unique(written).size == written.size, "two rows write one slot"
            rows = np.repeat(np.arange(len(seqs)), sizes)
            at = np.asarray(positions) - P * np.asarray(gone)[rows]
            place = table[rows, at // P].astype(np.int64) * P + at % P
            assert ((slots == place) | (slots == -1)).all()
            if self.config.staged:
                staging = table[rows, at // P] >= self.config.num_pages(group)
                first = np.asarray(positions) // P * P  # of its page
                complete = (first > 0) & (first + P <= np.repeat(ends, sizes))
                complete &= first >= np.repeat(starts, sizes)
                assert (staging == ~complete)[slots >= 0].all()
                assert (slots[complete] == -1).all()
            assert mode != "count" or all(
                (slots[bounds[i] : bounds[i + 1]] >= 0).all()
                for i, s in enumerate(seqs)
                if not self.texts[s].pending and not self.config.staged
            ), "a slot left unwritten without knowing the id"
            indptr, indices, last = (x.tolist() for x in step.csr(group))
            for b, seq in enumerate(seqs):
                first, used = self.texts[seq].dropped[group], pages_for(stored[b], self.config)
                assert (table[b, :first] == -1).all()
                assert (table[b, first:used] >= 0).all()
                assert (table[b, first:used] < pages_of(self.config, group)).all()
                assert indices[indptr[b] : indptr[b + 1]] == table[b, first:used].tolist()
                assert last[b] == (ends[b] - 1) % P + 1

    def attend(
        self, step: Any, layer: int, k: Any, v: Any, seqs: list[int], news: list[list[int]]
    ) -> None:
        """Writes a layer and attends, twice and for some queries alone; all comes to the same."""
        heads, group = 2 * k.shape[1], self.config.group_of[layer]
        drawn = torch.Generator().manual_seed(len(k))
        q = (0.1 * torch.randn(len(k), heads, k.shape[2], generator=drawn)).to(k.dtype)
        out = paged_attention(q, k, v, step, layer).float()
        near = {"rtol": 0, "atol": 1e-3 if k.dtype == torch.float32 else 0.1}
        torch.testing.assert_close(attend_again(q, step, layer).float(), out, **near)
        sizes = [len(new) for new in news]
        counts = [(size + place) % (size + 1) for place, size in enumerate(sizes)]
        counts[-1] = counts[-1] or 1
        last = [
            end - i
            for end, n in zip(np.cumsum(sizes), counts, strict=True)
            for i in range(n, 0, -1)
        ]
        again = attend_again(q[last], step, layer, num_queries=counts).float()
        torch.testing.assert_close(again, out[last], **near)
        if not self.config.dense:
            return
        at, P, window = 0, self.config.page_size, self.config.groups[group].window
        for seq, new in zip(seqs, news, strict=True):
            text, hashes = self.texts[seq], self.texts[seq].after(new)
            places = text.held(group, P) + list(range(len(text.tokens), len(hashes)))
            keys, values = kv_of_hashes([hashes[i] for i in places], layer, self.config)
            keys, values = (x.float().repeat_interleave(2, 1) for x in (keys, values))
            away = torch.arange(len(text.tokens), len(hashes))[:, None] - torch.tensor(places)
            hidden = (away < 0) | (away >= (window or 1 << 30))
            scores = torch.einsum("thd,shd->hts", q[at : at + len(new)].float(), keys)
            weights = (scores * k.shape[2] ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1)
            expected = torch.einsum("hts,shd->thd", weights, values)
            torch.testing.assert_close(out[at : at + len(new)], expected, **near)
            at += len(new)
