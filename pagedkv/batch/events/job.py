"""The loop of `batch/job.py` for rows that come while others run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagedkv.batch.encoder import PromptEncoder
from pagedkv.batch.job import GenerationJob
from pagedkv.batch.prompt_queue import Coming
from pagedkv.batch.results import Result
from pagedkv.batch.rows import NOT_RUNNING, Row

from .request import Event, Request, Wish, Wishes
from .text import Text

CANCELLED = "cancelled"


class EventsJob(GenerationJob):
    """Rows that were added, each with options of its own. `run` gives the events of each step.

    Args:
        requests: by the place of their prompts; those that ended are removed.
        wishes: what other threads want of rows, in the order of asking.
        encoder: has the tokenizer for the text of events, if there is one.
        logprobs: whether events have log-probabilities.
        job: the arguments of a `Job`.
    """

    def __init__(
        self,
        requests: dict[int, Request],
        wishes: Wishes,
        encoder: PromptEncoder,
        logprobs: bool,
        *job: Any,
    ) -> None:
        super().__init__(None, *job)
        self._requests, self._wishes = requests, wishes
        self._encoder, self._logprobs = encoder, logprobs

    def _rows(self, coming: Coming) -> list[Row]:
        rows, request = super()._rows(coming), self._requests[coming.place]
        (row,) = rows
        if row.rules is not None and row.rules.alike is not None:
            row.rules = replace(row.rules, alike=(coming.options, row.rules.alike))
        request.row, request.text = row, Text(self._encoder.tokenizer, coming.options.stops)
        if request.is_cancelled:
            row.error = CANCELLED
        return rows

    def _step(self) -> list[Any] | None:
        while self._wishes and self._runner.in_flight is None:
            self._heed(*self._wishes.popleft())
        if self._wishes:
            self._scheduler.rows.is_changed = True  # so the next step lands first
        ended = super()._step()
        if ended is None:
            return None
        events = [
            event for row in (*self._scheduler.rows.running, *ended) for event in self._news(row)
        ]
        return [events] if events else []

    def _heed(self, request: Request, wish: Wish) -> None:
        """Does what another thread wants of a row, if the row has not ended meanwhile."""
        row, rows = request.row, self._scheduler.rows
        if row is None or row.error or row.finish_reason:  # not taken in yet, or over
            return
        if wish == "cancel":
            rows.set_aside(row)
            rows.fail(row, CANCELLED)
        elif wish == "pause":
            rows.set_aside(row)
        elif row.seq == NOT_RUNNING and row not in rows.waiting:
            rows.waiting.appendleft(row)

    def _news(self, row: Row) -> list[Event]:
        """Makes the events of a row's tokens that were not sent yet, and of its end."""
        request = self._requests[row.index]
        tokens, sent, text = row.tokens, request.sent, request.text
        is_over = bool(row.error or row.finish_reason)
        if len(tokens) == sent and not is_over:
            return []
        assert text is not None
        request.sent = len(tokens)
        events = []
        for i in range(sent, len(tokens)):
            logprob = row.logprobs[i] if self._logprobs else None
            events.append(Event(request, tokens[i], text.add(tokens[i]), logprob))
        if is_over:
            del self._requests[row.index]
            result = result_of(row, self._encoder, self._logprobs)
            last = events.pop() if events else Event(request, None, "")
            rest = last.text + text.end(result.text)
            events.append(last._replace(text=rest, finish_reason=result.finish_reason))
            request.end(result)
        return events


def result_of(row: Row, encoder: PromptEncoder, logprobs: bool) -> Result:
    """Makes the result of a row that ended, perhaps because somebody cancelled it."""
    result = row.result(encoder.text(row.tokens), logprobs)
    if row.error == CANCELLED:
        return replace(result, finish_reason="cancelled", error=None)
    return result
