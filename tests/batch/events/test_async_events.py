"""Tasks of an event loop add rows, read them and die, and each takes only its own row along."""

import asyncio
import gc
import threading
from contextlib import suppress

import pytest

from pagedkv.batch.events import Event, asynchronous
from tests.batch.generating import assert_nothing_held, failing
from tests.hf.tiny import prompts

GREEDY = {"do_sample": False, "max_new_tokens": 6}
MOST_UNREAD = 16
LONG = {"do_sample": False, "max_new_tokens": 3 * MOST_UNREAD}


@pytest.fixture(autouse=True)
def _few_unread(monkeypatch):
    monkeypatch.setattr(asynchronous, "MOST_UNREAD", MOST_UNREAD)


async def tokens_of(row):
    return [event.token async for event in row]


async def until(is_so):
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.005)


def assert_over(batched):
    batched.generate([[1]], **GREEDY)  # gives back what was let go
    assert_nothing_held(batched)
    assert not [one for one in threading.enumerate() if one.name == "pagedkv events"]


def test_tasks_get_what_generate_gives_each_its_own(batched):
    rows = prompts(5, 9, 3, 12)
    expected = [result.tokens for result in batched.generate(rows, **GREEDY)]

    async def job():
        async with batched.async_events() as live:
            added = [live.add(row, **GREEDY) for row in rows]
            assert await asyncio.gather(*map(tokens_of, added)) == expected
            assert (await live.add(rows[1], **GREEDY).wait()).tokens == expected[1]

    asyncio.run(job())
    assert_over(batched)


def test_a_task_that_is_cancelled_takes_only_its_row_along(batched):
    stays, goes = prompts(5, 9)
    (alone,) = batched.generate([stays], **LONG)

    async def job():
        async with batched.async_events() as live:
            kept = asyncio.create_task(tokens_of(live.add(stays, **LONG)))
            row = live.add(goes, **LONG)
            request, task = row.request, asyncio.create_task(tokens_of(row))
            del row
            await until(lambda: request.sent > 2)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            del task
            await until(lambda: request.is_over)
            assert request.result.finish_reason == "cancelled"
            assert await kept == alone.tokens

    asyncio.run(job())
    assert_over(batched)


def test_a_reader_that_stops_stops_its_own_row_which_holds_no_pages(batched):
    quick, idle = prompts(5, 9)
    (first,), (second,) = (batched.generate([row], **LONG) for row in (quick, idle))

    async def job():
        async with batched.async_events() as live:
            row = live.add(idle, **LONG)
            assert await tokens_of(live.add(quick, **LONG)) == first.tokens
            await until(lambda: not batched.cache.stats().live)
            assert MOST_UNREAD <= row.request.sent < len(second.tokens)
            assert await tokens_of(row) == second.tokens

    asyncio.run(job())
    assert_over(batched)


def test_rows_that_are_left_are_cancelled_and_end_their_iterators(batched):
    async def job():
        async with batched.async_events() as live:
            row = live.add([1, 2, 3], **LONG)
            await anext(row)
        *events, last = [event async for event in row]  # whose reader knows no other end
        assert len(events) < 2 * MOST_UNREAD
        assert last == Event(row.request, None, "", None, "cancelled")
        assert row.request.result.finish_reason == "cancelled"
        assert not row.cancel()
        with pytest.raises(ValueError, match="were closed"):
            live.add([1], **GREEDY)

    asyncio.run(job())
    assert_over(batched)


def test_an_error_of_the_model_is_raised_to_every_task(batched, model):
    async def job():
        async with batched.async_events() as live:
            rows = [live.add([1, 2, 3], **GREEDY), live.add([4], **GREEDY)]
            with failing(model.model.layers[1], 2, ZeroDivisionError("on purpose")):
                said = await asyncio.gather(*map(tokens_of, rows), return_exceptions=True)
        assert [str(one) for one in said] == ["on purpose"] * 2

    asyncio.run(job())
    assert_over(batched)


def test_a_loop_that_is_closed_under_its_rows_leaves_no_thread(batched):
    """Alone finds a thread that goes on for a loop that nobody runs."""

    async def job():
        live = batched.async_events()
        await live.__aenter__()
        return live.add([1, 2, 3], **LONG)

    loop = asyncio.new_event_loop()
    row = loop.run_until_complete(job())
    loop.close()
    row.request.wait(60)
    for thread in threading.enumerate():
        if thread.name == "pagedkv events":
            thread.join(60)
    assert row.request.result.finish_reason in ("cancelled", "length")
    assert_over(batched)


def test_a_block_whose_end_is_cancelled_ends_the_iterators_of_other_tasks(batched):
    inside, done = threading.Event(), threading.Event()

    def hold(*_):
        inside.set()
        assert done.wait(60)

    async def job():
        async def block():
            async with live:
                added.set_result(live.add([1, 2, 3], **LONG))
                await until(inside.is_set)

        live, added = batched.async_events(), asyncio.get_running_loop().create_future()
        with batched.model.register_forward_pre_hook(hold):
            task = asyncio.create_task(block())
            reader = asyncio.create_task(tokens_of(await added))
            await until(lambda: live._events._is_closed)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            done.set()
            async with asyncio.timeout(60):
                assert len(await reader) < 2 * MOST_UNREAD

    asyncio.run(job())
    assert_over(batched)


@pytest.mark.filterwarnings("ignore")  # of asyncio: the task is destroyed
def test_a_task_that_is_destroyed_with_its_loop_leaves_no_thread(batched):
    async def job():
        async with batched.async_events():
            await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    task = loop.create_task(job())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    del task
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "pagedkv events":
            thread.join(60)
    assert_over(batched)


def test_rows_are_added_within_the_block_alone(batched):
    live = batched.async_events()
    with pytest.raises(RuntimeError, match="expected a task of the loop"):
        live.add([1], **GREEDY)

    async def job():
        async with live:
            with pytest.raises(RuntimeError, match="entered twice"):
                await live.__aenter__()

    asyncio.run(job())
    assert_over(batched)
