"""Draft models: which are refused, and what rows get where one fails, changes or is interrupted."""

import copy
import gc
import sys
from threading import Thread

import pytest
import torch

from pagedkv import BatchGenerator
from pagedkv.batch.drafts import model_drafts
from pagedkv.errors import ModelChangedError, UnsupportedModelError
from pagedkv.storage import memory
from tests.batch.drafts.drafted import noisy
from tests.batch.generating import assert_nothing_held, failing, generator, tokens_alone
from tests.batch.letters import LETTERS, letters
from tests.contents import Boom
from tests.effort import examples, sampled
from tests.hf.adapted import adapted
from tests.hf.tiny import prompts, tiny
from tests.hf.unsupported import unsupported
from tests.hybrids import tiny_hybrid
from tests.pressing import AtLine

OPTIONS = {"max_new_tokens": 16, "do_sample": False}
ROWS = prompts(5, 23, 9)


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def draft(model):
    return noisy(model, 0.02)


@pytest.fixture(scope="module")
def expected(model):
    return [tokens_alone(model, row, **OPTIONS) for row in ROWS]


def tokens(results):
    assert [result.error for result in results] == [None] * len(results)
    return [result.tokens for result in results]


# ------------------------------------------------------------------ what is refused


def test_a_draft_of_another_vocabulary_is_refused(model):
    with pytest.raises(ValueError, match="draft: expected the model's vocabulary of 101 ids"):
        generator(model, draft=tiny("llama", vocab_size=7))


@pytest.mark.parametrize("what", ["smol", 3, torch.nn.Linear(2, 2)], ids=str)
def test_what_is_no_model_is_refused(model, what):
    with pytest.raises(TypeError, match="draft: expected a transformers model, got"):
        generator(model, draft=what)


def test_a_draft_with_another_tokenizer_is_refused_where_both_are_known(model, draft, tmp_path):
    ours, more = letters(), letters()
    ours.save_pretrained(tmp_path / "same")
    letters(LETTERS[::-1]).save_pretrained(tmp_path / "other")
    more.add_tokens(["<more>"])
    more.save_pretrained(tmp_path / "more")
    draft = copy.deepcopy(draft)
    draft.config._name_or_path = str(tmp_path / "other")
    with pytest.raises(ValueError, match="the model's tokenizer, got one in which 'a' is 100"):
        generator(model, ours, draft=draft)
    for known in ("same", "more", "none"):
        draft.config._name_or_path = str(tmp_path / known)
        generator(model, ours, draft=draft).close()
    draft.config._name_or_path = str(tmp_path / "other")
    generator(model, draft=draft).close()


@pytest.mark.parametrize("vocabulary", [99, 120])
def test_a_vocabulary_may_be_filled_up_differently_where_the_words_are_the_same(
    model, draft, expected, tmp_path, vocabulary
):
    letters().save_pretrained(tmp_path)
    draft = copy.deepcopy(draft)
    draft.resize_token_embeddings(vocabulary)
    draft.config._name_or_path = str(tmp_path)
    options = {**OPTIONS, "do_sample": True, "seed": 2, "temperature": 0.7}
    with generator(model, letters(), draft=draft) as batched, generator(model) as alone:
        assert tokens(batched.generate(ROWS, **OPTIONS)) == expected
        assert batched.stats.accepted > 0
        assert tokens(batched.generate(ROWS, **options)) == tokens(alone.generate(ROWS, **options))
        assert batched.stats.accepted > 0


def test_a_draft_with_recurrent_states_is_refused():
    hybrid = tiny_hybrid()
    plain = tiny("llama", vocab_size=hybrid.config.vocab_size)
    with pytest.raises(UnsupportedModelError, match="draft: it has recurrent states"):
        generator(plain, draft=hybrid)
    with pytest.raises(UnsupportedModelError, match="draft: its model has recurrent states"):
        BatchGenerator(hybrid, draft=plain, max_tokens=64)


def test_a_draft_that_cannot_be_paged_is_refused_under_its_name(model):
    with pytest.raises(UnsupportedModelError, match=r"draft: CpmAnt.* cannot"):
        generator(model, draft=unsupported("CpmAntForCausalLM"))
    assert model.config._attn_implementation != "pagedkv"


def test_a_draft_elsewhere_is_refused(model, draft, monkeypatch):
    from pagedkv.batch.drafts import draft_model

    place = {id(draft): torch.device("cuda:0")}
    monkeypatch.setattr(
        draft_model, "device_of", lambda one: place.get(id(one), torch.device("cpu"))
    )
    with pytest.raises(ValueError, match="draft: expected a model on cpu, got one on cuda:0"):
        generator(model, draft=draft)


def test_a_draft_is_refused_where_nothing_can_be_verified(model, draft):
    with pytest.raises(ValueError, match="verify_width: expected 2 or more with a draft, got 1"):
        generator(model, draft=draft, verify_width=1)
    with pytest.raises(ValueError, match="draft: expected none with read_tokens"):
        generator(model, draft=draft, read_tokens=64)
    assert model.config._attn_implementation != "pagedkv"


