"""Grammars that follow one text: rows are sampled, drafted, put back, and every text is valid."""

import pytest
import torch

from tests.batch.generating import assert_nothing_held, generator
from tests.hf.tiny import prompts

# Ids that may follow one another, by the length so far; the last of each stands for the end.
SHORT = [{10, 11}, {12}]
MIDDLE = [{20, 21, 22}, {23, 24}, {20, 21}, {29}]
LONG = [{30, 31}] * 20 + [{39}]
GRAMMARS = [SHORT, MIDDLE, LONG]


class Matcher:
    """Moves on by the last token of its text at each call but the first, as xgrammar's does."""

    def __init__(self, grammar):
        self.grammar, self.at, self.begun = grammar, 0, False

    def __call__(self, input_ids, scores):
        if self.begun:
            if int(input_ids[0, -1]) not in self.grammar[self.at]:
                raise AssertionError
            self.at += 1
        self.begun = True
        allowed = torch.tensor(sorted(self.grammar[self.at]))
        return torch.full_like(scores, -torch.inf).index_copy_(1, allowed, scores[:, allowed])


def is_valid(text, grammar):
    return len(text) == len(grammar) and all(token in some for token, some in zip(text, grammar))


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("max_tokens", [2048, 192])
def test_rows_of_three_grammars_are_all_valid(model, width, max_tokens):
    options = {"do_sample": True, "num_return_sequences": 2, "seed": 1, "max_new_tokens": 24}
    texts = [prompts(4 + i % 3)[0] for i in range(32)]
    with generator(model, verify_width=width, max_tokens=max_tokens, max_sequences=64) as batched:
        results = batched.generate(
            texts,
            processors=lambda index, sample: [Matcher(GRAMMARS[index % 3])],
            eos_token_id=[12, 29, 39],
            **options,
        )
        stats = batched.stats
        assert_nothing_held(batched)
    assert {r.error for r in results} == {None}
    assert all(is_valid(r.tokens, GRAMMARS[r.index % 3]) for r in results)
    assert len(results) == 64
    assert (stats.preemptions > 0) == (max_tokens == 192)
    assert (stats.drafted > 0) == (width > 1)


def test_one_object_for_several_rows_ends_them_as_errors_that_say_what_was_raised(batched):
    results = batched.generate(
        prompts(5, 9, 2), logits_processor=[Matcher(MIDDLE)], max_new_tokens=4, do_sample=False
    )
    errors = [r.error for r in results if r.error]
    assert errors
    assert set(errors) <= {
        "AssertionError while choosing a token",
        "IndexError while choosing a token: list index out of range",
    }
