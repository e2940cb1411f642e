"""The smallest way of keeping whose KL stays below a wish, and how surely on texts like these.

Texts are cut in windows. A third of them, drawn at random, puts the ways in an order, the closest
first. The others choose nothing: each way is judged on them in that order until one fails, so that
all before it hold together as surely as one of them alone (fixed-sequence testing), and the
smallest may be picked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor

from .probes import CHARACTERS, WARM, Probe, encoded, given, head_of
from .reading import compare, tokens_of
from .variants import Variant

LEAST_WINDOWS, MOST_WINDOWS = 24, 48
DRAWS, ENOUGH = 1000, 0.95
TOGETHER = 8  # windows that are read side by side: each holds the distributions of some tokens


@dataclass(frozen=True)
class Promise:
    """The answer to a wish.

    Attributes:
        at_most: the wish, nats.
        windows: held-out ones; each of 1,000 draws has as many of them, with replacement.
        near: mean KL of each way on the windows that put them in order; the closest first.
        kl, held: of the ways that were judged, their mean KL on the held-out windows, and the share
            of draws in which it was at most the wish.
        chosen: the smallest that held; None where none did.
    """

    at_most: float
    windows: int
    near: dict[str, float]
    kl: dict[str, float]
    held: dict[str, float]
    chosen: str | None

    @property
    def sentence(self) -> str:
        """Says what was found of the nearest or the chosen way."""
        if not self.near:
            return f"Nothing is promised at {self.at_most:g} nats: all that was tried loses recall."
        name = self.chosen or next(iter(self.near))
        said = f"a KL of {self.kl[name]:.4f} nats on {self.windows} held-out windows"
        said += f", at most {self.at_most:g} in {self.held[name]:.1%} of {DRAWS:,} draws"
        if self.chosen is None:
            return f"Nothing stays below {self.at_most:g} nats: the nearest, {name}, has {said}."
        return f"Use {name}: {said}."


def windows_of(tokenizer: Any, length: int, texts: Mapping[str, str] | None = None) -> list[Probe]:
    """Texts cut in windows, at even distances where there are many; a short text is one.

    Args:
        length: tokens of each.
        texts: as for `probes`.

    Raises:
        ValueError: there are too few to say anything of texts like them.
    """
    head, found = head_of(tokenizer), list[Tensor]()
    own = length - len(head)
    for text in given(texts).values():
        ids = encoded(tokenizer, text[: CHARACTERS * length * MOST_WINDOWS])
        found += ids[: len(ids) // own * own or len(ids)].split(own)
    if missing := max(0, LEAST_WINDOWS - len(found)):
        raise ValueError(
            f"at_most: expected {LEAST_WINDOWS} windows of {length:,} tokens, got {len(found)}; "
            f"give {missing * own:,} more tokens of text, or a smaller length"
        )
    count = min(len(found), MOST_WINDOWS)
    some = (torch.cat([head, found[i * len(found) // count]]) for i in range(count))
    return [
        Probe(f"window {i}", ids, torch.arange(WARM, len(ids), device="cpu"), True)
        for i, ids in enumerate(some)
    ]


def promise_of(
    model: Any,
    ways: Mapping[str, tuple[Variant, float]],
    windows: Sequence[Probe],
    at_most: float,
    tell: Callable[[int, int], None],
) -> Promise:
    """Reads windows in each way, and judges them.

    Args:
        ways: by name, each with the bytes that it takes a token.
        windows: as `windows_of` gives them.
        tell: as of `compare`.
    """
    drawn = torch.randperm(len(windows), generator=_seeded(), device="cpu").tolist()
    third, done = len(windows) // 3, 0

    def read(names: list[str], places: list[int], to_come: list[int]) -> dict[str, Tensor]:
        """The mean KL of each window in some ways, before others."""
        nonlocal done
        found: dict[str, list[float]] = {name: [] for name in names}
        for at in range(0, len(places), TOGETHER):
            group = [windows[i] for i in places[at : at + TOGETHER]]
            readings = compare(model, [ways[name][0] for name in names], group)
            for kl, of_way in zip(found.values(), readings):
                kl += [_distance(reading.mean_kl) for reading in of_way.values()]
            done += tokens_of(group) * (1 + len(names))
            left = places[at + TOGETHER :] + to_come
            tell(done, done + tokens_of([windows[i] for i in left]) * (1 + len(names)))
        return {name: torch.tensor(kl, device="cpu") for name, kl in found.items()}

    near = read([*ways], drawn[:third], drawn[third:]) if ways else {}
    # What reads less takes as many bytes; of such ways the one that reads least is smallest.
    size = {
        name: (nbytes, variant.fields.get("read_tokens", inf))
        for name, (variant, nbytes) in ways.items()
    }
    return judge(near, lambda names: read(names, drawn[third:], []), size, at_most)


def judge(
    near: Mapping[str, Tensor],
    read: Callable[[list[str]], Mapping[str, Tensor]],
    size: Mapping[str, Any],
    at_most: float,
) -> Promise:
    """Judges ways by the mean KL of windows.

    Args:
        near: of each way, on the windows that put them in order.
        read: gives that of some ways on the held-out windows.
        size: of each way, in an order of its own.
    """
    means = {name: kl.mean().item() for name, kl in near.items()}
    order = sorted(means, key=means.__getitem__)
    far = read([name for name in order if means[name] <= at_most] or order[:1]) if order else {}
    held, good = dict[str, float](), list[str]()
    for name, kl in far.items():
        held[name] = share_held(kl, at_most)
        if held[name] < ENOUGH:
            break
        good.append(name)
    return Promise(
        at_most,
        windows=max(map(len, far.values()), default=0),
        near={name: means[name] for name in order},
        kl={name: far[name].mean().item() for name in held},
        held=held,
        chosen=min(good, key=size.__getitem__, default=None),
    )


def share_held(kl: Tensor, at_most: float) -> float:
    """Share of draws in which the mean of all windows like these is at most so much.

    In each draw it is thought to be as far from the mean of these, in standard errors, as theirs is
    from that of the draw (the studentized bootstrap). The mean of a draw itself would be too low
    too often, since a few windows of many have most of the KL.
    """
    places = torch.randint(len(kl), (DRAWS, len(kl)), generator=_seeded(), device="cpu")
    drawn = kl.double()[places]
    off = (drawn.mean(1) - kl.double().mean()) / drawn.std(1).clamp(min=1e-12)
    means = kl.double().mean() - off * kl.double().std()
    return (means <= at_most).double().mean().item()


def _distance(kl: float) -> float:
    """A KL without its rounding below zero; what is no number is as far as can be."""
    return inf if isnan(kl) else max(0.0, kl)


def _seeded() -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(0)
