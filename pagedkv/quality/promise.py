"""Finds the smallest way of keeping whose KL stays below a wish, and how surely on similar texts.

Texts are cut in windows. A third of the windows, drawn at random, only orders the ways, the closest
first. The other windows only judge: each way in this order, until one fails. So all ways before it
hold together as surely as one of them alone (fixed-sequence testing), and the smallest may be
chosen.
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
TOGETHER = 8  # windows read side by side: more take more memory for distributions


@dataclass(frozen=True)
class Promise:
    """The answer to a wish.

    Attributes:
        at_most: the wish, nats.
        windows: how many held-out windows there are; each of 1,000 draws takes as many of them,
            with replacement.
        near: mean KL of each way on the windows that order the ways; the closest first.
        kl, held: of judged ways: mean KL on held-out windows, share of draws with at most the wish.
        chosen: the smallest way that held; None if none did.
    """

    at_most: float
    windows: int
    near: dict[str, float]
    kl: dict[str, float]
    held: dict[str, float]
    chosen: str | None

    @property
    def sentence(self) -> str:
        """The result for the chosen way, or else for the nearest, in words."""
        if not self.near:
            return f"Nothing is promised at {self.at_most:g} nats: all that was tried loses recall."
        name = self.chosen or next(iter(self.near))
        said = f"a KL of {self.kl[name]:.4f} nats on {self.windows} held-out windows"
        said += f", at most {self.at_most:g} in {self.held[name]:.1%} of {DRAWS:,} draws"
        if self.chosen is None:
            return f"Nothing stays below {self.at_most:g} nats: the nearest, {name}, has {said}."
        return f"Use {name}: {said}."


def windows_of(tokenizer: Any, length: int, texts: Mapping[str, str] | None = None) -> list[Probe]:
    """Cuts texts in windows; of too many it takes some at even distances. A short text is one.

    Args:
        length: tokens of each window.
        texts: as for `probes`.

    Raises:
        ValueError: there are too few windows for a statement on similar texts.
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
        ways: by name, each with its bytes a token.
        windows: the result of `windows_of`.
        tell: as in `compare`.
    """
    drawn = torch.randperm(len(windows), generator=_seeded(), device="cpu").tolist()
    third, done = len(windows) // 3, 0

    def read(names: list[str], places: list[int], to_come: list[int]) -> dict[str, Tensor]:
        """Returns the mean KL of each window in some ways; windows `to_come` are read later."""
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
    # Ways that read fewer tokens take equal bytes; of these the way that reads least is smallest.
    size = {
        name: (nbytes, way.fields.get("read_tokens", inf)) for name, (way, nbytes) in ways.items()
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
        near: KL of each way, on the windows that order the ways.
        read: returns the KL of some ways on the held-out windows.
        size: size of each way, as any values that can be compared.
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
    """Returns the share of draws in which the mean KL of all similar windows is at most this.

    Each draw assumes that this mean is as far from the mean of `kl`, in standard errors, as the
    mean of `kl` is from the mean of the draw (the studentized bootstrap). The mean of a draw itself
    would be too low too often, since a few windows of many have most of the KL.
    """
    places = torch.randint(len(kl), (DRAWS, len(kl)), generator=_seeded(), device="cpu")
    drawn = kl.double()[places]
    off = (drawn.mean(1) - kl.double().mean()) / drawn.std(1).clamp(min=1e-12)
    means = kl.double().mean() - off * kl.double().std()
    return (means <= at_most).double().mean().item()


def _distance(kl: float) -> float:
    """Returns a KL, with 0 for less than 0, which is rounding, and infinity for NaN."""
    return inf if isnan(kl) else max(0.0, kl)


def _seeded() -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(0)
