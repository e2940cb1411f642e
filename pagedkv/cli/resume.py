"""Finds the rows of a job that are done, and runs the rest; without a rest torch is not loaded."""

from __future__ import annotations

from pathlib import Path

from pagedkv.interrupt import Uninterrupted

from .causes import told_at_the_end
from .encode import Encoder
from .job_rows import JobRows, key_of
from .job_spec import Job
from .output import Output
from .report import BAD_PROMPTS, DONE, SOME_FAILED
from .screen import Screen
from .shard import Shard, rows_of_shard
from .table import rows_beside, write_table
from .torchrun import Launch


def carry_out(job: Job, out: Path | None, device: str, screen: Screen, launch: Launch) -> int:
    """Runs the prompts of a job that are not done yet.

    Args:
        out: the file for the answers; standard output without one.
        launch: the processes that run it together; the first one has the prompts and the output.

    Returns:
        The command's exit code.

    Raises:
        UsageError: it cannot be run; nothing was computed.
    """
    launch.first(job.require_readable)
    if out is None:
        left = [i for i, prompt in enumerate(job.prompts) if not prompt.cause]
        code = _run(job, left, None, device, screen, launch)
        return _told(code, job.refused(), len(job.prompts), screen)
    begun = launch.first(lambda: _begin(job, out, screen))
    if begun is None:  # another process has the output
        return _run(job, [], None, device, screen, launch)
    output, left = begun
    try:
        code = _run(job, left, output, device, screen, launch)
        if job.shard and code == DONE:
            output.keep()
        if rows_beside(out) != out:
            code = _tabulate(job, out, output, code, screen)
        return _told(code, output.failed(), len(output.assigned), screen)
    finally:
        output.close()


def _told(code: int, failed: dict[int, str], every: int, screen: Screen) -> int:
    """Says how many prompts have errors that stay; returns the exit code."""
    if failed:
        screen.close()
        screen.console.print(told_at_the_end(failed, every))
    return BAD_PROMPTS if failed and code == DONE else code


def _begin(job: Job, out: Path, screen: Screen) -> tuple[Output, list[int]]:
    """Opens the output; returns it and the indices of the prompts that are left."""
    screen.doing("looking what is done already")
    rows, console = rows_beside(out), screen.console
    made_with = job.made_with()
    keys = [key_of(made_with, prompt.content, prompt.options) for prompt in job.prompts]
    beside = job.shard.beside(rows) if job.shard else []
    output = Output(rows, JobRows(keys, job.samples, made_with, job.final, job.side), beside)
    try:
        output.skip({i for i, prompt in enumerate(job.prompts) if prompt.cause in job.skipped})
        left, every = output.unfinished(), len(job.prompts)
        if done := len(output.assigned) - len(left):
            where = f"{rows} and files of other shards have" if beside else f"{rows} has"
            console.print(f"{where} {done} of {every} prompts already")
        elif rows != out:
            console.print(f"rows go to {rows}; {out} is made of them at the end")
        elif job.shard:
            console.print(f"rows of shard {job.shard} go to {rows}")
        # Only the tokenizer can tell which rows belong to the table of a shard.
        if job.shard and (left or rows != out):
            left = _left_of_shard(job, job.shard, left, output, screen)
        left = job.set_aside(left, output)
    except BaseException:
        output.close()
        raise
    return output, left


def _left_of_shard(
    job: Job, shard: Shard, left: list[int], output: Output, screen: Screen
) -> list[int]:
    """Finds this shard's prompts among those left, in the order of their prefixes."""
    screen.doing("loading the tokenizer")
    with Uninterrupted():
        import transformers

        from .loading import tokenizer_of
    transformers.logging.set_verbosity_error()
    tokenizer = tokenizer_of(job)
    screen.doing(f"encoding {len(job.prompts):,} prompts, to find those of shard {shard}")
    new = [job.samples * p.options.get("max_new_tokens", job.most_new) for p in job.prompts]
    encoder = Encoder(job.prefix, tokenizer, job.raw, job.template)
    skipped = {*range(len(job.prompts))} - {*output.assigned}
    output.assigned = rows_of_shard(shard, job.prompts, new, encoder.encode)
    output.skip(skipped)
    missing = set(left)
    found = [i for i in output.assigned if i in missing]
    screen.console.print(
        f"shard {shard} has {len(output.assigned):,} of {len(job.prompts):,} prompts, "
        f"{len(found):,} are left"
    )
    return found


def _run(
    job: Job, left: list[int], output: Output | None, device: str, screen: Screen, launch: Launch
) -> int:
    job, left = launch.handed_over(job, left)
    if not left:
        return DONE
    screen.doing("loading torch and transformers")
    with Uninterrupted():  # a Ctrl-C during torch's start in C++ would abort the process
        import torch  # noqa: F401

        from .job import JobRun, run_job

        if job.scoring:
            from .score_run import score as work
        else:
            from .generate_run import generate as work
    return run_job(JobRun(job, left, output, screen, launch), device, work)


def _tabulate(job: Job, out: Path, output: Output, code: int, screen: Screen) -> int:
    """Makes the table of all rows if they are there; returns the exit code."""
    if output.unfinished():
        screen.console.print(f"{out} is made when no row is missing: run the same command again")
        return code
    if not output.assigned:
        screen.console.print(f"no table is made of no rows: there is no {out}")
        return code
    try:
        number = write_table(out, output.rows(), job.types, job.prompts, job.source)
    except (OSError, ValueError) as error:  # Arrow's errors are subclasses
        screen.console.print(f"cannot write {out}, its rows are kept: {error}", style="red")
        return code or SOME_FAILED
    screen.console.print(f"{out} has {number:,} rows")
    return code
