"""`pagedkv score`: labels, or log-probabilities of texts, for every row of a table."""

from __future__ import annotations

from .errors import UsageError
from .job_options import MEMORY_OPTIONS, OUTPUT_OPTIONS, PROMPT_OPTIONS
from .option import MODEL, Given, Panel, argument, but, takes
from .prompts import Prompt
from .report import EXIT_CODES
from .scoring import LABEL, Scoring, choices_of
from .start import running, start

LABELS = Panel("Labels")
LABEL_OPTIONS = (
    LABELS(
        "--choices A,B,C",
        str | None,
        "Possible labels of a prompt; the likeliest is taken. @FILE has one on each line. "
        "[dim]Default: no labels, but the log-probability and perplexity of the texts.[/dim]",
    ),
    LABELS(
        "--normalize",
        bool,
        "Compare choices by the mean log-probability of a token, for choices of different "
        "length. [dim]Default: by the sum.[/dim]",
    ),
    LABELS("--label NAME", str, "The column that labels are written to.", LABEL),
)
GIVEN = "One text each; or give --file, or a pipe."


@takes(
    MODEL,
    argument("TEXTS", list[str] | None, GIVEN),
    *but(PROMPT_OPTIONS, "too_long"),
    *LABEL_OPTIONS,
    *MEMORY_OPTIONS,
    *but(OUTPUT_OPTIONS, "answer", "tokens", "logprobs", "explain"),
    epilog=EXIT_CODES,
)
def score(given: Given) -> None:
    r"""Label the rows of a table, or say how likely a model finds texts.

    Rows go to a file, or as JSON lines to standard output. For example:

    pagedkv score MODEL --file tickets.csv --column text --choices billing,login

    pagedkv score MODEL "Snow is white." "Green snow whites."
    """
    given.prompts, given.too_long, given.draft = given.texts, "error", None
    choices, normalize, label = given.choices, given.normalize, given.label
    with running() as command:
        launch = command.launch
        asked = launch.share(launch.first(lambda: choices_of(choices))) or ()
        if choices is None and (normalize or label != LABEL):
            option = "--normalize" if normalize else "--label"
            raise UsageError(f"{option}: expected with --choices")
        scoring = Scoring(asked, normalize, label)

        def check(before: object, texts: list[Prompt]) -> None:
            for text in texts if given.template else ():
                text.name = None  # rows have the columns that it was made of
            scoring.require_room(texts)
            if not asked:
                _require_texts(before, texts)

        raw = given.raw or not asked
        command.code = start(given, launch, check, row_options=(), raw=raw, scoring=scoring)


def _require_texts(prefix: object, prompts: list[Prompt]) -> None:
    """Raises for chat messages: only texts behind them can be scored."""
    if isinstance(prefix, list):
        raise UsageError("--prefix: expected a text without --choices, got chat messages")
    for i, prompt in enumerate(prompts):
        if not prompt.cause and not isinstance(prompt.content, str):
            raise UsageError(
                f"prompt {i}: expected a text without --choices, got chat messages; choices are "
                "scored as answers to them"
            )
