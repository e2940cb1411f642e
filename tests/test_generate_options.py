"""`BatchGenerator`'s options: sampling, transformers' rules row by row, stopping, bad input."""

from array import array

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import SuppressTokensLogitsProcessor, TopKLogitsWarper

from tests.generating import (
    alone,
    assert_like_alone,
    assert_nothing_held,
    assert_same,
    failing,
    generator,
    tokens_alone,
)
from tests.hf.tiny import VOCAB, prompts, tiny
from tests.support import Boom

LETTERS = [chr(ord("a") + i) if i < 26 else chr(0x4E00 + i) for i in range(VOCAB)]
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}z"
SAMPLED = {"do_sample": True, "temperature": 0.9, "max_new_tokens": 8}


@pytest.fixture
def model():
    return tiny()


@pytest.fixture
def batched(model):
    with generator(model) as batched:
        yield batched
        assert_nothing_held(batched)


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of one letter for each id."""
    tokenizer = Tokenizer(models.WordLevel({x: i for i, x in enumerate(LETTERS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT)


def text(ids) -> str:
    return "".join(LETTERS[i] for i in ids)


def tokens(results) -> list[list[int]]:
    return [result.tokens for result in results]


# ------------------------------------------------------------------ sampling


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"top_k": 0, "top_p": 0.8},
        {"top_k": 7, "min_p": 0.05},
        {"typical_p": 0.7, "renormalize_logits": True},
        {"epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "remove_invalid_values": True},
        {"repetition_penalty": 1.5, "top_p": 0.9},
    ],
)
def test_sample_k_draws_as_generate_alone_does_after_seed_plus_k(model, rules):
    options = {**SAMPLED, "num_return_sequences": 3, "seed": 7, **rules}
    results, _ = assert_like_alone(model, prompts(5, 9, 2), **options)
    assert len({tuple(result.tokens) for result in results[:3]}) > 1


def test_a_temperature_of_zero_in_a_list_is_greedy(model, batched):
    rows = prompts(5, 9)
    mixed = batched.generate(
        rows, do_sample=True, temperature=[0, 0.9], seed=4, max_new_tokens=8, top_p=0.8
    )
    assert_same(mixed[0], alone(model, rows[0], do_sample=False, max_new_tokens=8))
    assert_same(mixed[1], alone(model, rows[1], seed=4, top_p=0.8, **SAMPLED))


def test_every_prompt_may_have_its_own_seed_temperature_and_length(model):
    options = {"do_sample": True, "seed": [3, 1, 4], "temperature": [0.2, 1.0, 3.0]}
    assert_like_alone(model, prompts(5, 9, 2), max_new_tokens=[9, 4, 6], **options)
    arrays = {"seed": np.array([3, 1, 4]), "temperature": torch.tensor([0.5, 1.0, 2.0])}
    rows = prompts(5, 9, 2)
    with generator(model) as batched:
        a = batched.generate(rows, do_sample=True, **arrays)
        b = batched.generate(
            rows, do_sample=True, **{name: list(x.tolist()) for name, x in arrays.items()}
        )
    assert tokens(a) == tokens(b)


def test_a_seed_means_the_same_whatever_else_is_in_the_batch(model, batched):
    rows, seeds = prompts(5, 9, 2, 7, 9), [10, 11, 12, 13, 14]
    once = tokens(batched.generate(rows, seed=seeds, **SAMPLED))
    back = tokens(batched.generate(rows[::-1], seed=seeds[::-1], **SAMPLED))
    single = [tokens(batched.generate([row], seed=s, **SAMPLED))[0] for row, s in zip(rows, seeds)]
    with generator(model, step_tokens=3, max_tokens=20, max_sequences=2) as narrow:
        turns = tokens(narrow.generate(rows, seed=seeds, **SAMPLED))
    assert once == back[::-1] == single == turns


def test_without_a_seed_samples_differ_and_follow_the_global_generator(batched):
    rows = prompts(5) * 4
    torch.manual_seed(1)
    once, other = (tokens(batched.generate(rows, **SAMPLED)) for _ in "ab")
    torch.manual_seed(1)
    assert tokens(batched.generate(rows, **SAMPLED)) == once != other
    assert len(set(map(tuple, once))) > 1


# ------------------------------------------------------------------ rules that look at the text


@pytest.mark.parametrize(
    "rules",
    [
        {"repetition_penalty": 1.7},
        {"encoder_repetition_penalty": 2.0},
        {"no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 1},
        {"bad_words_ids": [[5], [7, 9], [70], [71]]},
        {"suppress_tokens": list(range(60, 100))},
        {"begin_suppress_tokens": list(range(60, 100))},
        {"sequence_bias": {(5,): 9.0, (5, 6): 20.0}},
        {"forced_eos_token_id": 8},
        {"min_new_tokens": 6, "eos_token_id": list(range(2, 100))},
        {"min_length": 12, "eos_token_id": list(range(2, 100))},
        {"exponential_decay_length_penalty": (2, 1.6), "eos_token_id": 8},
        {"prefix_allowed_tokens_fn": lambda _, ids: [(int(ids.sum()) + i) % 90 for i in range(9)]},
    ],
    ids=lambda rules: next(iter(rules)),
)
def test_transformers_rules_apply_to_each_row(model, rules):
    rows = prompts(5, 13, 2, 9)
    changed, _ = assert_like_alone(model, rows, max_new_tokens=12, **rules)
    assert tokens(changed) != [tokens_alone(model, row, max_new_tokens=12) for row in rows]


class Seen(LogitsProcessor):
    def __init__(self) -> None:
        self.texts: set[tuple[int, ...]] = set()

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == 1
        assert scores.isfinite().all(), "something was read that was never written"
        self.texts.add(tuple(input_ids[0].tolist()))
        return scores


def test_a_custom_processor_sees_each_text_alone_and_without_padding(batched):
    rows, seen = prompts(5, 13, 2), Seen()
    results = batched.generate(rows, max_new_tokens=6, logits_processor=[seen])
    texts = [row.tolist() + result.tokens for row, result in zip(rows, results)]
    expected = {tuple(t[: len(row) + i]) for row, t in zip(rows, texts) for i in range(6)}
    assert seen.texts == expected


def test_a_custom_processor_and_the_allowed_tokens_are_those_of_generate(model):
    class Away(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, input_ids[:, -1] // 2 :] -= 20
            return scores

    assert_like_alone(model, prompts(5, 13, 2), logits_processor=LogitsProcessorList([Away()]))


def test_the_allowed_tokens_are_asked_for_by_the_prompts_place(batched):
    results = batched.generate(
        prompts(5, 13, 2), max_new_tokens=3, prefix_allowed_tokens_fn=lambda i, ids: [40 + i]
    )
    assert tokens(results) == [[40] * 3, [41] * 3, [42] * 3]


class Grammar(LogitsProcessor):
    """Allows 10, then 11, then 12 ...; follows one text token by token, as xgrammar's do."""

    def __init__(self) -> None:
        self.length, self.state = None, 9

    def __call__(self, input_ids, scores):
        assert self.length in (None, input_ids.shape[1] - 1), "this is another text"
        assert self.length is None or int(input_ids[0, -1]) == self.state
        self.length, self.state = input_ids.shape[1], self.state + 1
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([self.state]), 0.0)


