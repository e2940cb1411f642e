"""`pagedkv score`: labels, or log-probabilities of texts, for every row of a table."""

from __future__ import annotations

from typing import Annotated

import typer

from . import job_options as opt
from .command import running
from .prompts import Prompt
from .scoring import LABEL, Scoring, choices_of
from .start import Given, start
from .usage import UsageError


def score(
    model: opt.Model,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXTS", help="One text each; or give --file, or a pipe."),
    ] = None,
    files: opt.Files = None,
    column: opt.Column = None,
    template: opt.TemplateText = None,
    encoding: opt.Encoding = None,
    empty: opt.Empty = "error",
    prefix: opt.Prefix = None,
    tokenizer: opt.Tokenizer = None,
    raw: opt.Raw = False,
    chat_template_kwargs: opt.ChatTemplateKwargs = None,
    choices: Annotated[
        str | None,
        opt.LABELS(
            metavar="A,B,C",
            help="Possible labels of a prompt; the likeliest is taken. @FILE has one on each line. "
            "[dim]Default: no labels, but the log-probability and perplexity of the texts.[/dim]",
        ),
    ] = None,
    normalize: Annotated[
        bool,
        opt.LABELS(
            "--normalize",
            metavar="",
            help="Compare choices by the mean log-probability of a token, for choices of different "
            "length. [dim]Default: by the sum.[/dim]",
        ),
    ] = False,
    label: Annotated[
        str, opt.LABELS(metavar="NAME", help="The column that labels are written to.")
    ] = LABEL,
    device_memory: opt.DeviceMemory = None,
    host_memory: opt.HostMemory = None,
    expert_slots: opt.ExpertSlots = None,
    max_tokens: opt.MaxTokens = None,
    kv_format: opt.KVFormat = "dense",
    page_size: opt.PageSize = None,
    cache: opt.Cache = None,
    step_tokens: opt.StepTokens = None,
    prefix_store: opt.PrefixStoreFolder = None,
    prefix_store_size: opt.PrefixStoreSize = None,
    pack_weights: opt.PackWeights = None,
    dtype: opt.DType = "auto",
    device: opt.Device = "auto",
    expert_parallel: opt.ExpertParallel = False,
    out: opt.Out = None,
    shard: opt.ShardName = None,
    trace: opt.Trace = None,
) -> None:
    r"""Label the rows of a table, or say how likely a model finds texts.

    Rows go to a file, or as JSON lines to standard output. For example:

    pagedkv score MODEL --file tickets.csv --column text --choices billing,login

    pagedkv score MODEL "Snow is white." "Green snow whites."
    """
    given = Given(**locals(), too_long="error", draft=None)
    with running() as command:
        launch = command.launch
        asked = launch.share(launch.first(lambda: choices_of(choices))) or ()
        if choices is None and (normalize or label != LABEL):
            option = "--normalize" if normalize else "--label"
            raise UsageError(f"{option}: expected with --choices")
        scoring = Scoring(asked, normalize, label)

        def check(before: object, texts: list[Prompt]) -> None:
            for text in texts if template else ():
                text.name = None  # the columns that it is made of say it
            scoring.require_room(texts)
            if not asked:
                _require_texts(before, texts)

        raw = raw or not asked
        command.code = start(given, launch, check, row_options=(), raw=raw, scoring=scoring)


def _require_texts(prefix: object, prompts: list[Prompt]) -> None:
    """Raises where there are chat messages, which can only be scored behind."""
    if isinstance(prefix, list):
        raise UsageError("--prefix: expected a text without --choices, got chat messages")
    for i, prompt in enumerate(prompts):
        if not prompt.cause and not isinstance(prompt.content, str):
            raise UsageError(
                f"prompt {i}: expected a text without --choices, got chat messages; choices are "
                "scored as answers to them"
            )
