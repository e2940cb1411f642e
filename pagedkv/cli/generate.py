"""`pagedkv generate`: its options, and what they make a job of.

Texts go to standard output, everything else to standard error.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from pagedkv.names import OPTIONS

from . import job_options as opt
from .answers import ANSWER, answer_name, require_room
from .command import running
from .options import FLAGS, options_of, sampling_of
from .prompts import Prompt
from .start import Given, start


class Generate(TyperCommand):
    """The command, which knows by what names other programs have its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the options; one that is not there is answered with the one to give instead."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer has its own copy of click's NoSuchOption
            name = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
            said = OPTIONS.get(name, name)
            if said in OPTIONS.values():
                error.possibilities = [FLAGS.get(said, f"--set {said}=...")]  # type: ignore[attr-defined]
            raise


def generate(
    model: opt.Model,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPTS", help="One prompt each; or give --file, or a pipe."),
    ] = None,
    files: opt.Files = None,
    column: opt.Column = None,
    template: opt.TemplateText = None,
    encoding: opt.Encoding = None,
    empty: opt.Empty = "error",
    too_long: opt.TooLong = "error",
    prefix: opt.Prefix = None,
    tokenizer: opt.Tokenizer = None,
    raw: opt.Raw = False,
    chat_template_kwargs: opt.ChatTemplateKwargs = None,
    max_new_tokens: Annotated[
        int,
        opt.SAMPLING(
            "--max-new-tokens",
            "-n",
            min=1,
            metavar="N",
            help="The most tokens that an answer gets.",
        ),
    ] = 128,
    temperature: Annotated[
        float | None,
        opt.SAMPLING(
            "--temperature",
            "-t",
            min=0,
            metavar="X",
            help="0 always takes the likeliest token. [dim]Default: as the model says.[/dim]",
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        opt.SAMPLING(
            min=0,
            max=1,
            metavar="X",
            help="Draw from the likeliest tokens that together have this probability.",
        ),
    ] = None,
    samples: Annotated[
        int,
        opt.SAMPLING("--samples", "-k", min=1, metavar="N", help="Answers to each prompt."),
    ] = 1,
    seed: Annotated[
        int | None,
        opt.SAMPLING(
            metavar="N", help="Draw the same answers again: sample k draws from seed + k."
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        opt.SAMPLING(
            metavar="TEXT", help="An answer ends with this text. May be given several times."
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        opt.SAMPLING(
            "--set",
            metavar="NAME=VALUE",
            help="Any other option of transformers' generate, for example top_k=40.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        opt.MEMORY(
            metavar="MODEL",
            help="A smaller model with the same tokenizer that drafts; answers are the same.",
        ),
    ] = None,
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
    answer: opt.Answer = ANSWER,
    tokens: opt.Tokens = False,
    logprobs: opt.Logprobs = False,
    explain: opt.Explain = False,
    trace: opt.Trace = None,
) -> None:
    """Generate answers to many prompts at once, as text on standard output or as rows in a file.

    For example:

    pagedkv generate MODEL "Why is the sky blue?" "Why does ice float?"

    pagedkv generate MODEL -f prompts.csv --column question -o answers.csv
    """
    given = Given(**locals())
    with running() as command:
        answer_name(answer)
        asked = {"--answer": answer != ANSWER, "--tokens": tokens, "--logprobs": logprobs}
        chosen = {
            "max_new_tokens": max_new_tokens,
            **sampling_of(temperature, top_p, samples, stop),
            **options_of(options or []),
        }

        def check(_: object, found: list[Prompt]) -> None:
            if out:
                require_room(answer, found)

        command.code = start(
            given,
            command.launch,
            check,
            asked,
            raw=raw,
            samples=samples,
            options=chosen,
            seed=seed,
            logprobs=logprobs,
            answer=answer,
            tokens=tokens,
            explain=explain,
        )
