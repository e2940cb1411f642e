"""`pagedkv plan`: the table or JSON on standard output, mistakes on standard error, no torch."""

import json
import re

import pytest

from pagedkv import plan_memory
from pagedkv.planner.gpus import gpu_table
from tests.planner.models import LLAMA_70B, save


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return tmp_path


def test_the_table_is_that_of_the_plan(pagedkv, folder):
    result = pagedkv("plan", folder, "--device-memory", "8GiB")
    assert result.exit_code == 0
    assert result.stdout == f"{plan_memory(str(folder), device_memory='8GiB')}\n"
    assert not result.stderr


OPTIONS = {
    "streams": {
        "device_memory": "24GiB", "host_memory": "30GB", "batch": 4, "length": 1000,
        "page_size": 32, "kv_dtype": "fp16", "kv_format": "int8,int4", "weight_dtype": "int4",
        "max_tokens": 4096, "step_tokens": 500, "link_gbps": 12.5, "device": "cpu",
    },
    "ranks": {"gpu": "A100 80GB", "ranks": 4, "kv_format": "int8,int4"},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_reaches_the_plan(pagedkv, folder, name):
    options = OPTIONS[name]
    given = [x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", value)]
    result = pagedkv("plan", folder, *given, "--json")
    assert result.exit_code == 0, result.stderr
    plan = plan_memory(str(folder), **{**options, "kv_format": ("int8", "int4")})
    assert json.loads(result.stdout) == json.loads(plan.to_json())
    assert plan.cache.page_size == options.get("page_size", plan.cache.page_size)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device-memory", "8 gigs"], "pagedkv: --device-memory: expected bytes"),
        (["--device-memory", "1GiB"], "--device-memory 4"),
        (["--device-memory", "8"], "did you mean '8GiB'?"),
        (["--device-memory", "8GiB", "--batch", "0"], "pagedkv: --batch: expected"),
        (["--device-memory", "8GiB", "--kv-dtype", "x"], "pagedkv: --kv-dtype: expected one of"),
        (["--device-memory", "8GiB", "--batch", "many"], "--batch"),
        (["--device-memory", "8GiB", "--ranks", "3"], "which 3 processes cannot share out whole"),
        (["--gpu", "h100", "--ranks", "2", "--host-memory", "9GB"], "pagedkv: --host-memory: exp"),
        ([], "--device-memory"),
    ],
)
def test_mistakes_and_budgets_that_are_exceeded_exit_with_2(pagedkv, folder, options, words):
    result = pagedkv("plan", folder, *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    "options",
    [
        ["--device-memory", "8GiB", "--batch", "8"],
        ["--device-memory", "8GiB", "--max-tokens", "500000"],
        ["--device-memory", "8gb", "--host-memory", "1 GiB", "-l", "64"],
        ["--device-memory", "8GiB", "-l", "64", "--step-tokens", "60000"],
        ["--gpu", "4060", "--batch", "16", "--kv-format", "int4", "-l", "8000"],
        ["--device-memory", "48GiB", "--ranks", "2", "--batch", "4"],
    ],
)
def test_each_advice_of_a_refusal_is_followed_as_it_is_printed(pagedkv, folder, options):
    refused = pagedkv("plan", folder, *options)
    assert refused.exit_code == 2
    advice = re.fullmatch(r".*\. (--.*) would fit\n", refused.stderr)[1]
    for change in advice.split(" or "):
        followed = pagedkv("plan", folder, *options, *change.split())
        assert followed.exit_code == 0, followed.stderr
        assert "it fits" in followed.stdout
        assert " 0 x" not in followed.stdout


def test_a_card_stands_for_its_memory_and_the_known_ones_are_listed(pagedkv, folder):
    found = pagedkv("plan", folder, "--gpu", "rtx 5090")
    assert found.stdout == f"{plan_memory(str(folder), gpu='RTX 5090')}\n"
    listed = pagedkv("plan", folder, "--gpu", "list")
    assert (listed.exit_code, listed.stdout) == (0, f"{gpu_table()}\n")
    assert pagedkv("plan", "--gpu", "LIST").stdout == listed.stdout
    missed = pagedkv("plan", folder, "--gpu", "RTX 4019")
    assert missed.exit_code == 2
    assert missed.stderr.startswith(
        "pagedkv: --gpu: 'RTX 4019' is not known; did you mean one of RTX"
    )


def test_packed_weights_reach_the_plan(pagedkv, folder):
    asked = "plan", folder, "--device", "cpu", "--pack-weights", "--device-memory"
    found = pagedkv(*asked, "600GiB", "--json")
    options = {"device": "cpu", "pack_weights": True}
    plan = plan_memory(str(folder), device_memory="600GiB", **options)
    assert json.loads(found.stdout) == json.loads(plan.to_json())
    refused = pagedkv(*asked, "200GiB")
    assert refused.exit_code == 2
    assert re.search(r"\. no --pack-weights or --device-memory .* would fit\n", refused.stderr)
    on_a_card = pagedkv("plan", folder, "--pack-weights", "--device-memory", "200GiB")
    assert "--pack-weights: expected none with --device cuda, got True" in on_a_card.stderr


def test_a_folder_without_a_model_exits_with_2(pagedkv, tmp_path):
    result = pagedkv("plan", tmp_path, "--device-memory", "8GiB")
    assert result.exit_code == 2
    assert "config.json" in result.stderr


def test_planning_a_checkpoint_does_not_wait_for_torch(fresh_python, tmp_path):
    save(tmp_path, LLAMA_70B)
    code = f"""
import sys
from pagedkv.cli import main
sys.argv = ["pagedkv", "plan", {str(tmp_path)!r}, "--device-memory", "8GiB"]
try:
    main()
except SystemExit as ended:
    print("code", ended.code)
print(sorted({{"torch", "transformers", "numpy"}} & set(sys.modules)))
"""
    assert fresh_python("-c", code).splitlines()[-2:] == ["code 0", "[]"]
