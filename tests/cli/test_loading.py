"""A model's folder is checked before anything is computed."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config, ViTConfig

from pagedkv.cli import job
from tests.cli.conftest import SHORT


@pytest.fixture
def bare(model, tmp_path):
    """A model as `model.save_pretrained` alone leaves it."""
    folder = tmp_path / "bare"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*token*"))
    return folder


def test_a_folder_without_a_tokenizer_says_so_before_anything_is_loaded(
    pagedkv, bare, tmp_path, monkeypatch
):
    monkeypatch.setattr(job, "run_job", None)
    for out in ((), ("-o", tmp_path / "out.jsonl")):
        refused = pagedkv("generate", bare, "abc", *out)
        assert refused.exit_code == 2
        assert "bare has no tokenizer (tokenizer.json, say); save one there with" in refused.stderr
        assert refused.stderr.endswith("or give --tokenizer NAME\n")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_tokenizer_from_elsewhere_counts_as_the_models_own_does(
    generate, pagedkv, bare, model, chat_model, tmp_path, rows
):
    out = tmp_path / "out.jsonl"
    own = pagedkv("generate", bare, *SHORT, "abc", "--tokenizer", model)
    assert own.stdout == generate("abc").stdout
    generate("abc", "-o", out)
    again = pagedkv("generate", bare, *SHORT, "abc", "-o", out, "--tokenizer", model)
    assert (again.exit_code, again.stdout) == (0, "")
    assert "has 1 of 1 prompts already" in again.stderr
    other = pagedkv("generate", bare, *SHORT, "abc", "-o", out, "--tokenizer", chat_model)
    assert "(tokenizer: " in other.stderr
    shards = ("abc", "bcd", "-o", tmp_path / "parts.jsonl", "--shard", "0/1")
    assert pagedkv("generate", bare, *SHORT, *shards, "--tokenizer", model).exit_code == 0
    nowhere = pagedkv("generate", bare, "abc", "--tokenizer", tmp_path / "no")
    assert nowhere.exit_code == 2
    assert "--tokenizer: no folder " in nowhere.stderr


def test_gguf_is_answered_as_the_plan_answers_it(pagedkv, tmp_path):
    file = tmp_path / "folder" / "model.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    for given in (file, file.parent):
        refused = pagedkv("generate", given, "abc")
        assert refused.exit_code == 2
        assert "GGUF weights are not read in place; convert them once" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1


@pytest.fixture
def altered(model, tmp_path):
    """Copies the model's folder; `change` gets its tensors by name."""

    def alter(change):
        folder = tmp_path / "altered"
        shutil.copytree(model, folder)
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        return folder

    return alter


@pytest.mark.parametrize("command", ["generate", "score", "check"])
def test_a_model_whose_weights_are_not_all_there_is_not_filled_up_at_random(
    pagedkv, altered, command
):
    lacks = "model.layers.1.mlp.up_proj.weight"
    prompts = [] if command == "check" else ["abc"]
    refused = pagedkv(command, altered(lambda t: t.pop(lacks)), *prompts)
    assert refused.exit_code == 2
    assert f"is no checkpoint of LlamaForCausalLM: no file has {lacks}\n" in refused.stderr
    assert not refused.stdout


def test_tensors_that_the_model_lacks_are_named(generate, pagedkv, altered):
    extra = "model.layers.1.mlp.up_proj.weight_scale_inv"
    folder = altered(lambda t: t.update({extra: torch.ones(1)}))
    came = pagedkv("generate", folder, *SHORT, "abc")
    assert came.stdout == generate("abc").stdout
    assert f"has tensors that LlamaForCausalLM lacks: {extra}\n" in came.stderr


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (T5Config, "t5 is an encoder-decoder"),
        (ViTConfig, "expected a decoder of text, vit is none to transformers"),
    ],
)
def test_what_is_no_decoder_is_refused_in_one_sentence(pagedkv, model, tmp_path, config, says):
    for file in model.glob("*token*"):
        shutil.copy(file, tmp_path)
    config().save_pretrained(tmp_path)
    refused = pagedkv("generate", tmp_path, "abc")
    assert refused.exit_code == 2
    (said,) = refused.stderr.splitlines()
    assert said.startswith("pagedkv: MODEL: expected a decoder")
    assert said.endswith(says)
