"""Prompts with images or audio: every row as `generate` would, whatever else is in the batch."""

import pytest
import torch

from pagedkv.batch.preemption import Preemption
from pagedkv.batch.row_queues import RowQueues
from pagedkv.batch.step_images import StepImages
from tests.batch.generating import assert_nothing_held, assert_same, generator
from tests.effort import few, slow
from tests.hf.images import (
    MROPE,
    PLAIN,
    behind,
    image_token,
    joined,
    pictured,
    seeing_model,
)
from tests.hf.sounds import AUDIO
from tests.hf.tiny import generate, prompts

KINDS = [*MROPE, *PLAIN, *AUDIO]
VARIED = ["qwen3_vl", "qwen3_5", "smolvlm", "qwen2_audio"]
OPTIONS = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(
    params=few(KINDS, "qwen2_vl", "qwen2_5_vl", "glm4v", "internvl", "mistral3", "voxtral", *VARIED)
)
def model(request):
    return seeing_model(request.param)


def varied(*kinds):
    """A fixture's value for tests of what families share."""
    return pytest.mark.parametrize("model", few(KINDS, *(kinds or VARIED)), indirect=True)


def alone(model, prompt, seed=0, **options):
    torch.manual_seed(seed)
    if not isinstance(prompt, dict):
        prompt = {"input_ids": prompt[None], "attention_mask": torch.ones_like(prompt[None])}
    return generate(model, prompt, **{**OPTIONS, **options})


def mixed(model):
    """Rows with small and large images, and rows of text, of different lengths."""
    texts = prompts(9, 5, 13)
    rows = [pictured(model, t, n, seed) for seed, (t, n) in enumerate(zip(texts, (4, 8, 4)))]
    return [rows[0], *prompts(7), rows[1], *prompts(3), rows[2]]


def run(model, rows, sizes=None, **options):
    """Results of all rows at once, each held against `generate`; and the stats."""
    new = options.get("max_new_tokens", OPTIONS["max_new_tokens"])
    new = new if isinstance(new, list) else [new] * len(rows)
    expected = [alone(model, row, max_new_tokens=n) for row, n in zip(rows, new)]
    with generator(model, **(sizes or {})) as batched:
        results = batched.generate(rows, **{**OPTIONS, **options})
        assert_nothing_held(batched)
    for result, one in zip(results, expected, strict=True):
        assert_same(result, one)
    return results, batched.stats


def test_rows_with_and_without_images_get_the_tokens_of_each_alone(model):
    rows = mixed(model)
    _, stats = run(model, rows)
    assert stats.vision_forwards == 3
    other = alone(model, pictured(model, rows[0]["input_ids"][0, -9:], 4, seed=77)).logits[0]
    assert (alone(model, rows[0]).logits[0] - other).abs().max() > 0.01, "the image is not seen"


@varied()
def test_images_that_are_cut_into_chunks_keep_their_features_in_place(model):
    _, stats = run(model, mixed(model), {"step_tokens": 6})
    assert stats.vision_forwards == 3


@varied()
def test_questions_about_one_image_share_it_and_it_is_looked_at_once(model):
    text, *tails = prompts(9, 4, 6, 5)
    rows = [behind(pictured(model, text), tail, model) for tail in tails]
    results, stats = run(model, rows)
    shared = rows[0]["input_ids"].shape[1] - 4
    assert [result.cached_tokens for result in results] == [0, shared, shared]
    assert stats.vision_forwards == 1


@varied()
def test_other_images_before_the_same_text_share_nothing_from_the_image_on(model):
    (text,) = prompts(9)
    rows = [pictured(model, text, seed=seed) for seed in (1, 2, 1)]
    before = next(i for i, t in enumerate(rows[0]["input_ids"][0]) if t not in (1, 5))
    results, stats = run(model, rows)
    assert results[1].cached_tokens <= before + 1
    assert stats.vision_forwards == 2
    assert results[0].tokens != results[1].tokens


# Its pixels do not say which image they are of, so that those of a prompt are told together.
TOLD_APART = sorted({*KINDS} - {"inkling_mm_model"})


@pytest.mark.parametrize("model", few(TOLD_APART, "qwen2_5_vl"), indirect=True)
def test_a_turn_with_another_image_finds_the_first(model):
    first, second = prompts(6, 4)
    begin = pictured(model, first, seed=1)
    with generator(model) as batched:
        (answer,) = batched.generate([begin], **OPTIONS)
        said = torch.tensor([3 if t == image_token(model) else t for t in answer.tokens])
        more = pictured(model, second, patches=8, seed=2)
        turn = joined(behind(begin, said, model), more)
        (result,) = batched.generate([turn], **OPTIONS)
    assert_same(result, alone(model, turn))
    assert result.cached_tokens >= begin["input_ids"].shape[1]


