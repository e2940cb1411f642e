"""What the cache's tests share: recognisable contents, small configurations, and a model.

Keys and values are a pure function of (salt, tokens up to and including their own, layer, head).
Sharing a page between equal prefixes is then legal, and every other way to end up with a wrong page
shows as wrong contents. `World` drives a `PagedKVCache` and a model of lists side by side.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch

from pagedkv import CacheConfig, LayerGroup, OutOfPagesError, PagedKVCache, write_kv
from pagedkv.errors import (
    HostMemoryError,
    OffloadedError,
    OpenStepError,
    SequenceTooLongError,
    TooManySequencesError,
)

WORD = (1 << 64) - 1
SALTS = (b"", b"other tenant")


# ------------------------------------------------------------------ contents


def roots(salt: bytes) -> int:
    return int.from_bytes(salt.ljust(8, b"\x5a")[:8], "little") ^ len(salt)


def hash_on(before: int, tokens: Iterable[int]) -> list[int]:
    """Hashes of a text's prefixes that end in each of `tokens`; `before` is the last one so far."""
    hashes = []
    for token in tokens:
        before = ((before ^ (before >> 29)) * 0x9E3779B97F4A7C15 + 2 * int(token) + 1) & WORD
        hashes.append(before)
    return hashes


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def kv_of_hashes(
    hashes: Sequence[int], layer: int, config: CacheConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[n, G, D]` of the tokens with these prefix hashes.

    Eight significant bits a number, so that every dtype holds them exactly.
    """
    shape = (2, len(hashes), config.num_kv_heads, config.head_dim)
    size = config.num_kv_heads * config.head_dim
    place = _mix(np.arange(2 * size, dtype=np.uint64) + np.uint64((layer + 1) << 32))
    rows = np.asarray(hashes, dtype=np.uint64)
    bits = _mix(rows[None, :, None] + place.reshape(2, 1, size)) >> np.uint64(56)
    numbers = (bits.astype(np.float32) - 128) / 16
    k, v = torch.from_numpy(numbers.reshape(shape)).to(getattr(torch, config.dtype))
    return k, v


def kv_of(
    tokens: Sequence[int], layer: int, config: CacheConfig, salt: bytes = b""
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[n, G, D]` of a whole text in one layer."""
    return kv_of_hashes(hash_on(roots(salt), tokens), layer, config)


def write_step(
    cache: PagedKVCache,
    step: Any,
    texts: Sequence[Sequence[int]],
    salt: bytes = b"",
    layers: Iterable[int] | None = None,
) -> None:
    """Writes every layer's K and V of a step.

    texts: each sequence's whole text, the new tokens included.
    """
    for layer in range(cache.config.num_layers) if layers is None else layers:
        parts = [
            [x[len(text) - new :] for x in kv_of(text, layer, cache.config, salt)]
            for text, new in zip(texts, step.num_new.tolist(), strict=True)
        ]
        write_kv(*(torch.cat(x) for x in zip(*parts, strict=True)), step, layer)


def advance(
    cache: PagedKVCache, texts: dict[int, Sequence[int]], salt: bytes = b"", **commit: Any
) -> None:
    """One step in which each sequence grows to the text given, ids and all."""
    new = [list(text[cache.length(seq) :]) for seq, text in texts.items()]
    step = cache.prepare(list(texts), tokens=new)
    write_step(cache, step, list(texts.values()), salt)
    cache.commit(step, **commit)


def start(
    cache: PagedKVCache, text: Sequence[int], salt: bytes = b"", max_tokens: int | None = None
) -> int:
    """A sequence with this prompt, computed and committed."""
    seq = cache.add(text, salt=salt, max_tokens=max_tokens)
    advance(cache, {seq: text}, salt)
    return seq


def assert_contents(
    cache: PagedKVCache, seq: int, tokens: Sequence[int], salt: bytes = b""
) -> None:
    """Every layer of a sequence holds what `kv_of` says (the last `stored` tokens of it)."""
    assert cache.length(seq) == len(tokens)
    for layer in range(cache.config.num_layers):
        for actual, expected in zip(
            cache.gather(seq, layer), kv_of(tokens, layer, cache.config, salt), strict=True
        ):
            stored = actual.shape[0]
            assert stored <= len(tokens)
            assert torch.equal(actual, expected[len(tokens) - stored :]), (seq, layer)


# ------------------------------------------------------------------ configurations


def one_group(**fields: Any) -> CacheConfig:
    base = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "dtype": "float32"}
    return CacheConfig(**{**base, "max_tokens": 64, "page_size": 4, "max_sequences": 8, **fields})


def window_only(window: int = 6, **fields: Any) -> CacheConfig:
    return one_group(groups=(LayerGroup((0, 1), window),), **fields)


def two_groups(window: int = 6, **fields: Any) -> CacheConfig:
    """Layers 0 and 2 see everything, layer 1 a window."""
    return one_group(num_layers=3, groups=(LayerGroup((0, 2)), LayerGroup((1,), window)), **fields)


def in_few_bits(kv_format: str | tuple[str, str], **fields: Any) -> CacheConfig:
    return one_group(**{"head_dim": 32, "page_size": 16, **fields, "kv_format": kv_format})


@dataclass(frozen=True)
class Case:
    name: str
    config: CacheConfig
    debug: bool


CASES = [
    Case("full-P1", one_group(page_size=1, max_tokens=24, max_sequences=6), True),
    Case("full-P3", one_group(page_size=3, max_tokens=30, max_sequences=6), True),
    Case("full-P4", one_group(page_size=4, max_tokens=40, max_sequences=6, rollback=4), False),
    Case("full-P4-bf16", one_group(max_tokens=64, max_step_tokens=20, dtype="bfloat16"), True),
    Case("full-P16", one_group(page_size=16, max_tokens=112, max_sequences=6), False),
    Case("window-P1", window_only(3, page_size=1, max_tokens=24, rollback=4), True),
    Case("window-P3", window_only(5, page_size=3, max_tokens=36, rollback=4), False),
    Case("window-P4", window_only(6, page_size=4, max_tokens=48), True),
    # The pool of this one is sized by windows: it cannot run out.
    Case(
        "window-P4-roomy",
        window_only(6, max_tokens=160, max_sequences=3, max_step_tokens=16, rollback=4),
        True,
    ),
    Case("two-P3-W1", two_groups(1, page_size=3, max_tokens=36), True),
    Case("two-P4", two_groups(6, page_size=4, max_tokens=40), False),
    Case("two-P4-rollback", two_groups(5, page_size=4, max_tokens=40, rollback=4), True),
    Case(
        "two-P4-roomy-window",
        two_groups(4, max_tokens=96, max_sequences=4, max_step_tokens=12),
        True,
    ),
    Case("grow-P1", one_group(page_size=1, max_tokens=24, growth_step=3, max_sequences=6), True),
    # Pages of the size that the system's pages mostly have.
    Case("grow-P4", one_group(max_tokens=64, growth_step=8, head_dim=128, rollback=4), True),
    Case("grow-two-P4", two_groups(5, max_tokens=40, growth_step=6, rollback=4), True),
    Case(
        "grow-two-P4-roomy-window",
        two_groups(4, max_tokens=96, growth_step=16, max_sequences=4, max_step_tokens=12),
        False,
    ),
    Case(
        "grow-int4-P16", in_few_bits("int4", max_tokens=128, growth_step=20, max_sequences=5), True
    ),
    Case("host-P3", one_group(page_size=3, max_tokens=30, host_tokens=15, max_sequences=6), True),
    Case("host-two-P4", two_groups(5, max_tokens=40, host_tokens=24, rollback=4), True),
    Case("two-P16", two_groups(20, page_size=16, max_tokens=112, rollback=4), False),
    Case("int8-P4", one_group(head_dim=16, max_tokens=64, kv_format="int8"), True),
    Case("fp8-P3-bf16", in_few_bits("fp8", page_size=3, max_tokens=36, dtype="bfloat16"), True),
    Case("int4-P16", in_few_bits("int4", max_tokens=80, max_sequences=5), True),
    Case("int8-int4-P16", in_few_bits(("int8", "int4"), max_tokens=128, rollback=4), False),
    Case(
        "two-int4-P16",
        two_groups(
            20, head_dim=32, page_size=16, max_tokens=112, max_sequences=6, kv_format="int4"
        ),
        True,
    ),
]

# How far an element of `kv_of`, at most 8 in size, may be from what is stored. 4-bit pages that
# were cut and written on are coded again, and drift by half a step each time.
SLACK = {"dense": 0.0, "int8": 0.04, "fp8": 0.5, "int4": 2.2}


def pages_for(tokens: int, config: CacheConfig) -> int:
    return -(-tokens // config.page_size)


def pages_of(config: CacheConfig, group: int) -> int:
    """Pages of a group, staging pages included."""
    return config.num_pages(group) + config.num_staging_pages(group)


def can_run_out(config: CacheConfig, group: int) -> bool:
    """Whether the design lets a group run out: a pool sized by its windows never does."""
    window = config.groups[group].window
    if window is None:
        return True
    held = pages_for(window + config.rollback, config) + 2
    roomy = config.max_sequences * held + pages_for(config.max_step_tokens, config)
    return roomy > pages_for(config.max_tokens, config)


# ------------------------------------------------------------------ the model


@dataclass
class Text:
    """What one sequence must hold."""

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

    def held(self, group: int, page_size: int) -> list[int]:
        """Positions that a group must hold."""
        first, gone = self.dropped[group] * page_size, self.evicted.get(group, ())
        return [i for i in range(first, len(self.tokens)) if i // page_size not in gone]

    def after(self, ids: Sequence[int]) -> list[int]:
        return self.hashes + hash_on(self.hashes[-1] if self.hashes else roots(self.salt), ids)

    def cut(self, n: int) -> None:
        del self.tokens[n:], self.hashes[n:]
        self.known, self.sure = min(self.known, n), min(self.sure, n)
        if n == 0:
            self.stale = False
            self.evicted = {}

    def copy(self) -> Text:
        lists = {name: list(getattr(self, name)) for name in ("tokens", "hashes", "pending")}
        return Text(
            self.salt, None, list(self.dropped), **lists,
            known=self.known, sure=self.sure, stale=self.stale, lost=self.lost,
            evicted={group: set(gone) for group, gone in self.evicted.items()},
        )  # fmt: skip


def common(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


class Boom(Exception):
    """Raised inside a step on purpose."""


class World:
    """A cache and its model; every operation checks what it must do and what it must leave alone.

    Operations take plain numbers, which are read modulo what there is, so that a list of them is a
    trace that replays on any cache.
    """

    def __init__(self, case: Case, everything: bool = True) -> None:
        self.config = case.config
        self.cache = PagedKVCache(case.config, device="cpu", debug=case.debug)
        self.texts: dict[int, Text] = {}
        self.findable: set[int] = set()
        self.computed = self.reused = 0
        self.everything = everything
        self.in_step: set[int] = set()
        self.away: set[int] = set()  # offloaded
        self.extra = 0  # tokens of the open step
        self.injected = False  # running out is expected whatever the arithmetic says
        self.quiet = False  # no checks: this part was checked before
        self.ran_out = self.refusals = self.offloads = self.restores = 0
        self.ever: set[int] = set()
        self.turn = 0
        P, source = case.config.page_size, random.Random(7)
        sizes = (P, 2 * P + 1, 3 * P + 2, min(5 * P, 4 * P + 5))
        self.bases = [[source.randrange(3) for _ in range(n)] for n in sizes]

    # ---- operations

    def apply(self, op: tuple[Any, ...]) -> None:
        getattr(self, op[0])(*op[1:])
        self.note_evictions()
        if not self.in_step:
            self.verify()

    def prompt(self, base: int, cut: int, tail: Sequence[int]) -> list[int]:
        text = self.bases[base % len(self.bases)]
        return text[: cut % (len(text) + 1)] + list(tail) or [0]

    def pick(self, number: int) -> int | None:
        return sorted(self.texts)[number % len(self.texts)] if self.texts else None

    def add(
        self, prompt: tuple[int, int, Sequence[int]] | None, salt: int, reserve: int | None
    ) -> None:
        ids = None if prompt is None else self.prompt(*prompt)
        limit = None if reserve is None else max(1, len(ids or []) + reserve)
        text = Text(SALTS[salt % len(SALTS)], limit, [0] * len(self.config.groups))
        refusals: list[type[Exception]] = []
        if len(self.texts) >= self.config.max_sequences:
            refusals.append(TooManySequencesError)
        if max(len(ids or []), limit or 0) > self.config.max_sequence_length:
            refusals.append(SequenceTooLongError)
        before = self.snapshot()
        try:
            seq = self.cache.add(ids, salt=text.salt, max_tokens=limit)
        except (TooManySequencesError, SequenceTooLongError) as error:
            assert type(error) in refusals, error  # noqa: PT017
            return self.unchanged(before)
        except OutOfPagesError as error:
            assert not refusals
            assert limit is not None, "only a reservation can run out in add"
            return self.exhausted(error, before, [(limit, limit)])
        assert not refusals, f"expected {refusals}"
        assert isinstance(seq, int)
        assert seq not in self.ever, "an id was given out twice"
        self.ever.add(seq)
        if ids:
            self.take_hit(seq, text, ids)
        self.texts[seq] = text

    def take_hit(self, seq: int, text: Text, ids: list[int]) -> None:
        hit, P = self.cache.length(seq), self.config.page_size
        assert 0 <= hit < len(ids)
        text.hashes = text.after(ids[:hit])
        text.tokens, text.pending = ids[:hit], ids[hit:]
        text.known = text.sure = hit
        # Contents and salts: a hit is a prefix of something committed, with ids, under this salt.
        assert hit == 0 or text.hashes[-1] in self.findable, "a hit nobody ever committed"
        if len(self.config.groups) == 1 and self.config.groups[0].window is None:
            for other in (t for s, t in self.texts.items() if s not in self.away):
                if other.salt == text.salt and not other.stale:
                    shared = min(common(ids[:-1], other.tokens), other.sure)
                    assert hit >= shared // P * P, "full pages of a live sequence were not found"
        for group, info in enumerate(self.config.groups):
            if info.window is not None:
                stored = self.cache.gather(seq, info.layers[0])[0].shape[0]
                dropped, rest = divmod(hit - stored, P)
                assert rest == 0
                assert 0 <= dropped <= max(0, hit - info.window) // P
                text.dropped[group] = dropped
        self.reused += hit

    def fork(self, number: int, n: int) -> None:
        seq = self.pick(number)
        if seq is None:
            return None
        before, source = self.snapshot(), self.texts[seq]
        if seq in self.in_step:
            return self.refused(OpenStepError, before, self.cache.fork, seq, n)
        if seq in self.away:
            return self.refused(OffloadedError, before, self.cache.fork, seq, n)
        if len(self.texts) + n > self.config.max_sequences:
            return self.refused(TooManySequencesError, before, self.cache.fork, seq, n)
        try:
            children = self.cache.fork(seq, n)
        except OutOfPagesError as error:
            reserved = any(text.limit is not None for text in self.texts.values())
            assert reserved or self.injected, "a fork without reservations takes no page"
            return self.exhausted(error, before, [(len(source.tokens), 0)] * n)
        assert len(set(children)) == n
        assert not self.ever & set(children)
        self.ever.update(children)
        for child in children:
            text = source.copy()
            pending = self.cache.uncached(child).tolist()
            assert pending in ([], source.pending)
            text.pending = pending
            self.texts[child] = text
            self.reused += len(text.tokens)
        return None

    def truncate(self, number: int, back: int) -> None:
        seq = self.pick(number)
        if seq is None:
            return None
        before, text, P = self.snapshot(), self.texts[seq], self.config.page_size
        n = 0 if back < 0 else max(0, len(text.tokens) - back)
        gone = any(
            info.window is not None and max(0, n - info.window) // P < dropped
            for info, dropped in zip(self.config.groups, text.dropped, strict=True)
        )
        ends = [(max(pages) + 1) * P for pages in text.evicted.values() if pages]
        gone |= n < min(len(text.tokens), max(ends, default=0))
        refusals = (OpenStepError,) * (seq in self.in_step) + (ValueError,) * (n > 0 and gone)
        if seq in self.away:
            return self.refused(OffloadedError, before, self.cache.truncate, seq, n)
        if refusals:
            return self.refused(refusals, before, self.cache.truncate, seq, n)
        self.cache.truncate(seq, n)
        shared = max(
            (common(text.hashes, o.hashes) for s, o in self.texts.items() if s != seq), default=0
        )
        if n < len(text.tokens) and shared > n // P * P:
            text.void = True  # pages shared with others are no longer promised
        rest = text.tokens[n:] + text.pending if text.pending else []
        text.cut(n)
        # Either what is left of the prompt is forgotten, or it is still what follows the text.
        prompt_left = self.cache.uncached(seq).tolist()
        assert prompt_left in ([], rest), "uncached does not continue the truncated text"
        text.pending = prompt_left
        if n == 0:
            text.dropped = [0] * len(self.config.groups)
        return None

    def free(self, numbers: Sequence[int]) -> None:
        seqs = sorted({self.pick(number) for number in numbers} - {None})
        if not seqs:
            return None
        if self.in_step & set(seqs):
            return self.refused(OpenStepError, self.snapshot(), self.cache.free, seqs)
        self.cache.free(seqs[0] if len(seqs) == 1 else seqs)
        for seq in seqs:
            del self.texts[seq]
        self.away -= set(seqs)
        return None

    def offload(self, numbers: Sequence[int]) -> None:
        picked = {self.pick(number) for number in numbers} - {None}
        seqs = sorted(picked - self.away if numbers[0] % 8 else picked)
        before = self.snapshot()
        if not seqs:
            return None
        refusals = (OpenStepError,) * bool(self.in_step & set(seqs))
        refusals += (OffloadedError,) * bool(self.away & set(seqs))
        if refusals:
            return self.refused(refusals, before, self.cache.offload, seqs)
        try:
            self.cache.offload(seqs)
        except HostMemoryError:
            held = sum(len(t.tokens) for s, t in self.texts.items() if s in self.away or s in seqs)
            spare = self.config.page_size * len(self.away | set(seqs))
            self.refusals += 1
            if self.injected:  # prefixes may have had to go before it came to that
                return self.verify(all_of_them=True)
            assert held + spare > self.config.host_tokens, "there was room"
            return self.unchanged(before)
        self.away |= set(seqs)
        self.offloads += 1
        return None

    def restore(self, numbers: Sequence[int]) -> None:
        seqs = sorted({self.pick(number) for number in numbers} - {None})
        if not seqs:
            return None
        before = self.snapshot()
        try:
            self.cache.restore(seqs)
        except OutOfPagesError as error:
            coming = [t for s, t in self.texts.items() if s in self.away and s in seqs]
            joining = [(len(t.tokens), t.limit or 0) for t in coming]
            return self.exhausted(error, before, joining)
        self.away -= set(seqs)
        self.restores += 1
        return None

    def clear(self) -> None:
        if self.in_step:
            return self.refused(OpenStepError, self.snapshot(), self.cache.clear_prefixes)
        self.cache.clear_prefixes()
        self.findable.clear()
        for text in self.texts.values():
            text.known = text.sure = 0
            text.stale, text.lost = bool(text.tokens), True
        assert self.cache.stats().cached == 0
        return None

    def shrink(self) -> None:
        before = self.snapshot()
        if self.config.growth_step is None:
            return self.refused(ValueError, before, self.cache.shrink)
        if self.in_step:
            return self.refused(OpenStepError, before, self.cache.shrink)
        gone, after = self.cache.shrink(), self.cache.stats()
        assert gone == before[0].bytes - after.bytes >= 0
        for name in ("live", "cached", "promised", "growths"):
            assert getattr(after, name) == getattr(before[0], name), name
        assert self.cache.shrink() == 0, "not everything went at once"
        return None

    def step(
        self,
        entries: Sequence[tuple[int, Sequence[int], int]],
        mode: str,
        form: int,
        ending: str,
        meanwhile: tuple[Any, ...] | None = None,
    ) -> None:
        """One step.

        entries: (which sequence, new ids, how many of them are accepted).
        mode: how the ids are told: tokens, uncached, count, count_ids.
        """
        before = self.snapshot()
        if self.in_step:
            return self.refused(OpenStepError, before, self.cache.prepare, [min(self.texts)], [[1]])
        batch: dict[int, tuple[list[int], int]] = {}
        for number, wanted, accept in entries:
            seq = self.pick(number)
            if seq is None or seq in batch or (seq in self.away and number % 8):
                continue
            pending = self.texts[seq].pending
            if mode == "uncached" and not pending:
                continue
            ids = pending if mode == "uncached" else pending[: len(wanted)] or list(wanted)
            batch[seq] = (list(ids), accept % (len(ids) + 1))
        if not batch:
            return None
        if self.away & set(batch):
            call = [[1]] * len(batch)
            return self.refused(OffloadedError, before, self.cache.prepare, list(batch), call)
        seqs, news = list(batch), [ids for ids, _ in batch.values()]
        kept = None if form % 3 == 0 else [accept for _, accept in batch.values()]
        call, after = self.fed(seqs, news, mode, form)
        layers = range(self.config.num_layers) if form % 2 else None  # some write again
        total, length = sum(map(len, news)), self.config.max_sequence_length
        longest = max(len(self.texts[s].tokens) + len(n) for s, n in zip(seqs, news, strict=True))
        too_long = longest > length or total > self.config.max_step_tokens
        try:
            if ending.startswith("with"):
                with self.cache.step(seqs, **call, layers=layers) as step:
                    self.inside(step, seqs, news, mode, form, meanwhile)
                    if ending == "with_raise":
                        raise Boom
                    if ending == "with_abort":
                        self.cache.abort(step)
                    elif ending == "with_commit" or kept is not None or after is not None:
                        self.cache.commit(step, kept, after, layers=layers)
            else:
                step = self.cache.prepare(seqs, **call)
                self.inside(step, seqs, news, mode, form, meanwhile)
                if ending == "abort":
                    self.cache.abort(step)
                else:
                    self.cache.commit(step, kept, after, layers=layers)
        except Boom:
            assert ending == "with_raise"
        except SequenceTooLongError as error:
            assert too_long, error  # noqa: PT017
            return self.unchanged(before)
        except OutOfPagesError as error:
            assert not too_long
            assert not self.in_step, "only prepare runs out"
            texts = [self.texts[s] for s in seqs]
            # With a budget, pages are promised for that; more of one step may not fit.
            void = [text.void or self.config.budget is not None for text in texts]
            kept_promise = [
                not lost and len(text.tokens) + len(new) <= (text.limit or 0)
                for text, new, lost in zip(texts, news, void, strict=True)
            ]
            assert self.injected or not all(kept_promise), f"a reservation was broken: {error}"  # noqa: PT017
            assert self.injected or self.evicting_would_not_do(error), f"more could go: {error}"  # noqa: PT017
            return self.exhausted(error, before, [], dict(zip(seqs, map(len, news), strict=True)))
        assert not too_long, "a step that can never fit was accepted"
        self.in_step, self.extra = set(), 0
        if ending in ("abort", "with_raise", "with_abort"):
            if meanwhile is None:
                self.restored(before)
            return None
        for seq, ids, accept in zip(seqs, news, kept or map(len, news), strict=True):
            text, P = self.texts[seq], self.config.page_size
            if self.config.staged and (len(text.tokens) + len(ids)) // P > len(text.tokens) // P:
                text.void |= accept < len(ids)  # cut within a coded page, perhaps
            self.accept(seq, ids[:accept], mode)
        return None

    # ---- parts of a step

    def fed(
        self, seqs: list[int], news: list[list[int]], mode: str, form: int
    ) -> tuple[dict[str, Any], Any]:
        """The keywords of prepare and the ids of commit, in one of their forms."""
        sizes = list(map(len, news))
        ids: Any = [np.asarray(new) for new in news]
        if form % 2 and len(set(sizes)) == 1:
            ids = [new[0] for new in news] if sizes[0] == 1 else np.asarray(news)
        elif form % 5 == 1:
            ids = news
        if mode == "tokens":
            return {"tokens": ids}, None
        if mode == "uncached":
            return {}, None
        counts = sizes[0] if form % 2 and len(set(sizes)) == 1 else sizes
        told = mode == "count_ids" and any(not self.texts[s].pending for s in seqs)
        return {"num_new": counts}, ids if told else None

    def inside(
        self,
        step: Any,
        seqs: list[int],
        news: list[list[int]],
        mode: str,
        form: int,
        meanwhile: tuple[Any, ...] | None,
    ) -> None:
        self.in_step, self.extra = set(seqs), sum(map(len, news))
        self.note_evictions()
        self.verify_step(step, seqs, news, mode)
        layers = list(range(self.config.num_layers))
        if form % 2:
            layers = layers[::-1] + layers[:1]  # any order; a layer may be written again
        hashes = [self.texts[s].after(n)[-len(n) :] for s, n in zip(seqs, news, strict=True)]
        for layer in layers:
            write_kv(*kv_of_hashes(list(chain(*hashes)), layer, self.config), step, layer)
        if meanwhile is not None:
            self.apply(meanwhile)
        self.verify()

    def accept(self, seq: int, ids: list[int], mode: str) -> None:
        text, P = self.texts[seq], self.config.page_size
        with_ids = mode != "count" or bool(text.pending)
        text.hashes = text.after(ids)
        if ids and not with_ids:
            text.lost = True
        if with_ids and text.known == len(text.tokens) and not text.stale:
            self.findable.update(text.hashes[len(text.tokens) :])
            text.sure += 0 if text.lost else len(ids)
            text.known += len(ids)
        text.tokens += ids
        del text.pending[: len(ids)]
        self.computed += len(ids)
        for group, info in enumerate(self.config.groups):
            if info.window is not None:
                behind = len(text.tokens) - self.config.rollback - info.window
                text.dropped[group] = max(text.dropped[group], max(0, behind) // P)

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
            table, slots = step.page_table(group).numpy(), step.slots(group).numpy()
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

    # ---- checks

    def snapshot(self) -> tuple[Any, ...]:
        lengths = {seq: self.cache.length(seq) for seq in self.texts}
        return self.cache.stats(), lengths, self.computed, self.reused

    def unchanged(self, before: tuple[Any, ...]) -> None:
        assert self.snapshot() == before, "a call that failed changed something"
        self.verify(all_of_them=True)

    def restored(self, before: tuple[Any, ...]) -> None:
        """After abort: as before, but cached pages that were reused do not come back."""
        after = self.snapshot()
        assert after[1:] == before[1:]
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
    ) -> None:
        """Nothing changed, and pages were really short: not even all disjoint would it fit."""
        self.unchanged(before)
        self.ran_out += 1
        if self.injected:
            return
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
        if self.config.policy is None or "staging" in str(error):
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
        """What must hold at any time, seen from outside."""
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
        for seq in chosen:
            self.verify_contents(seq)

    def verify_contents(self, seq: int) -> None:
        text, P = self.texts[seq], self.config.page_size
        assert self.cache.length(seq) == len(text.tokens)
        assert self.cache.uncached(seq).tolist() == text.pending
        if seq in self.away:
            return
        for group, info in enumerate(self.config.groups):
            places = text.held(group, P)
            held = [text.hashes[i] for i in places]
            for layer in info.layers:
                assert self.cache.positions(seq, layer).tolist() == places
                actual = self.cache.gather(seq, layer)
                expected = kv_of_hashes(held, layer, self.config)
                for name, x, y in zip("kv", actual, expected, strict=True):
                    assert x.shape == y.shape, (seq, layer, name, x.shape, y.shape)
                    slack = SLACK[self.config.kv_format[name == "v"]]
                    wrong = f"sequence {seq}, layer {layer}: wrong {name}"
                    assert ((x - y).abs() <= slack).all(), wrong
                    if self.config.staged and places[:1] == [0]:
                        assert torch.equal(x[:P], y[:P]), f"{wrong} in the first page"


# ------------------------------------------------------------------ random operations

MODES = ("tokens", "tokens", "uncached", "count", "count_ids")
ENDINGS = (
    "commit", "commit", "with", "with", "with_commit", "abort", "with_abort", "with_raise",
)  # fmt: skip


def random_op(source: random.Random, config: CacheConfig, inside: bool = False) -> tuple[Any, ...]:
    """One operation, its weights such that pools are often, not always, full."""
    P = config.page_size

    def tokens(least: int, most: int) -> list[int]:
        return [source.randrange(3) for _ in range(source.randint(least, most))]

    kinds = {"add": 16, "fork": 8, "truncate": 9, "free": 13, "clear": 1, "step": 53}
    if config.growth_step is not None:
        kinds["shrink"] = 5
    if config.host_tokens:
        kinds |= {"add": 30, "fork": 12, "free": 9, "offload": 8, "restore": 10}
    kind = source.choices(list(kinds), list(kinds.values()))[0]
    if kind in ("offload", "restore"):
        return kind, [source.randrange(64) for _ in range(source.choice((1, 1, 2, 4)))]
    if kind == "add":
        prompt = (source.randrange(4), source.randrange(6 * P), tokens(0, 3))
        return (
            "add",
            None if source.random() < 0.08 else prompt,
            int(source.random() < 0.2),
            source.randrange(3 * P) if source.random() < 0.25 else None,
        )
    if kind == "fork":
        return "fork", source.randrange(64), source.choice((1, 1, 1, 2, 3))
    if kind == "truncate":
        return "truncate", source.randrange(64), source.choice((-1, 0, 1, 1, 2, P, 2 * P + 1))
    if kind == "free":
        return "free", [source.randrange(64) for _ in range(source.choice((1, 1, 1, 2, 4)))]
    if kind in ("clear", "shrink"):
        return (kind,)
    entries = [
        (source.randrange(64), tokens(1, source.choice((1, 1, 2, P + 2))), source.randrange(64))
        for _ in range(source.choice((1, 2, 3, 6)))
    ]
    during = None
    if not inside and source.random() < 0.1:
        during = random_op(source, config, inside=True)
    return (
        "step",
        entries,
        source.choice(MODES),
        source.randrange(30),
        source.choice(ENDINGS),
        during,
    )
