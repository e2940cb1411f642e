"""The interface of drafters, and the configurations under which nothing can be drafted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagedkv.arrays import Tokens
from pagedkv.batch.rows import Row
from pagedkv.config import CacheConfig


class Drafter:
    """Guesses the next tokens of rows; the step that follows finds out whether they are right."""

    def drafts(self, rows: Sequence[Row], most: Sequence[int], budget: int) -> list[Tokens]:
        """Guesses the next tokens of decoding rows.

        Args:
            rows: decoding rows.
            most: the most ids for each row; below 1 none.
            budget: the most ids for all rows together.

        Returns:
            A draft for each row, which may be empty; or an empty list.
        """
        raise NotImplementedError

    def forget(self, rows: Iterable[Row]) -> None:
        """Lets go of rows that leave, whether it knows them or not."""

    def close(self) -> None:
        """Lets go of everything."""

    def close_later(self) -> None:
        """`close`, at a moment when its cache may be in the middle of a call."""


def why_none(config: CacheConfig) -> str | None:
    """Returns why nothing can be drafted for a cache; None if drafts are possible."""
    if config.read_tokens:  # steps of several tokens read all pages: drafts would change results
        return "with read_tokens"
    if config.states:
        return (
            "for a model with recurrent states, because the state behind a rejected draft cannot "
            "be taken back"
        )
    return None
