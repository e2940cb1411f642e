"""Rows that are added while others run get what `generate` gives them, token by token."""

import gc
from itertools import islice
from threading import Event as Signal
from threading import Thread

import pytest

from pagedkv.batch.events.request import Event
from tests.batch.generating import assert_nothing_held, failing, generator, ragged
from tests.batch.letters import letters, text
from tests.hf.tiny import prompts

GREEDY = {"do_sample": False, "max_new_tokens": 6}
KINDS = [
    GREEDY,
    {"do_sample": True, "temperature": 1.5, "seed": 7, "max_new_tokens": 9},
    {"do_sample": True, "top_k": 5, "temperature": 1.5, "seed": 7, "max_new_tokens": 4},
    {"do_sample": False, "repetition_penalty": 1.5, "max_new_tokens": 8},
    {"do_sample": False, "stop_strings": ["a", "bc"], "max_new_tokens": 12},
    {"do_sample": False, "suppress_tokens": [3, 5], "max_new_tokens": 5},
]


def assert_told(events, request):
    """The events of a row are its result, piece by piece."""
    own, result = [event for event in events if event.request is request], request.result
    assert [event.token for event in own if event.token is not None] == result.tokens
    assert "".join(event.text for event in own) == (result.text or "")
    assert [event.finish_reason for event in own] == [None] * (len(own) - 1) + [
        result.finish_reason
    ]
    if result.logprobs is not None:
        assert [event.logprob for event in own if event.token is not None] == result.logprobs


@pytest.mark.parametrize("sizes", [{}, {"max_tokens": 64, "step_tokens": 9}, {"verify_width": 3}])
def test_rows_of_any_options_that_come_at_any_time_get_what_generate_gives(model, sizes):
    """Alone finds rules of one row that act on another: each row here has options of its own."""
    some = [(row, KINDS[i % len(KINDS)]) for i, row in enumerate([*ragged(), *ragged()])]
    with generator(model, letters(), **sizes) as batched:
        expected = [batched.generate([row], **options, logprobs=True)[0] for row, options in some]
        batched.cache.clear_prefixes()
        with batched.events(logprobs=True) as live:
            waiting, requests, events = iter(some), [], []
            while (new := next(waiting, None)) is not None:
                requests.append(live.add(new[0], **new[1]))
                events += islice(live, 3)
            events += live
        for request, alone in zip(requests, expected, strict=True):
            assert (request.result.tokens, request.result.text) == (alone.tokens, alone.text)
            assert request.result.finish_reason == alone.finish_reason
            assert_told(events, request)
        assert_nothing_held(batched)


def test_the_first_token_is_told_after_one_step_and_others_in_the_order_of_steps(batched):
    live = batched.events()
    for row in prompts(5, 9, 3):
        live.add(row, **GREEDY)
    assert next(live).finish_reason is None
    assert live.stats.steps == 1
    order = [event.request.index for event in live]
    assert order[:2] == [1, 2]
    assert [sorted(order[i : i + 3]) for i in range(2, len(order), 3)] == [[0, 1, 2]] * 5


def test_a_stopped_row_gives_its_pages_back_at_the_next_step_and_leaves_others_alone(batched):
    stays, goes = prompts(5, 40)
    (alone,) = batched.generate([stays], **GREEDY)
    live = batched.events()
    kept, stopped = live.add(stays, **GREEDY), live.add(goes, max_new_tokens=99, do_sample=False)
    events = [next(live) for _ in range(4)]
    live_pages = batched.cache.stats().live
    assert stopped.cancel()
    assert stopped.cancel()  # twice is once
    events.append(next(live))
    assert batched.cache.stats().live <= live_pages - 10
    events += live
    assert stopped.result.finish_reason == "cancelled"
    assert len(stopped.result.tokens) == 2
    assert not stopped.cancel()
    assert kept.result.tokens == alone.tokens
    for request in (kept, stopped):
        assert_told(events, request)


def test_a_row_that_is_cancelled_before_it_begins_computes_nothing(batched):
    live = batched.events()
    request = live.add([1, 2, 3], **GREEDY)
    request.cancel()
    assert list(live) == [Event(request, None, "", None, "cancelled")]
    assert live.stats.steps == 0


