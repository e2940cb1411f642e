"""Salts: callers that must not find one another's prefixes, through `BatchGenerator`."""

import pytest
import torch

from pagedkv.batch.row_queues import RowQueues
from tests.batch.generating import assert_nothing_held, generator, tokens_alone
from tests.hf.tiny import prompts, tiny

OPTIONS = {"max_new_tokens": 3, "do_sample": False}


@pytest.fixture(scope="module")
def model():
    return tiny()


def found(batched, rows, **options):
    return [result.cached_tokens for result in batched.generate(rows, **OPTIONS, **options)]


@pytest.mark.parametrize(("one", "other"), [(b"a", b"b"), (b"", b"a"), (b"a", b""), (b"a", b"aa")])
def test_a_prefix_is_found_under_its_salt_and_no_other(model, one, other):
    rows = prompts(9, 13)
    with generator(model) as batched:
        assert found(batched, rows, salt=one) == [0, 0]
        assert found(batched, rows, salt=other) == [0, 0]
        assert found(batched, rows, salt=one) == found(batched, rows, salt=other) == [8, 12]


def test_each_prompt_may_have_a_salt_of_its_own(model):
    (row,) = prompts(9)
    salts = [b"a", b"b", b"a"]
    with generator(model) as batched:
        results = batched.generate([row] * 3, salt=salts, **OPTIONS)
        assert [result.cached_tokens for result in results] == [0, 0, 8]
        assert batched.stats.steps == 4  # both of other salts begin at once
        expected = tokens_alone(model, row, **OPTIONS)
        assert [result.tokens for result in results] == [expected] * 3
        assert found(batched, [row] * 3, salt=(b"b", b"c", b"a")) == [8, 0, 8]
        assert_nothing_held(batched)


def test_rows_that_were_put_back_keep_their_salt(model, monkeypatch):
    def join_for_nothing(self, row, join=RowQueues.join):
        self._share_used = 0.0  # rows are expected to need little, so that pages run short
        join(self, row)

    monkeypatch.setattr(RowQueues, "join", join_for_nothing)
    rows = prompts(9, 9, 9)
    with generator(model, max_tokens=64) as batched:
        results = batched.generate(rows, salt=b"a", max_new_tokens=24, do_sample=False)
        assert batched.stats.preemptions
        assert [result.error for result in results] == [None] * 3
        assert found(batched, rows) == [0, 0, 0]


def test_the_salts_of_a_call_are_those_of_the_cache(model):
    rows = prompts(9)
    with generator(model) as batched:
        seq = batched.cache.add(rows[0], salt=b"tenant")
        with torch.no_grad(), batched.cache.step([seq]) as step:
            batched._packed.logits(step)
        batched.cache.free(seq)
        assert found(batched, rows) == [0]
        assert found(batched, rows, salt=b"tenant") == [8]


def test_rows_share_what_is_public_and_nothing_behind_it(model):
    (row,) = prompts(13)
    users = [[(0, b""), (8, b"a")], [(0, b""), (8, b"b")]]
    with generator(model) as batched:
        results = batched.generate([row, row], salt=users, **OPTIONS)
        assert [result.cached_tokens for result in results] == [0, 8], "the second waited for it"
        assert [result.tokens for result in results] == [tokens_alone(model, row, **OPTIONS)] * 2
        assert found(batched, [row], salt=users[0]) == [12]
        assert found(batched, [row]) == [8]
        assert found(batched, [row, row], salt=((0, b""), (4, b"a"))) == [4, 12], "one for all"


@pytest.mark.parametrize("salt", ["tenant", None, 7, bytearray(b"a"), [b"a", "b"], [None, None]])
def test_a_salt_that_is_no_bytes_is_refused_before_any_work(model, salt):
    with (
        generator(model) as batched,
        pytest.raises(TypeError, match="salt: expected bytes, regions, or a list of them, got"),
    ):
        batched.stream(prompts(5, 6), salt=salt)


@pytest.mark.parametrize("salt", [[], [b"a"], [b"a"] * 3])
def test_salts_that_are_not_one_for_each_prompt_are_refused(model, salt):
    with (
        generator(model) as batched,
        pytest.raises(ValueError, match=f"salt: .* one value for each of 2 .* got {len(salt)}"),
    ):
        batched.stream(prompts(5, 6), salt=salt)
