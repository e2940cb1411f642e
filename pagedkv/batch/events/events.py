"""`Events`: rows are added while others run, and each token is an event."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from threading import Condition, Lock, get_ident
from typing import Any

import numpy as np

from pagedkv.batch.calls import options_of
from pagedkv.batch.chats import NAME as CHATS
from pagedkv.batch.chats import Told
from pagedkv.batch.encoder import PromptEncoder
from pagedkv.batch.options import GenerationOptions
from pagedkv.batch.per_prompt import EACH, value_of
from pagedkv.batch.prompt_queue import Coming, PromptQueue
from pagedkv.batch.prompts import Prompt
from pagedkv.batch.rows import Row
from pagedkv.batch.runner import StepRunner
from pagedkv.batch.scheduler import Scheduler
from pagedkv.pages.salts import Salt

from .job import CANCELLED, EventsJob, result_of
from .request import Event, Request, Wish, Wishes

MOST_OPTIONS = 64  # combinations of options that are kept
PLAIN = str, int, float, bool, type(None)
Parts = tuple[Scheduler, StepRunner, PromptQueue]  # the arguments of a `Job`


class Events(Iterator[Event]):
    """Rows that are added at any time, and an iterator over their events.

    One thread reads the events, and so takes the steps. Any thread adds rows, cancels them and
    waits for them. The iterator ends when no row is left, and goes on once another was added.

    Attributes:
        stats: a `GenerationStats` of all its rows.
    """

    def __init__(self, encoder: PromptEncoder, parts: Parts, logprobs: bool) -> None:
        self._encoder, self._logprobs = encoder, logprobs
        _, runner, self._source = parts
        self.stats = runner.stats
        self._requests: dict[int, Request] = {}
        self._wishes: Wishes = deque()
        self._job = EventsJob(self._requests, self._wishes, encoder, logprobs, *parts)
        self._running: Generator[Any] | None = None
        self._pending: deque[Event] = deque()
        self._added, self._adding = 0, Lock()
        self._chosen: dict[Any, GenerationOptions] = {}
        self._reading, self._is_closed = Lock(), False
        self._reader: int | None = None  # the thread that took the latest step, until rows end
        self._changed = Condition()

    # ------------------------------------------------------------------ rows

    def add(
        self,
        prompt: Prompt,
        *,
        salt: Salt = b"",
        chat_template_kwargs: Told | None = None,
        **options: Any,
    ) -> Request:
        """Adds a row, which joins at the next step that has room for it.

        Args:
            prompt: text, ids, chat messages, or what a processor returns, as for `generate`.
            salt: the row shares prefixes only with rows of the same salt.
            chat_template_kwargs: what the chat template is told.
            options: those of `generate`, for this row alone. A row is one sample: for several
                samples, add the prompt several times; it is computed once.

        Raises:
            ValueError, TypeError: the prompt or an option is invalid, or the events were closed.
        """
        told, salt = value_of(CHATS, chat_template_kwargs), value_of("salt", salt)
        with self._adding:
            self._require_open()
            chosen, own = self._options(options)
            ids = self._encoder.one(prompt, told, self._added)
            request = Request(self._added, self._wish, lambda: self._reader)
            self._added += 1
            self._requests[request.index] = request
            self._source.put(Coming(request.index, ids, {"salt": salt, **own}, chosen))
            self._require_open()  # a row that is added after the end would never end
        self._wake()
        return request

    def _options(self, options: dict[str, Any]) -> tuple[GenerationOptions, dict[str, Any]]:
        """Returns a row's options, which rows with equal ones share, and values of its own."""
        own = {
            name: value_of(name, options[name])
            for name in ("seed", *EACH)
            if options.get(name) is not None
        }
        plain = {name: value for name, value in options.items() if name not in own}
        key = _key(plain)
        if key is None:
            each = {name: [value] for name, value in own.items()}
            chosen = options_of(self._encoder, 1, {**plain, **each})
        else:
            key = frozenset(own), key
            if key not in self._chosen:
                if len(self._chosen) >= MOST_OPTIONS:
                    self._chosen.clear()
                in_step = {name: iter(()) for name in own}
                self._chosen[key] = options_of(self._encoder, None, {**plain, **in_step})
            chosen = self._chosen[key]
            chosen.require(own)
        if chosen.samples > 1:
            raise ValueError(
                f"num_return_sequences: expected 1, got {chosen.samples}; add the prompt again, "
                "what rows have in common is computed once"
            )
        return chosen, own

    def _wish(self, request: Request, wish: Wish) -> None:
        self._wishes.append((request, wish))
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------ events

    def __iter__(self) -> Events:
        return self

    def __next__(self) -> Event:
        while not self._pending:
            events = self.step()
            if events is None:
                raise StopIteration
            self._pending += events
        return self._pending.popleft()

    def step(self) -> list[Event] | None:
        """Computes until a row has news; returns that step's events, None if no row is left.

        Raises:
            RuntimeError: another thread is in a step.
            Exception: an error that ends the steps of all rows, such as one of the model's forward.
                The events are closed then.
        """
        if not self._reading.acquire(blocking=False):
            raise RuntimeError("events: another thread reads them")
        try:
            self._reader = get_ident()
            events = self._next()
            if self._is_closed:  # by this thread, or by one that has not waited for this step
                self._end(None)
            elif events is None:
                self._reader = None
            return events
        except BaseException as error:
            self._is_closed = True
            self._end(error)
            raise
        finally:
            self._reading.release()

    def _next(self) -> list[Event] | None:
        while not self._is_closed and (self._running is not None or self._has_work):
            if self._running is None:
                self._running = self._job.run()
            for events in self._running:
                return events
            self._running = None
        return None

    @property
    def _has_work(self) -> bool:
        return bool(self._source.num_read or self._wishes)

    def wait_for_work(self) -> bool:
        """Waits until a row was added or another thread wants something; False once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has_work)
        return not self._is_closed

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Cancels the rows that are left. Idempotent; any thread may call it.

        Within a step, such as in a handler of a signal, rows end with that step.
        """
        self.stop()
        if self._reading.locked() and self._reader == get_ident():
            return
        with self._reading:  # a step that another thread computes ends first
            self._end(None)

    def stop(self) -> None:
        """Accepts no more rows; the thread that takes steps ends the rest, or `close` does."""
        self._is_closed = True
        self._wake()

    def _end(self, error: BaseException | None) -> None:
        """Ends the rows that are left, between two steps."""
        self._reader = None
        if self._running is not None:
            self._running.close()
            self._running = None
        while self._requests:
            _, request = self._requests.popitem()
            row, result = request.row, None
            if error is None:
                row = row or Row(np.empty(0, np.int32), 0, request.index)
                row.error = CANCELLED
                result = result_of(row, self._encoder, self._logprobs)
            request.end(result, error)

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError("add: these events were closed")

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _key(options: dict[str, Any]) -> Any:
    """Returns a key that equal options share; None if they cannot be compared or limit the time."""
    values = []
    for name, value in sorted(options.items()):
        many = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if name == "max_time" or not all(isinstance(one, PLAIN) for one in many):
            return None
        values.append((name, type(value), many))
    return tuple(values)
