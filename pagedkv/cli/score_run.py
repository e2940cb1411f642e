"""A job that scores; `job.py` has the code that it shares with a job that generates."""

from __future__ import annotations

import json
from collections.abc import Callable
from time import perf_counter
from typing import Any

from pagedkv.batch.results import Score
from pagedkv.errors import PagedKVError

from .answers import OWN, left_out, refused_row, row_of
from .errors import UsageError, words_of
from .job import JobRun, Loaded, carried, generator_of, report
from .job_spec import Job
from .prompts import Prompt
from .report import DONE, SOME_FAILED
from .scoring import Scoring, behind
from .screen import Progress


class Labelled(Progress):
    """Progress of a job that scores: its prompts take the time, so their tokens are counted.

    Args:
        lengths: tokens of each prompt.
    """

    def __init__(self, lengths: list[int], clock: Callable[[], float] = perf_counter) -> None:
        super().__init__(clock)
        self.rows, self._lengths = 0, lengths
        self._done, self._all = 0, sum(lengths)

    def ended(self, index: int) -> None:
        """Counts a prompt that has all its scores."""
        self.rows += 1
        self._done += self._lengths[index]

    @property
    def share(self) -> float:
        return self._done / self._all if self._all else 0.0

    def done(self) -> list[str]:
        rate = self.rows / self.passed if self.passed else 0.0
        return [f"{self.rows:,}/{len(self._lengths):,} rows", f"{rate:,.1f} rows/s"]


def score(run: JobRun, loaded: Loaded) -> int:
    """Scores; see `job.run_job`."""
    job, left, output, screen, launch = run
    tokenizer = loaded.tokenizer
    assert job.scoring is not None
    scoring, console = job.scoring, screen.console
    prompts = [job.prompts[i] for i in left]
    given = launch.share(launch.first(lambda: _given(job, prompts, tokenizer)))
    contexts, continuations = given  # type: ignore[misc]
    lengths = [len(prompt.ids) for prompt in prompts]
    # A choice gets pages of its own, behind those of its prompt.
    sizes = [_size(tokenizer, choice) for choice in continuations[0]] if scoring.choices else []
    generator = generator_of(job, loaded, lengths + sizes * len(prompts), console)
    try:
        scores = generator.stream_scores(contexts, continuations)
    except (ValueError, TypeError, PagedKVError) as error:
        raise UsageError(words_of(error)) from error
    for said in _said(job, scoring, sizes, prompts):
        console.print(said)
    pace = Labelled(lengths)
    screen.doing(pace)
    found: dict[int, list[Score]] = {}
    failed = 0

    def put(row: dict[str, Any]) -> None:
        if output:
            output.write(row)
        elif launch.is_first:
            shown = {name: value for name, value in row.items() if name not in OWN}
            print(json.dumps(shown, ensure_ascii=False), flush=True)

    def take(score: Score) -> None:
        nonlocal failed
        own = found.setdefault(score.index, [])
        own.append(score)
        if len(own) < len(continuations[score.index]):
            return
        del found[score.index]
        pace.ended(score.index)
        index, prompt = left[score.index], prompts[score.index]
        row = scoring.row(index, sorted(own, key=lambda one: one.choice))
        if wrong := row.get("error"):
            failed += 1
            console.print(f"prompt {index}: {wrong}", style="red")
        put(row_of(job.types, prompt, row))

    for index in () if output else job.refused():
        put(refused_row(job.types, job.prompts[index], index, 0))
    code = carried(scores, take, run)
    screen.close()
    report(generator, pace.rows, screen)
    return code or (SOME_FAILED if failed else DONE)


def _given(job: Job, prompts: list[Prompt], tokenizer: Any) -> tuple[list[Any], list[list[str]]]:
    """The contexts and their continuations, as `BatchGenerator.score` takes them."""
    assert job.scoring is not None
    choices = job.scoring.choices
    if not choices:
        return [job.prefix or ""] * len(prompts), [[prompt.content] for prompt in prompts]
    if not job.raw and getattr(tokenizer, "chat_template", None) is not None:
        return [prompt.ids for prompt in prompts], [[*choices]] * len(prompts)
    texts = [(job.prefix or "") + prompt.content for prompt in prompts]
    return texts, [[behind(text, choice) for choice in choices] for text in texts]


def _size(tokenizer: Any, choice: str) -> int:
    return len(tokenizer(choice, add_special_tokens=False)["input_ids"])


def _said(job: Job, scoring: Scoring, sizes: list[int], prompts: list[Prompt]) -> list[str]:
    """Says how choices are compared, and which columns are left out, before rows come."""
    said = []
    if sizes:
        how, other = ("mean", "sum") if scoring.normalize else ("sum", "mean")
        option = "without --normalize" if scoring.normalize else "--normalize"
        tokens = " to ".join(f"{n}" for n in sorted({min(sizes), max(sizes)}))
        word = "token" if max(sizes) == 1 else "tokens"
        said.append(
            f"choices, {tokens} {word} long, are compared by the {how} of their log-probabilities "
            f"({option}: by the {other})"
        )
    if taken := left_out(job.types, prompts):
        said.append(
            f"columns of the table that are left out: {', '.join(taken)}; scores have their own of "
            "these names"
        )
    return said
