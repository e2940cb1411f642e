"""Reads texts through several caches side by side, and compares each token's prediction.

All caches advance by a few tokens at a time, the full cache first, so that memory holds only these
tokens' distributions, however long the texts are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagedkv.cache.cache import PagedKVCache
from pagedkv.config import CacheConfig
from pagedkv.hf.model import cache_config
from pagedkv.storage.memory import available_memory

from .probes import Probe
from .variants import FULL, Variant

BLOCK = 64  # tokens of each text by which the caches advance


@dataclass
class Reading:
    """A model's predictions of the tokens `[n]` of a probe; NaN for the first, which has none.

    Attributes:
        nats: -log p of the token.
        rank: 1 if nothing was more likely than the token.
        kl: KL(full || this) of the distribution that predicted the token; only for running texts.
        same: whether the full cache has the same most likely token; only for running texts.
    """

    probe: Probe
    nats: Tensor
    rank: Tensor
    kl: Tensor
    same: Tensor

    @classmethod
    def of(cls, probe: Probe) -> Reading:
        """Makes an empty reading."""
        blank = torch.full((len(probe.ids),), torch.nan, device="cpu")
        return cls(probe, *(blank.clone() for _ in range(4)))

    @property
    def perplexity(self) -> float:
        return self.nats[self.probe.scored].mean().exp().item()

    @property
    def mean_kl(self) -> float:
        return self.kl[self.probe.scored].mean().item()

    @property
    def found(self) -> float:
        """The share of the tokens that count for which nothing was likelier."""
        return (self.rank[self.probe.scored] == 1).float().mean().item()

    def note(self, begin: int, log_p: Tensor, full: Tensor | None) -> None:
        """Adds predictions `[n, vocab]` that were made at tokens from `begin` on."""
        told = self.probe.ids[begin + 1 : begin + 1 + len(log_p)].to(log_p.device)
        if not len(told):
            return
        log_p, here = log_p[: len(told)], slice(begin + 1, begin + 1 + len(told))
        chosen = log_p.gather(1, told[:, None])
        self.nats[here] = -chosen[:, 0].cpu()
        self.rank[here] = 1.0 + (log_p > chosen).sum(-1).cpu()
        if full is not None:
            full = full[: len(told)]
            self.kl[here] = (full.exp() * (full - log_p)).sum(-1).cpu()
            self.same[here] = (full.argmax(-1) == log_p.argmax(-1)).float().cpu()


class Reader:
    """A `with` region that reads texts, as rows of one batch, through a cache of their own.

    Steps are small, as in decoding, so that answers come from the kept pages and not from the
    step's own tokens.
    """

    def __init__(self, model: Any, variant: Variant, texts: Sequence[Probe]) -> None:
        self.model, self.texts, self.at = model, texts, 0
        with warnings.catch_warnings():
            # The size of a cache for a few short probes is no advice for a job's cache.
            warnings.filterwarnings("ignore", "kv_format: .* takes less")
            self.kv = PagedKVCache(config_of(model, variant, texts), device=model.device)
        self.runner = variant.runner(model, cache=self.kv)
        config = self.kv.config
        # If whole pages are coded, a step has half a page, so that a page is read while it is being
        # filled, as in decoding. Else it has a page, or more in long texts with larger budgets.
        self._chunk = max(config.page_size, longest_of(texts) // 128)
        if config.staged:
            self._chunk = max(1, config.page_size // 2)
        if variant is FULL:
            self._chunk = BLOCK
        # Only decoding steps choose pages, so counted tokens are read one by one.
        self._alone = longest_of(texts)
        if config.read_tokens:
            self._alone = min(int(text.scored[0]) for text in texts)
        # Texts that begin alike would share pages, and shared pages are never evicted.
        self.seqs = [self.kv.add(salt=text.name.encode()) for text in texts]

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.close()

    def read(self, until: int) -> Iterator[tuple[Probe, int, Tensor]]:
        """Reads on.

        Yields:
            A text, the index of its first token in the step, log-probabilities `[tokens, vocab]`.
        """
        until = min(until, longest_of(self.texts))
        while self.at < until:
            step = self._chunk if self.at < self._alone else 1
            stop = self._alone if self.at < self._alone else until
            end = min(self.at + step, stop, until)
            parts = [text.ids[self.at : end] for text in self.texts]
            left = [i for i, part in enumerate(parts) if len(part)]
            fed = [parts[i].numpy() for i in left]
            with self.kv.step([self.seqs[i] for i in left], tokens=fed) as step_:
                rows = torch.arange(step_.num_tokens, device=self.model.device)
                logits = self.runner.logits(step_, rows)
            begin, self.at = self.at, end
            for i, own in zip(left, logits.split([len(part) for part in fed])):
                yield self.texts[i], begin, own.float().log_softmax(-1)


def config_of(model: Any, variant: Variant, texts: Sequence[Probe]) -> CacheConfig:
    """Returns the configuration of the cache in which a variant keeps some texts."""
    room = len(texts) * (longest_of(texts) + 64)  # 64 for the page being written
    return cache_config(model, room, **{"max_sequences": len(texts), **variant.fields})


def longest_of(texts: Iterable[Probe]) -> int:
    """Counts the tokens of the longest text."""
    return max(len(text.ids) for text in texts)


@torch.inference_mode()
def compare(
    model: Any,
    variants: Sequence[Variant],
    texts: Sequence[Probe],
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Reading]]:
    """Reads texts in every variant, and compares running texts with the full cache.

    Args:
        variants: the reading of `FULL`, if it is one of them, is also the basis of comparison.
        tell: is called now and then with how many tokens were read, over all texts and variants,
            and how many there are.

    Returns:
        For each variant, readings by the names of the texts.
    """
    compared = [text for text in texts if text.running or FULL in variants]
    kept = [text for text in texts if not text.full_only]
    found = [
        {text.name: Reading.of(text) for text in (texts if variant is FULL else kept)}
        for variant in variants
    ]
    whole = [readings for variant, readings in zip(variants, found) if variant is FULL]
    groups = _groups(model, variants, texts)
    total = len(groups) * tokens_of(compared) + sum(map(len, groups)) * tokens_of(kept)
    done = 0
    for together in groups:
        with ExitStack() as stack:
            full = stack.enter_context(Reader(model, FULL, compared)) if compared else None
            readers = [
                (found[i], stack.enter_context(Reader(model, variants[i], kept))) for i in together
            ]
            for begin in range(0, longest_of(texts), BLOCK):
                known: dict[str, Tensor] = {}
                for text, at, log_p in full.read(begin + BLOCK) if full else ():
                    known[text.name] = log_p
                    for readings in whole:
                        readings[text.name].note(at, log_p, log_p if text.running else None)
                    done += len(log_p)
                for readings, reader in readers:
                    for text, at, log_p in reader.read(begin + BLOCK):
                        beside = known[text.name][at - begin :] if text.running else None
                        readings[text.name].note(at, log_p, beside)
                        done += len(log_p)
                    tell(done, total)
                tell(done, total)
    return found


def tokens_of(texts: Iterable[Probe]) -> int:
    """Counts the tokens of all texts."""
    return sum(len(text.ids) for text in texts)


def _groups(model: Any, variants: Sequence[Variant], texts: Sequence[Probe]) -> list[list[int]]:
    """Groups variants' indices so that a group's caches and the full one fit in half of memory."""
    room = available_memory(model.device) // 2 - config_of(model, FULL, texts).nbytes
    groups: list[list[int]] = [[]]
    left = room
    for i, variant in enumerate(variants):
        if variant is FULL:
            continue
        need = config_of(model, variant, texts).nbytes
        if need > left and groups[-1]:
            groups.append([])
            left = room
        groups[-1].append(i)
        left -= need
    return groups