@pytest.mark.parametrize("pause_at", [1, 4])
def test_a_row_that_pauses_holds_no_pages_and_goes_on_as_if_it_had_not(batched, pause_at):
    (row,) = prompts(9)
    (alone,) = batched.generate([row], **GREEDY)
    live = batched.events()
    request = live.add(row, **GREEDY)
    events = [next(live) for _ in range(pause_at)]
    request.tell(request, "pause")
    assert list(live) == []
    assert_nothing_held(batched)
    request.tell(request, "pause")
    request.tell(request, "resume")
    events += live
    assert request.result.tokens == alone.tokens
    assert_told(events, request)


def test_a_paused_row_can_be_cancelled(batched):
    live = batched.events()
    request = live.add([1, 2, 3], **GREEDY)
    next(live)
    request.tell(request, "pause")
    request.cancel()
    assert [event.finish_reason for event in live] == ["cancelled"]


# ------------------------------------------------------------------ threads


def test_other_threads_add_cancel_and_wait(batched):
    some = [row.tolist() for row in ragged()]
    expected = [result.tokens for result in batched.generate(some, **GREEDY)]
    live, found = batched.events(), {}

    def customer(place):
        request = live.add(some[place], **GREEDY)
        found[place] = request.wait(60).tokens

    threads = [Thread(target=customer, args=(place,)) for place in range(len(some))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for _ in live:
            pass
    assert [found[place] for place in range(len(some))] == expected


def test_a_thread_that_reads_the_events_is_told_not_to_wait_for_itself(batched):
    live = batched.events()
    request = live.add([1, 2, 3], **GREEDY)
    said = []

    def look(*_):
        with pytest.raises(RuntimeError, match="this thread reads the events") as error:
            request.wait()
        said.append(error)

    hook = batched.model.register_forward_pre_hook(look)
    with hook:
        list(live)
    assert said
    assert request.wait().tokens == request.result.tokens
    with pytest.raises(TimeoutError, match="has not ended within"):
        live.add([1], **GREEDY).wait(0.01)
    live.close()


def test_between_two_events_their_reader_may_not_wait_for_a_row_either(batched):
    live = batched.events()
    request = live.add([1, 2, 3], **GREEDY)
    next(live)
    with pytest.raises(RuntimeError, match="this thread reads the events"):
        request.wait(9)
    live.close()


def test_two_threads_that_read_the_same_events_are_told(batched):
    inside, done = Signal(), Signal()
    live = batched.events()
    live.add([1, 2, 3], **GREEDY)

    def hold(*_):
        inside.set()
        assert done.wait(30)

    with batched.model.register_forward_pre_hook(hold):
        reader = Thread(target=next, args=(live,))
        reader.start()
        assert inside.wait(30)
        with pytest.raises(RuntimeError, match="another thread reads them"):
            next(live)
        done.set()
        reader.join()
    assert len(list(live)) == 5


def test_two_events_of_one_generator_take_turns(batched):
    first, second = batched.events(), batched.events()
    one, other = first.add([1, 2, 3], **GREEDY), second.add([4, 5], **GREEDY)
    for _ in zip(first, second):
        pass
    list(first), list(second)
    expected = batched.generate([[1, 2, 3], [4, 5]], **GREEDY)
    assert [one.result.tokens, other.result.tokens] == [result.tokens for result in expected]


# ------------------------------------------------------------------ mistakes and ends


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"prompt": 5}, TypeError, "prompt"),
        ({"max_new_tokens": "four"}, TypeError, "max_new_tokens: expected an int"),
        ({"max_new_tokens": [4, 5]}, TypeError, "max_new_tokens: expected an int"),
        ({"temperature": -1.0, "do_sample": True}, ValueError, "temperature"),
        ({"num_return_sequences": 2, "do_sample": True}, ValueError, "add the prompt again"),
        ({"max_tokens": 4}, ValueError, "max_new_tokens"),
        ({"salt": "text"}, TypeError, "salt: expected bytes"),
        ({"seed": -1}, ValueError, "seed"),
        ({"max_new_tokens": [4], "max_time": 9.0}, TypeError, "max_new_tokens: expected an int"),
        ({"seed": [4], "max_time": 9.0, "do_sample": True}, TypeError, "seed: expected an int"),
    ],
)
def test_a_mistake_is_raised_where_the_row_is_added_and_changes_nothing(
    batched, given, error, words
):
    live = batched.events()
    with pytest.raises(error, match=words):
        live.add(**{"prompt": [1, 2], "do_sample": False, **given})
    request = live.add([1, 2], **GREEDY)
    assert request.index == 0
    assert len(list(live)) == 6