@pytest.mark.parametrize(
    "package", ["xgrammar.contrib.hf", "outlines.backends", "llguidance", "guidance"]
)
def test_a_processor_that_follows_one_text_is_refused_for_several_rows(batched, package):
    follows = type("LogitsProcessor", (Grammar,), {"__module__": package})
    derived = type("Mine", (follows,), {"__module__": "mine"})
    why = r"follows the text of one row, and there are 2; .*processors=lambda index, sample"
    for made in (follows(), derived()):
        options = {"logits_processor": [made], "max_new_tokens": 3}
        with pytest.raises(ValueError, match=why):
            batched.stream(prompts(5, 9), **options)
        with pytest.raises(ValueError, match=why):
            batched.stream(prompts(5), num_return_sequences=2, do_sample=True, **options)
    (alone,) = batched.generate(prompts(5), **options)  # one row may have it
    assert alone.tokens == [10, 11, 12]


@pytest.mark.parametrize(
    "sizes", [{}, {"verify_width": 4}, {"max_tokens": 24}, {"step_tokens": 3}], ids=str
)
def test_each_row_has_processors_of_its_own_that_are_made_once(model, sizes):
    made = []

    def make(index, sample):
        made.append((index, sample))
        return [Grammar()]

    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 12, "seed": 1}
    with generator(model, **sizes) as batched:
        results = batched.generate(prompts(5, 9, 2), processors=make, **options)
        assert_nothing_held(batched)
    assert tokens(results) == [list(range(10, 22))] * 6
    assert sorted(made) == [(i, k) for i in range(3) for k in range(2)]