def test_what_was_refused_or_closed_is_not_attached(model, draft):
    for one in (model, draft):
        assert one.config._attn_implementation != "pagedkv"
    with generator(model, draft=draft):
        assert draft.config._attn_implementation == "pagedkv"
    for one in (model, draft):
        assert one.config._attn_implementation != "pagedkv"


# ------------------------------------------------------------------ its pages


def test_its_pages_are_for_as_many_tokens_as_the_models(model):
    sizes = {"max_tokens": 640, "page_size": 8, "max_sequences": 9, "max_sequence_length": 100}
    with generator(model, draft=tiny("gemma3"), verify_width=6, **sizes) as batched:
        config = batched._draft.cache.config
        assert {name: getattr(config, name) for name in sizes} == sizes
        assert config.rollback == 6
        assert batched.verify_width == 6
    with generator(model, draft=model) as batched:
        assert batched.verify_width == 5


def test_pages_of_a_size_nobody_said_leave_room_for_those_of_the_draft(model, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda device: 4_000_000)
    alone = BatchGenerator(model)
    with BatchGenerator(model, draft=model) as both:
        one, two = both.cache.config, both._draft.cache.config
        assert one.max_tokens == two.max_tokens
        assert 0.9e6 < one.nbytes + two.nbytes <= 1_000_000
        assert alone.cache.config.max_tokens > 1.8 * one.max_tokens
        assert len(both.generate(ROWS, **OPTIONS)) == 3
    alone.close()


# ------------------------------------------------------------------ what can go wrong


@pytest.mark.parametrize(("inside", "at_call"), [("model", 0), ("second layer", 1), ("model", 5)])
def test_a_draft_that_fails_costs_the_drafts_of_its_call(model, draft, expected, at_call, inside):
    with generator(model, draft=draft) as batched:
        module = draft if inside == "model" else draft.model.layers[1]
        with (
            failing(module, at_call, Boom("no memory")),
            pytest.warns(UserWarning, match="LlamaForCausalLM raised Boom: no memory") as said,
        ):
            assert tokens(batched.generate(ROWS, **OPTIONS)) == expected
        assert len(said) == 1
        assert batched.stats.draft_steps == at_call
        assert_nothing_held(batched)
        assert tokens(batched.generate(ROWS, **OPTIONS)) == expected
        assert batched.stats.accepted > 0
        assert_nothing_held(batched)


def test_a_draft_that_fails_in_one_stream_drafts_for_others_meanwhile(model, draft, expected):
    with generator(model, draft=draft) as batched:
        stream = batched.stream(ROWS, max_new_tokens=[2, 16, 16], do_sample=False)
        with failing(draft, 1, Boom("no memory")), pytest.warns(UserWarning, match="no memory"):
            next(stream)
        assert tokens(batched.generate(ROWS, **OPTIONS)) == expected
        assert batched.stats.accepted > 0
        assert len(list(stream)) == 2


@pytest.mark.parametrize("at_call", range(3))
def test_a_model_that_fails_frees_what_the_draft_holds(model, draft, at_call):
    with generator(model, draft=draft) as batched:
        with failing(model, at_call, Boom()), pytest.raises(Boom):
            batched.generate(ROWS, **OPTIONS)
        assert_nothing_held(batched)


@pytest.mark.parametrize("at_call", [0, 1, 4])
def test_ctrl_c_in_the_draft_ends_the_call(model, draft, expected, at_call):
    with generator(model, draft=draft) as batched:
        with failing(draft, at_call, KeyboardInterrupt()):
            results = batched.generate(ROWS, max_new_tokens=[1, 16, 16], do_sample=False)
        assert [result.index for result in results] == [0]
        assert_nothing_held(batched)
        assert tokens(batched.generate(ROWS, **OPTIONS)) == expected


@sampled
def test_ctrl_c_at_any_line_of_the_drafter_leaves_nothing_held(model, draft, expected):
    with generator(model, draft=draft) as batched:
        least, line, pressed = 1200 // examples(150, 4), 1, True
        while pressed:
            with AtLine(line, lambda file: file == model_drafts.__file__) as press:
                results = batched.generate(ROWS, **OPTIONS)
            assert_nothing_held(batched)
            pressed = press.pressed
            assert pressed or tokens(results) == expected
            line += least
        assert line > 600


@pytest.mark.parametrize("how", ["close", "del"])
def test_a_stream_left_unfinished_frees_what_the_draft_holds(model, draft, how):
    with generator(model, draft=draft) as batched:
        stream = batched.stream(ROWS, max_new_tokens=[2, 16, 16], do_sample=False)
        next(stream)
        if how == "close":
            stream.close()
        del stream
        gc.collect()
        assert_nothing_held(batched)


