"""Types whose class, name or configuration mislead: right through each door, or refused."""

import re

import pytest

from tests.effort import few
from tests.hf.doors import DOORS, is_planned, reasons
from tests.hf.zoo import SHARED, built

ATTENTION_ALONE = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
GEMMA4 = {**SHARED, "global_head_dim": 16}

# Types that the flag of their class, their configuration or their name tell nothing true about.
SERVED = {
    "stablelm": {}, "biogpt": {}, "deepseek_vl": {}, "janus": {}, "gpt_bigcode": {}, "ctrl": {},
    "granitemoehybrid": ATTENTION_ALONE, "gemma4_text": GEMMA4, "bert": {"is_decoder": True},
    "roberta": {"is_decoder": True}, "qwen3_5_text": {}, "nemotron_h": {}, "falcon_h1": {},
    "gemma3n_text": {}, "gemma4": {"text_config": GEMMA4}, "gemma4_unified": {},
    "bloom": {}, "mpt": {}, "falcon": {}, "rembert": {"is_decoder": True},
    "megatron-bert": {"is_decoder": True}, "big_bird": {"is_decoder": True},
    "mimo_v2_flash": {}, "deepseek_v3": {}, "kimi_k25": {}, "longcat_flash": {}, "kimi_linear": {},
    "inkling_text": {},
}  # fmt: skip
REFUSED = {
    "bart": "causal", "whisper": "causal", "paligemma": "causal",
    "moshi": "layer 0 attends under a mask of all tokens, .* a window of 8|asked for no mask",
    "jetmoe": "after the cache", "diffllama": "after the cache", "doge": "after the cache",
    "git": "after the cache", "bert": "causal", "kosmos-2.5": "causal", "minimax": "states",
    "rembert": "causal", "xlstm": "num_attention_heads",
}  # fmt: skip


# Types whose like is among the others, or that the fast tests of modes take through both doors.
ALIKE = {
    "gemma4_text", "gemma4_unified", "janus", "kimi_k25", "nemotron_h", "falcon_h1", "gemma3n_text",
    "mimo_v2_flash", "longcat_flash", "deepseek_v3", "bloom", "mpt", "falcon",
    "rembert", "big_bird", "roberta", "megatron-bert",
}  # fmt: skip


@pytest.mark.parametrize("kind", few(SERVED, *(SERVED.keys() - ALIKE)))
def test_type_is_served_by_both_doors_and_planned(kind):
    model = built(kind, **SERVED[kind])
    assert reasons(model) == dict.fromkeys(DOORS)
    assert is_planned(model) or kind == "gemma4_text"


@pytest.mark.parametrize("kind", REFUSED)
def test_type_is_refused_with_its_reason_by_both_doors_and_not_planned(kind):
    model = built(kind)
    for name, reason in reasons(model).items():
        assert reason is not None, name
        assert re.search(REFUSED[kind], reason), reason
    assert not is_planned(model)