@pytest.mark.parametrize("sampled", [False, True])
def test_a_rows_own_processors_are_not_those_of_another_even_if_they_look_at_no_ids(model, sampled):
    rows = prompts(5, 9, 7)
    usual = [tokens_alone(model, row, max_new_tokens=4, do_sample=False) for row in rows]
    said = sorted({token for row in usual for token in row})

    def make(index, sample):
        if sampled:
            return [TopKLogitsWarper(1)] if index else [TopKLogitsWarper(50)]
        return [] if index else [SuppressTokensLogitsProcessor(said)]

    options = {"do_sample": sampled, "seed": 1, "max_new_tokens": 4}
    with generator(model) as batched:
        results = batched.generate(rows, processors=make, **options)
    assert tokens(results)[1:] == usual[1:]
    assert sampled or not {*results[0].tokens} & {*said}


class EndsSoon(StoppingCriteria):
    """Texts behind a prompt of two ids end with their first token, others with their twentieth."""

    def __call__(self, input_ids, scores, **kwargs):
        prompt = input_ids[0].tolist().index(10)
        return torch.tensor([input_ids.shape[1] - prompt >= (1 if prompt == 2 else 20)])


def test_a_row_that_is_put_back_keeps_its_processors(model):
    # Nine that end at once teach the schedule to expect little; then four use nearly all they may.
    rows = [[5, 6]] * 9 + [[20 + i] * 4 for i in range(4)]
    options = {"stopping_criteria": [EndsSoon()], "max_new_tokens": 24}
    with generator(model, max_tokens=48) as batched:
        results = batched.generate(rows, processors=lambda index, sample: [Grammar()], **options)
        assert batched.stats.preemptions > 0
    assert tokens(results) == [list(range(10, 10 + n)) for n in [1] * 9 + [20] * 4]


def test_a_row_whose_processors_cannot_be_made_is_its_own_error(model, batched):
    def make(index, sample):
        if (index, sample) == (0, 0):
            raise Boom("no grammar")
        return 3 if (index, sample) == (1, 1) else []

    rows, options = prompts(5, 9), {"do_sample": True, "max_new_tokens": 4}
    results = batched.generate(rows, processors=make, num_return_sequences=2, seed=1, **options)
    assert results[0].error == "Boom while making its processors: no grammar"
    assert "processors: expected a list of callables, got 3" in results[3].error
    for i, k in ((0, 1), (1, 0)):
        assert_same(results[2 * i + k], alone(model, rows[i], 1 + k, **options))


# ------------------------------------------------------------------ stopping


