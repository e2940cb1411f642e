"""`pagedkv compile`: from a configuration alone, for a card that is not there."""

import json

import pytest

pytest.importorskip("triton")

import torch

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 64, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_what_cannot_be_compiled_is_said_before_anything_is(pagedkv, folder, monkeypatch):
    assert "TRITON_INTERPRET" in pagedkv("compile", folder, "--arch", 90).stderr
    monkeypatch.setattr("pagedkv.kernels.triton.launch.interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options, said in (
        ([], "--arch: expected one of 80, 86, 89, 90, 100, 120, because no card is here"),
        (["--arch", 91], "--arch: expected one of 80, 86, 89, 90, 100, 120, got 91"),
        (["--kv-format", "int3"], "--kv-format: "),
        (["--cache", "read_token=5"], "did you mean read_tokens?"),
        (["--dtype", "int8"], "--dtype: "),
    ):
        result = pagedkv("compile", folder, *options)
        assert result.exit_code == 2
        assert said in result.stderr
        assert not result.stdout


RUN = """
from typer.testing import CliRunner

from pagedkv.cli.app import app

for options in ([], [], ["--kv-format", "int8"]):
    done = CliRunner().invoke(app, ["compile", arguments[0], "--arch", "90", *options])
    assert done.exit_code == 0, done.output
    print(done.stderr.split()[0])
"""


@pytest.mark.slow
def test_kernels_are_compiled_once_for_each_kind_of_pages(folder, tmp_path, forked):
    env = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    first, again, coded = map(int, forked(RUN, str(folder), **env).split())
    assert first > 5
    assert again == 0
    assert 0 < coded <= first
