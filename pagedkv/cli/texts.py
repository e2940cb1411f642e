"""The texts of a job on standard output, each under its question."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from .prompts import Prompt
from .screen import Screen

if TYPE_CHECKING:  # it brings torch along, for which --help does not wait
    from pagedkv.batch.results import Result

COLUMNS = 120  # of a question, if no terminal says its width


class Texts:
    """Prints texts: on a terminal as rows end, elsewhere in the order of the prompts.

    A text that ended at its limit or by an error says so. If a single prompt's texts go to a
    program, they are printed alone. In a pipe a bad prompt keeps its place, without a text.

    Args:
        skipped: causes of prompts that are left out.
    """

    def __init__(
        self, screen: Screen, prompts: list[Prompt], samples: int, skipped: Collection[str] = ()
    ) -> None:
        self._prompts = prompts
        shown = [i for i, prompt in enumerate(prompts) if prompt.cause not in skipped]
        self._order = [(i, sample) for i in shown for sample in range(samples)]
        self._next = 0  # in a pipe: the place in `_order` of the first text not yet printed
        bad = (place for place in self._order if prompts[place[0]].cause)
        self._held: dict[tuple[int, int], Result | None] = dict.fromkeys(bad)
        self._last: int | None = None  # the prompt whose text was printed last
        self._console = None
        if sys.stdout.isatty():
            # If there is a bar, texts go through its console; else they would run into the bar.
            own = Console(highlight=False, markup=False, emoji=False)
            self._console = screen.console if screen.is_shared else own

    def add(self, index: int, result: Result) -> None:
        """Takes the text of a row that ended; `index` is its prompt's index in the job."""
        if self._console is not None:
            self._print(index, result)
            return
        self._held[index, result.sample] = result
        while self._next < len(self._order) and self._order[self._next] in self._held:
            place = self._order[self._next]
            self._print(place[0], self._held.pop(place))
            self._next += 1

    def flush(self) -> None:
        """Prints the texts that wait for an earlier one, which will not come any more."""
        for place in self._order[self._next :] if self._console is None else ():
            if place in self._held:
                self._print(place[0], self._held.pop(place))

    def _print(self, index: int, result: Result | None) -> None:
        named = self._console is not None or len(self._prompts) > 1
        text = ((result and result.text) or "").strip()
        mark = ""
        if named and (result is None or result.finish_reason != "stop"):
            failed = result is None or result.error
            said = "error" if failed else f"cut at {len(result.tokens):,} tokens"  # type: ignore[union-attr]
            mark = f"{' ' if text else ''}[{said}]"
        question, between = "", "" if self._last is None else "\n"
        if named and index != self._last:
            columns = self._console.width if self._console else COLUMNS
            question = head(asked(self._prompts[index]), columns)
        self._last = index
        if self._console is None:
            question = question and f"{question}\n"
            print(f"{between}{question}{text}{mark}", flush=True)
            return
        parts = between, (question, "dim"), "\n" if question else "", text, (mark, "dim")
        self._console.print(Text.assemble(*parts), soft_wrap=True)


def asked(prompt: Prompt) -> str:
    """The question of a prompt: its text, or its last message."""
    content = (prompt.error or "") if prompt.cause else prompt.content
    return content if isinstance(content, str) else str(content[-1]["content"])


def head(question: str, columns: int) -> str:
    """Returns the line above an answer: a question, or its end, in `columns` columns."""
    room, line = columns - 4, " ".join(question.split())
    return f"> {line if len(line) <= room else '...' + line[3 - room :]}"
