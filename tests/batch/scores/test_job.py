"""Rows that cannot be scored, calls that end early, and calls of several threads."""

import math

import pytest
import torch

from pagedkv import BatchGenerator, PagedKVCache
from pagedkv.hf.model import cache_config
from tests.batch.generating import alone, assert_nothing_held, assert_same, failing, generator
from tests.batch.letters import letters
from tests.batch.scores.expected_scores import assert_exact, continuations, largest_difference
from tests.batch.test_threads import run_all
from tests.contents import Boom
from tests.effort import few
from tests.hf.tiny import VOCAB, prompts, tiny

CONTEXTS = continuations(5, 23, 12, seed=4)
EACH = [continuations(1, 3, 9, seed=i) for i in range(3)]


@pytest.fixture(scope="module")
def model():
    return tiny()


def numbered(scores):
    return [[(score.index, score.choice) for score in own] for own in scores]


# ------------------------------------------------------------------ errors of a row


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "continuation: expected at least one token, got none"),
        ([5, VOCAB], f"continuation: expected ids 0..{VOCAB - 1}, got 5..{VOCAB}"),
        ([-1, 5], f"continuation: expected ids 0..{VOCAB - 1}, got -1..5"),
        (
            [5] * 253,
            "continuation: the model takes 256 tokens, got 23 before it and 253 of ",
        ),
        ([5] * 300, "continuation: the model takes 256 tokens, got 300"),
    ],
    ids=["empty", "beyond", "negative", "together too long", "too long"],
)
def test_a_bad_continuation_is_its_own_error(model, given, message):
    each = [EACH[0], [EACH[1][0], given, EACH[1][2]], EACH[2]]
    with generator(model, max_tokens=1024) as batched:
        scores = batched.score(CONTEXTS, each)
        assert_nothing_held(batched)
    bad = scores[1][1]
    assert bad.error.startswith(message)
    assert (bad.index, bad.choice, bad.tokens, bad.logprobs) == (1, 1, [], [])
    assert math.isnan(bad.logprob)
    assert math.isnan(bad.mean)
    assert not bad.is_greedy
    good = [score for own in scores for score in own if score is not bad]
    assert [score.error for score in good] == [None] * 8


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ([5, 200], f"prompt: expected ids 0..{VOCAB - 1}, got 5..200"),
        ([5] * 257, "prompt: the model takes 256 tokens, got 257"),
    ],
    ids=["beyond", "too long"],
)
def test_a_bad_context_is_the_error_of_all_its_continuations(model, context, message):
    with generator(model) as batched:
        scores = batched.score([CONTEXTS[0], context], [[3, 4], [5]])
        assert_nothing_held(batched)
    assert [score.error for score in scores[0]] == [None, None]
    assert [score.error for score in scores[1]] == [message] * 2


def test_a_model_without_a_first_token_needs_a_context():
    model = tiny(bos_token_id=None)
    with generator(model) as batched:
        ((score,),) = batched.score([[]], [[3]])
    assert score.error == "prompt: expected at least one token, got none"


def test_the_last_token_needs_no_room(model):
    """The last token is never fed, so it may stand beyond all that the model or the cache takes."""
    for context in (CONTEXTS[1], [7]):
        given, longer = continuations(257 - len(context), 258 - len(context))
        with generator(model, max_tokens=1024) as batched:
            ((fits, does_not),) = batched.score([context], [[given, longer]])
            assert_nothing_held(batched)
        assert fits.error is None
        assert len(fits.logprobs) == len(given)
        assert "the model takes 256 tokens" in does_not.error
    with generator(model, max_tokens=32) as batched:
        ((fits, does_not),) = batched.score([CONTEXTS[0]], [continuations(28, 29)])
        assert_nothing_held(batched)
    assert fits.error is None
    assert does_not.error.startswith("continuation: the cache takes 32 tokens, got 5 before it")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_an_error(value):
    """Beside an infinite logit all others had a log-probability of minus infinity."""
    model = tiny()
    model.lm_head = torch.nn.Linear(model.lm_head.in_features, model.lm_head.out_features).eval()
    with torch.no_grad():
        model.lm_head.bias[7] = value
    with generator(model) as batched:
        scores = batched.score(CONTEXTS, EACH)
        assert_nothing_held(batched)
    errors = {score.error for own in scores for score in own}
    assert errors == {"the model's logits are no numbers"}


