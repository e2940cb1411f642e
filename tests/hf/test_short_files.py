"""Plans of files that leave fields out, or say them by older names, against transformers' classes.

A plan of a folder reads `config.json` alone. Here the class of transformers completes the same
fields, and both must tell the same layers, or the plan says in a sentence what it lacks.
"""

import copy
import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from pagedkv import BatchGenerator, plan_memory
from pagedkv.errors import UnsupportedModelError
from pagedkv.models import state_tensors
from pagedkv.models.model import Model
from pagedkv.models.names import INNER
from tests.effort import few
from tests.hf.doors import OPTIONS, SIZES, rows_of_tokens
from tests.hf.table import DOCUMENT, SERVED, parsed, part
from tests.hf.tiny import generate
from tests.hf.zoo import built, shrunk

SERVED_TYPES = sorted(
    kind
    for kind, verdict in parsed(part(DOCUMENT.read_text("utf-8"))).items()
    if verdict.header == SERVED
)
# One of each way by which a class completes a file.
SOME = ["llama", "gemma4_text", "mistral_large4", "minimax_m3_vl", "llama4_text", "qwen3_next"]
# Their classes complete the decoder by numbers of their own, which are not in its class.
OF_THE_WHOLE = {"glmasr", "voxtral", "deepseek_ocr2"}


def told(fields):
    """What a plan of a folder knows of the layers; None where it says why it does not."""
    try:
        c = Model("of a file", fields).settings
        return c.kinds, c.shapes, state_tensors(c, "bfloat16")
    except (UnsupportedModelError, ValueError):
        return None


def completed(fields):
    """The fields once transformers' class has read them; None where it refuses them."""
    try:
        return CONFIG_MAPPING[fields["model_type"]].from_dict(copy.deepcopy(fields)).to_dict()
    except Exception:  # of many kinds: each class checks what it reads
        return None


def written(config):
    return json.loads(config.to_json_string(use_diff=False))


def shorter(fields):
    """The fields without one of the decoder's, and with one of them as null or by another name."""
    inner = next((name for name in INNER if fields.get(name)), None)
    text = fields[inner] if inner else fields
    kind = text.get("model_type")
    older = CONFIG_MAPPING[kind].attribute_map if kind in CONFIG_MAPPING else {}
    for name in text.keys() - ({"model_type"} if inner is None else set()):
        left = {other: value for other, value in text.items() if other != name}
        others = [alias for alias, of in older.items() if of == name]
        renamed = [{**left, alias: text[name]} for alias in others]
        for each in (left, {**text, name: None}, *renamed):
            yield name, {**fields, inner: each} if inner else each


@pytest.mark.parametrize("kind", few(SERVED_TYPES, *SOME))
def test_a_plan_reads_of_a_short_file_what_the_class_makes_of_it(kind):
    for config in (shrunk(kind), CONFIG_MAPPING[kind]()):
        for name, fields in shorter(written(config)):
            planned, whole = told(fields), completed(fields)
            if planned is not None and whole is not None and kind not in OF_THE_WHOLE:
                assert planned == told(whole), name


LISTS = {"num_hidden_layers": 9, "layer_types": None}
OLDER = {
    "index_topk_pattern": ("glm_moe_dsa", {"index_topk_pattern": "FFSSFSSFS"}),
    "index_topk_freq": ("mistral_large4_text", {"index_topk_freq": 3, "kv_source_layers": None}),
    "no_rope_layer_interval": ("mistral_large4_text", {"no_rope_layer_interval": 3}),
    "sliding_window_pattern": ("gemma3_text", {"sliding_window_pattern": 4}),
    "global_attn_every_n_layers": ("modernbert-decoder", {"global_attn_every_n_layers": 2}),
    "full_attention_interval": ("qwen3_next", {"full_attention_interval": 3}),
    "sliding_window_size": ("mimo_v2_flash", {"sliding_window_size": 30}),
    "swa_kv_lora_rank": ("dots3_note_text", {"swa_kv_lora_rank": 96, "sliding_window_size": 40}),
    "local_layer_ids": ("inkling_text", {"local_layer_ids": [0, 1, 4]}),
    "linear_attn_config": ("kimi_linear", {"linear_attn_config": {"head_dim": 8, "num_heads": 6}}),
    "mamba_d_conv": ("nemotron_h", {"mamba_d_conv": 3, "hybrid_override_pattern": "MM*M-M*M-"}),
    "layers of drafts": (
        "step3p5",
        {"num_nextn_predict_layers": 3, "layer_types": ["full_attention"] * 12},
    ),
}


