"""Rules behind `top_k` are applied to the tokens it leaves, and give what they give for all."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from pagedkv.batch import sampling
from pagedkv.batch.candidates import AMONG_FEW, among_few, by_all, rules_among_few
from pagedkv.batch.sampling import NO_TOKEN, choose
from tests.batch.test_sampling import row
from tests.effort import examples, sampled

VOCAB, INF = 2048, torch.inf
BEHIND = {
    "nothing": [],
    "top_p": [TopPLogitsWarper(0.9)],
    "a small top_p": [TopPLogitsWarper(0.4)],
    "min_p": [MinPLogitsWarper(0.05)],
    "epsilon_cutoff": [EpsilonLogitsWarper(0.01)],
    "eta_cutoff": [EtaLogitsWarper(0.01)],
    "several": [TopPLogitsWarper(0.9), TemperatureLogitsWarper(1.5), MinPLogitsWarper(0.1)],
    "top_k": [TopPLogitsWarper(0.8), TopKLogitsWarper(4)],
}


def rules(behind, k=20):
    return [TemperatureLogitsWarper(0.8), TopKLogitsWarper(k), *BEHIND[behind]]


def drawn_logits(kind, n, seed):
    logits = 3 * torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed))
    if kind == "equal":  # more of them than there are candidates
        logits = logits.clamp(max=2)
    if kind == "few allowed":
        logits[:, 10:] = -INF
    return logits.bfloat16() if kind == "bfloat16" else logits


def test_every_rule_that_is_known_to_need_no_more_is_tried():
    assert {type(rule) for kind in BEHIND for rule in rules(kind)} == {*AMONG_FEW}


@sampled
@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "equal", "few allowed"])
def test_the_tokens_that_are_left_are_those_that_are_left_of_all(kind, behind):
    for seed in range(examples(16)):
        scores = drawn_logits(kind, 64, seed).float()
        few = among_few(rules(behind), scores, rules_among_few(rules(behind), VOCAB)[1])
        mine = torch.full_like(scores, -INF).scatter(1, few.ids, few.scores)
        differ = (mine != by_all(rules(behind), scores)).any(-1) & ~few.unsure
        assert not differ.any()
        assert few.unsure.all() if kind == "equal" else not few.unsure.all()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "equal", "few allowed"])
def test_rows_draw_what_they_draw_from_all_scores(monkeypatch, kind, waits):
    """Of every kind, in one step; with doubts that are settled at once or when tokens are read."""
    monkeypatch.setattr(sampling, "waits", lambda device: waits)
    logits, alike = drawn_logits(kind, 24, 5), list(BEHIND)
    logits[7] = torch.nan

    def rows():
        # Rows of one kind lie together, and others apart.
        made = [
            row(i, rules(kind), kind) for i, kind in enumerate((alike * 2 + sorted(alike))[:21])
        ]
        made[4:4] = [row(), row(9, [TopPLogitsWarper(0.9)], "all"), row(3, rules("top_p", 60), 60)]
        return made

    mine = choose(rows(), logits, True)
    tokens, logprobs = mine.read()
    assert repr((tokens, logprobs)) == repr(mine.read())
    monkeypatch.setattr(sampling, "rules_among_few", lambda processors, vocab: None)
    expected = choose(rows(), logits, True)
    theirs = expected.read()
    assert mine.errors == expected.errors == {7: NO_TOKEN}
    for one in (tokens, logprobs, *theirs):
        del one[7]
    assert tokens == theirs[0]
    assert logprobs == pytest.approx(theirs[1], abs=1e-5)
    fed = mine.tokens.tolist()
    assert mine.corrected == (fed[:7] + fed[8:] != tokens)
    if kind == "equal":
        assert mine.corrected == (not waits)


class Widths(TorchDispatchMode):
    """Notes how many scores of a row are sorted, added up or made probabilities."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::sort", "aten::cumsum", "aten::_softmax"):
            self.seen.add(args[0].shape[-1])
        return func(*args, **(kwargs or {}))


def test_nothing_but_top_k_is_computed_of_the_whole_vocabulary():
    rows = [row(i, rules("several")) for i in range(3)]
    with Widths() as widths:
        choose(rows, drawn_logits("float32", 3, 1), False)
    assert widths.seen == {128}


class Own(TopPLogitsWarper):
    pass


@pytest.mark.parametrize(
    ("processors", "expected"),
    [
        (rules("top_p"), (0, 128)),
        (rules("top_p", 100), (0, 400)),
        (rules("top_p", 200), None),  # of so many little is won
        ([LogitNormalization(), *rules("top_p")], (1, 128)),
        ([TopPLogitsWarper(0.9), *rules("nothing")], (1, 128)),
        ([TopPLogitsWarper(0.9)], None),
        ([TopKLogitsWarper(5, filter_value=-1e4)], None),
        ([TopKLogitsWarper(5), TopPLogitsWarper(0.9, filter_value=-1e4)], None),
        ([TopKLogitsWarper(5), Own(0.9)], None),
        ([TopKLogitsWarper(5), lambda ids, scores: scores + 1], None),
        ([TopKLogitsWarper(5), TypicalLogitsWarper(0.9)], None),
    ],
)
def test_candidates_are_enough_where_all_that_follows_is_known(processors, expected):
    assert rules_among_few(processors, VOCAB) == expected
