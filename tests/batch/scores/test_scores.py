"""Scores equal those of a plain forward, however they are computed.

Pages are in debug mode: a slot that nothing was written to is NaN and would show.
"""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import BatchGenerator
from pagedkv.errors import ModelChangedError
from pagedkv.retention import Fifo
from tests.batch.generating import assert_nothing_held, generator, with_own
from tests.batch.scores.expected_scores import (
    Exact,
    assert_exact,
    continuations,
    error_of_plain,
    largest_difference,
)
from tests.effort import examples, few, sampled
from tests.hf.adapted import adapted, add
from tests.hf.tiny import FAMILIES, VARIED, prompts, tiny
from tests.hybrids import HYBRIDS, STEPWISE, tiny_hybrid

SAME = 2e-6  # nats a token: what another order of sums makes
CONTEXTS = continuations(5, 23, 1, 12, 2, seed=9)  # one token, and beyond every window
CONTEXTS.append(CONTEXTS[1][:18] + CONTEXTS[0])
EACH = [continuations(1, 3, 9, seed=i) for i in range(6)]
model_of = cache(tiny)


@pytest.fixture(scope="module")
def model():
    """One whose logits are as large as those of language models are, for what `SAME` says."""
    return tiny(initializer_range=0.1)


@pytest.fixture(scope="module")
def usual(model):
    """The scores of `CONTEXTS` and `EACH`, with sizes that cut nothing."""
    return scored(model, CONTEXTS, EACH)[0]


def scored(model, contexts, each, **sizes):
    """Scores and what the call did; nothing is held afterwards."""
    with generator(model, **sizes) as batched:
        scores = batched.score(contexts, each)
        assert_nothing_held(batched)
    return scores, batched.stats


def fed(contexts, each) -> int:
    """Tokens of contexts and continuations, but for the last of each of these."""
    return sum(map(len, contexts)) + sum(len(one) - 1 for own in each for one in own)


# ------------------------------------------------------------------ the same as a plain forward


@pytest.mark.parametrize("family", few(FAMILIES, *VARIED[::2], "deepseek_v3"))
def test_every_family_says_what_its_plain_forward_says(family):
    model = model_of(family)
    scores, _ = scored(model, CONTEXTS, EACH, step_tokens=7)
    assert_exact(model, CONTEXTS, EACH, scores, 1e-4)


# inkling2_text routes in float32, so that there is no forward in float64 to hold it against.
EXACT = sorted(HYBRIDS.keys() - STEPWISE - {"inkling2_text"})


@pytest.mark.parametrize("family", few(EXACT, "qwen3_next", "falcon_h1"))
def test_a_continuation_goes_on_from_the_state_of_its_context(family):
    model, contexts = tiny_hybrid(family), [CONTEXTS[1], CONTEXTS[-1]]
    # One token alone takes another way through transformers in zamba2, up to 4e-3 away.
    width = 64 if family == "zamba2" else 11
    scores, stats = scored(model, contexts, EACH[:2], step_tokens=width)
    # Some of these models make much of a rounding: granitemoehybrid is 6e-4 away, and so is a
    # plain float32 forward, whose error says how near float32 can be.
    most = max(1e-4, 3 * error_of_plain(model, contexts, EACH[:2]))
    assert_exact(model, contexts, EACH[:2], scores, most)
    assert stats.computed == fed([contexts[0], contexts[1][18:]], EACH[:2])


@sampled
@settings(max_examples=examples(40, 8))
@given(st.data())
def test_any_job_is_scored_as_plain_forwards_would(data):
    model = model_of(data.draw(st.sampled_from(["llama", "gemma3", "mistral"])))
    letters = st.lists(st.integers(2, 4), min_size=1, max_size=20)
    contexts = data.draw(st.lists(letters, min_size=1, max_size=4))
    own = st.lists(st.lists(st.integers(2, 5), min_size=1, max_size=12), max_size=5)
    each = [data.draw(own) for _ in contexts]
    longest = max(len(one) for one in contexts) + 12
    sizes = {
        "max_tokens": longest + data.draw(st.integers(0, 40)),
        "page_size": data.draw(st.sampled_from([1, 4, 16])),
        "step_tokens": data.draw(st.sampled_from([1, 5, 64])),
        "max_sequences": data.draw(st.integers(1, 8)),
    }
    scores, _ = scored(model, contexts, each, **sizes)
    assert_exact(model, contexts, each, scores, 1e-4)


