"""What models read when quality is measured: running text, a recall probe, needles.

Running text alone cannot tell one way of forgetting from another, a random one included. `recall`
repeats a passage after other text, `needles` asks at the end for facts that lay in between: only a
cache that still has them does well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DATA = Path(__file__).resolve().parent
SHA256 = {
    "docs": "509e51cf9925ca8413e521576438000c090f3a9e66cb99c94d3575a7d05db3af",
    "prose": "05f560ddbd20bf65578b0a4ae85116cc7f49f6f2d97ec0b1c009bfc5404626c3",
}

NAMES = "prose", "docs", "recall", "needles"
WARM = 64  # tokens of a running text that do not count: no cache has forgotten anything yet
PASSAGE = 3 / 16  # share of a text that is repeated at its end
HINT = 1 / 8  # and of the repetition what is read before it counts
CITIES = ("Lisbon", "Ottawa", "Nairobi", "Prague", "Lima", "Hanoi", "Dublin", "Tunis")
NUMBERS = (4831, 7295, 1604, 9378, 5062, 2749, 8413, 3926)


@dataclass(frozen=True)
class Probe:
    """A text as tokens, and which of them count.

    Attributes:
        name: what tables call it.
        ids: `[n]` int64.
        scored: `[m]`, indices of tokens whose probability counts.
        running: whether every token after the first `WARM` is like the others, so that the whole
            distribution is worth comparing.
    """

    name: str
    ids: Tensor
    scored: Tensor
    running: bool = False


@cache
def text(name: str) -> str:
    """A text of `benchmarks/texts`.

    Raises:
        ValueError: the file is not the one that figures were measured on.
    """
    raw = (DATA / f"{name}.txt").read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != SHA256[name]:
        raise ValueError(f"{name}.txt: expected sha256 {SHA256[name]}, got {found}")
    return raw.decode()


def probes(
    tokenizer: Any, tokens: int = 1024, names: Iterable[str] = NAMES, since: int = WARM
) -> dict[str, Probe]:
    """Probes in the tokens of a model.

    Args:
        tokens: length of each text.
        names: which ones.
        since: first token of a running text that counts.

    Raises:
        ValueError: the texts are shorter than that.
    """
    prose, docs = (_ids(tokenizer, text(name)) for name in ("prose", "docs"))
    passage = int(tokens * PASSAGE)
    longest = min(int(len(prose) / (1 + PASSAGE)), len(docs))
    if not since < tokens <= longest:
        raise ValueError(f"tokens: expected {since + 1}..{longest}, got {tokens}")
    head = _head(tokenizer)

    def running(name: str, ids: Tensor) -> Probe:
        return Probe(name, torch.cat([head, ids])[:tokens], torch.arange(since, tokens), True)

    def recall() -> Probe:
        later, between = prose[-passage:], docs[: tokens - 2 * passage - len(head)]
        scored = torch.arange(tokens - passage + int(passage * HINT), tokens)
        return Probe("recall", torch.cat([head, later, between, later]), scored)

    make = {
        "prose": lambda: running("prose", prose),
        "docs": lambda: running("docs", docs),
        "recall": recall,
        "needles": lambda: needles(tokenizer, torch.cat([head, docs]), tokens),
    }
    return {name: make[name]() for name in names}


def needles(tokenizer: Any, hay: Tensor, tokens: int) -> Probe:
    """Facts at even distances in a text, asked for one after the other behind it.

    The questions come when everything was read, so nothing can be kept for their sake. What counts
    is the digits of the answers.

    Raises:
        ValueError: facts and questions alone are longer than that.
    """
    facts = [f"\nThe secret number of {c} is {n}.\n" for c, n in zip(CITIES, NUMBERS)]
    asked = [_ids(tokenizer, fact) for fact in facts]
    length = tokens - 2 * sum(map(len, asked))
    if length < len(facts):
        raise ValueError(
            f"tokens: expected more than {tokens - length} to hide needles, got {tokens}"
        )
    *pieces, last = hay[:length].tensor_split(len(facts) + 1)
    hidden = [part for both in zip(pieces, asked) for part in both]
    ids = torch.cat([*hidden, last, *asked])
    answers = torch.tensor([tokenizer.decode(i).strip().isdigit() for i in ids])
    answers[: tokens - sum(map(len, asked))] = False
    return Probe("needles", ids, answers.nonzero()[:, 0])


def _ids(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)


def _head(tokenizer: Any) -> Tensor:
    """What the tokenizer puts before every text; a model that had it in training misses it."""
    begin = tokenizer("x").input_ids[:1]
    return torch.tensor(begin if begin == [tokenizer.bos_token_id] else [], dtype=torch.long)
