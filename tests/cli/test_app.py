"""The command's answers before anything is computed: info, help, and what is missing."""

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.effort import slow


def test_what_is_installed_says_its_version(pagedkv):
    assert pagedkv("--version").stdout == f"pagedkv {version('pagedkv')}\n"


def test_info_names_versions_devices_and_backends(pagedkv):
    import torch

    printed = pagedkv("info").stdout
    for words in ("pagedkv", "python", torch.__version__, "transformers", "cpu", "backend", "GiB"):
        assert words in printed
    assert "\x1b" not in printed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
@pytest.mark.parametrize("asked", [["--version"], ["plan", "any", "--gpu", "list"]], ids=str)
def test_standard_output_without_room_is_told_in_a_sentence(start, asked):
    with open("/dev/full", "wb") as full:
        process = start(*asked, stdout=full)
    _, stderr = process.communicate()
    assert stderr.decode() == "pagedkv: standard output: No space left on device\n"
    assert process.returncode == 1


def test_help_names_the_exit_codes(pagedkv):
    printed = " ".join(pagedkv("generate", "--help").stdout.split())
    for words in ("Exit codes", "130", "--samples", "--set"):
        assert words in printed
    assert pagedkv("--help").exit_code == 0


@pytest.mark.parametrize(
    "command", ["generate", "score", "plan", "compile", "trace", "quality", "check", "info"]
)
def test_help_has_an_example_and_says_what_a_value_is(pagedkv, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    printed = pagedkv(command, "--help").stdout
    assert f"For example:\n\npagedkv {command}" in "\n".join(map(str.strip, printed.splitlines()))
    options = [line for line in printed.splitlines() if line.startswith("│ --")]
    kinds = ("<str>", "<int>", "<float>", "<path>", "<list")
    assert not [line for line in options if any(kind in line for kind in kinds)]


def test_help_and_mistakes_do_not_wait_for_torch(fresh_python):
    code = """
import sys
from pagedkv.cli import main
for arguments in (["--help"], ["generate", "--help"], ["generate", "m", "-f", "nothing"]):
    sys.argv = ["pagedkv", *arguments]
    try:
        main()
    except SystemExit as ended:
        print("code", ended.code)
print(sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
"""
    printed = fresh_python("-c", code).splitlines()
    assert [line for line in printed if line.startswith("code")] == ["code 0", "code 0", "code 2"]
    assert printed[-1] == "[]"


@pytest.mark.parametrize(("name", "code"), slow(("SIGINT", 130), ("SIGTERM", 143)))
def test_an_interruption_waits_until_torch_is_loaded(fresh_python, name, code):
    # In the middle of it C++ would meet an exception that it does not know.
    code_run = f"""
import signal, sys
class Press:
    def find_spec(self, name, *_):
        if name == "torch":
            signal.raise_signal(signal.{name})
            print("goes on")
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Press())
sys.argv = ["pagedkv", "generate", "nowhere/at all", "abc"]
from pagedkv.cli import main
try:
    main()
except SystemExit as ended:
    print("code", ended.code)
"""
    assert fresh_python("-c", code_run).splitlines() == ["goes on", f"code {code}"]


@pytest.mark.parametrize("package", ["typer", *slow("rich", "filelock"), "transformers"])
def test_a_package_that_is_missing_is_named(fresh_python, package):
    code = f"""
import sys
sys.modules[{package!r}] = None
from pagedkv.cli import main
sys.argv = ["pagedkv", "generate", "model", "abc"]
try:
    main()
except SystemExit as ended:
    print(ended)
"""
    *_, said = fresh_python("-c", code).splitlines()  # behind what others warn of
    assert said == f"pagedkv: the command needs {package}: pip install 'pagedkv[hf,cli]'"