# ------------------------------------------------------------------ nothing else changes them


@pytest.mark.parametrize(
    "sizes",
    [
        {"page_size": 1},
        {"page_size": 16},
        {"step_tokens": 7},
        {"step_tokens": 1024},
        {"max_sequences": 1},
        {"max_sequences": 2},
        {"max_sequences": 40},
        {"max_tokens": 48},
        {"host_tokens": 256, "max_tokens": 48},
    ],
    ids=str,
)
def test_sizes_change_no_score(model, usual, sizes):
    assert largest_difference(scored(model, CONTEXTS, EACH, **sizes)[0], usual) <= SAME


def test_alone_a_continuation_has_the_score_that_it_has_among_others(model, usual):
    for i, context in enumerate(CONTEXTS):
        for k, one in enumerate(EACH[i]):
            ((alone,),), _ = scored(model, [context], [[one]])
            assert alone.greedy == usual[i][k].greedy
            assert alone.logprobs == pytest.approx(usual[i][k].logprobs, abs=SAME, rel=0)


def test_order_changes_no_score(model, usual):
    turned, _ = scored(model, CONTEXTS[::-1], [own[::-1] for own in EACH[::-1]])
    for own, theirs in zip(usual, turned[::-1]):
        for a, b in zip(own, theirs[::-1], strict=True):
            assert a.tokens == b.tokens
            assert a.logprobs == pytest.approx(b.logprobs, abs=SAME, rel=0)


def test_a_second_call_finds_the_contexts_and_says_the_same(model):
    contexts = prompts(23, 12)
    with generator(model) as batched:
        first, second = (batched.score(contexts, EACH[:2]) for _ in range(2))
        assert_nothing_held(batched)
    assert largest_difference(first, second) <= SAME
    assert [own[0].cached_tokens for own in first] == [0, 0]
    assert [own[0].cached_tokens for own in second] == [22, 11]
    assert batched.stats.computed == fed([[1], [1]], EACH[:2])


def test_a_generator_scores_between_generating(model):
    (context,) = prompts(17)
    with generator(model) as batched:
        (made,) = batched.generate([context], max_new_tokens=6, do_sample=False, logprobs=True)
        ((score,),) = batched.score([context], [made.tokens])
        assert batched.generate([context], max_new_tokens=6, do_sample=False)[0].tokens
        assert_nothing_held(batched)
    assert score.is_greedy
    assert score.logprobs == pytest.approx(made.logprobs, abs=SAME, rel=0)
    assert score.cached_tokens == 16


# ------------------------------------------------------------------ what it costs


@pytest.fixture
def logit_rows(monkeypatch):
    """How many tokens of each step got logits."""
    from pagedkv.batch.scores.continuations import ContinuationRunner

    rows, logits = [], ContinuationRunner._logits

    def noting(self, batch):
        rows.append(len(found := logits(self, batch)))
        return found

    monkeypatch.setattr(ContinuationRunner, "_logits", noting)
    return rows


@pytest.mark.parametrize("places", [2, 8, 256])
def test_one_context_of_many_continuations_is_computed_once(model, logit_rows, places):
    (context,) = prompts(200)
    each = [continuations(*[4] * 192)]
    sizes = {"max_tokens": 4096, "max_sequences": places, "step_tokens": 256}
    scores, stats = scored(model, [context], each, **sizes)
    assert all(score.error is None for score in scores[0])
    assert len(scores[0]) == 192
    assert stats.prompt_tokens == 200
    assert stats.scored == 4 * 192
    assert stats.computed == 200 + 3 * 192
    assert sum(logit_rows) == 1 + 3 * 192