def test_stop_strings_end_rows_within_a_draft(model, expected):
    stops = [LETTERS[row[4]] for row in expected]
    options = {**OPTIONS, "stop_strings": stops}
    with (
        generator(model, letters(), draft=model) as batched,
        generator(model, letters()) as alone,
    ):
        results = batched.generate(ROWS, **options)
        assert tokens(results) == tokens(alone.generate(ROWS, **options))
        assert {result.finish_reason for result in results} == {"stop"}
        assert batched.stats.accepted > 0
        assert_nothing_held(batched)


def test_a_row_that_fails_frees_what_the_draft_holds_of_it(model, draft):
    def picky(ids, scores):
        if ids.shape[1] == 15:
            raise Boom
        return scores

    with generator(model, draft=draft) as batched:
        results = batched.generate(ROWS, logits_processor=[picky], **OPTIONS)
        assert [bool(result.error) for result in results] == [True, False, True]
        assert_nothing_held(batched)


# ------------------------------------------------------------------ what changes


def test_changed_weights_of_the_draft_are_noticed(model, draft, expected):
    draft = copy.deepcopy(draft)
    with generator(model, draft=draft) as batched:
        cache = batched._draft.cache
        reused = []
        for _ in range(2):
            before = cache.stats().tokens_reused
            assert tokens(batched.generate(ROWS, **OPTIONS)) == expected
            reused.append(cache.stats().tokens_reused - before)
        assert reused[0] == 0 < reused[1]
        with torch.no_grad():
            draft.model.layers[0].self_attn.k_proj.weight.mul_(1.1)
        before = cache.stats().tokens_reused
        assert tokens(batched.generate(ROWS, **OPTIONS)) == expected
        assert cache.stats().tokens_reused == before


def test_a_draft_that_was_cast_is_refused_by_the_next_call(model, draft):
    draft = copy.deepcopy(draft)
    with generator(model, draft=draft) as batched:
        draft.to(torch.bfloat16)
        with pytest.raises(ModelChangedError, match="its dtype has changed"):
            batched.generate(ROWS, **OPTIONS)
        draft.to(torch.float32)
        assert len(batched.generate(ROWS, **OPTIONS)) == 3


def test_a_draft_may_have_another_dtype(model, draft, expected):
    with generator(model, draft=copy.deepcopy(draft).to(torch.bfloat16)) as batched:
        assert tokens(batched.generate(ROWS, **OPTIONS)) == expected
        assert batched.stats.accepted > 0


def test_a_draft_may_have_adapters(model, draft, expected):
    lora = adapted(copy.deepcopy(draft))
    with generator(model, draft=lora) as batched:
        assert tokens(batched.generate(ROWS, **OPTIONS)) == expected
        assert batched.stats.drafted > 0
        with lora.disable_adapter():
            assert tokens(batched.generate(ROWS, **OPTIONS)) == expected
        assert tokens(batched.generate(ROWS, **OPTIONS)) == expected
        assert_nothing_held(batched)


# ------------------------------------------------------------------ several at once


def test_streams_in_turn_share_a_draft(model, draft, expected):
    with generator(model, draft=draft) as batched:
        streams = [batched.stream(ROWS, **OPTIONS) for _ in range(2)]
        found = [[], []]
        for _ in ROWS:
            for place, stream in enumerate(streams):
                found[place].append(next(stream))
        for results in found:
            in_order = sorted(results, key=lambda result: result.index)
            assert tokens(in_order) == expected
        for stream in streams:
            assert next(stream, None) is None
        assert_nothing_held(batched)


@pytest.mark.parametrize("pages", ["one generator", "the same pages", "own pages"])
def test_threads_use_the_same_draft(model, draft, expected, pages):
    found = [None] * 3
    with generator(model, draft=draft) as first:
        others = [first, first]
        if pages == "the same pages":
            others = [BatchGenerator(model, cache=first.cache, draft=draft) for _ in range(2)]
        if pages == "own pages":
            others = [generator(model, draft=draft) for _ in range(2)]

        def run(place, one):
            found[place] = tokens(one.generate(ROWS, **OPTIONS))

        every = enumerate([first, *others])
        threads = [Thread(target=run, args=pair, daemon=True) for pair in every]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        sys.setswitchinterval(interval)
        assert found == [expected] * 3
        for one in (first, *others):
            assert_nothing_held(one)


def test_two_models_may_draft_for_each_other(model, draft, expected):
    theirs = [tokens_alone(draft, row, **OPTIONS) for row in ROWS]
    with generator(model, draft=draft) as one, generator(draft, draft=model) as other:
        assert tokens(one.generate(ROWS, **OPTIONS)) == expected
        assert tokens(other.generate(ROWS, **OPTIONS)) == theirs
        assert tokens(one.generate(ROWS, **OPTIONS)) == expected
        assert_nothing_held(one)
        assert_nothing_held(other)