# ------------------------------------------------------------------ errors of the call


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([[5]], "yes"), {}, TypeError, "continuations: expected a list"),
        (("text", ["yes"]), {}, TypeError, "prompts: expected a list of prompts"),
        (([[5], [6]], [["a"]]), {}, ValueError, "a list for each of 2 prompts, got 1"),
        (([[5], [6]], [[3]]), {"salt": [b"a"]}, ValueError, "salt: expected one value for each"),
        (([[5]], [[3]]), {"temperature": 0.5}, TypeError, "temperature"),
        (([[5]], [[3]]), {"max_new_tokens": 5}, TypeError, "max_new_tokens"),
        (([[5]], ["yes"]), {}, ValueError, "tokenizer: give one"),
        (([[[5]]], [[3]]), {}, TypeError, "prompts: expected text, .n. ids"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_any_work(model, arguments, options, error, message):
    with generator(model) as batched:
        before = batched.stats
        for call in (batched.score, batched.stream_scores):
            with pytest.raises(error, match=message):
                call(*arguments, **options)
        assert batched.stats is before
        assert batched.cache.stats().tokens_computed == 0


def test_a_closed_generator_scores_nothing(model):
    batched = generator(model)
    batched.close()
    with pytest.raises(ValueError, match="this BatchGenerator was closed"):
        batched.score([[5]], [[3]])


# ------------------------------------------------------------------ what ends early


@pytest.mark.parametrize("step", few(range(6), 0, 1, 3))
@pytest.mark.parametrize("inside", ["model", "second layer"])
def test_ctrl_c_returns_what_is_scored_and_holds_nothing(model, step, inside):
    sizes = {"step_tokens": 9}
    with generator(model, **sizes) as batched:
        expected = batched.score(CONTEXTS, EACH)
    with generator(model, **sizes) as batched:
        module = model if inside == "model" else model.model.layers[1]
        with failing(module, step, KeyboardInterrupt()):
            scores = batched.score(CONTEXTS, EACH)
        assert len(scores) == 3
        assert sum(map(len, scores)) < 9
        for own, theirs in zip(scores, expected):
            for score in own:
                assert score.logprobs == theirs[score.choice].logprobs
        assert_nothing_held(batched)
        assert largest_difference(batched.score(CONTEXTS, EACH), expected) < 1e-4


@pytest.mark.parametrize("step", few(range(6), 1, 4))
@pytest.mark.parametrize("inside", ["model", "second layer"])
def test_an_error_of_the_model_has_what_was_scored(model, step, inside):
    with generator(model, step_tokens=9) as batched:
        module = model if inside == "model" else model.model.layers[1]
        with failing(module, step, Boom()), pytest.raises(Boom) as raised:
            batched.score(CONTEXTS, EACH)
        assert_nothing_held(batched)
        finished = sum(map(len, raised.value.results))
        assert len(raised.value.results) == 3
        assert raised.value.__notes__ == [
            f"{finished} continuations were scored: `results` of this error has them"
        ]
        assert finished < 9
        assert (finished > 0) == (step >= 1)
        scores = batched.score(CONTEXTS, EACH)
    assert_exact(model, CONTEXTS, EACH, scores, 1e-4)


def test_a_stream_gives_scores_as_they_finish_and_holds_nothing_once_it_is_left(model):
    with generator(model, step_tokens=9, max_sequences=4) as batched:
        stream = batched.stream_scores(CONTEXTS, EACH)
        first = next(stream)
        assert (first.index, first.choice, first.error) == (0, 0, None)
        assert batched.stats.steps == 1
        stream.close()
        assert_nothing_held(batched)
        streamed = list(batched.stream_scores(CONTEXTS, EACH))
        assert len({(score.index, score.choice) for score in streamed}) == len(streamed) == 9
        assert numbered(batched.score(CONTEXTS, EACH)) == [
            [(i, k) for k in range(3)] for i in range(3)
        ]


# ------------------------------------------------------------------ beside others


@pytest.mark.parametrize("sizes", [{"max_tokens": 64}, {"max_sequences": 4}, {}], ids=str)
def test_threads_that_score_and_generate_take_turns(model, sizes):
    cache = PagedKVCache(
        cache_config(model, **{"max_tokens": 512, "page_size": 4, **sizes}), device="cpu"
    )
    row = prompts(7)[0]
    expected = alone(model, row, max_new_tokens=12, do_sample=False)
    with BatchGenerator(model, cache=cache, step_tokens=9) as batched:
        found = {}

        def score(name):
            for _ in range(2):
                found[name] = batched.score(CONTEXTS, EACH)

        def generate():
            for _ in range(2):
                found["generated"] = batched.generate([row], max_new_tokens=12, do_sample=False)

        run_all(lambda: score("a"), generate, lambda: score("b"))
        assert_nothing_held(batched)
    assert_same(found["generated"][0], expected)
    for name in "ab":
        assert_exact(model, CONTEXTS, EACH, found[name], 1e-4)


def test_a_text_is_scored_by_the_tokens_of_its_tokenizer(model):
    tokenizer = letters()
    with generator(model, tokenizer) as batched:
        by_text = batched.score(["abc", "b"], ["de", "f"])
        by_ids = batched.score([[0, 1, 2], [1]], [[3, 4], [5]])
    assert largest_difference(by_text, by_ids) < 1e-5
