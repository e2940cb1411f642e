"""Texts that models read when quality is measured: running text, a recall probe, needles.

Running text alone cannot tell one way of forgetting from another, not even from a random one.
`recall` repeats a passage after other text, `needles` asks at the end for facts from in between:
only a cache that still has them does well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DATA = Path(__file__).resolve().parent / "texts"
SHA256 = {
    "docs": "509e51cf9925ca8413e521576438000c090f3a9e66cb99c94d3575a7d05db3af",
    "prose": "05f560ddbd20bf65578b0a4ae85116cc7f49f6f2d97ec0b1c009bfc5404626c3",
}

WARM = 64  # first tokens of a running text that do not count: no cache has forgotten anything yet
LEAST = 2 * WARM  # tokens of a text at least
CHARACTERS = 64  # characters of a text that are tokenized for each token that is asked for
PASSAGE = 3 / 16  # share of a text that is repeated at its end
HINT = 1 / 8  # share of the repetition that is read before it counts
OWN = {"recall", "unseen", "needles"}
CITIES = ("Lisbon", "Ottawa", "Nairobi", "Prague", "Lima", "Hanoi", "Dublin", "Tunis")
NUMBERS = (4831, 7295, 1604, 9378, 5062, 2749, 8413, 3926)


@dataclass(frozen=True)
class Probe:
    """A text as tokens, and which of them count.

    Attributes:
        name: its name in tables.
        ids: `[n]` int64.
        scored: `[m]`, indices of tokens whose probability counts.
        running: whether it is a running text, of which the whole distributions are compared.
    """

    name: str
    ids: Tensor
    scored: Tensor
    running: bool = False
    full_only: bool = False


@cache
def built_in(name: str) -> str:
    """Returns a text that comes with the package.

    Raises:
        ValueError: the file differs from the one on which figures were measured.
    """
    raw = (DATA / f"{name}.txt").read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != SHA256[name]:
        raise ValueError(f"{name}.txt: expected sha256 {SHA256[name]}, got {found}")
    return raw.decode()


def given(texts: Mapping[str, str] | None) -> Mapping[str, str]:
    """Returns the given texts, or by default those that come with the package."""
    return {name: built_in(name) for name in ("prose", "docs")} if texts is None else texts


def probes(
    tokenizer: Any, tokens: int = 1024, texts: Mapping[str, str] | None = None
) -> dict[str, Probe]:
    """Makes probes in a model's tokens: all texts as they are, then `recall`, `unseen`, `needles`.

    Args:
        tokens: the largest length of each probe.
        texts: by name. The passage that `recall` repeats comes from the end of the first text; the
            text in between, and around the needles, comes from the last one. Default: `prose` and
            `docs`, which come with the package.

    Returns:
        Probes by name. There is no `needles` if the text is too short, or the model has no digits.

    Raises:
        ValueError: a text, or `tokens`, is too short for a measurement.
    """
    if tokens < LEAST:
        raise ValueError(f"length: expected at least {LEAST} tokens, got {tokens}")
    texts = given(texts)
    if not texts or OWN & texts.keys():
        raise ValueError(
            f"texts: expected one or more, none of them called {', '.join(sorted(OWN))}, got "
            f"{', '.join(texts) or 'none'}"
        )
    head = head_of(tokenizer)
    found, ids = [], []
    for name, text in texts.items():
        ids.append(encoded(tokenizer, text[: CHARACTERS * tokens]))
        running = torch.cat([head, ids[-1]])[:tokens]
        if len(running) < LEAST:
            raise ValueError(f"{name}: expected at least {LEAST} tokens, got {len(running)}")
        found.append(Probe(name, running, torch.arange(WARM, len(running), device="cpu"), True))
    hay = torch.cat([head, ids[-1]])
    length = min(tokens, len(hay))
    found += recall(ids[0], ids[-1], head, length)
    if needles := hidden_facts(tokenizer, hay, length):
        found.append(needles)
    return {probe.name: probe for probe in found}


def recall(source: Tensor, between: Tensor, head: Tensor, tokens: int) -> tuple[Probe, Probe]:
    """Makes two probes: a passage, other text, and the passage again; and without the first one.

    The second probe, `unseen`, shows how well a model predicts the passage that it never saw.
    """
    passage = source[-int(tokens * PASSAGE) :]
    between = between[: tokens - 2 * len(passage) - len(head)]
    read = len(passage) - int(tokens * PASSAGE * HINT)
    found = []
    for name, first in (("recall", passage), ("unseen", passage[:0])):
        ids = torch.cat([head, first, between, passage])
        scored = torch.arange(len(ids) - read, len(ids), device="cpu")
        found.append(Probe(name, ids, scored, full_only=name == "unseen"))
    return found[0], found[1]


def hidden_facts(tokenizer: Any, hay: Tensor, tokens: int) -> Probe | None:
    """Hides facts at even distances in a text, and asks for them one after the other behind it.

    The questions come when everything was read, so a cache cannot keep pages for their sake. Only
    the digits of the answers count.

    Returns:
        None if hardly any text would be between the facts, or no token is a digit.
    """
    facts = [f"\nThe secret number of {c} is {n}.\n" for c, n in zip(CITIES, NUMBERS)]
    asked = [encoded(tokenizer, fact) for fact in facts]
    questions = sum(map(len, asked))
    length = tokens - 2 * questions
    if length < len(facts):
        return None
    *pieces, last = hay[:length].tensor_split(len(facts) + 1)
    hidden = [part for both in zip(pieces, asked) for part in both]
    ids = torch.cat([*hidden, last, *asked])
    digits = [tokenizer.decode(i).strip().isdigit() for i in ids[-questions:]]
    if not any(digits):
        return None
    places = torch.tensor(digits, device="cpu").nonzero()[:, 0]
    return Probe("needles", ids, places + len(ids) - questions)


def encoded(tokenizer: Any, text: str) -> Tensor:
    """Returns the ids of a text without special tokens, `[n]` int64."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return torch.tensor(ids, dtype=torch.long, device="cpu")


def head_of(tokenizer: Any) -> Tensor:
    """Returns the token that begins every text, if there is one: models trained with it need it."""
    begin = tokenizer("x").input_ids[:1]
    head = begin if begin == [tokenizer.bos_token_id] else []
    return torch.tensor(head, dtype=torch.long, device="cpu")