def test_contexts_with_a_few_choices_are_computed_once_each(model, logit_rows):
    contexts = with_own(prompts(20)[0], *[30] * 16)
    each = [continuations(15, 15, 15, 15, seed=i) for i in range(16)]
    scores, stats = scored(model, contexts, each, max_tokens=4096, step_tokens=256)
    assert all(score.error is None for own in scores for score in own)
    assert stats.computed == fed([contexts[0], *[[0] * 31] * 15], each)
    assert sum(logit_rows) == 16 + sum(len(one) - 1 for own in each for one in own)
    assert max(logit_rows) <= 256


def test_where_places_are_few_contexts_wait_for_the_choices_of_others(model):
    """A context that took the last place would part another from its choices."""
    contexts = prompts(*[30] * 16)
    each = [continuations(15, 15, 15, 15, seed=i) for i in range(16)]
    _, stats = scored(model, contexts, each, max_tokens=160, max_sequences=9, step_tokens=64)
    assert stats.computed <= 1.02 * fed(contexts, each)


def test_equal_contexts_of_several_prompts_are_one(model):
    (context,) = prompts(40)
    each = [[one] for one in continuations(*[3] * 20)]
    _, stats = scored(model, [context] * 20, each)
    assert stats.computed == 40 + 2 * 20
    assert stats.prompt_tokens == 40


def test_continuations_of_one_token_need_no_step_and_no_pages_of_their_own(model):
    contexts = prompts(5, 9)
    scores, stats = scored(model, contexts, continuations(*[1] * 30), max_sequences=2)
    assert stats.steps == 1
    assert stats.computed == 14
    assert [len(own) for own in scores] == [30, 30]


def test_no_step_has_more_logits_than_memory_is_set_aside_for(model, monkeypatch, logit_rows):
    from pagedkv.batch.scores import continuations as module

    monkeypatch.setattr(module, "LOGITS_BYTES", 5 * 4 * 101)
    scores, _ = scored(model, CONTEXTS, EACH)
    assert max(logit_rows) == 5
    assert sum(logit_rows) == 6 + sum(len(one) - 1 for own in EACH for one in own)
    assert_exact(model, CONTEXTS, EACH, scores)


@pytest.mark.parametrize("tokens", [32, 36, 40, 48])
def test_rows_that_are_put_back_for_want_of_pages_get_the_same_scores(model, usual, tokens):
    scores, stats = scored(model, CONTEXTS, EACH, max_tokens=tokens, step_tokens=9)
    assert largest_difference(scores, usual) <= SAME
    assert stats.preemptions > 0
    assert stats.computed <= 1.2 * fed(CONTEXTS, EACH)


@pytest.mark.parametrize("host_tokens", [0, 256])
def test_forks_that_are_put_back_lose_nothing_that_was_computed(model, host_tokens):
    contexts, each = continuations(30, seed=1), [continuations(*[12] * 8)]
    _, stats = scored(model, [contexts[0]], each, max_tokens=56, host_tokens=host_tokens)
    assert stats.preemptions > 0
    assert (stats.offloaded > 0) == (host_tokens > 0)
    assert stats.computed == fed(contexts, each)


# ------------------------------------------------------------------ where weights and texts part


def test_what_is_salted_is_found_under_its_salt_alone(model):
    (context,) = prompts(23)
    with generator(model) as batched:
        salts = [b"a", b"b", b"a"]
        first = batched.score([context] * 3, [[3, 4]], salt=salts)
        assert batched.stats.prompt_tokens == 2 * 23
        again = batched.score([context] * 3, [[3, 4]], salt=[b"a", b"", b"b"])
    assert [own[0].cached_tokens for own in first] == [0, 0, 23]  # a fork of the first
    assert [own[0].cached_tokens for own in again] == [22, 0, 22]


