"""The next token of a row: drawn as `torch.multinomial` draws it, and held to what a token is."""

import re
import types
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from pagedkv.batch import options
from pagedkv.batch.sampling import NO_TOKEN, RowRules, _process, choose
from tests.effort import examples, sampled

INF = torch.inf


def row(seed: int | None = None, processors=(), alike="alike"):
    """A row of two tokens; greedy without a seed."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    processors = LogitsProcessorList(processors)
    ids = torch.zeros(1, 2, dtype=torch.long)
    rules = RowRules(99, frozenset(), alike, processors, StoppingCriteriaList(), generator, ids)
    return types.SimpleNamespace(rules=rules, length=2)


@sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", [2, 31, 101, 1000, 32_003])
def test_rows_that_draw_together_draw_what_multinomial_draws_for_each_alone(vocab, dtype):
    n, scores = 16, torch.Generator().manual_seed(vocab)
    for step in range(examples(2000 // n) if vocab < 2000 else 4):
        seeds = range(step * n, (step + 1) * n)
        logits = 3 * torch.randn(n, vocab, generator=scores)
        logits[::3, : vocab // 2] = -INF
        rows = [row(seed, [lambda ids, scores: scores.to(dtype)]) for seed in seeds]
        alone = [torch.Generator().manual_seed(seed) for seed in seeds]
        for _ in range(2):  # the generators go on alike
            expected = [
                torch.multinomial(each.to(dtype).softmax(-1), 1, generator=generator).item()
                for each, generator in zip(logits, alone)
            ]
            assert choose(rows, logits, False).read()[0] == expected


BAD = {
    "a NaN": lambda scores: scores.index_fill_(1, torch.tensor([3]), torch.nan),
    "nothing but NaN": lambda scores: scores.fill_(torch.nan),
    "an infinite score": lambda scores: scores.index_fill_(1, torch.tensor([3]), INF),
    "nothing allowed": lambda scores: scores.fill_(-INF),
}


@pytest.mark.parametrize(
    ("bad", "seed"),
    [(bad, 5) for bad in BAD] + [(bad, None) for bad in BAD if bad != "an infinite score"],
)
def test_scores_of_which_no_token_can_be_chosen_are_that_rows_error(bad, seed):
    logits = torch.randn(3, 50)
    good = [row(None if seed is None else seed + i, [lambda ids, scores: scores]) for i in range(3)]
    expected, _ = choose(good, logits, False).read()
    rows = [row(None if seed is None else seed + i, [lambda ids, x: x], alike=None) for i in (0, 2)]
    rows.insert(1, row(seed, [lambda ids, scores: BAD[bad](scores)], alike=None))
    chosen = choose(rows, logits, True)
    assert int(chosen.tokens.min()) >= 0
    assert int(chosen.tokens.max()) < 50, "the device may be fed with them before they are read"
    tokens, _ = chosen.read()
    assert chosen.errors == {1: NO_TOKEN}
    assert [tokens[0], tokens[2]] == [expected[0], expected[2]]


@pytest.mark.parametrize(
    ("processors", "error"), [((), NO_TOKEN), ([EtaLogitsWarper(0.01)], "ValueError while")]
)
def test_a_bad_row_among_rows_that_are_processed_together_is_alone_in_its_error(
    processors, error, monkeypatch
):
    # Which others turn off for the whole process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    logits = torch.randn(4, 50)
    logits[2] = torch.nan
    chosen = choose([row(seed, processors) for seed in range(4)], logits, False)
    fine = choose([row(seed, processors) for seed in (0, 1, 3)], logits[[0, 1, 3]], False)
    tokens, _ = chosen.read()
    assert list(chosen.errors) == [2]
    assert chosen.errors[2].startswith(error)
    assert [tokens[i] for i in (0, 1, 3)] == fine.read()[0]


def test_a_greedy_row_whose_logits_are_no_numbers_is_an_error_alone_and_beside_others():
    logits = torch.randn(4, 50)
    logits[1, 7], logits[2] = torch.nan, -INF
    best = logits.argmax(-1).tolist()
    for dtype in (torch.float32, torch.bfloat16):
        for rows in ([row() for _ in range(4)], [row(), row(), row(), row(5, alike="drawn")]):
            chosen = choose(rows, logits.to(dtype), True)
            tokens, _ = chosen.read()
            assert chosen.errors == {1: NO_TOKEN, 2: NO_TOKEN}
            assert tokens[0] == best[0]
            assert rows[3].rules.generator is not None or tokens[3] == best[3]


@pytest.mark.parametrize("kinds", ["sgs", "sgsigs", "gsggs", "iii", "igi"])
def test_rows_of_several_kinds_get_their_tokens_wherever_they_stand(kinds):
    """Sampled, greedy, and sampled by rules that look at ids."""
    logits, made = torch.randn(len(kinds), 50), {"s": "s", "g": "g", "i": None}
    seeds = [None if kind == "g" else i for i, kind in enumerate(kinds)]
    rows = [row(seed, [lambda _, x: x], made[kind]) for seed, kind in zip(seeds, kinds)]
    tokens, logprobs = choose(rows, logits, True).read()
    for i, (seed, token) in enumerate(zip(seeds, tokens)):
        assert choose([row(seed)], logits[i : i + 1], False).read()[0] == [token]
        assert logprobs[i] == pytest.approx(logits[i].log_softmax(-1)[token].item(), abs=1e-5)


def test_of_scores_that_are_equal_the_first_wins_as_in_generate():
    logits = torch.randint(0, 4, (200, 101)).float()
    rows = [row(None, [lambda _, x: x]) for _ in logits]
    assert choose(rows, logits, False).read()[0] == logits.argmax(-1).tolist()


class Returns:
    def __init__(self, value) -> None:
        self.value = value

    def __call__(self, ids, scores):
        return self.value


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (None, "got NoneType"),
        ([0.0] * 50, "got list"),
        (torch.zeros(1, 51), r"torch.float32 \[1, 51\]"),
        (torch.zeros(1, 49), r"torch.float32 \[1, 49\]"),
        (torch.zeros(2, 50), r"\[2, 50\]"),
        (torch.zeros(50), r"\[50\]"),
        (torch.zeros(1, 50, dtype=torch.long), "torch.int64"),
        (torch.zeros(1, 50, dtype=torch.bool), "torch.bool"),
        (torch.zeros(1, 50, device="meta"), "on meta"),
    ],
    ids=str,
)
@pytest.mark.parametrize("behind", [True, False])
def test_a_processor_that_returns_no_scores_is_named_in_its_rows_error(value, got, behind):
    logits = torch.randn(2, 50)
    processors = [Returns(value), lambda ids, scores: scores]
    chosen = choose([row(), row(None, processors[:: 1 if behind else -1], None)], logits, False)
    tokens, _ = chosen.read()
    assert tokens[0] == int(logits[0].argmax())
    assert chosen.errors[1].startswith(
        "TypeError while choosing a token: logits_processor: expected Returns to return float "
        "scores [1, 50] on cpu"
    )
    assert re.search(got, chosen.errors[1])
    assert list(chosen.errors) == [1]


def test_an_error_without_words_is_told_by_its_name():
    def fails(ids, scores):
        raise AssertionError

    chosen = choose([row(None, [fails], None)], torch.zeros(1, 5), False)
    assert chosen.errors == {0: "AssertionError while choosing a token"}


class Operators(TorchDispatchMode):
    """Counts torch's operators by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


