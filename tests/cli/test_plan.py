"""`pagedkv plan`: the table or JSON on standard output, mistakes on standard error, no torch."""

import json

import pytest

pytest.importorskip("typer")

from pagedkv import plan_memory
from tests.planner.models import LLAMA_70B


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return tmp_path


def test_the_table_is_that_of_the_plan(pagedkv, folder):
    result = pagedkv("plan", folder, "--device-memory", "8GiB")
    assert result.exit_code == 0
    assert result.stdout == f"{plan_memory(str(folder), device_memory='8GiB')}\n"
    assert not result.stderr


def test_every_option_reaches_the_plan(pagedkv, folder):
    options = {
        "device_memory": "24GiB", "host_memory": "30GB", "batch": 4, "length": 1000,
        "page_size": 32, "kv_dtype": "fp16", "kv_format": "int8,int4", "weight_dtype": "int4",
        "max_tokens": 4096, "step_tokens": 500, "link_gbps": 12.5, "device": "cpu",
    }  # fmt: skip
    given = [x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", value)]
    result = pagedkv("plan", folder, *given, "--json")
    assert result.exit_code == 0, result.stderr
    plan = plan_memory(str(folder), **{**options, "kv_format": ("int8", "int4")})
    assert json.loads(result.stdout) == json.loads(plan.to_json())
    assert plan.cache.page_size == 32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device-memory", "8 gigs"], "pagedkv: device_memory: expected bytes"),
        (["--device-memory", "1GiB"], "device_memory=4"),
        (["--device-memory", "8GiB", "--batch", "0"], "pagedkv: batch: expected"),
        (["--device-memory", "8GiB", "--kv-dtype", "x"], "pagedkv: kv_dtype: expected one of"),
        (["--device-memory", "8GiB", "--batch", "many"], "--batch"),
        ([], "--device-memory"),
    ],
)
def test_mistakes_and_budgets_that_are_exceeded_exit_with_2(pagedkv, folder, options, words):
    result = pagedkv("plan", folder, *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not result.stdout


def test_a_folder_without_a_model_exits_with_2(pagedkv, tmp_path):
    result = pagedkv("plan", tmp_path, "--device-memory", "8GiB")
    assert result.exit_code == 2
    assert "config.json" in result.stderr


def test_planning_does_not_wait_for_torch(fresh_python, folder):
    code = f"""
import sys
from pagedkv.cli import main
sys.argv = ["pagedkv", "plan", {str(folder)!r}, "--device-memory", "8GiB"]
try:
    main()
except SystemExit as ended:
    print("code", ended.code)
print(sorted({{"torch", "transformers", "numpy"}} & set(sys.modules)))
"""
    assert fresh_python("-c", code).splitlines()[-2:] == ["code 0", "[]"]
