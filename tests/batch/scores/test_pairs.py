"""Contexts and continuations: which lists are whose, and where text is cut into ids."""

import numpy as np
import pytest

from pagedkv.batch.scores.pairs import by_prompt, contexts_of
from tests.batch.letters import Scalar, letters

START = 1


def ids(text: str) -> list[int]:
    return [ord(letter) - ord("a") for letter in text]


def made(prompts, continuations, tokenizer=None, salts=None, start=START):
    """Returns the ids of each context, and `(index, choice, ids)` of its continuations."""
    each = by_prompt(continuations, len(prompts))
    found = contexts_of(
        prompts, each, salts or [b""] * len(prompts), [{}] * len(prompts), tokenizer, start
    )
    return [
        (one.ids.tolist(), [(c.index, c.choice, c.ids.tolist()) for c in one.continuations])
        for one in found
    ]


# ------------------------------------------------------------------ whose continuations


@pytest.mark.parametrize(
    "given",
    [["yes", "no"], ("yes", "no"), [[1, 2], [3]], [np.array([1, 2]), "no"], [[1], []]],
    ids=str,
)
def test_one_list_is_for_all_prompts(given):
    assert by_prompt(given, 3) == [list(given)] * 3


@pytest.mark.parametrize(
    "given",
    [
        [["yes"], ["no", "perhaps"]],
        [[[1, 2], [3]], [[4]]],
        [["yes"], []],
        [[], []],
        (("yes", [1]), (np.array([2]),)),
        [np.array(["yes", "no"]), ["perhaps"]],
    ],
    ids=str,
)
def test_a_list_of_lists_is_one_for_each_prompt(given):
    assert [list(own) for own in by_prompt(given, 2)] == [list(own) for own in given]


def test_columns_are_lists():
    pandas = pytest.importorskip("pandas")
    assert by_prompt(pandas.Series(["yes", "no"]), 2) == [["yes", "no"]] * 2
    assert by_prompt(pandas.Series([["yes"], ["no"]]), 2) == [["yes"], ["no"]]
    assert by_prompt([Scalar(b"yes"), Scalar(b"no")], 1) == [["yes", "no"]]


def test_prompts_without_continuations_are_nothing_to_score():
    assert made([[5], [6]], [[], []]) == made([], []) == made([], ["yes"], letters()) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("yes", "expected a list of continuations, got str"),
        (b"yes", "expected a list of continuations, got bytes"),
        ({"yes": 1}, "expected a list of continuations, got dict"),
        (5, "expected a list of continuations, got int"),
        ([5, 6], "at 0: expected a list of continuations, got int"),
        (["yes", ["no"]], "expected text or .n. ids.*got at 1 list"),
        ([["yes"], [b"no"]], "expected text or .n. ids.*got at 1 bytes"),
        ([["yes"], [[0.5]]], "expected text or .n. ids.*got at 1 list"),
        ([["yes"], [None]], "expected text or .n. ids.*got at 1 NoneType"),
        ([[["yes"]], [["no"]]], "expected text or .n. ids.*got at 0 list"),
    ],
    ids=str,
)
def test_what_is_no_list_of_continuations_is_refused(given, message):
    with pytest.raises(TypeError, match=f"continuations: {message}"):
        by_prompt(given, 2)


@pytest.mark.parametrize("given", [[], [["yes"]], [["a"], ["b"], ["c"]]], ids=str)
def test_as_many_lists_as_prompts_are_wanted(given):
    with pytest.raises(ValueError, match="continuations: expected a list for each of 2 prompts"):
        by_prompt(given, 2)


def test_a_table_is_refused():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(
        TypeError, match="continuations: expected a list of continuations, got DataFrame"
    ):
        by_prompt(pandas.DataFrame({"a": ["yes"]}), 1)


# ------------------------------------------------------------------ ids, text and messages


def test_ids_stay_as_they_are_and_equal_contexts_are_one():
    prompts = [[5, 6], np.array([7]), [5, 6]]
    found = made(prompts, [[[1], [2, 3]], [[4]], [[1]]])
    assert found == [([5, 6], [(0, 0, [1]), (0, 1, [2, 3]), (2, 0, [1])]), ([7], [(1, 0, [4])])]
    apart = made(prompts, [[1]], salts=[b"a", b"a", b"b"])
    assert [context for context, _ in apart] == [[5, 6], [7], [5, 6]]


