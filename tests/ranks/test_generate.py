"""Ranks that share out a model generate what one process generates."""

import math

import pytest
from transformers import GraniteSWAConfig
from transformers.distributed import DistributedConfig

from tests.conftest import seed
from tests.effort import few
from tests.hf.tiny import prompts
from tests.ranks import jobs
from tests.ranks.pool import run

JOBS = "tests.ranks.jobs"
SAMPLED = {"do_sample": True, "num_return_sequences": 2, "temperature": 0.7}
# What a family needs, and how it is shared out.
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"attention": "eager"},  # newer transformers refuses sdpa: it has a softcap
    "mixtral": {},
    "mixtral ep": {"ep": True},
    "gpt_oss ep": {"ep": True, "attention": "eager"},
    "deepseek_v3": {},
}
HYBRIDS = ["qwen3_next", "qwen3_5", "olmo_hybrid", "bamba", "falcon_h1", "lfm2", "kimi_linear"]
HYBRIDS += ["nemotron_h", "granitemoehybrid"]


def asked(n=5, shared=14):
    seed()
    common, *own = prompts(shared, *range(3, 3 + n))
    return [[*common.tolist(), *each.tolist()] for each in own]


def assert_alike(n, function, *args, **kwargs):
    """All ranks return what one process returns."""
    alone = getattr(jobs, function)(*args, **kwargs)
    for one in run(n, f"{JOBS}:{function}", *args, **kwargs):
        assert one == alone
    return alone


@pytest.mark.parametrize("n", few([2, 3], 2))
def test_whatever_is_drawn_is_drawn_alike(saved, n):
    calls = [{}, SAMPLED | {"seed": 5}, {"logprobs": True, "stop_strings": None}]
    found = run(n, f"{JOBS}:generate", saved("llama"), asked(), [*calls, SAMPLED])
    assert all(one == found[0] for one in found)  # the last call has no seed
    alone = jobs.generate(saved("llama"), asked(), calls)
    for (results, *counts), (others, *other_counts) in zip(alone, found[0]):
        assert counts == other_counts
        assert_same(results, others)
    assert alone[1][1]["reused"] > 0


def assert_same(results, others):
    """Equal but for the last digits of log-probabilities."""
    for one, other in zip(results, others, strict=True):
        ours, theirs = one.pop("logprobs") or [], other.pop("logprobs") or []
        assert one == other
        assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("n", few([2, 3], 2))
@pytest.mark.parametrize("family", few(FAMILIES, "gemma2", "mixtral", "gpt_oss ep", "deepseek_v3"))
def test_every_family(saved, family, n):
    folder = saved(family.split()[0])
    assert_alike(n, "generate", folder, asked(), [{}], model=FAMILIES[family])


def test_sinks_are_shared_out_as_heads_are_or_refused(saved):
    given, model = (saved("granite_swa"), asked(), [{}]), {"attention": "eager"}
    if "local_params" in GraniteSWAConfig.base_model_tp_plan.values():
        assert_alike(2, "generate", *given, model=model)
        return
    # Here the plan names sinks, but what it says of a bare parameter is not done.
    folder, *rest = given
    for kind, text in run(2, f"{JOBS}:refused", folder, "generate", *rest, model=model):
        assert kind == "UnsupportedModelError"
        assert "tensor parallelism over 2 processes" in text
        assert "sinks: expected" in text


@pytest.mark.parametrize("family", few(HYBRIDS, "qwen3_next"))
def test_recurrent_states_stay_whole(saved, family):
    assert_alike(2, "generate", saved(family), asked(), [{}])


# What makes pages other, or fewer than tokens.
SIZES = {
    "int8": {"kv_format": "int8"},
    "keydiff": {"retention": "keydiff", "budget": 80},
    "importance": {"retention": "importance", "budget": 80},
    "sinks": {"retention": "sinks", "budget": 80},
    "guesses": {"verify_width": 4},
}


@pytest.mark.parametrize("n", few([2, 3], 2))
@pytest.mark.parametrize("sizes", few(SIZES, "int8", "importance", "guesses"))
def test_every_kind_of_pages(saved, sizes, n):
    long = {"max_new_tokens": 24}
    prompts = asked(5, 80 if "retention" in SIZES[sizes] else 14)
    folder = saved("llama", head_dim=16) if sizes == "int8" else saved("llama")
    found = assert_alike(n, "generate", folder, prompts, [long, long], **SIZES[sizes])
    assert (found[0][1]["accepted"] > 0) == (sizes == "guesses")


@pytest.mark.parametrize("n", few([2, 3], 2))
@pytest.mark.parametrize("host_tokens", [0, 256])
def test_rows_that_are_put_back(saved, host_tokens, n):
    # Many that stop with their second token, then some that use all they may.
    seed()
    short, long = prompts(5)[0].tolist(), [ids.tolist() for ids in prompts(*[4] * 5)]
    folder, drawn = saved("llama"), {"do_sample": True, "seed": 3}
    two = jobs.generate(folder, [short], [drawn | {"max_new_tokens": 2}])[0][0][0]["tokens"]
    call = drawn | {"max_new_tokens": 24, "eos_token_id": two[1]}
    given = folder, [short] * 9 + long, [call]
    sizes = {"max_tokens": 48, "host_tokens": host_tokens}
    found = run(n, f"{JOBS}:generate", *given, **sizes)
    assert all(one == found[0] for one in found)
    (alone, *_), (together, stats, _) = jobs.generate(*given, **sizes)[0], found[0][0]
    # How often a copy takes less time than computing again is a matter of speed.
    assert [one["tokens"] for one in together] == [one["tokens"] for one in alone]
    assert stats["preemptions"] > 0
    assert (stats["offloaded"] > 0) == (host_tokens > 0)


def test_a_draft_model_drafts_alike(saved):
    draft = saved("llama", num_hidden_layers=1)
    for calls in ([{}], [SAMPLED | {"seed": 3}]):
        found = assert_alike(2, "generate", saved("llama"), asked(), calls, draft=draft)
        assert found[0][1]["drafted"] > 0


@pytest.mark.parametrize("n", few([2, 3], 3))
def test_scores(saved, n):
    words = [[5, 6, 7], [8], [9, 10]]
    said, logprobs = jobs.score(saved("llama"), asked(), words)
    found = run(n, f"{JOBS}:score", saved("llama"), asked(), words)
    assert all(one == found[0] for one in found)
    assert found[0][0] == said
    for ours, theirs in zip(found[0][1], logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("n", few([2, 3], 2))
def test_stock_generate_over_a_paged_cache(saved, n):
    assert_alike(n, "stock", saved("llama"), asked())
    assert_alike(n, "stock", saved("llama"), asked(2), num_beams=2)


@pytest.mark.parametrize(
    ("family", "n", "model", "heads"),
    [
        ("llama", 2, {}, 3),
        ("llama", 3, {}, 2),
        ("olmo2", 2, {}, 6),  # whose plan gathers K and V
        ("phi3", 2, {}, 6),
        ("mixtral", 2, {"ep": True}, 3 if hasattr(DistributedConfig, "ep_size") else 6),
        ("mixtral", 3, {}, 2),
        ("deepseek_v3", 2, {}, 1),
    ],
)
def test_a_rank_keeps_the_heads_that_it_computes(saved, family, n, model, heads):
    assert run(n, f"{JOBS}:heads", saved(family), **model) == [[heads]] * n
