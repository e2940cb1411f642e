"""Steps that are launched before the last one's tokens are read give what read ones give."""

import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, StoppingCriteria

from pagedkv.batch import candidates, sampling
from pagedkv.batch.runner import StepRunner
from pagedkv.batch.sampling import Chosen
from tests.batch.generating import assert_nothing_held, failing, generator, tokens_alone
from tests.contents import Boom
from tests.effort import examples, sampled
from tests.hf.tiny import prompts, tiny


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture
def launched_early(monkeypatch):
    """How often a step was launched before the tokens it is fed were read."""
    times = []
    read = StepRunner._read

    def counting(self, *args):
        times.append(1)
        return read(self, *args)

    monkeypatch.setattr(StepRunner, "_read", counting)
    return times


def outcome(model, rows, sizes=None, *, ahead, **options):
    """Returns each row's result and the stats of a generator that runs ahead or not."""
    with generator(model, **(sizes or {})) as batched:
        batched._ahead = ahead
        results = batched.generate(rows, **{"do_sample": False, **options})
        assert_nothing_held(batched)
        return results, batched.stats


def assert_ahead_is_like_reading(model, rows, sizes=None, **options):
    mine, stats = outcome(model, rows, sizes, ahead=True, **options)
    theirs, expected = outcome(model, rows, sizes, ahead=False, **options)
    assert [r.tokens for r in mine] == [r.tokens for r in theirs]
    assert [r.finish_reason for r in mine] == [r.finish_reason for r in theirs]
    assert [r.error for r in mine] == [r.error for r in theirs]
    for a, b in zip(mine, theirs):
        if b.logprobs is not None:
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    assert stats.new_tokens == expected.new_tokens
    return stats, expected


def test_while_rows_only_decode_each_step_is_launched_early(model, launched_early):
    stats, expected = assert_ahead_is_like_reading(
        model, prompts(5, 23, 9), max_new_tokens=12, logprobs=True
    )
    # One step computes the prompts, one is the first to decode; the last token is never fed.
    assert len(launched_early) == 12 - 2
    assert stats.steps == expected.steps
    assert stats.computed == expected.computed


def test_a_row_that_ended_computes_one_token_that_nobody_gets(model, launched_early):
    row = prompts(9)[0]
    tokens = tokens_alone(model, row, max_new_tokens=12, do_sample=False)
    end = next(token for token in tokens[3:] if token not in tokens[:3])
    stats, expected = assert_ahead_is_like_reading(
        model, [row], max_new_tokens=12, eos_token_id=end
    )
    assert launched_early
    assert stats.computed == expected.computed + 1


@sampled
@settings(
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    news=st.data(),
    pages=st.integers(12, 40),
    sequences=st.integers(1, 6),
    step_tokens=st.sampled_from([7, 16, 64]),
    ends=st.lists(st.integers(0, 90), max_size=20),
    samples=st.integers(1, 3),
    sampled=st.booleans(),
)
def test_any_job_gets_the_same_tokens(
    model, lengths, news, pages, sequences, step_tokens, ends, samples, sampled
):
    rows = prompts(*lengths)
    limits = [news.draw(st.integers(1, 14)) for _ in rows]
    options = {"max_new_tokens": limits, "eos_token_id": ends or None}
    options |= {"num_return_sequences": samples if sampled else 1}
    if sampled:
        options |= {"do_sample": True, "seed": 5, "temperature": 0.9}
    sizes = {"max_tokens": 4 * pages, "max_sequences": sequences, "step_tokens": step_tokens}
    assert_ahead_is_like_reading(model, rows, sizes, **options)


def test_stop_rules_that_look_at_the_text_end_it_where_they_should(model, launched_early):
    class Third(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] % 7 == 0])

    assert_ahead_is_like_reading(
        model, prompts(5, 23, 9), max_new_tokens=12, stopping_criteria=[Third()]
    )
    assert launched_early