def test_end_tokens_stop_a_row_and_are_part_of_it(model):
    rows = prompts(5, 13, 2, 9)
    plain = [tokens_alone(model, row) for row in rows]
    for ends in (plain[0][3], [plain[0][6], plain[1][2], plain[3][0]]):
        results, _ = assert_like_alone(model, rows, eos_token_id=ends)
        assert results[0].finish_reason == "stop"
        for result in results:
            assert (result.tokens[-1] in np.atleast_1d(ends)) == (result.finish_reason == "stop")


@pytest.mark.parametrize("new", [1, 4])
def test_samples_that_end_with_their_first_token(model, new):
    options = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": new, "seed": 1}
    assert_like_alone(model, prompts(5, 9), eos_token_id=list(range(2, 80)), **options)


def test_stop_strings_stop_a_row_across_tokens(model):
    rows, tokenizer = prompts(5, 13, 2), letters()
    plain = [tokens_alone(model, row) for row in rows]
    stops = [text(plain[0][2:4]), text(plain[1][4:7])]
    results, _ = assert_like_alone(model, rows, tokenizer=tokenizer, stop_strings=stops)
    assert [result.finish_reason for result in results[:2]] == ["stop"] * 2
    assert results[0].text.endswith(stops[0])


def test_a_stop_string_that_never_comes_changes_nothing(model):
    rows = prompts(5, 13)
    results, _ = assert_like_alone(model, rows, tokenizer=letters(), stop_strings=["never here"])
    assert tokens(results) == [tokens_alone(model, row) for row in rows]
    assert {result.finish_reason for result in results} == {"length"}


class EndsOn(StoppingCriteria):
    """Stops where the ids add up to a multiple of three."""

    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.shape[0] == 1
        return input_ids.sum(1) % 3 == 0


def test_a_custom_criterion_sees_each_text_alone(model):
    criteria = StoppingCriteriaList([EndsOn()])
    results, _ = assert_like_alone(model, prompts(5, 13, 2, 9), stopping_criteria=criteria)
    assert "stop" in {result.finish_reason for result in results}


def test_max_time_stops_what_runs_with_its_next_token_and_begins_no_more(model):
    rows = prompts(*[5] * 6)
    with generator(model, max_sequences=2) as batched:
        stream = batched.stream(rows, max_new_tokens=10**6, max_time=0.2)
        results = sorted(stream, key=lambda result: result.index)
    ran, left = results[:2], results[2:]
    assert [result.finish_reason for result in ran] == ["stop", "stop"]
    assert all("max_time" in result.error for result in left)


def test_max_length_counts_the_prompt(model, batched):
    rows = prompts(5, 13, 2)
    results = batched.generate(rows, max_length=12)
    assert [len(result.tokens) for result in results] == [7, 0, 10]
    assert "max_length" in results[1].error
    assert tokens(results)[0] == tokens_alone(model, rows[0], max_new_tokens=7)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_the_default_length_is_that_of_generate(model):
    assert_like_alone(model, prompts(5, 13), max_new_tokens=None)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_a_length_criterion_takes_the_place_of_the_built_in_one(model):
    criteria = StoppingCriteriaList([MaxLengthCriteria(40)])
    assert_like_alone(model, prompts(5, 13), max_new_tokens=None, stopping_criteria=criteria)


def test_an_end_token_criterion_takes_the_place_of_the_built_in_one(model):
    rows = prompts(5, 13)
    plain = tokens_alone(model, rows[0])
    criteria = StoppingCriteriaList([EosTokenCriteria(plain[6])])
    assert_like_alone(model, rows, eos_token_id=plain[2], stopping_criteria=criteria)


def test_options_come_from_generation_configs_too(model):
    own = GenerationConfig(max_new_tokens=6, do_sample=True, temperature=0.6, seed=None)
    rows = prompts(5, 13)
    assert_like_alone(model, rows, generation_config=own, seed=3)
    model.generation_config.repetition_penalty = 1.4
    model.generation_config.eos_token_id = tokens_alone(model, rows[0])[5]
    assert_like_alone(model, rows)


