"""Hugging Face's `kernels` and the folder of that name do not meet, and importing is harmless."""

import os
from pathlib import Path

import pytest
import transformers
from transformers.utils import import_utils

ROOT = Path(__file__).resolve().parents[2]

# What transformers takes from the package; decorators that leave everything as it is.
STAND_IN = """
class Anything:
    def __init__(self, *args, **kwargs): pass
    def __getattr__(self, name): return Anything()
    def __enter__(self): return self
    def __exit__(self, *exc): pass

def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    return (lambda *a, **k: lambda x: x) if name.startswith("use_kernel") else Anything
"""

GENERATE = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.import_utils import is_kernels_available
from pagedkv.hf import PagedCache
from pagedkv.hf.release import CACHE
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=20, max_position_embeddings=32, **sizes)).eval()
ids = torch.tensor([[1, 2, 3]])
new = dict(max_new_tokens=3, min_new_tokens=3, pad_token_id=0)
with PagedCache(model, max_tokens=32) as cache:
    out = model.generate(ids, **{CACHE: cache}, **new)
assert torch.equal(out, model.generate(ids, **new))
theirs = sys.modules.get("kernels")
assert "pagedkv.kernels.torch.backend" in sys.modules
print(is_kernels_available(), getattr(theirs, "__file__", None))
"""


@pytest.mark.slow
@pytest.mark.parametrize("installed", [False, True], ids=["as it is", "with"])
def test_generating_from_the_repository_root_beside_their_kernels(
    fresh_python, tmp_path, installed
):
    expected = [str(import_utils.is_kernels_available())]
    if installed:
        package = tmp_path / "kernels" / "__init__.py"
        package.parent.mkdir()
        package.write_text(STAND_IN)
        version = import_utils.KERNELS_MIN_VERSION
        info = tmp_path / f"kernels-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n"
        )
        (info / "RECORD").write_text("kernels/__init__.py,,\n")
        expected = ["True", str(package)]
    site = Path(transformers.__file__).parents[1]
    found = fresh_python("-c", GENERATE, path=f"{tmp_path}{os.pathsep}{site}")
    known_and_theirs = found.splitlines()[-1].split()
    assert known_and_theirs[: len(expected)] == expected
    assert not Path(known_and_theirs[1]).is_relative_to(ROOT / "kernels")


@pytest.mark.slow
def test_importing_the_integration_registers_nothing(fresh_python):
    code = (
        "import pagedkv.hf, transformers as t;"
        "print('pagedkv' in t.AttentionInterface._global_mapping,"
        "'pagedkv' in t.AttentionMaskInterface._global_mapping);"
        "pagedkv.hf.register(); pagedkv.hf.register();"
        "print('pagedkv' in t.AttentionInterface._global_mapping,"
        "'pagedkv' in t.AttentionMaskInterface._global_mapping)"
    )
    assert fresh_python("-c", code).split() == ["False", "False", "True", "True"]