def test_a_processor_that_looks_at_the_text_is_waited_for(model, launched_early):
    class NeverTwice(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.scatter(1, input_ids, -torch.inf)

    options = {"max_new_tokens": 8, "logits_processor": [NeverTwice()]}
    assert_ahead_is_like_reading(model, prompts(5, 11), **options)
    assert not launched_early


def test_rows_that_come_late_join_rows_that_run(model, launched_early):
    """With two sequences at a time, the others wait until somebody leaves."""
    assert_ahead_is_like_reading(
        model, prompts(5, 23, 9, 2, 14), {"max_sequences": 2}, max_new_tokens=[3, 9, 5, 1, 7]
    )
    assert launched_early


def test_pages_that_run_short_put_rows_back_as_ever(model, launched_early):
    # Nine that end at once teach the schedule to expect little; then five use all they may.
    short, long = prompts(5)[0], prompts(*[4] * 5)
    end = tokens_alone(model, short, max_new_tokens=2, do_sample=False)[1]
    stats, expected = assert_ahead_is_like_reading(
        model, [short] * 9 + long, {"max_tokens": 48}, max_new_tokens=24, eos_token_id=end
    )
    assert stats.preemptions > 0
    assert expected.preemptions > 0
    assert launched_early


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_token_that_is_found_to_be_another_takes_the_step_back_that_was_fed_it(
    model, launched_early, monkeypatch, logprobs
):
    """Where so many scores are equal that `top_k` leaves more tokens than are looked at."""
    monkeypatch.setattr(candidates, "FEWEST", 4)
    monkeypatch.setattr(candidates, "SPARE", 1)
    monkeypatch.setattr(sampling, "waits", lambda device: False)
    corrected, hook = [], model.lm_head.register_forward_hook(lambda _, args, out: out.round())
    read = Chosen.read

    def noting(self):
        got = read(self)
        corrected.append(self.corrected)
        return got

    options = {"max_new_tokens": 12, "do_sample": True, "top_k": 4, "top_p": 0.9, "seed": 3}
    rows, options["logprobs"] = prompts(5, 23, 9), logprobs
    with monkeypatch.context() as patched:
        patched.setattr(Chosen, "read", noting)
        mine, _ = outcome(model, rows, ahead=True, **options)
    monkeypatch.setattr(sampling, "rules_among_few", lambda processors, vocab: None)
    theirs, _ = outcome(model, rows, ahead=False, **options)
    hook.remove()
    assert launched_early
    assert True in corrected
    assert [r.tokens for r in mine] == [r.tokens for r in theirs]
    if logprobs:
        for a, b in zip(mine, theirs):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@pytest.mark.parametrize("at_call", range(5))
def test_a_row_whose_logits_are_no_numbers_ends_alone_whenever_that_is_read(
    model, launched_early, at_call
):
    rows = prompts(5, 23, 9)
    options = {"max_new_tokens": 8, "do_sample": True, "seed": 3}
    whole, _ = outcome(model, rows, ahead=False, **options)
    found = []
    for ahead in (True, False):
        calls = iter(range(100))

        def spoil(module, args, logits, calls=calls):
            if next(calls) == at_call:
                logits[..., 1, :] = torch.nan

        hook = model.lm_head.register_forward_hook(spoil)
        found.append(outcome(model, rows, ahead=ahead, **options)[0])
        hook.remove()
    assert launched_early
    assert [r.tokens for r in found[0]] == [r.tokens for r in found[1]]
    assert [r.error for r in found[0]] == [r.error for r in found[1]]
    spoilt = next(i for i, r in enumerate(found[0]) if r.error)
    assert "no token can be chosen" in found[0][spoilt].error
    for i in range(3):
        expected = whole[i].tokens[:at_call] if i == spoilt else whole[i].tokens
        assert found[0][i].tokens == expected


@pytest.mark.parametrize("at_call", range(6))
def test_a_forward_that_fails_with_a_step_in_flight_leaves_nothing_behind(model, at_call):
    rows = prompts(5, 9)
    with generator(model) as batched:
        batched._ahead = True
        with failing(model, at_call, Boom()), pytest.raises(Boom):
            batched.generate(rows, max_new_tokens=8)
        assert_nothing_held(batched)
        again = batched.generate(rows, max_new_tokens=8, do_sample=False)
    assert [r.tokens for r in again] == [
        tokens_alone(model, row, max_new_tokens=8, do_sample=False) for row in rows
    ]


@pytest.mark.parametrize("at_call", range(1, 6))
def test_ctrl_c_keeps_the_rows_that_are_finished(model, at_call):
    with generator(model) as batched:
        batched._ahead = True
        with failing(model, at_call, KeyboardInterrupt()):
            results = batched.generate(prompts(5, 9), max_new_tokens=[2, 8])
        assert [result.index for result in results] == [0] * (at_call >= 2)
        assert_nothing_held(batched)


def test_a_stream_that_is_dropped_with_a_step_in_flight_gives_its_pages_back(model):
    with generator(model) as batched:
        batched._ahead = True
        stream = batched.stream(prompts(5, 9), max_new_tokens=[2, 9])
        next(stream)
        stream.close()
        assert_nothing_held(batched)


def test_ids_and_log_probabilities_are_read_as_they_were_chosen():
    fine = torch.tensor([True, True])
    chosen = Chosen(torch.tensor([3, 1]), torch.tensor([-0.5, -2.0]), {}, fine)
    assert chosen.read() == ([3, 1], [-0.5, -2.0])
    assert Chosen(torch.tensor([7]), None, {}, fine[:1]).read() == ([7], None)


FORWARDS = """
import resource, torch
from pagedkv.batch.runner import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        layer = [torch.ones(3 << 20, dtype=torch.uint8) for _ in range(8)]
        del layer
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
keep_freed_memory(torch.device("cpu"))
faults()
print(first, faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc alone learns so")
def test_what_a_layer_frees_is_kept_for_the_next(fresh_python):
    before, after = map(int, fresh_python("-c", FORWARDS).split())
    assert after < 200 < before
