"""Draws what a terminal shows above a job's progress: the pages, and the text of one row."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text

from pagedkv.batch.generator import BatchGenerator
from pagedkv.batch.results import Running

from .report import drawn
from .texts import head

ROWS = 2  # lines of a terminal that the growing text may take


class Show:
    """Lines below the texts, drawn anew while rows run.

    Args:
        generator: runs the rows.
        asked: the question of each prompt.
        decode: makes text of ids.
    """

    def __init__(
        self, generator: BatchGenerator, asked: list[str], decode: Callable[[list[int]], str]
    ) -> None:
        self._generator, self._asked, self._decode = generator, asked, decode
        self._shown: tuple[int, int] | None = None

    def __call__(self, width: int) -> list[Text]:
        """The pages that rows use, then the row that is shown, for a terminal of this width."""
        owners = self._generator.cache.owners()
        used, shared = int((owners > 0).sum()), int((owners > 1).sum())
        if not used:
            return []
        spared = int(owners.sum()) - used
        pages = {"live": used - shared, "shared": shared, "saved by sharing": spared}
        lines = [drawn(pages, width)]
        if (row := self._row()) is not None:
            text = " ".join(self._decode(row.tokens).split())
            lines.append(Text(head(self._asked[row.index], width), style="dim"))
            lines.append(Text(text[-ROWS * width :], style="italic"))
        return [Text(), *lines]

    def _row(self) -> Running | None:
        """Returns the row that was shown, as long as it runs; then that with the longest text."""
        rows = [row for row in self._generator.running if row.tokens]
        found = [row for row in rows if (row.index, row.sample) == self._shown]
        row = max(found or rows, key=lambda row: len(row.tokens), default=None)
        self._shown = None if row is None else (row.index, row.sample)
        return row