# ------------------------------------------------------------------ prompts


def test_text_chats_ids_arrays_and_tensors_are_one(model):
    ids = [3, 1, 4, 1, 25]
    forms = [text(ids), ids, tuple(ids), np.array(ids, np.uint8), torch.tensor(ids)]
    forms.append([{"role": "user", "content": text(ids[:-1])}])
    with generator(model, letters()) as batched:
        results = batched.generate(forms, max_new_tokens=5)
    expected = tokens_alone(model, ids, max_new_tokens=5)
    assert [(result.tokens, result.text) for result in results] == [(expected, text(expected))] * 6


class Scalar(bytearray):
    """As pyarrow's: numpy reads its bytes, `as_py` says what it is."""

    def as_py(self) -> str:
        return self.decode()


def test_scalars_of_a_column_are_their_text_and_not_its_bytes(model):
    with generator(model, letters()) as batched:
        found = batched.generate([Scalar(b"dbe"), Scalar(b"ef")], max_new_tokens=3)
        expected = batched.generate(["dbe", "ef"], max_new_tokens=3)
    assert tokens(found) == tokens(expected)


def columns_of(kind: str, rows: list):
    library = pytest.importorskip(kind.split()[0])
    if kind == "pyarrow chunked":
        return library.chunked_array([rows[:1], rows[1:]])
    if kind == "pyarrow table":
        return library.table({"prompt": rows})["prompt"]
    if kind == "numpy objects":
        return library.array(rows, dtype=object)
    if kind == "datasets":
        return library.Dataset.from_dict({"prompt": rows})["prompt"]
    return (library.Series if hasattr(library, "Series") else library.array)(rows)


KINDS = ["numpy", "numpy objects", "pandas", "polars", "datasets"]


@pytest.mark.parametrize("kind", [*KINDS, "pyarrow", "pyarrow chunked", "pyarrow table"])
def test_a_column_of_texts_is_a_list_of_prompts(model, kind):
    column = columns_of(kind, ["dbe", "ef"])
    with generator(model, letters()) as batched:
        found = batched.generate(column, max_new_tokens=3)
        assert tokens(found) == tokens(batched.generate(["dbe", "ef"], max_new_tokens=3))


def test_a_pyarrow_column_of_ids_or_of_messages_is_a_list_of_prompts(model):
    pyarrow = pytest.importorskip("pyarrow")
    chats = [[{"role": "user", "content": "dbe"}], [{"role": "user", "content": "ef"}]]
    with generator(model, letters()) as batched:
        for rows in ([[3, 1, 4], [4, 5]], chats):
            found = batched.generate(pyarrow.array(rows), max_new_tokens=3)
            assert tokens(found) == tokens(batched.generate(rows, max_new_tokens=3))


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_a_table_is_no_list_of_prompts(batched, library):
    library = pytest.importorskip(library)
    table = getattr(library, "DataFrame", None) or library.table
    with pytest.raises(TypeError, match="give one of its columns"):
        batched.generate(table({"prompt": ["dbe"]}), max_new_tokens=3)


def test_the_tokenizer_is_by_default_the_one_beside_the_checkpoint(model, tmp_path):
    model.save_pretrained(tmp_path)
    letters().save_pretrained(tmp_path)
    with generator(AutoModelForCausalLM.from_pretrained(tmp_path)) as batched:
        (result,) = batched.generate(["dbe"], max_new_tokens=5)
    assert result.text == text(tokens_alone(model, [3, 1, 4], max_new_tokens=5))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ([], "at least one token"),
        ([5, VOCAB], f"0..{VOCAB - 1}"),
        ([5, -1], f"0..{VOCAB - 1}"),
        ([5] * 257, "256"),  # the model's positions
        ([2**32 + 5], f"0..{VOCAB - 1}"),
    ],
    ids=["empty", "too high", "negative", "too long", "beyond 32 bits"],
)
def test_a_bad_prompt_is_its_own_error_and_others_go_on(model, batched, bad, why):
    rows = prompts(5, 7)
    results = batched.generate([rows[0], bad, rows[1]], max_new_tokens=4)
    assert [result.finish_reason for result in results] == ["length", "error", "length"]
    assert why in results[1].error
    assert (results[1].tokens, results[0].error, results[2].error) == ([], None, None)
    assert [results[0].tokens, results[2].tokens] == [
        tokens_alone(model, row, max_new_tokens=4) for row in rows
    ]


