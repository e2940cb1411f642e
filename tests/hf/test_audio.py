"""Audio in `generate` over a `PagedCache`, held against transformers' own cache."""

import pytest
import torch

from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import PagedCache
from tests.effort import few
from tests.hf.images import behind
from tests.hf.sounds import AUDIO, heard, hearing_model
from tests.hf.tiny import assert_same_tokens, generate, padded, prompts

SIZES = {"max_tokens": 1024, "page_size": 4}
OF_TEXT = ("input_ids", "attention_mask")


@pytest.fixture(params=few(AUDIO, "voxtral", "qwen2_audio"))
def model(request):
    return hearing_model(request.param)


def of_text(batch):
    """A batch whose audio is not given again."""
    return {name: batch[name] for name in OF_TEXT}


def asked(row, *questions):
    """Rows of one audio and a question each, padded on the left."""
    rows = [torch.cat([row["input_ids"][0], question]) for question in questions]
    features = {name: x.repeat_interleave(len(rows), 0) for name, x in row.items()}
    return {**features, **padded(rows)}


def test_rows_of_any_length_hear_their_own_audio(model):
    batch = heard(model, *prompts(5, 9, 3))
    expected = generate(model, batch)
    other = generate(model, {**batch, "input_features": batch["input_features"].flip(0)})
    assert (other.logits[0] - expected.logits[0]).abs().max() > 0.01, "the audio is not heard"
    with PagedCache(model, **SIZES) as cache:
        assert_same_tokens(generate(model, batch, cache), expected)
        cache.kv.check()


@pytest.mark.parametrize("given", ["again", "once"])
def test_questions_share_an_audio_that_was_computed_once(model, given):
    row, questions = heard(model, *prompts(6)), prompts(4, 7)
    batch = asked(row, *questions)
    with PagedCache.prefill(model, row, **SIZES) as shared:
        before = shared.stats().tokens_computed
        with shared.fork(2) as cache:
            asking = batch if given == "again" else of_text(batch)
            actual = generate(model, asking, cache, max_new_tokens=1)
            assert_same_tokens(actual, generate(model, batch, max_new_tokens=1))
            if given == "once":
                computed = cache.stats().tokens_computed - before
                assert computed == sum(map(len, questions))
            cache.kv.check()


@pytest.mark.parametrize("given", ["again", "once"])
def test_a_turn_behind_an_audio_goes_on(model, given):
    row, (more,) = heard(model, *prompts(6)), prompts(5)
    with PagedCache(model, **SIZES) as cache:
        said = generate(model, row, cache).sequences[0, row["input_ids"].shape[1] :]
        said = said.where(said != model.config.audio_token_id, 3)
        turn = behind(row, torch.cat([said, more]), model)
        actual = generate(model, turn if given == "again" else of_text(turn), cache)
        assert_same_tokens(actual, generate(model, turn))
        cache.kv.check()


def test_another_audio_in_a_later_turn_is_heard(model):
    """Rows whose ids are equal, and whose audio is not."""
    (text,) = prompts(6)
    with PagedCache(model, **SIZES) as cache:
        for seed in (0, 1):
            row = heard(model, text, seed=seed)
            assert_same_tokens(generate(model, row, cache), generate(model, row))


def test_tokens_of_an_audio_that_is_not_given_are_not_computed_as_text(model):
    row = heard(model, *prompts(6))
    other = of_text({**row, "input_ids": row["input_ids"].clone()})
    other["input_ids"][0, 0] = 7  # before the audio
    refused = pytest.raises(UnsupportedModelError, match="images or audio, which ids cannot")
    with PagedCache.prefill(model, row, **SIZES) as shared, shared.fork(1) as cache, refused:
        generate(model, other, cache)