# Room, views, and what torch says of a number that becomes a tensor.
NO_KERNELS = {"aten::empty", "aten::empty_like", "aten::unbind", "aten::lift_fresh", "aten::alias"}


def test_a_step_draws_for_all_rows_at_once_whatever_their_processors_and_seeds():
    n, kinds = 64, 4
    logits = 3 * torch.randn(n, 50)
    logits[7], logits[22] = -INF, torch.nan
    drawn = [i for i in range(n) if i % 5]  # the others are greedy

    def a_row(i):
        kind = i % kinds
        scaled = [lambda ids, scores: scores.div_(1 + kind)]
        return row(1000 + i, scaled, f"scaled {kind}") if i % 5 else row(alike="greedy")

    alone = [choose([a_row(i)], logits[i : i + 1], False).read()[0][0] for i in range(n)]
    rows = [a_row(i) for i in range(n)]
    with Operators() as operators:
        chosen = choose(rows, logits, False)
    counts = {k: n for k, n in operators.counts.items() if k not in NO_KERNELS}
    assert counts.pop("aten::exponential_") == len(drawn)
    each = {"aten::index": kinds, "aten::_to_copy": kinds, "aten::div_": kinds}
    greedy = {"aten::index": 1, "aten::max": 1}
    draw = {"aten::cat": 1, "aten::_softmax": 1, "aten::div": 1, "aten::max": 1}
    order = {"aten::cat": 2, "aten::gt": 1, "aten::index": 2}
    told = {"aten::bitwise_not": 1, "aten::where": 1}
    assert counts == sum(map(Counter, (each, greedy, draw, order, told)), Counter())
    tokens, _ = chosen.read()
    assert chosen.errors == {7: NO_TOKEN, 22: NO_TOKEN}
    assert [x for i, x in enumerate(tokens) if i not in (7, 22)] == [
        x for i, x in enumerate(alone) if i not in (7, 22)
    ]