def test_a_prompt_longer_than_the_pool_is_its_own_error_for_each_sample(model):
    options = {"do_sample": True, "num_return_sequences": 2, "seed": 1, "max_new_tokens": 4}
    with generator(model, max_tokens=16) as batched:
        results = batched.generate(prompts(17, 5), **options)
        assert_nothing_held(batched)
    assert ["16 tokens" in str(result.error) for result in results] == [True, True, False, False]


def test_a_text_that_outgrows_the_pool_keeps_what_it_got(model):
    with generator(model, max_tokens=16) as batched:
        row = prompts(9)[0]
        (result,) = batched.generate([row], max_new_tokens=20)
        assert_nothing_held(batched)
    assert "16 tokens" in result.error
    assert result.tokens == tokens_alone(model, row, max_new_tokens=8)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_prompt_longer_than_the_model_is_refused_whatever_the_cache_allows(family):
    with generator(tiny(family), max_sequence_length=512) as batched:
        results = batched.generate(prompts(257, 5), max_new_tokens=2)
    assert [result.error is None for result in results] == [False, True]


def test_a_text_ends_where_the_models_positions_end(model):
    with generator(model, max_sequence_length=512) as batched:
        results = batched.generate(prompts(250, 5), max_new_tokens=10)
    assert [len(result.tokens) for result in results] == [6, 10]
    assert {result.finish_reason for result in results} == {"length"}


# ------------------------------------------------------------------ refused before any work


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"no_such_option": 1}, ValueError, "no_such_option"),
        ({"num_beams": 2}, ValueError, "beam"),
        ({"prompt_lookup_num_tokens": 3}, ValueError, "assisted"),
        ({"assistant_model": object()}, ValueError, "assistant_model"),
        ({"guidance_scale": 1.5}, ValueError, "guidance_scale"),
        ({"output_scores": True}, ValueError, "output_scores"),
        ({"output_logits": True}, ValueError, "output_logits"),
        ({"output_attentions": True}, ValueError, "output_attentions"),
        ({"return_dict_in_generate": True}, ValueError, "return_dict_in_generate"),
        ({"use_cache": False}, ValueError, "use_cache"),
        ({"cache_implementation": "static"}, ValueError, "cache_implementation"),
        ({"attention_mask": torch.ones(2, 5)}, ValueError, "attention_mask"),
        ({"num_return_sequences": 2}, ValueError, "num_return_sequences"),
        ({"stop_strings": ["a"]}, ValueError, "tokenizer"),
        ({"do_sample": True, "temperature": [1.0, -1.0]}, ValueError, "temperature"),
        ({"max_new_tokens": [1, 2, 3]}, ValueError, "max_new_tokens.*2 prompts, got 3"),
        ({"max_new_tokens": [3, 0]}, ValueError, "max_new_tokens"),
        ({"temperature": [1.0]}, ValueError, "temperature.*2 prompts, got 1"),
        ({"seed": np.arange(5)}, ValueError, "seed.*2 prompts, got 5"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_options_that_are_not_served_raise_before_any_work(model, batched, options, error, why):
    before = batched.cache.stats()
    with failing(model, 0, Boom()), pytest.raises(error, match=why):
        batched.stream(prompts(5, 5), **options)  # no result is asked for
    assert batched.cache.stats() == before


# Fields of a generation configuration that greedy search and sampling never look at.
UNUSED = {
    *("cache_config", "max_cache_len", "length_penalty", "num_assistant_tokens"),
    *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "max_matching_ngram_size"),
    *("assistant_lookbehind", "target_lookbehind", "speculation_type", "disable_compile"),
    *("continuous_batching_config", "low_memory", "diversity_penalty"),
    *("num_beam_groups", "prefill_chunk_size", "transformers_version"),
}
FIELDS = sorted(name for name in vars(GenerationConfig()) if name[0] != "_")


