"""Contexts and continuations as callers give them, and the ids that they become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv.arrays import Ints
from pagedkv.batch.chats import Told
from pagedkv.batch.encoder import encode
from pagedkv.batch.prompts import Prompt, as_python, ids_of, kind_of
from pagedkv.pages.salts import Salt


@dataclass(frozen=True)
class Choice:
    """A continuation: its prompt's place, its own place among that prompt's, and its ids `[m]`."""

    index: int
    choice: int
    ids: Ints


@dataclass(frozen=True)
class Context:
    """Ids `[n]` that stand before some continuations, perhaps of several prompts."""

    ids: Ints
    salt: Salt
    continuations: list[Choice]


def by_prompt(continuations: Any, prompts: int) -> list[list[Any]]:
    """Returns the continuations of each prompt, from one list for all or a list for each.

    Raises:
        TypeError, ValueError: they are neither.
    """
    given = _as_list(continuations, "continuations")
    alone = [_is_one(one) for one in given]
    if any(alone):
        for i, one in enumerate(given):
            _require_one(one, i)
        return [given] * prompts
    each = [_as_list(one, f"continuations: at {i}") for i, one in enumerate(given)]
    if len(each) != prompts:
        raise ValueError(
            f"continuations: expected a list for each of {prompts} prompts, got {len(each)} lists"
        )
    for i, own in enumerate(each):
        for one in own:
            _require_one(one, i)
    return each


def contexts_of(
    prompts: list[Prompt],
    each: list[list[Any]],
    salts: list[Salt],
    chats: list[Told],
    tokenizer: Any,
    start: int | None,
) -> list[Context]:
    """Returns the distinct contexts of all prompts, with their continuations.

    Where both are text, context and continuation are encoded together, because a tokenizer may
    merge over the border, and are cut behind as many tokens as the context has alone. So the
    choices of one prompt may differ in the last token of their context. Ids that a tokenizer puts
    behind every text are left out. Spaces at a context's end belong to the continuation.

    Args:
        each: the continuations of each prompt.
        chats: what the template of each prompt is told.
        start: the token that stands for an empty context, if there is one.

    Raises:
        TypeError, ValueError: something given is no prompt, or has images.
    """
    for i, prompt in enumerate(prompts):
        if kind_of(prompt) in ("images", "processed"):
            raise ValueError(f"prompts: expected text to score behind, got images at {i}")
    pairs = [
        _Pair(i, k, prompts[i], one) for i, own in enumerate(each) for k, one in enumerate(own)
    ]
    joint = _encoded(tokenizer, [text for pair in pairs for text in pair.texts])
    behind = _encoded(tokenizer, [pair.behind for pair in pairs if pair.behind], bare=True)
    rest = [[] if isinstance(prompt, str) else prompt for prompt in prompts]
    others: list[Any] = encode(rest, tokenizer, told=chats)
    found: dict[tuple[Salt, bytes], Context] = {}
    for pair in pairs:
        if pair.is_joint:
            alone, whole = (joint[text] for text in pair.texts)
            cut = min(len(alone), len(whole) - 1)  # something is always left to score
            ids, after = whole[:cut], whole[cut:]
        else:
            ids = joint[pair.prompt] if pair.texts else others[pair.index]
            after = behind[pair.behind] if pair.behind else pair.ids
        if not ids.size and start is not None:
            ids = np.array([start], np.int64)
        key = salts[pair.index], ids.tobytes()
        context = found.setdefault(key, Context(ids, salts[pair.index], []))
        context.continuations.append(Choice(pair.index, pair.choice, after))
    return list(found.values())


class _Pair:
    """A prompt and one of its continuations, and what the tokenizer is asked for them.

    Attributes:
        is_joint: whether both are text.
        texts: the prompt if it is text; where `is_joint`, also both together.
        behind: the continuation, if it is text and the prompt is not.
        ids: the continuation, if it is no text.
    """

    def __init__(self, index: int, choice: int, prompt: Prompt, given: Any) -> None:
        self.index, self.choice, self.prompt = index, choice, prompt
        are_text = isinstance(prompt, str), isinstance(given, str)
        self.is_joint = all(are_text) and bool(given)
        self.behind = given if are_text == (False, True) else ""
        self.texts: list[str] = [prompt] if are_text[0] else []
        if self.is_joint:
            self.texts = [prompt.rstrip(), prompt + given]
        self.ids = np.empty(0, np.int64)
        if not are_text[1] and (ids := ids_of(given)) is not None:
            self.ids = ids


def _encoded(tokenizer: Any, texts: list[str], bare: bool = False) -> dict[str, Ints]:
    """Encodes all texts at once, without ids that end a text; with `bare` without special ids."""
    each = list(dict.fromkeys(texts))
    if not each:
        return {}
    rows = tokenizer(each, **({"add_special_tokens": False} if bare else {}))["input_ids"]
    longest = max(range(len(each)), key=lambda i: len(each[i]))
    ends = 0 if bare else _ends(tokenizer, each[longest], rows[longest])
    return {text: np.asarray(row[: len(row) - ends], np.int64) for text, row in zip(each, rows)}


def _ends(tokenizer: Any, text: str, ids: list[int]) -> int:
    """Counts the ids that a tokenizer puts behind every text, where a continuation should stand."""
    own = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    more = len(ids) - len(own)
    return next((more - at for at in range(more + 1) if own == ids[at : at + len(own)]), 0)


def _as_list(value: Any, name: str) -> list[Any]:
    is_text = isinstance(value, (str, bytes, bytearray, Mapping)) or hasattr(value, "as_py")
    if is_text or hasattr(value, "columns") or not isinstance(value, Iterable):
        raise TypeError(f"{name}: expected a list of continuations, got {type(value).__name__}")
    return [as_python(one) for one in value]


def _is_one(value: Any) -> bool:
    """Whether it is a continuation: text, or at least one id."""
    if isinstance(value, str):
        return True
    ids = ids_of(value)
    return ids is not None and ids.size > 0


def _require_one(value: Any, i: int) -> None:
    is_empty = hasattr(value, "__len__") and not len(value)
    if not (_is_one(value) or is_empty):
        raise TypeError(
            "continuations: expected text or [n] ids, in one list for all prompts or in a list "
            f"for each, got at {i} {type(value).__name__}"
        )
