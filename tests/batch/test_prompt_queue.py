"""Prompts that an iterator gives are read as rows leave, and computed as those of a list are."""

import gc
import weakref
from itertools import count, islice, repeat
from threading import Thread

import numpy as np
import pytest
import torch

from pagedkv.batch import job, prompt_queue
from pagedkv.batch.scheduler import LOOKAHEAD
from tests.batch.generating import assert_nothing_held, generator, ragged
from tests.batch.letters import Scalar, letters, text, tokens
from tests.effort import examples, sampled
from tests.hf.tiny import prompts, tiny

PLAIN = {"do_sample": False, "max_new_tokens": 4}
SAMPLED = {"do_sample": True, "temperature": 1.5, "seed": 3, "max_new_tokens": 6}


def rows(n):
    return [[1 + i % 7, 2 + i % 11, 3 + i % 5] for i in range(n)]


class Reader:
    """An iterator of prompts that notes how many were read."""

    def __init__(self, prompts):
        self.read, self._prompts = 0, iter(prompts)

    def __iter__(self):
        return self

    def __next__(self):
        prompt = next(self._prompts)
        self.read += 1
        return prompt


# ------------------------------------------------------------------ the same answers


@pytest.mark.parametrize("options", [PLAIN, SAMPLED | {"num_return_sequences": 3}], ids=str)
def test_an_iterator_gets_the_results_of_a_list(model, options):
    some = ragged()
    with generator(model, step_tokens=16) as batched:
        expected = batched.generate(some, **options)
        assert tokens(batched.generate(iter(some), **options)) == tokens(expected)
        found = list(batched.stream((row for row in some), **options))
    named = sorted(found, key=lambda result: (result.index, result.sample))
    assert [(r.index, r.sample, r.tokens) for r in named] == [
        (r.index, r.sample, r.tokens) for r in expected
    ]


def test_texts_chats_and_scalars_come_one_after_another(model):
    ids = [3, 1, 4, 1, 25]
    chat = [{"role": "user", "content": text(ids[:-1])}]
    forms = [text(ids), ids, chat, torch.tensor(ids), Scalar(text(ids).encode())]
    with generator(model, letters()) as batched:
        found = batched.generate(iter(forms), **PLAIN)
        assert tokens(found) == tokens(batched.generate([ids], **PLAIN)) * 5


def test_values_of_each_prompt_are_read_in_step_with_it(model):
    some = prompts(5, 9, 3)
    own = {"max_new_tokens": [2, 5, 3], "temperature": [0.7, 0, 2.5], "seed": [4, 5, 6]}
    own |= {"salt": [b"a", b"b", b"a"]}
    with generator(model) as batched:
        expected = batched.generate(some, do_sample=True, **own)
        lazily = {name: (value for value in values) for name, values in own.items()}
        assert tokens(batched.generate(iter(some), do_sample=True, **lazily)) == tokens(expected)
        seeds = {**own, "seed": count(4), "max_new_tokens": torch.tensor([2, 5, 3])}
        assert tokens(batched.generate(iter(some), do_sample=True, **seeds)) == tokens(expected)
        assert [r.cached_tokens > 0 for r in batched.generate(iter(some), **seeds)] == [True] * 3


# ------------------------------------------------------------------ how much is read


def test_what_has_a_length_but_no_iterator_is_a_list(model):
    class MapStyle:
        """As a map-style dataset of torch."""

        def __len__(self):
            return 3

        def __getitem__(self, place):
            return rows(3)[place]

    with generator(model) as batched:
        assert tokens(batched.generate(MapStyle(), **PLAIN)) == tokens(
            batched.generate(rows(3), **PLAIN)
        )


def test_results_come_while_later_prompts_have_not_been_read(model):
    reader = Reader(repeat([1, 2, 3]))  # without an end
    with generator(model, max_sequences=4) as batched:
        stream = batched.stream(reader, **PLAIN)
        assert reader.read == 0
        for n, result in enumerate(islice(stream, 40), start=1):
            assert result.index <= reader.read
            assert reader.read <= n + 4 + 2 * LOOKAHEAD
        stream.close()
        assert_nothing_held(batched)
    assert reader.read >= 40


def test_a_prompt_may_depend_on_the_results_before_it(model):
    answers: list = []

    def follows():
        yield [1, 2, 3]
        while len(answers) < 5:
            yield [1, *answers[-1].tokens] if answers else [4, 5]

    class Clock:
        now = 0.0

        def __call__(self):
            self.now += 1.0  # each prompt takes long
            return self.now

    with generator(model) as batched, pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_queue, "perf_counter", Clock())
        for result in batched.stream(follows(), **PLAIN):
            answers.append(result)
    assert len(answers) >= 5
    assert all(result.error is None for result in answers)