class Calls(LogitsProcessorList):
    """Notes the shape of the ids that each call gets."""

    def __init__(self, *processors):
        super().__init__([self._noted, *processors])
        self.shapes = []

    def _noted(self, ids, scores):
        self.shapes.append(tuple(ids.shape))
        return scores


BY_IDS = {
    "min_length": MinLengthLogitsProcessor(7, [3, 4]),
    "min_new_tokens": MinNewTokensLengthLogitsProcessor(4, 3, [3, 4]),
    "repetition_penalty": RepetitionPenaltyLogitsProcessor(1.7),
    "no_repeat_ngram_size": NoRepeatNGramLogitsProcessor(2),
    "bad_words_ids": NoBadWordsLogitsProcessor([[5], [7, 9]], 3),
    "sequence_bias": SequenceBiasLogitsProcessor([[[5], 9.0], [[1, 6], -4.0]]),
    "forced_eos_token_id": ForcedEOSTokenLogitsProcessor(7, [8]),
    "forced_bos_token_id": ForcedBOSTokenLogitsProcessor(8),
    "exponential_decay_length_penalty": ExponentialDecayLengthPenalty((1, 1.6), 8, 4),
    "begin_suppress_tokens": SuppressTokensAtBeginLogitsProcessor([1, 2, 3], 6),
}


def test_every_processor_that_is_known_to_look_at_its_own_row_alone_is_tried():
    assert {type(one) for one in BY_IDS.values()} == {*options.BY_IDS}


@pytest.mark.parametrize("name", BY_IDS)
@pytest.mark.parametrize("seed", [None, 5])
def test_rows_of_one_length_and_the_same_rules_by_their_text_are_processed_at_once(name, seed):
    lengths, vocab = [6, 1, 6, 9, 6, 1], 12  # few ids, so that texts repeat themselves
    texts = [torch.randint(0, vocab, (1, 9), generator=torch.Generator().manual_seed(7))]
    texts += [text.roll(1, 1) for text in texts * 5]
    logits, calls = torch.randn(6, vocab), Calls(BY_IDS[name])

    def a_row(i):
        made = row(None if seed is None else seed + i, calls)
        rules = replace(made.rules, processors=calls, ids=texts[i], by_text=True)
        return types.SimpleNamespace(rules=rules, length=lengths[i])

    alone = [choose([a_row(i)], logits[i : i + 1], True).read() for i in range(6)]
    calls.shapes.clear()
    tokens, logprobs = choose([a_row(i) for i in range(6)], logits, True).read()
    assert calls.shapes == [(3, 6), (2, 1), (1, 9)]
    assert tokens == [own[0] for own, _ in alone]
    assert logprobs == [pytest.approx(own[0], abs=1e-6) for _, own in alone]
    for i, length in enumerate(lengths):  # the scores too, to the bit
        rows = [a_row(i), a_row(lengths.index(length))]
        both = logits[[i, lengths.index(length)]]
        together = _process(rows, both.clone())[0]
        assert torch.equal(together, _process(rows[:1], both[:1].clone())[0])


def test_rows_whose_rules_nobody_knows_are_processed_one_by_one():
    calls = Calls()
    rows = [row(None, calls, None) for _ in range(3)]
    for one in rows:
        one.rules.processors = calls
    choose(rows, torch.randn(3, 50), False)
    assert calls.shapes == [(1, 2)] * 3