def test_text_and_ids_may_be_mixed():
    tokenizer = letters()
    assert made(["ab"], ["cd", [9], "c"], tokenizer) == [
        (ids("ab"), [(0, 0, ids("cd")), (0, 1, [9]), (0, 2, ids("c"))])
    ]
    assert made([[7]], ["cd", [9]], tokenizer) == [([7], [(0, 0, ids("cd")), (0, 1, [9])])]


def test_messages_go_through_the_template_and_what_follows_is_encoded_alone():
    chat = [{"role": "user", "content": "ab"}]
    assert made([chat], ["cd"], letters()) == [(ids("abz"), [(0, 0, ids("cd"))])]


@pytest.mark.parametrize("empty", ["", []], ids=["text", "ids"])
def test_an_empty_prompt_is_the_token_that_begins_a_text(empty):
    tokenizer = letters()
    assert made([empty], ["cd", [9]], tokenizer) == [([1], [(0, 0, ids("cd")), (0, 1, [9])])]
    assert made([empty], ["cd"], tokenizer, start=None) == [([], [(0, 0, ids("cd"))])]


@pytest.mark.parametrize("prompt", ["ab", [7]], ids=["text", "ids"])
@pytest.mark.parametrize("empty", ["", [], np.array([], np.int64)], ids=["text", "ids", "array"])
def test_an_empty_continuation_has_no_ids(prompt, empty):
    ((_, found),) = made([prompt], [["c", empty]], letters())
    assert found == [(0, 0, ids("c")), (0, 1, [])]


def test_images_are_refused():
    chat = [{"role": "user", "content": [{"type": "image", "url": "x"}]}]
    for prompt in (chat, {"text": "a", "images": []}):
        with pytest.raises(ValueError, match="prompts: expected text to score behind, got images"):
            made([[5], prompt], ["c"], letters())


# ------------------------------------------------------------------ where text is cut


@pytest.fixture(scope="module")
def smol(smollm2_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_path)


BORDERS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is ", "Paris"),
    ("The capital of France is  \n", "Paris"),
    ("one", "two"),
    ("The answer: un", "believable"),
    ("x = 1", "000"),
    ("Hello,", " world. And more."),
    ("", "Once upon a time"),
    (" ", "Once"),
    ("日", "本語"),
    ("caf", "é"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("context", "given"), BORDERS, ids=str)
def test_a_context_and_its_continuation_are_the_ids_of_both_together(smol, context, given):
    (found,) = made([context], [given], smol)
    before, ((_, _, behind),) = found
    whole = smol(context + given)["input_ids"]
    assert behind
    if before == [START] and len(whole) == len(behind):  # there was no context
        assert behind == whole
        return
    assert before + behind == whole
    assert len(before) == len(smol(context.rstrip())["input_ids"])


@pytest.mark.slow
def test_each_choice_may_move_the_border_of_its_own_context(smol):
    """` un` and `believable` are other tokens together than apart."""
    prompt, choices = "It was un", ["believable", " usual", "known", "til"]
    found = made([prompt], choices, smol)
    for context, own in found:
        for _, choice, behind in own:
            assert smol.decode(context + behind) == prompt + choices[choice]
            assert context + behind == smol(prompt + choices[choice])["input_ids"]
    assert len(found) > 1
    assert sorted(choice for _, own in found for _, choice, _ in own) == [0, 1, 2, 3]


@pytest.mark.slow
def test_something_is_left_to_score_where_a_continuation_merges_with_its_context(smol):
    ((context, ((_, _, behind),)),) = made(["th"], ["e"], smol)
    assert (context, behind) == ([START], smol("the")["input_ids"])


def test_what_a_tokenizer_puts_at_the_end_of_a_text_is_in_no_context_and_not_scored():
    from tokenizers.processors import TemplateProcessing

    tokenizer = letters()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="b $A c", special_tokens=[("b", 1), ("c", 2)]
    )
    assert made(["xy", ""], ["z", "zc"], tokenizer) == [
        ([1, *ids("xy")], [(0, 0, ids("z")), (0, 1, ids("zc"))]),
        ([1], [(1, 0, ids("z")), (1, 1, ids("zc"))]),
    ]
    assert made(["xy"], [[5, 6]], tokenizer) == [([1, *ids("xy")], [(0, 0, [5, 6])])]
