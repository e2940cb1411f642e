"""`pagedkv eval`: lm-evaluation-harness, with its own options, over pages."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import typer

from pagedkv.errors import BudgetExceeded, ModelArgsError, RequestError, UnsupportedModelError

from .errors import UsageError, refusing

# Everything behind the command's name goes to lm-eval, `--help` too.
CONTEXT = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": list[str](),
}
OTHERS = ("ls", "validate")  # commands of lm-eval that evaluate nothing


def evaluate(context: typer.Context) -> None:
    """Evaluate a model on standard tasks: lm-evaluation-harness, computed over pages.

    For example:

    pagedkv eval --model_args pretrained=MODEL,kv_format=int4 --tasks arc_easy,hellaswag
    """
    refused = ModelArgsError, UnsupportedModelError, BudgetExceeded
    with refusing(*refused, failed=(RequestError,)):
        arguments = _arguments(context.args)
        if find_spec("lm_eval") is None:
            raise UsageError("eval needs lm_eval: pip install 'pagedkv[cli,eval]'")
        import pagedkv.integrations.lm_eval  # noqa: F401 - makes --model pagedkv known

        _run(arguments)


def _arguments(given: list[str]) -> list[str]:
    """Returns the arguments that lm-eval is called with.

    Raises:
        UsageError: another model was asked for.
    """
    if given[:1] and given[0] in OTHERS:
        return given
    given = given[1:] if given[:1] == ["run"] else given
    for i, word in enumerate(given):
        option, _, value = word.partition("=")
        if option in ("-M", "--model") and (value or "".join(given[i + 1 : i + 2])) != "pagedkv":
            raise UsageError(f"{option}: expected pagedkv or nothing; `lm-eval` has the others")
    return ["run", *given, "--model", "pagedkv"] if given else ["run"]


def _run(arguments: list[str]) -> None:
    from lm_eval.__main__ import cli_evaluate

    before = sys.argv
    sys.argv = ["lm-eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
