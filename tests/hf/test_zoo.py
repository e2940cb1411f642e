"""Every type of model is right through each door or refused by name, and planned if served."""

import pytest
import torch

from pagedkv import BatchGenerator, PagedCache, plan_memory
from pagedkv.errors import UnsupportedModelError
from tests.hf.tiny import CLOSE_CALL, assert_same_tokens, generate
from tests.hf.zoo import SHARED, TYPES, built

LENGTHS = (14, 9, 12)
SIZES = {"page_size": 4, "max_tokens": 512}
OPTIONS = {"max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
ATTENTION_ALONE = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
GEMMA4 = {**SHARED, "global_head_dim": 16}

# Types that the flag of their class, their configuration or their name tell nothing true about.
SERVED = {
    "stablelm": {}, "biogpt": {}, "deepseek_vl": {}, "janus": {}, "gpt_bigcode": {}, "ctrl": {},
    "granitemoehybrid": ATTENTION_ALONE, "gemma4_text": GEMMA4, "bert": {"is_decoder": True},
    "roberta": {"is_decoder": True}, "qwen3_5_text": {}, "nemotron_h": {}, "falcon_h1": {},
    "gemma3n_text": {}, "gemma4": {"text_config": GEMMA4}, "gemma4_unified": {},
    "mimo_v2_flash": {}, "deepseek_v3": {}, "kimi_k25": {}, "longcat_flash": {}, "kimi_linear": {},
}  # fmt: skip
REFUSED = {
    "granitemoehybrid": "no layer has K and V", "inkling_text": "bias", "bart": "causal",
    "whisper": "causal", "paligemma": "causal", "moshi": "window",
    "jetmoe": "after the cache", "diffllama": "after the cache", "doge": "mask", "bert": "causal",
    "kosmos-2.5": "causal", "minimax": "its own", "git": "mask",
    "deepseek_v32": "MLA", "xlstm": "num_attention_heads", "falcon": "interface",
}  # fmt: skip


def rows_of_tokens():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 170, (n,), generator=generator) for n in LENGTHS]


def padded(rows):
    width = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    real = torch.stack([torch.arange(width) >= width - len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": real.long()}


def through_padded_cache(model, rows):
    with PagedCache(model, **SIZES) as cache:
        actual = generate(model, padded(rows), cache, **OPTIONS)
    assert_same_tokens(actual, generate(model, padded(rows), **OPTIONS))


def through_cache(model, rows):
    for row in rows:  # without padding no mask is made, which some models take for another case
        with PagedCache(model, **SIZES) as cache:
            actual = generate(model, padded([row]), cache, **OPTIONS)
        assert_same_tokens(actual, generate(model, padded([row]), **OPTIONS))


def through_batch(model, rows):
    generator = BatchGenerator(model, **SIZES)
    try:
        results = generator.generate([row.tolist() for row in rows], do_sample=False, **OPTIONS)
    finally:
        generator.close()
    for row, result in zip(rows, results):
        expected = generate(model, padded([row]), **OPTIONS)
        tokens = expected.sequences[0, len(row) :].tolist()
        if result.tokens != tokens:
            step = next(i for i, (a, e) in enumerate(zip(result.tokens, tokens)) if a != e)
            best = expected.logits[step][0].topk(2).values
            assert best[0] - best[1] < CLOSE_CALL, f"{result.tokens}, expected {tokens}"


DOORS = {"padded": through_padded_cache, "cache": through_cache, "batch": through_batch}


def reasons(model):
    """By door, why a model is refused; None where its tokens are right."""
    found = {}
    for name, door in DOORS.items():
        try:
            found[name] = door(model, rows_of_tokens())
        except UnsupportedModelError as error:
            found[name] = str(error)
    return found


def is_planned(model):
    try:
        plan_memory(model.config, device_memory="1GiB", device="cpu")
    except UnsupportedModelError:
        return False
    return True


@pytest.mark.parametrize("kind", SERVED)
def test_type_is_served_by_both_doors_and_planned(kind):
    model = built(kind, **SERVED[kind])
    assert reasons(model) == dict.fromkeys(DOORS)
    assert is_planned(model) or kind == "gemma4_text"


@pytest.mark.parametrize("kind", REFUSED)
def test_type_is_refused_with_its_reason_by_both_doors_and_not_planned(kind):
    model = built(kind)
    for name, reason in reasons(model).items():
        assert reason is not None, name
        assert REFUSED[kind] in reason
    assert not is_planned(model)


@pytest.mark.slow
def test_every_type_is_right_or_refused_by_name_and_planned_only_if_served():
    judged, without_flag, wrong = set(), set(), {}
    for kind in TYPES:
        try:
            model = built(kind)
            generate(model, padded(rows_of_tokens()), **OPTIONS)
        except Exception:  # of any kind: parts that are missing, images that it asks for
            continue
        judged.add(kind)
        try:
            why = reasons(model)
            served = not all(why.values())
            if not model._supports_attention_backend and served:
                without_flag.add(kind)
            if is_planned(model) and not served:
                wrong[kind] = f"it is planned, but refused: {why['cache']}"
            elif served and not is_planned(model):
                wrong[kind] = "it is served, but not planned"
        except Exception as error:
            wrong[kind] = f"{type(error).__name__}: {error}"
    assert not wrong
    assert len(judged) >= 185
    assert {"stablelm", "biogpt", "janus"} <= without_flag