def test_a_slow_iterator_is_asked_for_one_prompt_between_two_steps(model, monkeypatch):
    """So rows that run go on, and the first begins at once."""
    clock, steps = [0.0], []
    monkeypatch.setattr(prompt_queue, "perf_counter", lambda: clock[0])

    def slowly(batched):
        for row in rows(12):
            clock[0] += 1
            steps.append(batched.stats.steps)
            yield row

    with generator(model) as batched:
        batched.generate(slowly(batched), do_sample=False, max_new_tokens=20)
    assert steps == list(range(12))


def test_an_iterator_that_does_not_wait_fills_the_first_step(model, monkeypatch):
    monkeypatch.setattr(prompt_queue, "perf_counter", lambda: 0.0)
    with generator(model, step_tokens=256) as batched:
        list(batched.stream(iter(rows(40)), max_new_tokens=1, do_sample=False))
        assert batched.stats.steps <= 3


def test_one_stream_takes_fewer_steps_than_a_call_for_each_batch(model):
    """A call ends with its longest row: until then places stay empty."""
    lengths = [2, 20, 3, 2] * 4
    options = {"do_sample": False}
    with generator(model, max_sequences=4) as batched:
        calls = 0
        for begin in range(0, 16, 4):
            part = slice(begin, begin + 4)
            batched.generate(rows(16)[part], max_new_tokens=lengths[part], **options)
            calls += batched.stats.steps
        batched.generate(iter(rows(16)), max_new_tokens=lengths, **options)
        streamed = batched.stats.steps
        batched.generate(rows(16), max_new_tokens=lengths, **options)
        assert streamed <= batched.stats.steps + 4
    assert streamed < 0.5 * calls


@sampled
def test_what_is_held_does_not_grow_with_the_number_of_prompts(monkeypatch):
    n, alive = examples(20_000, 1_500), weakref.WeakSet()

    class Row(job.Row):
        def __init__(self, *args, **given):
            super().__init__(*args, **given)
            alive.add(self)

    class Ids(list):
        __hash__ = object.__hash__

    def given():
        for row in islice(zip(count(), rows(n)), n):
            ids = Ids(row[1])
            read.add(ids)
            yield ids

    read: weakref.WeakSet = weakref.WeakSet()
    monkeypatch.setattr(job, "Row", Row)
    most = found = 0
    model = tiny(num_hidden_layers=1)
    with generator(model, step_tokens=64, max_sequences=16) as batched:
        own = {"seed": count(), "temperature": (1 + 1e-6 * i for i in count())}
        for result in batched.stream(given(), do_sample=True, max_new_tokens=1, **own):
            assert result.error is None
            found += 1
            if found % 500 == 0:
                gc.collect()
                most = max(most, len(alive), len(read))
    assert found == n
    assert 0 < most < 3 * LOOKAHEAD


# ------------------------------------------------------------------ what can go wrong


def test_a_prompt_that_is_none_is_its_rows_error(model):
    wrong = {1: "abc", 2: 3.5, 3: [], 4: [10**6], 6: {"role": "user", "content": "a"}}
    some = [wrong.get(i, [1, 2, 3]) for i in range(8)]
    with generator(model) as batched:
        found = batched.generate(iter(some), **PLAIN)
        assert_nothing_held(batched)
    assert [r.index for r in found if r.error] == list(wrong)
    for place, says in {1: "tokenizer: give one", 2: "got at 2 float", 4: "expected ids 0"}.items():
        assert says in found[place].error
    assert len({tuple(r.tokens) for r in found if not r.error}) == 1


def test_a_cell_of_a_table_that_is_no_prompt_is_its_rows_error(model):
    wrong = {1: "", 2: None, 3: float("nan"), 4: object(), 5: np.float32("nan"), 7: b"abc"}
    some = [wrong.get(i, "abc") for i in range(9)]
    with generator(model, letters()) as batched:
        found = batched.generate(some, **PLAIN)
        assert [r.index for r in found if r.error] == list(wrong)
        assert len({tuple(r.tokens) for r in found if not r.error}) == 1
        assert "expected at least one token" in found[1].error
        assert found[2].error.startswith("prompts: expected text, [n] ids")
        with pytest.raises(TypeError, match=r"prompts: expected text, .* got at 0 NoneType"):
            batched.generate([None, float("nan")], **PLAIN)
        assert_nothing_held(batched)