@pytest.mark.parametrize(
    "wrong", ["abc", {"a": 1}, object(), float("nan")], ids=lambda x: str(type(x))
)
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_a_wrong_kind_raises_before_any_work_and_is_named(model, field, wrong):
    if field == "stop_strings" and wrong == "abc":
        wrong = ["abc", ""]
    options = {"do_sample": True, "seed": 3, "max_new_tokens": 2, field: wrong}
    with generator(model, letters()) as batched:
        if field in UNUSED:
            found = tokens(batched.generate([[5, 6]], **options))
            del options[field]
            assert found == tokens(batched.generate([[5, 6]], **options))
            return
        # What leads to another way of generating is told by that way's name.
        named = rf"{field}|got (beam|assisted|dola|constrained)|WatermarkingConfig"
        with failing(model, 0, Boom()), pytest.raises((TypeError, ValueError), match=named):
            batched.stream([[5, 6]], **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", x) for x in (float("nan"), float("inf"), -1.0, [1.0, float("inf")])),
        *(("temperature", [1.0, x]) for x in (float("nan"), -1, "hot", True)),
        *(("max_new_tokens", x) for x in (-1, 0, 1.5, True, [3, -1], [3, 2.0])),
        *((name, -1) for name in ("max_length", "min_length", "min_new_tokens", "top_k")),
        *((name, 1.5) for name in ("max_length", "min_new_tokens", "top_k", "top_p", "min_p")),
        *((name, -0.1) for name in ("top_p", "typical_p", "epsilon_cutoff", "max_time")),
        *(("num_return_sequences", x) for x in (0, -1, True, 2.0)),
        *(("repetition_penalty", x) for x in (0.0, -1.0, 2, float("inf"))),
        *(("eos_token_id", x) for x in ("a", 1.5, [1, "a"], True)),
        *(("suppress_tokens", x) for x in (1, ["a"], [1.5], "ab")),
        *(("forced_eos_token_id", x) for x in (VOCAB, -1, [3, VOCAB])),
        ("forced_bos_token_id", VOCAB),
        *((name, 10**20) for name in ("eos_token_id", "pad_token_id", "bos_token_id")),
        *((name, {3}) for name in ("eos_token_id", "forced_eos_token_id")),
        ("forced_eos_token_id", []),
        *(("encoder_no_repeat_ngram_size", x) for x in (10**20, 2**16 + 1, np.int64(2))),
        *(("no_repeat_ngram_size", x) for x in (10**20, np.int64(2))),
        *(("bad_words_ids", x) for x in ([[]], [3], [["a"]], 3)),
        *(("sequence_bias", x) for x in ([[]], [[[1]]], 3)),
        *((name, torch.ones(2)) for name in ("top_p", "use_cache", "max_time", "guidance_scale")),
        *((name, np.ones(2)) for name in ("top_k", "length_penalty", "num_return_sequences")),
        *(("do_sample", x) for x in ("yes", 1, [True])),
        *(("stop_strings", x) for x in ("", ["a", ""], [], 3)),
        *(("exponential_decay_length_penalty", x) for x in (3, (1,), ("a", 1.0))),
        *(("logits_processor", x) for x in (3, [3], EndsOn)),
        *(("stopping_criteria", x) for x in (3, ["a"])),
        *((name, 3) for name in ("prefix_allowed_tokens_fn", "processors")),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["option", "configuration"])
