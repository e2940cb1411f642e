"""Events for `asyncio`: a thread takes the steps, and each row is an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from threading import Thread
from typing import Any
from weakref import WeakValueDictionary

from pagedkv.batch.prompts import Prompt
from pagedkv.batch.results import GenerationStats, Result

from .events import Events
from .request import Event, Request

MOST_UNREAD = 64  # a row with so many unread events waits without pages


class AsyncRequest:
    """One row: `async for event in row` gives its events, `await row.wait()` its result.

    A row whose events nobody reads stops after 64 of them and holds no pages; it goes on where it
    stopped once somebody reads. A row that nobody references any more is cancelled.

    Attributes:
        request: the row's `Request`.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self._unread: deque[Event] = deque()
        self._news = asyncio.Event()
        self._is_over, self._is_paused = False, False
        self._error: BaseException | None = None

    def __aiter__(self) -> AsyncRequest:
        return self

    async def __anext__(self) -> Event:
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._is_over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        event = self._unread.popleft()
        if self._is_paused and len(self._unread) <= MOST_UNREAD // 2:
            self._is_paused = False
            self.request.tell(self.request, "resume")
        return event

    async def wait(self) -> Result:
        """Reads the events that are left, and returns the result."""
        async for _ in self:
            pass
        assert self.request.result is not None
        return self.request.result

    def cancel(self) -> bool:
        """Ends the row at the next step; returns whether it still ran."""
        return self.request.cancel()

    def take(self, event: Event) -> None:
        """Takes in an event, and pauses the row if too many are unread."""
        self._unread.append(event)
        self._is_over = event.finish_reason is not None
        if len(self._unread) >= MOST_UNREAD and not (self._is_paused or self._is_over):
            self._is_paused = True
            self.request.tell(self.request, "pause")
        self._news.set()

    def end(self, error: BaseException | None) -> None:
        """Notes that no more events come; a row that was cut off gets a last, "cancelled" one."""
        if error is None and not self._is_over:
            self._unread.append(Event(self.request, None, "", None, "cancelled"))
        self._is_over, self._error = True, error
        self._news.set()

    def __del__(self) -> None:
        self.request.cancel()


class AsyncEvents:
    """Rows that tasks of one event loop add and read; `async with` takes their steps.

    Attributes:
        stats: a `GenerationStats` of all its rows.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._rows: WeakValueDictionary[int, AsyncRequest] = WeakValueDictionary()
        self._thread: Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def stats(self) -> GenerationStats:
        return self._events.stats

    def add(self, prompt: Prompt, **options: Any) -> AsyncRequest:
        """Adds a row; arguments and errors as for `Events.add`.

        Raises:
            RuntimeError: outside of the `async with` block, or of its event loop.
        """
        if self._loop is None or self._loop is not asyncio.get_running_loop():
            raise RuntimeError("add: expected a task of the loop of `async with ...async_events()`")
        row = AsyncRequest(self._events.add(prompt, **options))
        self._rows[row.request.index] = row
        return row

    async def __aenter__(self) -> AsyncEvents:
        if self._thread is not None:
            raise RuntimeError("async_events: entered twice; make another for another block")
        self._loop = asyncio.get_running_loop()
        self._thread = Thread(target=self._take_steps, name="pagedkv events", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._thread is not None
        self._events.stop()  # also where this task is cancelled, or no loop runs any more
        await asyncio.shield(asyncio.to_thread(self._thread.join))

    def _take_steps(self) -> None:
        """Takes steps until the events are closed or the loop is gone, then ends all rows."""
        assert self._loop is not None
        error: BaseException | None = None
        try:
            while self._events.wait_for_work():
                while (events := self._events.step()) is not None:
                    self._loop.call_soon_threadsafe(self._deliver, events)
        except BaseException as raised:
            error = raised
        self._events.close()
        with suppress(RuntimeError):  # the loop was closed, so no task hears of it
            self._loop.call_soon_threadsafe(self._tell_end, error)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            row = self._rows.get(event.request.index)
            if row is not None:  # else it is being cancelled
                row.take(event)

    def _tell_end(self, error: BaseException | None) -> None:
        for row in [*self._rows.values()]:
            row.end(error)
