"""Type checkers and editors find every mistake of users, and no false error."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.config import CacheConfig, CacheFields, ModelPagesFields, ShapedFields

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROGRAMS = ["user.py", "mistakes.py"]
BIN = Path(sys.executable).parent


def mypy(folder: Path) -> set[tuple[str, int]]:
    """The lines that `mypy --strict` complains about."""
    silent = ["--follow-imports=silent", "--no-error-summary", "--config-file=/dev/null"]
    command = [BIN / "mypy", "--strict", *silent, f"--cache-dir={ROOT}/.mypy_cache/users"]
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *PROGRAMS], cwd=folder, env=env, capture_output=True, text=True
    )
    found = re.findall(r"^(\w+\.py):(\d+): error:", done.stdout, re.MULTILINE)
    assert done.returncode < 2, done.stdout + done.stderr
    return {(name, int(line)) for name, line in found}


def pyright(folder: Path, mode: str) -> set[tuple[str, int]]:
    """The lines that pyright complains about, under its standard or its strict rules."""
    settings = {"typeCheckingMode": mode, "extraPaths": [str(ROOT)], "include": PROGRAMS}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [BIN / "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    "checked",
    [mypy, lambda folder: pyright(folder, "standard"), lambda folder: pyright(folder, "strict")],
    ids=["mypy", "pyright", "pyright-strict"],
)
def test_checkers_find_every_mistake_of_a_user_and_no_other(checked, tmp_path):
    marked = set()
    for name in PROGRAMS:
        text = (HERE / name).read_text()
        (tmp_path / name).write_text(text)
        marked |= {(name, i) for i, line in enumerate(text.splitlines(), 1) if "# error:" in line}
    assert checked(tmp_path) == marked


def test_fields_that_are_passed_on_are_those_of_the_configuration():
    shape = {"num_layers", "num_kv_heads", "head_dim", "dtype"}
    own = {field.name for field in dataclasses.fields(CacheConfig)}
    assert {*CacheFields.__annotations__} == own - shape - {"max_tokens"}
    beside = {"trace", "prefix_store"}
    assert {*ModelPagesFields.__annotations__} == own - shape - {"max_tokens"} | beside
    assert {*ShapedFields.__annotations__} == own - {"max_tokens"}