def test_a_value_that_makes_no_sense_raises_before_any_work_and_is_named(model, name, value, how):
    options = {"do_sample": True, "max_new_tokens": 2, name: value}
    if how == "configuration":
        if isinstance(value, list) and name in ("temperature", "max_new_tokens"):
            return  # lists with one value for each prompt are options alone
        config = GenerationConfig()
        if not hasattr(config, name):
            return
        for each, given in options.items():
            setattr(config, each, given)
        options = {"generation_config": config}
    refused = pytest.raises((TypeError, ValueError), match=name)
    with generator(model, letters()) as batched, failing(model, 0, Boom()), refused:
        batched.stream([[5, 6], [7, 8]], **options)


def test_a_greedy_row_of_which_several_samples_are_asked_for_is_its_own_error(model, batched):
    rows = prompts(5, 9)
    options = {"do_sample": True, "max_new_tokens": 4, "seed": 2}
    results = batched.generate(rows, temperature=[0.9, 0], num_return_sequences=2, **options)
    assert ["temperature: 0 is greedy" in str(r.error) for r in results] == [
        False,
        False,
        True,
        True,
    ]
    for k in range(2):
        assert_same(
            results[k],
            alone(model, rows[0], 2 + k, do_sample=True, temperature=0.9, max_new_tokens=4),
        )


@pytest.mark.parametrize("seed", ["one", [1, "one"], 1.5, 2**70])
def test_a_seed_that_is_no_seed_raises_before_any_work(batched, seed):
    with pytest.raises((TypeError, ValueError), match="seed"):
        batched.stream(prompts(5, 5), do_sample=True, seed=seed)


@pytest.mark.parametrize(
    ("bad", "got"),
    [
        ("one text", "one str"),
        (b"bytes", "one bytes"),
        (Scalar(b"dbe"), "one Scalar"),
        ({"prompt": ["dbe"]}, "one dict"),
        ([3, 4, 5], "at 0 int"),
        ([[1.0, 2.0]], r"at 0 list of shape \[2\], dtype float64"),
        ([[True]], "dtype bool"),
        ([[[1, 2]]], r"shape \[1, 2\]"),
        ([[[1], [1, 2]]], "at 0 list"),
        ([None], "at 0 NoneType"),
        ([torch.ones(2, 2)], r"at 0 Tensor of shape \[2, 2\]"),
        ([torch.ones(2, dtype=torch.bfloat16, requires_grad=True)], "dtype float32"),
        ([[3, 4], b"dbe"], "at 1 bytes"),
        ([bytearray(b"dbe")], "at 0 bytearray"),
        ([memoryview(b"dbe")], "at 0 memoryview"),
        ([array("B", b"dbe")], "at 0 array"),
        ([np.array(["a", "b"], dtype=object)], "at 0 ndarray.* dtype object"),
        ([[b"a", b"b"]], "dtype |S1"),
        ([{"prompt": "dbe"}], "at 0 dict"),
        ([float("nan")], "at 0 float"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_prompts_of_a_wrong_kind_raise_before_any_work(batched, bad, got):
    before = batched.cache.stats()
    with pytest.raises(TypeError, match=f"prompts: expected.*{got}"):
        batched.stream(bad, max_new_tokens=3)
    assert batched.cache.stats() == before


@pytest.mark.parametrize("step_tokens", [0, -1, True, 1.0])
def test_a_step_without_tokens_is_refused(model, step_tokens):
    with pytest.raises(ValueError, match="step_tokens"):
        generator(model, step_tokens=step_tokens)


def test_guesses_are_refused_where_queries_choose_their_pages(model):
    from pagedkv import BatchGenerator

    with pytest.raises(ValueError, match="verify_width: expected 1 beside read_tokens, got 4"):
        BatchGenerator(model, max_tokens=512, read_tokens=128, verify_width=4)