@varied()
def test_samples_of_an_image_fork_and_draw_as_alone(model):
    (row,) = (pictured(model, *prompts(6)),)
    options = {"do_sample": True, "max_new_tokens": 8}
    with generator(model) as batched:
        results = batched.generate([row], num_return_sequences=3, seed=5, **options)
        assert batched.stats.vision_forwards == 1
    for result in results:
        assert_same(result, alone(model, row, 5 + result.sample, **options))


@pytest.mark.parametrize("way", ["forgotten", *slow("found", "on the host")])
@varied()
def test_rows_that_are_put_back_go_on_and_look_again_where_their_image_is_gone(
    model, way, monkeypatch
):
    monkeypatch.setattr(RowQueues, "join", expects_little(RowQueues.join))
    monkeypatch.setattr(Preemption, "_pays", lambda aside, row: True)
    sizes = {"host_tokens": 512} if way == "on the host" else {}
    if way == "forgotten":
        monkeypatch.setattr(RowQueues, "preempt", forgets(RowQueues.preempt))
    images = [pictured(model, text, seed=i) for i, text in enumerate(prompts(5, 6, 7))]
    each = images[-1]["input_ids"].shape[1]
    sizes |= {"max_tokens": 3 * each + 12}
    _, stats = run(model, images, sizes, max_new_tokens=16)
    assert stats.preemptions > 0
    assert (stats.offloaded > 0) == (way == "on the host")
    if way != "found":
        assert (stats.vision_forwards > 3) == (way == "forgotten")


@varied("qwen2_vl")
def test_features_are_let_go_when_their_last_token_is_computed(model, monkeypatch):
    held = []
    inputs = StepImages.inputs

    def watched(sight, batch):
        given = inputs(sight, batch)
        held.append(sum(row.images.features is not None for row in batch.rows if row.images))
        return given

    monkeypatch.setattr(StepImages, "inputs", watched)
    rows = [pictured(model, text, seed=i) for i, text in enumerate(prompts(9, 5, 13))]
    run(model, rows, {"step_tokens": 6})
    assert max(held) == 1
    assert held[-1] == 0


# Drafts are refused for models with states.
DRAFTED = sorted({*KINDS} - {"inkling_mm_model", "qwen3_5", "qwen3_5_moe", "qwen4_exp"})


@pytest.mark.parametrize("model", few(DRAFTED, "qwen2_vl", "smolvlm"), indirect=True)
def test_drafts_behind_an_image_change_no_token(model):
    every_id = torch.arange(2, 180)  # so that whatever comes has come before
    every_id[every_id == image_token(model)] = 3
    rows = [pictured(model, every_id[i:], seed=i) for i in range(2)]
    _, stats = run(model, rows, {"verify_width": 4})
    assert stats.drafted > 0


def expects_little(join):
    """Makes rows be expected to end early."""

    def joined(running, row):
        running._share_used = 0.0
        join(running, row)

    return joined


def forgets(preempt):
    """Makes `preempt` clear the prefixes, so that a row put back finds nothing again."""

    def preempted(running, error):
        preempt(running, error)
        running.cache.clear_prefixes()

    return preempted


def test_the_models_own_offset_is_neither_used_nor_changed():
    model = seeing_model("qwen2_5_vl")
    row, mark = pictured(model, *prompts(5), 8), torch.tensor([[-7]])
    model.model.rope_deltas = mark
    with generator(model) as batched:
        (result,) = batched.generate([row], **OPTIONS)
    assert model.model.rope_deltas is mark
    assert_same(result, alone(model, row))


@pytest.mark.parametrize("part", ["visual", "language_model.layers.0"])
def test_a_forward_beside_one_with_images_sees_none_of_them(part):
    """As of another thread, on pages of its own: while an image is looked at, and is fed."""
    model = seeing_model("qwen2_5_vl")
    row, (text,) = pictured(model, *prompts(5)), prompts(23)
    beside, results = generator(model), []

    def run_beside(*_):
        if not results:
            results.append(None)
            results[:] = beside.generate([text], **OPTIONS)

    hook = model.model.get_submodule(part).register_forward_pre_hook(run_beside)
    with beside, generator(model) as batched:
        results += batched.generate([row], **OPTIONS)
    hook.remove()
    assert_same(results[0], alone(model, text))
    assert_same(results[1], alone(model, row))
