"""Ranks refuse by name what cannot be shared out: all of them, and before any step."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.ranks.pool import run

JOBS = "tests.ranks.jobs"


@pytest.mark.parametrize(
    ("n", "fields", "said"),
    [
        (2, {"num_key_value_heads": 3}, "3 KV heads cannot be shared out whole among 2 processes"),
        (2, {"num_key_value_heads": 1}, "1 KV heads cannot be shared out whole among 2 processes"),
        (3, {"num_key_value_heads": 4}, "4 KV heads cannot be shared out whole among 3 processes"),
    ],
)
@pytest.mark.parametrize("how", ["heads", "generate"])
def test_heads_that_do_not_divide(saved, how, n, fields, said):
    args = () if how == "heads" else ([[5, 6]], [{}])
    for kind, text in run(n, f"{JOBS}:refused", saved("llama", **fields), how, *args):
        assert kind == "UnsupportedModelError"
        assert said in text


@pytest.mark.parametrize("what", ["growth_step", "on_pressure", "prefix_store", "images", "layers"])
def test_what_one_rank_alone_would_decide(saved, tmp_path, what):
    folder = saved("llama")
    found = run(2, "tests.ranks.unserved:asked", folder, what, str(tmp_path / "store"))
    assert found[0] == found[1]
    kind, text = found[0]
    assert kind == {"layers": "UnsupportedModelError"}.get(what, "ValueError")
    assert {"images": "images and audio are not", "layers": "pp_size"}.get(what, what) in text
    assert not (tmp_path / "store").exists()


def test_code_of_others_is_tried_by_all_ranks(saved):
    found = run(2, "tests.ranks.unserved:stranger", saved("llama"))
    assert found[0] == found[1]
    served, (kind, text) = found[0]
    assert served[0] == ""
    assert kind == "UnsupportedModelError"
    assert "runs tests.ranks.unserved.adds_mean" in text


def test_code_of_others_on_one_rank_is_tried_by_all(saved):
    (kind, text), other = run(2, "tests.ranks.unserved:stranger_on_one", saved("llama"))
    assert (kind, text) == other
    assert "UnsupportedModelError" in kind
    assert "runs tests.ranks.unserved.adds_mean" in text


def test_the_file_of_another_rank(saved, tmp_path):
    found = run(2, "tests.ranks.unserved:exchanged", saved("llama"), str(tmp_path))
    assert found == [("", "WrongModelError")] * 2


@pytest.mark.parametrize("name", ["distributed_config", "tp_plan"])
def test_a_streamed_model_is_not_shared_out(saved, name):
    from pagedkv.stream import LayerStreamer

    with pytest.raises(ValueError, match=f"{name}: expected none, a streamed model"):
        LayerStreamer.from_pretrained(saved("llama"), resident_layers=1, **{name: {"tp_size": 2}})


SCRIPT = """
import os, signal, sys, threading, time
sys.path.append({root!r})
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from pagedkv import BatchGenerator
model = AutoModelForCausalLM.from_pretrained(
    {folder!r}, distributed_config=DistributedConfig(tp_size=2)
).eval()
steps, forward = iter(range(1 << 30)), model.forward
def counted(*args, **kwargs):
    if next(steps) == 8 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(*args, **kwargs)
with BatchGenerator(model, max_tokens=4096) as batched:
    model.forward = counted
    batched.generate([[5, 6, 7]] * 400, max_new_tokens=100, do_sample=False)
"""


@pytest.mark.slow
def test_a_killed_rank_ends_the_job(saved, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(ROOT), folder=saved("llama")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1"]  # the name of this machine may lead nowhere
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    env["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(  # torch waits half an hour for a rank unless it is told that it died
        [*command, "--nproc-per-node", "2", str(script)], env=env, capture_output=True, timeout=600
    )
    assert done.returncode != 0


def test_attention_that_is_cut_in_another_way(saved):
    for kind, text in run(2, "tests.ranks.unserved:unlike", saved("starcoder2")):
        assert kind == "UnsupportedModelError"
        assert "tensor parallelism over 2 processes" in text
        assert "expected shape" in text