@pytest.mark.parametrize("case", OLDER)
def test_older_fields_of_files_on_the_hub_are_read_as_the_class_reads_them(case):
    kind, fields = OLDER[case]
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers names {kind} inside another type alone")
    whole = {**written(CONFIG_MAPPING[kind]()), **LISTS, "model_type": kind}
    whole = {name: value for name, value in whole.items() if value is not None}
    lists = {name for name, value in whole.items() if isinstance(value, (list, dict))}
    file = {name: value for name, value in whole.items() if name not in lists} | fields
    known = completed(file)
    assert known is not None
    assert told(file) == told(known) is not None


@pytest.mark.parametrize("kind", few(SERVED_TYPES, "gemma3", "fuyu", "qwen2_vl"))
def test_what_a_file_says_of_a_decoder_beside_all_else_is_read_where_the_class_reads_it(kind):
    """Alone finds a plan of sizes that transformers leaves aside, for those of its class."""
    fields = written(shrunk(kind))
    inner = next((name for name in INNER if fields.get(name)), None)
    text = fields.pop(inner) if inner else {}
    flat = {**text, **fields}
    planned, whole = told(flat), completed(flat)
    if planned is not None and whole is not None and kind not in OF_THE_WHOLE:
        assert planned == told(whole)
    assert planned is not None or kind not in ("fuyu", "qwen2_vl")


def test_a_list_of_fewer_layers_than_there_are_is_refused_by_its_name():
    fields = written(shrunk("glm_moe_dsa")) | {"num_hidden_layers": 9, "layer_types": None}
    with pytest.raises(ValueError, match="indexer_types of 9 layers, got 2"):
        _ = Model("of a file", fields).settings


def test_a_decoder_of_a_type_that_only_its_files_name_is_that_of_the_model():
    config = shrunk("kimi_k25")
    fields = written(config)
    assert told({**fields, "text_config": {**fields["text_config"], "model_type": "kimi_k2"}}) == (
        told(fields)
    )


FORMER = {
    "index_n_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size", "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}  # fmt: skip


def test_a_checkpoint_of_minimax_m3_with_the_fields_of_its_release_is_planned_and_runs(tmp_path):
    """Alone finds fields that stand in a part of the configuration by other names."""
    model = built("minimax_m3_vl_text")
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text("utf-8"))
    sparse = {name: fields.pop(field) for field, name in FORMER.items()}
    kinds = fields.pop("layer_types")
    sparse["sparse_attention_freq"] = [int(kind == "minimax_m3_sparse") for kind in kinds]
    file.write_text(json.dumps({**fields, "sparse_attention_config": sparse}), "utf-8")
    plans = [plan_memory(each, device_memory="1GiB", device="cpu") for each in (tmp_path, model)]
    assert plans[0].cache == plans[1].cache
    assert plans[0].bytes_per_token == plans[1].bytes_per_token
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    opened.generation_config = model.generation_config
    row = rows_of_tokens()[0]
    with BatchGenerator(opened, **SIZES) as generator:
        (result,) = generator.generate([row.tolist()], do_sample=False, **OPTIONS)
    expected = generate(model, {"input_ids": row[None]}, **OPTIONS).sequences[0, len(row) :]
    assert result.tokens == expected.tolist()