def test_changed_weights_are_noticed():
    model, (context,) = tiny(), prompts(23)
    with generator(model) as batched:
        batched.score([context], [[3, 4]])
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        scores = batched.score([context], [[[3, 4]]])
        assert scores[0][0].cached_tokens == 0
    assert_exact(model, [context.tolist()], [[[3, 4]]], scores)


def test_each_adapter_has_scores_and_contexts_of_its_own():
    model, context = adapted(tiny()), CONTEXTS[1]
    add(model, "two")
    found = {}
    with generator(model) as batched:
        for name in ("one", "two", "one"):
            model.set_adapter(name)
            own = batched.score([context], EACH[:1])
            assert own[0][0].cached_tokens == (22 if name in found else 0)
            if name in found:
                assert largest_difference(own, found[name]) <= 5e-6
            found[name] = own
        model.set_adapter("two")
        stream = batched.stream_scores([context], EACH[:1])
        next(stream)
        model.set_adapter("one")
        with pytest.raises(ModelChangedError, match="its adapters were switched"):
            list(stream)
        assert_nothing_held(batched)
    assert largest_difference(found["one"], found["two"]) > 1e-2
    model.set_adapter("two")
    assert_exact(model, [context], EACH[:1], found["two"], 1e-4)


# Of these attention depends on where steps end, so scores do.
CUT = {
    "int4": {"kv_format": "int4"},
    "retention": {"retention": Fifo(4), "budget": 16},
    "read_tokens": {"read_tokens": 64},
}


@pytest.mark.parametrize("name", few([*CUT, "int8"], "retention", "int8"))
def test_what_forgets_is_served_and_where_it_forgets_depends_on_steps(name):
    model = tiny(head_dim=32, initializer_range=0.1)
    fields = {"page_size": 16, **CUT.get(name, {"kv_format": "int8"})}
    contexts = [CONTEXTS[1] * 6, CONTEXTS[3] * 9]
    wide, narrow = (
        scored(model, contexts, EACH[:2], step_tokens=n, **fields)[0] for n in (256, 16)
    )
    difference = largest_difference(wide, narrow)
    assert difference > 1e-3 if name in CUT else difference <= SAME


# ------------------------------------------------------------------ a language model

TEXTS = {
    "The capital of France is": [" Paris", " Rome", " the city of light, as many people call it"],
    "Water boils at a temperature of ": ["100 degrees Celsius.", "zero.", "212 F, at sea level."],
    "def add(a, b):\n    return": [" a + b", " a - b\n\nprint(add(1, 2))", " None"],
    "": ["Once upon a time, there was a lighthouse keeper.", "zxq"],
}


@pytest.mark.slow
def test_a_language_model_is_as_exact_as_its_numbers_are(smollm2_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    prompts, each = list(TEXTS), list(TEXTS.values())
    found = []
    for sizes in ({}, {"step_tokens": 7}, {"page_size": 1}, {"max_sequences": 2}):
        with BatchGenerator(model, tokenizer, max_tokens=512, **sizes) as batched:
            found.append(batched.score(prompts, each))
            assert_nothing_held(batched)
    for others in found[1:]:
        assert largest_difference(found[0], others) <= 3e-5  # each is at most so far from exact
    exact = Exact(model)
    for i, prompt in enumerate(prompts):
        context = tokenizer(prompt.rstrip())["input_ids"] or [tokenizer.bos_token_id]
        for text, score in zip(each[i], found[0][i], strict=True):
            whole = tokenizer(prompt + text)["input_ids"]
            given = whole[len(context) :] if prompt else whole
            expected, lead = exact(context, given)
            assert score.tokens == given
            assert score.logprobs == pytest.approx(expected, abs=5e-5, rel=0)
            assert score.logprob == pytest.approx(sum(expected), abs=1e-4, rel=0)
            assert score.mean == score.logprob / len(given)
            assert score.greedy == [ahead == 0 for ahead in lead]
    assert found[0][0][0].logprob > found[0][0][1].logprob  # Paris, not Rome
