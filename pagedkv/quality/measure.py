"""Computes bytes, losses and a verdict for each way of keeping K and V, and recommends one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isnan, log
from typing import Any

from transformers import PreTrainedModel

from pagedkv.config import CacheConfig
from pagedkv.hf.model import cache_config, longest_of

from .probes import probes
from .promise import Promise, promise_of, windows_of
from .reading import Reading, compare
from .variants import FULL, Variant, bytes_held, pays_from

# The gates of a verdict. 4-bit codes with one scale for a token fail the first, this library's int4
# passes it; a window, which forgets, fails the second.
MOST_KL = 0.012  # nats, mean over a text
LEAST_RECALL = 0.9  # share of the full cache's recall
# How many nats a token the full cache must gain from having seen a passage, and which share of
# hidden digits it must find: only then can a variant be said to lose them.
TELLING, FINDS = 0.5, 0.5

GOOD, VISIBLE, FORGETS = "good", "visible", "loses recall"


@dataclass(frozen=True)
class Measured:
    """A variant and what it costs.

    Attributes:
        name: the variant's name.
        bytes_per_token: K and V of one text at its end, in bytes a token; a float32 model counts as
            a bfloat16 one.
        fewer: the full cache's bytes divided by these.
        perplexity: for each running text.
        kl, kl_p99, agreement: for each running text, against the full cache: mean and 99th
            percentile of KL(full || this) in nats, and the share of tokens at which both predict
            the same token.
        recall: perplexity of a passage that comes again.
        needles: share of hidden digits that are found; None if none were hidden.
        recalled: share of the full cache's recall, of the passage or of the digits, whichever is
            less; None if the full cache recalls nothing.
        verdict: "good", "visible" (the predictions differ) or "loses recall".
    """

    name: str
    bytes_per_token: float
    fewer: float
    perplexity: dict[str, float]
    kl: dict[str, float]
    kl_p99: dict[str, float]
    agreement: dict[str, float]
    recall: float
    needles: float | None
    recalled: float | None
    verdict: str

    @property
    def worst_kl(self) -> float:
        """The largest mean KL of any text."""
        return max(self.kl.values())


@dataclass(frozen=True)
class Quality:
    """Variants of a cache compared with the full one; `print` it, or see `recommendation`.

    Attributes:
        tokens: by text, its tokens.
        dtype: the dtype in which the model computes.
        full: the full cache.
        unseen: perplexity of the recalled passage for a model that never saw it.
        variants: in the order in which they were given.
        pays_from: by variant that takes fewer bytes than another only in long rows: that other, and
            from how many tokens on. Others are the full cache and variants with other formats only.
        most_kl: the gate of a verdict, nats.
        promise: which variant, of those that keep their recall, stays below a wished KL; or None.
    """

    tokens: dict[str, int]
    dtype: str
    full: Measured
    unseen: float
    variants: tuple[Measured, ...]
    pays_from: dict[str, dict[str, int]] = field(default_factory=dict)
    most_kl: float = MOST_KL
    promise: Promise | None = None

    @property
    def recommendation(self) -> str:
        """A sentence that names the good variant with the fewest bytes, if there is one."""
        if self.promise is not None:
            return self.promise.sentence
        good = [m for m in self.variants if m.verdict == GOOD]
        good.sort(key=lambda m: (m.bytes_per_token, m.worst_kl))
        saving = [m for m in good if m.fewer > 1.01]
        if saving:
            best, *others = saving
            closer = [m for m in others if m.worst_kl < best.worst_kl / 2]
            words = f"Use {best.name}: {_price(best)}"
            if closer:
                nearest = min(closer, key=lambda m: m.worst_kl)
                words += f"; {nearest.name} stays closer, {_price(nearest)}"
            return words + "."
        if good:
            return f"{good[0].name} is good, but keeps no fewer bytes than the full cache."
        if not self.variants:
            return "Nothing was held against the full cache."
        least = min(self.variants, key=lambda m: (m.verdict == FORGETS, m.worst_kl))
        return f"Keep the full cache: the closest, {least.name}, {_loss(least)}."

    @property
    def lengths(self) -> list[str]:
        """A sentence on each variant that takes fewer bytes only in rows above some length."""
        found = []
        for name, others in self.pays_from.items():
            named = ((f"the {o}" if o == FULL.name else o, n) for o, n in others.items())
            than = ", ".join(f"than {other} from {tokens:,} tokens on" for other, tokens in named)
            found.append(f"{name} takes fewer bytes a row {than}.")
        return found


def measure_quality(
    model: PreTrainedModel,
    tokenizer: Any,
    variants: Sequence[Variant],
    texts: Mapping[str, str] | None = None,
    *,
    length: int = 1024,
    at_most: float | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Quality:
    """Measures how much a model loses in each variant, compared with the full cache.

    Args:
        model: a decoder of transformers that `BatchGenerator` takes.
        texts: texts to read, by name; default a novel and a manual that come with the package.
        length: how many tokens of each text are read at most.
        at_most: a KL in nats: also finds the smallest variant that stays below it on all texts, cut
            in windows of this length, and in which share of draws it does.
        tell: is called now and then with the number of tokens read so far, and of all tokens.

    Raises:
        UnsupportedModelError: packed rows cannot be computed with this model.
        ValueError: a text is too short, or longer than the model takes, or a variant is invalid; or
            the model's logits are NaN.
    """
    if length > (longest := longest_of(model)):
        raise ValueError(
            f"length: expected at most {longest}, which this model takes, got {length}"
        )
    if at_most is not None and not 0 < at_most < inf:
        raise ValueError(f"at_most: expected nats above 0, got {at_most}")
    read = list(probes(tokenizer, length, texts).values())
    windows = [] if at_most is None else windows_of(tokenizer, length, texts)
    gate = MOST_KL if at_most is None else at_most
    to_come, done = len(windows) * length * (1 + len(variants)), 0

    def tell_first(read: int, total: int) -> None:
        nonlocal done
        done = read
        tell(read, total + to_come)

    tokens = {probe.name: len(probe.ids) for probe in read if probe.running}
    configs = [_config(model, each, max(tokens.values())) for each in (FULL, *variants)]
    held = [bytes_held(each, max(tokens.values())) / max(tokens.values()) for each in configs]
    full, *others = compare(model, [FULL, *variants], read, tell_first)
    if wrong := next((name for name, each in full.items() if isnan(each.perplexity)), None):
        raise ValueError(f"model: its logits for {wrong} are no numbers, so nothing is compared")
    worth = full["unseen"].perplexity
    first = _measured(FULL, held[0], held[0], full, full, worth, gate)
    quality = Quality(
        tokens=tokens,
        dtype=str(model.dtype).removeprefix("torch."),
        full=first,
        unseen=worth,
        variants=tuple(
            _measured(variant, nbytes, held[0], readings, full, worth, gate)
            for variant, nbytes, readings in zip(variants, held[1:], others)
        ),
        pays_from=_pays_from([FULL, *variants], configs),
        most_kl=gate,
    )
    if at_most is None:
        return quality
    ways = {
        found.name: (variant, found.bytes_per_token)
        for variant, found in zip(variants, quality.variants)
        if found.verdict != FORGETS
    }
    promise = promise_of(
        model, ways, windows, at_most, lambda read, total: tell(done + read, done + total)
    )
    return replace(quality, promise=promise)


def _config(model: Any, variant: Variant, tokens: int) -> CacheConfig:
    try:
        return cache_config(model, tokens, **{"max_sequences": 1, **variant.fields})
    except ValueError as error:
        raise ValueError(f"{variant.name}: {error}") from error


def _pays_from(
    variants: Sequence[Variant], configs: Sequence[CacheConfig]
) -> dict[str, dict[str, int]]:
    """Returns, for variants that pay only in long rows, from how many tokens on they do."""
    found: dict[str, dict[str, int]] = {}
    formats = {"kv_format", "page_size"}
    kinds = [{n: x for n, x in each.fields.items() if n not in formats} for each in variants]
    ways = list(zip(variants, kinds, configs))
    for variant, kind, config in ways[1:]:
        for other, its_kind, its_config in ways:
            tokens = pays_from(config, its_config) if kind == its_kind else None
            if tokens is not None and tokens > 1:
                found.setdefault(variant.name, {})[other.name] = tokens
    return found


def _measured(
    variant: Variant,
    nbytes: float,
    dense: float,
    readings: Mapping[str, Reading],
    full: Mapping[str, Reading],
    unseen: float,
    most_kl: float,
) -> Measured:
    running = {name: each for name, each in readings.items() if each.probe.running}
    # Only rounding makes a KL negative.
    kl = {name: each.kl[each.probe.scored].clamp(min=0) for name, each in running.items()}
    recalled = _recalled(readings, full, unseen)
    return Measured(
        name=variant.name,
        bytes_per_token=nbytes,
        fewer=dense / nbytes,
        perplexity={name: each.perplexity for name, each in running.items()},
        kl={name: each.mean().item() for name, each in kl.items()},
        kl_p99={name: each.quantile(0.99).item() for name, each in kl.items()},
        agreement={
            name: each.same[each.probe.scored].mean().item() for name, each in running.items()
        },
        recall=readings["recall"].perplexity,
        needles=readings["needles"].found if "needles" in readings else None,
        recalled=recalled,
        verdict=verdict_of([each.mean().item() for each in kl.values()], recalled, most_kl),
    )


def verdict_of(kl: Iterable[float], recalled: float | None, most_kl: float = MOST_KL) -> str:
    """Returns the verdict for the mean KL on some texts and the recalled share."""
    if recalled is not None and recalled < LEAST_RECALL:
        return FORGETS
    return GOOD if all(each <= most_kl for each in kl) else VISIBLE  # NaN is not good


def _recalled(
    readings: Mapping[str, Reading], full: Mapping[str, Reading], unseen: float
) -> float | None:
    """Returns the share of the full cache's recall: nats gained by the passage, or digits found."""
    shares = []
    # Two logarithms: a quotient would be 0 below infinity.
    gained = log(unseen) - log(full["recall"].perplexity)
    if gained >= TELLING:
        shares.append((log(unseen) - log(readings["recall"].perplexity)) / gained)
    if "needles" in full and full["needles"].found >= FINDS:
        shares.append(readings["needles"].found / full["needles"].found)
    return min(1.0, max(0.0, min(shares))) if shares else None


def _price(measured: Measured) -> str:
    return f"{measured.fewer:.2f}x fewer bytes at a KL of {measured.worst_kl:.4f} nats"


def _loss(measured: Measured) -> str:
    if measured.verdict == FORGETS:
        return f"keeps {measured.recalled:.0%} of its recall"
    return f"has a KL of {measured.worst_kl:.3f} nats"
