"""`pagedkv eval`: what is handed on to lm-eval's own command, and what is said where it is not."""

import ast
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lm_eval(monkeypatch):
    """A stand-in for lm-eval, for what it is called with; it ends with code 3."""
    called = []

    def cli_evaluate():
        called.append(sys.argv[1:])
        sys.exit(3)

    main = ModuleType("lm_eval.__main__")
    main.cli_evaluate = cli_evaluate
    for module in (ModuleType("lm_eval"), main, ModuleType("pagedkv.integrations.lm_eval")):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return called


def test_without_lm_eval_it_says_what_to_install(pagedkv, monkeypatch):
    monkeypatch.setattr("pagedkv.cli.eval.find_spec", lambda name: None)
    done = pagedkv("eval", "--model_args", "pretrained=x", "--tasks", "arc_easy")
    assert done.exit_code == 2
    assert done.stderr == "pagedkv: eval needs lm_eval: pip install 'pagedkv[cli,eval]'\n"


@pytest.mark.parametrize(
    ("given", "called"),
    [
        (
            ["--model_args", "pretrained=x,kv_format=int4", "--tasks", "a", "b", "-L", "5"],
            ["run", "--model_args", "pretrained=x,kv_format=int4", "--tasks", "a", "b", "-L", "5"],
        ),
        (["run", "--tasks", "a"], ["run", "--tasks", "a"]),
        (["--tasks", "a", "--model", "pagedkv"], ["run", "--tasks", "a", "--model", "pagedkv"]),
        (["--help"], ["run", "--help"]),
        (["-h"], ["run", "-h"]),
    ],
)
def test_everything_is_handed_on_with_the_name_of_the_model(pagedkv, lm_eval, given, called):
    before = list(sys.argv)
    assert pagedkv("eval", *given).exit_code == 3
    assert lm_eval == [[*called, "--model", "pagedkv"]]
    assert sys.argv == before


@pytest.mark.parametrize("given", [["ls", "tasks"], ["validate", "--tasks", "a"]])
def test_commands_that_evaluate_nothing_are_handed_on_as_they_are(pagedkv, lm_eval, given):
    assert pagedkv("eval", *given).exit_code == 3
    assert lm_eval == [given]


def test_nothing_given_is_asked_for_help(pagedkv, lm_eval):
    pagedkv("eval")
    assert lm_eval == [["run"]]


@pytest.mark.parametrize("given", [["--model", "hf"], ["--model=hf"], ["-M", "vllm"]])
def test_another_model_is_refused(pagedkv, lm_eval, given):
    done = pagedkv("eval", *given, "--tasks", "a")
    assert done.exit_code == 2
    assert "expected pagedkv or nothing; `lm-eval` has the others" in done.stderr
    assert lm_eval == []


def test_mistakes_of_ours_end_without_a_traceback(pagedkv, lm_eval, monkeypatch):
    from pagedkv.errors import ModelArgsError, RequestError

    for error, code in ((ModelArgsError("so"), 2), (RequestError("so"), 1)):

        def fails(error=error):
            raise error

        monkeypatch.setattr(sys.modules["lm_eval.__main__"], "cli_evaluate", fails)
        done = pagedkv("eval", "--tasks", "a")
        assert (done.exit_code, done.stderr) == (code, "pagedkv: so\n")


def test_the_entry_point_names_a_class_that_is_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((name, place),) = project["entry-points"]["lm_eval.models"].items()
    module, _, wanted = place.partition(":")
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    assert wanted in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert name == "pagedkv"
    assert any(each.startswith("lm_eval") for each in project["optional-dependencies"]["eval"])