def test_an_id_that_the_model_does_not_know_ends_its_row_alone(batched):
    live = batched.events()
    wrong, right = live.add([10**6], **GREEDY), live.add([1, 2], **GREEDY)
    assert len(list(live)) == 7
    assert (wrong.result.finish_reason, right.result.finish_reason) == ("error", "length")
    assert "expected ids 0.." in wrong.result.error


def test_an_error_of_the_model_ends_all_rows_and_is_raised_to_who_waits(batched, model):
    live = batched.events()
    request = live.add([1, 2, 3], **GREEDY)
    layer, error = model.model.layers[1], ZeroDivisionError("on purpose")
    with failing(layer, 2, error), pytest.raises(ZeroDivisionError):
        list(live)
    assert_nothing_held(batched)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        request.wait()
    with pytest.raises(ValueError, match="were closed"):
        live.add([1], **GREEDY)
    assert list(live) == []


def test_rows_that_are_left_when_events_close_are_cancelled_with_what_they_got(batched):
    with batched.events() as live:
        begun, late = live.add([1, 2, 3], **GREEDY), None
        next(live)
        late = live.add([4], **GREEDY)
    assert [(r.result.finish_reason, len(r.result.tokens)) for r in (begun, late)] == [
        ("cancelled", 1),
        ("cancelled", 0),
    ]
    live.close()
    with pytest.raises(ValueError, match="were closed"):
        live.add([1], **GREEDY)
    batched.generate([[1]], **GREEDY)  # gives back what was let go
    assert_nothing_held(batched)


def test_events_that_a_step_closes_end_with_that_step(batched):
    """Alone finds a handler of a signal that waits for the step which it interrupted."""
    live = batched.events()
    request = live.add([1, 2, 3], **GREEDY)
    with batched.model.register_forward_pre_hook(lambda *_: live.close()):
        assert len(list(live)) == 1
    assert request.wait().finish_reason == "cancelled"
    batched.generate([[1]], **GREEDY)  # gives back what was let go


def test_a_row_that_is_added_while_events_close_is_refused(batched, monkeypatch):
    """Alone finds a row that joins behind the end, for which its thread waits for ever."""
    live = batched.events()
    put = live._source.put
    monkeypatch.setattr(live._source, "put", lambda coming: (live.close(), put(coming)))
    with pytest.raises(ValueError, match="were closed"):
        live.add([1], **GREEDY)


def test_events_that_nobody_holds_give_their_pages_back(batched):
    live = batched.events()
    live.add([1, 2, 3], **GREEDY)
    next(live)
    del live
    gc.collect()
    batched.generate([[1]], **GREEDY)
    assert_nothing_held(batched)


def test_a_closed_generator_ends_its_events(model):
    with generator(model) as batched:
        live = batched.events()
        live.add([1, 2, 3], **GREEDY)
    with pytest.raises(ValueError, match="closed"):
        next(live)


def test_chats_and_texts_are_encoded_as_by_generate(model):
    with generator(model, letters()) as batched:
        chat = [{"role": "user", "content": text([3, 1, 4])}]
        expected = batched.generate([text([5, 6]), chat], **GREEDY)
        live = batched.events()
        requests = [live.add(prompt, **GREEDY) for prompt in (text([5, 6]), chat)]
        list(live)
        assert [r.result.tokens for r in requests] == [r.tokens for r in expected]
