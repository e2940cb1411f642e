"""A cache and a model of lists side by side: every operation checks what it did to both."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from pagedkv import OutOfPagesError, PagedKVCache, write_kv
from pagedkv.errors import (
    HostMemoryError,
    LayerWritesError,
    OffloadedError,
    OpenStepError,
    SequenceTooLongError,
    TooManySequencesError,
)
from tests.cases import Case
from tests.contents import SALTS, Boom, kv_of_hashes, moved
from tests.world_checks import Checks, Text, common
from tests.world_states import StateBooks


class World(Checks):
    """A cache and its model; every operation checks what it must do and what it must leave alone.

    Operations take plain numbers, which are read modulo what there is, so that a list of them is a
    trace that replays on any cache.
    """

    def __init__(self, case: Case, everything: bool = True, device: Any = "cpu") -> None:
        self.config = case.config
        self.cache = PagedKVCache(case.config, device=device, debug=case.debug)
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
        books = (self.config, self.cache, self.texts, self.away)
        self.states = StateBooks(*books) if self.config.states else None
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
        if self.states is not None:
            self.states.found(text, ids, hit)
        elif len(self.config.groups) == 1 and self.config.groups[0].window is None:
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
            reserved |= self.states is not None
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
        if self.states is not None:
            lengths = self.states.lengths(seq)
            n = lengths[back % len(lengths)]
        gone = any(
            info.window is not None and max(0, n - info.window) // P < dropped
            for info, dropped in zip(self.config.groups, text.dropped, strict=True)
        )
        ends = [(max(pages) + 1) * P for pages in text.evicted.values() if pages]
        gone |= n < min(len(text.tokens), max(ends, default=0))
        gone |= self.states is not None and n not in lengths[:-1]
        refusals = (OpenStepError,) * (seq in self.in_step) + (ValueError,) * (n > 0 and gone)
        if seq in self.away:
            return self.refused(OffloadedError, before, self.cache.truncate, seq, n)
        if refusals:
            return self.refused(refusals, before, self.cache.truncate, seq, n)
        return self.cut(seq, n)

    def cut(self, seq: int, n: int) -> None:
        """A truncate that has to be possible."""
        before, text, P = self.snapshot(), self.texts[seq], self.config.page_size
        try:
            self.cache.truncate(seq, n)
        except OutOfPagesError as error:
            assert self.states is not None, "only a state needs room for this"
            return self.exhausted(error, before, [], slots=1, asking=[seq])
        shared = max(
            (common(text.hashes, o.hashes) for s, o in self.texts.items() if s != seq), default=0
        )
        if n < len(text.tokens) and shared > n // P * P:
            text.void = True  # pages shared with others are no longer promised
        if self.states is not None and n < len(text.tokens):
            self.states.cut(text, n)
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

    def checkpoint(self, number: int) -> None:
        seq, before = self.pick(number), self.snapshot()
        if seq is None:
            return None
        for kind, wrong in (
            (OffloadedError, seq in self.away),
            (OpenStepError, seq in self.in_step),
            (ValueError, self.states is None or not self.texts[seq].tokens),
        ):
            if wrong:
                return self.refused(kind, before, self.cache.checkpoint, seq)
        self.cache.checkpoint(seq)
        self.states.keep(seq)
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
            if self.injected or self.states is not None:  # prefixes may have had to go before
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
        if self.states is not None and self.in_step:
            return self.refused(OpenStepError, before, self.cache.restore, seqs)
        try:
            self.cache.restore(seqs)
        except OutOfPagesError as error:
            coming = [s for s in seqs if s in self.away]
            joining = [(len(self.texts[s].tokens), self.texts[s].limit or 0) for s in coming]
            slots = 0 if self.states is None else self.states.coming(coming)
            return self.exhausted(error, before, joining, slots=slots, asking=coming)
        self.away -= set(seqs)
        self.restores += 1
        for text in (self.texts[seq] for seq in seqs):
            text.sure = 0 if text.lost else text.sure  # restore names no page of an unknown text
        return None

    def clear(self) -> None:
        if self.in_step:
            return self.refused(OpenStepError, self.snapshot(), self.cache.clear_prefixes)
        self.cache.clear_prefixes()
        self.findable.clear()
        if self.states is not None:
            self.states.clear()
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
        how: str = "",
    ) -> None:
        """One step.

        entries: (which sequence, new ids, how many of them are accepted).
        mode: how the ids are told: tokens, uncached, count, count_ids.
        how: `revocable`, and with an odd form taken back at once; `some layers` alone write;
            `refused`, a commit before all layers wrote; `attend`, and what comes out is compared.
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
            kept = len(ids) * (accept % 3 > 0) if self.states else accept % (len(ids) + 1)
            batch[seq] = (list(ids), kept)
        if not batch:
            return None
        if self.away & set(batch):
            call = [[1]] * len(batch)
            return self.refused(OffloadedError, before, self.cache.prepare, list(batch), call)
        seqs, news = list(batch), [ids for ids, _ in batch.values()]
        kept = None if form % 3 == 0 else [accept for _, accept in batch.values()]
        call, after = self.fed(seqs, news, mode, form)
        layers = range(self.config.num_layers) if form % 2 else None  # some write again
        plain = self.config.dense and self.config.policy is None
        if how == "some layers":
            how = how if plain else ""  # what was never written is no number to code or to rank
            layers = range(1 + form % (self.config.num_layers - 1)) if plain else layers
        if how in ("revocable", "some layers") and ending == "with":
            ending = "with_commit"
        said = {"layers": layers, "revocable": how == "revocable"}
        total, length = sum(map(len, news)), self.config.max_sequence_length
        longest = max(len(self.texts[s].tokens) + len(n) for s, n in zip(seqs, news, strict=True))
        too_long = longest > length or total > self.config.max_step_tokens
        try:
            if ending.startswith("with"):
                with self.cache.step(seqs, **call, layers=layers) as step:
                    self.inside(step, seqs, news, mode, form, meanwhile, how)
                    if ending == "with_raise":
                        raise Boom
                    if ending == "with_abort":
                        self.cache.abort(step)
                    elif ending == "with_commit" or kept is not None or after is not None:
                        self.cache.commit(step, kept, after, **said)
            else:
                step = self.cache.prepare(seqs, **call)
                self.inside(step, seqs, news, mode, form, meanwhile, how)
                if ending == "abort":
                    self.cache.abort(step)
                else:
                    self.cache.commit(step, kept, after, **said)
        except Boom:
            assert ending == "with_raise"
        except SequenceTooLongError as error:
            assert too_long, error  # noqa: PT017
            return self.unchanged(before)
        except OutOfPagesError as error:
            assert not too_long
            assert not self.in_step, "only prepare runs out"
            texts = [self.texts[s] for s in seqs]
            # With a budget or a share, pages are promised for that; more of one step may not fit.
            void = [text.void or self.config.kept is not None for text in texts]
            kept_promise = [
                not lost and len(text.tokens) + len(new) <= (text.limit or 0)
                for text, new, lost in zip(texts, news, void, strict=True)
            ]
            assert self.injected or not all(kept_promise), f"a reservation was broken: {error}"  # noqa: PT017
            assert self.injected or self.evicting_would_not_do(error), f"more could go: {error}"  # noqa: PT017
            slots = 0 if self.states is None else self.states.needed(seqs)
            grown = dict(zip(seqs, map(len, news), strict=True))
            return self.exhausted(error, before, [], grown, slots, seqs)
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
            self.accept(seq, ids[:accept], mode, how, form)
        if how == "revocable" and form % 2 and not self.states:
            self.note_evictions()
            for seq, ids, accept in zip(seqs, news, kept or map(len, news), strict=True):
                if not self.texts[seq].evicted:
                    self.cut(seq, len(self.texts[seq].tokens) - len(ids[:accept]))
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
        how: str,
    ) -> None:
        self.in_step, self.extra = set(seqs), sum(map(len, news))
        self.note_evictions()
        for here in dict.fromkeys(step.at(layer) for layer in range(self.config.num_layers)):
            self.verify_step(here, seqs, news, mode)
        layers = list(range(self.config.num_layers))
        if form % 2:
            layers = layers[::-1] + layers[:1]  # any order; a layer may be written again
        if how == "some layers":
            layers = list(range(1 + form % (self.config.num_layers - 1)))
        hashes = [self.texts[s].after(n)[-len(n) :] for s, n in zip(seqs, news, strict=True)]
        attends = how == "attend" and not self.config.read_tokens
        attends &= not any(self.texts[s].bare for s in seqs)
        for place, layer in enumerate(layers):
            k, v = kv_of_hashes(list(chain(*hashes)), layer, self.config)
            k, v = moved(k, v, self.cache.placement.layers[layer])
            if how == "refused" and place == 1:
                self.refuse_commits(step, seqs, news)
            if attends and k.device == torch.device("cpu"):
                self.attend(step, layer, k, v, seqs, news)
            else:
                write_kv(k, v, step, layer)
        if self.states is not None:
            texts = [self.texts[s].tokens + n for s, n in zip(seqs, news, strict=True)]
            self.states.write(step, texts, seqs)
        if meanwhile is not None:
            self.apply(meanwhile)
        self.verify()

    def refuse_commits(self, step: Any, seqs: list[int], news: list[list[int]]) -> None:
        """Commits that are none leave the step open and all as it is."""
        before, most = self.snapshot(), [len(new) for new in news]
        self.refused(LayerWritesError, before, self.cache.commit, step)
        for wrong in ([n + 1 for n in most], [-1] * len(most), [*most[1:], 0, 0]):
            self.refused((ValueError, TypeError), before, self.cache.commit, step, wrong)
        assert step.state == "open"

    def accept(self, seq: int, ids: list[int], mode: str, how: str = "", form: int = 0) -> None:
        text, P = self.texts[seq], self.config.page_size
        with_ids = (mode != "count" or bool(text.pending)) and how != "some layers"
        start = len(text.tokens)
        if how == "some layers" and ids:
            for layer in range(1 + form % (self.config.num_layers - 1), self.config.num_layers):
                text.bare.setdefault(layer, set()).update(range(start, start + len(ids)))
        if ids:
            text.told &= with_ids
            text.state = next(self.states.numbers) if self.states else 0
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
                newest = start if how == "revocable" else len(text.tokens)
                behind = newest - self.config.rollback - info.window
                text.dropped[group] = max(text.dropped[group], max(0, behind) // P)
