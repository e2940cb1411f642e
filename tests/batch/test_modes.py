"""Models whose layers keep unlike things: every row as `generate` would, in one batch with others.

Some layers have recurrent states, some have K and V of another shape, some attend to the K and V of
other layers.
"""

import pytest
import torch

from tests.batch.generating import assert_like_alone, distinct, with_own
from tests.effort import few, slow
from tests.hf.modes import UNEVEN
from tests.hf.tiny import prompts, tiny
from tests.hybrids import HYBRIDS, STEPWISE, tiny_hybrid

FAMILIES = [family for family in (*HYBRIDS, *UNEVEN) if family not in STEPWISE]
# State layers between others; layers that have both K, V and state; that share K and V.
each = pytest.mark.parametrize("family", few(FAMILIES, "qwen3_next", "zaya", "gemma4"))


def made(family):
    return (tiny_hybrid if family in HYBRIDS else tiny)(family)


@pytest.mark.parametrize("step_tokens", [*slow(64), 7])
@each
def test_rows_whose_prompts_are_cut_among_decoding_rows_are_each_as_alone(family, step_tokens):
    rows = prompts(5, 19, 1, 12)
    assert_like_alone(made(family), rows, {"step_tokens": step_tokens}, max_new_tokens=6)


@each
def test_in_a_tree_of_prompts_every_token_is_computed_once(family):
    first, second = prompts(21, 11)
    rows = with_own(first, 3, 2) + with_own(torch.cat([first, prompts(7)[0]]), 2, 3)
    rows += with_own(second, 4, 2)
    results, batched = assert_like_alone(made(family), rows, max_new_tokens=3)
    assert [result.cached_tokens for result in results] == [0, 21, 21, 28, 0, 11]
    assert batched.stats.computed == distinct(rows) + 2 * len(rows)


@each
def test_samples_of_a_prompt_fork_what_it_left(family):
    options = {"do_sample": True, "num_return_sequences": 4, "seed": 3, "max_new_tokens": 4}
    assert_like_alone(made(family), prompts(9), **options)