def test_a_value_that_cannot_be_or_is_missing_is_its_rows_error(model):
    own = {"max_new_tokens": [3, "4", -1], "salt": repeat(b"")}
    with generator(model) as batched:
        found = batched.generate(iter(rows(4)), do_sample=False, **own)
    assert [bool(r.error) for r in found] == [False, True, True, True]
    assert "max_new_tokens: expected an int, got '4'" in found[1].error
    assert "max_new_tokens" in found[2].error
    assert "max_new_tokens: expected one value for each prompt, got 3" in found[3].error
    with generator(model) as batched:
        (_, other) = batched.generate(iter(rows(2)), seed=[1, -2], salt=[b"a", b"b"], **PLAIN)
        (salted,) = batched.generate(iter(rows(1)), salt=["a"], **PLAIN)
    assert "seed: expected 0 <= seed < 2**62, got -2" in other.error
    assert "salt: expected bytes, regions, or a list of them, got str" in salted.error


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ({"temprature": 1}, ValueError, "temprature"),
        ({"seed": -1}, ValueError, "seed: expected 0 <= seed"),
        ({"seed": "a"}, TypeError, "seed: expected an int or None"),
        ({"salt": "a"}, TypeError, "salt: expected bytes"),
        ({"num_beams": 2}, ValueError, "got beam_search"),
        ({"processors": 3}, TypeError, "processors: expected a callable"),
    ],
)
def test_options_are_checked_before_the_first_prompt_is_read(model, options, error, says):
    reader = Reader(repeat([1, 2, 3]))
    with generator(model) as batched, pytest.raises(error, match=says):
        batched.stream(reader, **options)
    assert reader.read == 0


def test_tables_and_what_is_no_iterator_are_refused_at_once(model):
    class Streamed:
        """As an IterableDataset of datasets, of which each row is a dictionary."""

        column_names = None

        def __iter__(self):
            return iter([{"prompt": "a"}])

    with generator(model) as batched:
        for wrong, says in ((Streamed(), "got Streamed: give one of its columns"), (7, "got int")):
            with pytest.raises(TypeError, match=says):
                batched.stream(wrong, **PLAIN)


def test_an_iterator_that_raises_ends_the_call_after_the_rows_it_gave(model):
    def broken():
        yield from rows(3)
        raise OSError("the disk is gone")

    with generator(model) as batched:
        found = []
        with pytest.raises(OSError, match="the disk is gone"):
            found.extend(batched.stream(broken(), **PLAIN))
        assert_nothing_held(batched)
        expected = batched.generate(rows(3), **PLAIN)
        assert sorted(r.index for r in found) == [0, 1, 2]
        with pytest.raises(OSError, match="gone") as raised:
            batched.generate(broken(), **PLAIN)
        assert tokens(raised.value.results) == tokens(expected)
        with pytest.raises(ZeroDivisionError):
            batched.generate(iter(rows(3)), seed=(1 // (1 - i) for i in count()), **PLAIN)
        assert_nothing_held(batched)


def test_an_interrupted_iterator_ends_the_call_at_once(model):
    def interrupted():
        yield [1, 2, 3]
        for _ in range(20):
            yield [4, 5]
        raise KeyboardInterrupt

    with generator(model, max_sequences=1) as batched:
        assert len(batched.generate(interrupted(), **PLAIN)) < 21
        assert_nothing_held(batched)


def test_time_that_is_over_ends_an_iterator_without_an_end(model):
    with generator(model, max_sequences=2) as batched:
        found = batched.generate(repeat([1, 2, 3]), max_time=0.2, max_new_tokens=5)
    assert any(r.error is None for r in found)
    assert all("max_time" in r.error for r in found if r.error)


def test_time_that_is_over_leaves_no_prompt_of_a_list_without_a_result(model):
    many = rows(3 * LOOKAHEAD)
    with generator(model, max_sequences=2) as batched:
        found = batched.generate(many, max_time=0.05, max_new_tokens=5)
    assert [r.index for r in found] == list(range(len(many)))
    assert "max_time" in found[-1].error


def test_no_iterator_and_only_an_empty_one_give_nothing(model):
    with generator(model) as batched:
        assert batched.generate(iter([]), **PLAIN) == []
        assert batched.generate([], **PLAIN) == []


def test_an_iterator_may_run_rows_itself_and_lets_others_in(model):
    """It is read while no lock is held."""
    answers, entered = [], []

    with generator(model) as batched:
        found = batched.generate(iter(rows(3)), **PLAIN)
        lock = batched.cache.lock.raw

        def given():
            for row in rows(3):
                (answer,) = batched.generate([row], **PLAIN)
                answers.append(answer.tokens)
                other = Thread(target=lambda: entered.append(_free(lock)))
                other.start()
                other.join()
                yield row

        assert tokens(batched.generate(given(), **PLAIN)) == tokens(found) == answers
        assert_nothing_held(batched)
    assert entered == [True] * 3


def _free(lock):
    free = lock.acquire(timeout=60)
    if free:
        lock.release()
    return free


def test_what_wraps_an_iterator_and_has_no_length_is_read_as_rows_leave(model):
    class Progress(Reader):
        """As a progress bar around an iterator."""

        def __len__(self):
            raise TypeError("object of type 'generator' has no len()")

    progress = Progress(iter(rows(5000)))
    with generator(model) as batched:
        stream = batched.stream(progress, **PLAIN)
        assert next(stream).index == 0
        assert progress.read < 1000
        stream.close()
