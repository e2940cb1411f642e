"""`pagedkv generate`: its options, and the job that they describe.

Texts go to standard output, everything else to standard error.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from pagedkv.names import OPTIONS

from .answers import ANSWER, answer_name, require_room
from .job_options import MEMORY, MEMORY_OPTIONS, OUTPUT_OPTIONS, PROMPT_OPTIONS
from .option import MODEL, Given, Panel, argument, takes
from .options import FLAGS, options_of, sampling_of
from .prompts import Prompt
from .report import EXIT_CODES
from .start import running, start

SAMPLING = Panel("Sampling")


class Generate(TyperCommand):
    """The command; it knows the names of its options in other programs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the options; for another program's option it suggests the one to give instead."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer has its own copy of click's NoSuchOption
            name = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
            said = OPTIONS.get(name, name)
            if said in OPTIONS.values():
                error.possibilities = [FLAGS.get(said, f"--set {said}=...")]  # type: ignore[attr-defined]
            raise


SAMPLING_OPTIONS = (
    SAMPLING("--max-new-tokens -n N", int, "The most tokens that an answer gets.", 128, min=1),
    SAMPLING(
        "--temperature -t X",
        float | None,
        "0 always takes the likeliest token. [dim]Default: as the model says.[/dim]",
        min=0,
    ),
    SAMPLING(
        "--top-p X",
        float | None,
        "Draw from the likeliest tokens that together have this probability.",
        min=0,
        max=1,
    ),
    SAMPLING("--samples -k N", int, "Answers to each prompt.", 1, min=1),
    SAMPLING("--seed N", int | None, "Draw the same answers again: sample k draws from seed + k."),
    SAMPLING(
        "--stop TEXT",
        list[str] | None,
        "An answer ends with this text. May be given several times.",
    ),
    SAMPLING(
        "--set NAME=VALUE",
        list[str] | None,
        "Any other option of transformers' generate, for example top_k=40.",
    ),
)
GIVEN = "One prompt each; or give --file, or a pipe."
DRAFT = MEMORY(
    "--draft MODEL",
    str | None,
    "A smaller model with the same tokenizer that drafts; answers are the same.",
)


@takes(
    MODEL,
    argument("PROMPTS", list[str] | None, GIVEN),
    *PROMPT_OPTIONS,
    *SAMPLING_OPTIONS,
    DRAFT,
    *MEMORY_OPTIONS,
    *OUTPUT_OPTIONS,
    epilog=EXIT_CODES,
    cls=Generate,
)
def generate(given: Given) -> None:
    """Generate answers to many prompts at once, as text on standard output or as rows in a file.

    For example:

    pagedkv generate MODEL "Why is the sky blue?" "Why does ice float?"

    pagedkv generate MODEL -f prompts.csv --column question -o answers.csv
    """
    with running() as command:
        answer_name(given.answer)
        asked = {
            "--answer": given.answer != ANSWER,
            "--tokens": given.tokens,
            "--logprobs": given.logprobs,
        }
        chosen = {
            "max_new_tokens": given.max_new_tokens,
            **sampling_of(given.temperature, given.top_p, given.samples, given.stop),
            **options_of(given.set or []),
        }

        def check(_: object, found: list[Prompt]) -> None:
            if given.out:
                require_room(given.answer, found)

        command.code = start(given, command.launch, check, asked, options=chosen)
