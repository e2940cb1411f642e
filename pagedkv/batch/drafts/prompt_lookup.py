"""Prompt lookup: drafts the tokens that followed where a text had its last tokens before.

Texts repeat themselves: answers quote their prompts, code its names, lists their form. The model
verifies each draft. A lookup scans the text in 10 us for 32,000 ids; an index would have to be
built for a prompt, copied for a fork, and kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pagedkv.arrays import Tokens
from pagedkv.batch.rows import Row

from .drafter import Drafter

LONGEST = 3  # most tokens compared: comparing more would hardly make better drafts


def draft(text: Tokens, most: int) -> Tokens:
    """Returns the tokens that followed the latest earlier occurrence of a text's last tokens.

    It takes the occurrence that agrees with the end in the most tokens, up to `LONGEST`. If fewer
    than `most` tokens followed it, they are repeated: a text that ends in a cycle goes on in it.

    Args:
        text: `[n]` ids.
        most: ids wanted.

    Returns:
        `[most]` ids, or none if the last token has not occurred before.
    """
    end = len(text) - 1
    places = np.flatnonzero(text[:-1] == text[-1])
    for back in range(1, min(LONGEST, len(text))):
        longer = places[places >= back]
        longer = longer[text[longer - back] == text[end - back]]
        if not longer.size:
            break
        places = longer
    return np.resize(text[places[-1] + 1 :], most) if places.size else text[:0]


class PromptLookup:
    """A growing text, from which its next tokens are drafted.

    Args:
        prompt: `[n]` ids it begins with, at least one.
    """

    def __init__(self, prompt: Tokens) -> None:
        self._text, self._size, self._begin = prompt, len(prompt), len(prompt)

    def draft(self, tokens: Sequence[int], most: int) -> Tokens:
        """Returns up to `most` ids that may come next.

        Args:
            tokens: all that came behind the prompt so far; only those not seen before are read.
        """
        size = self._begin + len(tokens)
        if size > len(self._text):
            self._text = np.resize(self._text, 2 * size)
        self._text[self._size : size] = tokens[self._size - self._begin :]
        self._size = size
        return draft(self._text[:size], most)


class Lookups(Drafter):
    """The `Drafter` that looks drafts up in each row's own text."""

    def __init__(self) -> None:
        self._of: dict[Row, PromptLookup] = {}

    def drafts(self, rows: Sequence[Row], most: Sequence[int], budget: int) -> list[Tokens]:
        # The first rows are the first to use the budget.
        found = []
        for row, limit in zip(rows, most):
            if row not in self._of:
                ids = row.prompt if row.images is None else row.images.ids
                self._of[row] = PromptLookup(ids)
            found.append(self._of[row].draft(row.tokens, max(0, min(limit, budget))))
            budget -= len(found[-1])
        return found

    def forget(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._of.pop(row, None)
