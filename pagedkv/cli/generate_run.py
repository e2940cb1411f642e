"""A job that generates; `job.py` has the code that it shares with a job that scores."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

from pagedkv.batch.forecast import Forecast
from pagedkv.batch.misses import Misses
from pagedkv.batch.results import Result
from pagedkv.hf.model import longest_of
from pagedkv.planner.shards import own_tokens

from .answers import SIDE, left_out, row_of
from .errors import UsageError, words_of
from .job import JobRun, Loaded, carried, generator_of, lengths_of, report
from .job_spec import Job
from .pace import Pace
from .prompts import OPTIONS, Prompt
from .report import DONE, SOME_FAILED
from .show import Show
from .texts import Texts, asked


def generate(run: JobRun, loaded: Loaded) -> int:
    """Generates; see `job.run_job`."""
    job, left, output, screen, launch = run
    model, tokenizer, _, bar, _ = loaded
    prompts, console = [job.prompts[i] for i in left], screen.console
    options = _options(job, prompts, model.generation_config)
    lengths = lengths_of(prompts, options["max_new_tokens"], longest_of(model))
    limits = [max(0, length - len(prompt.ids)) for prompt, length in zip(prompts, lengths)]
    generator = generator_of(job, loaded, lengths, console)
    try:
        ids = [prompt.ids for prompt in prompts]
        results = generator.stream(ids, logprobs=job.logprobs, **options)
    except Exception as error:  # transformers may raise anything to refuse options
        raise UsageError(words_of(error)) from error
    if output and (taken := left_out(job.types, prompts)):
        console.print(
            f"columns of the prompts that are left out of the answers: {', '.join(taken)}; answers "
            "have their own of these names"
        )
    texts = show = None
    if output is None and launch.is_first:
        texts = Texts(screen, job.prompts, job.samples, job.skipped)
        if screen.is_shared:
            decode = partial(tokenizer.decode, skip_special_tokens=True)
            show = Show(generator, [*map(asked, prompts)], decode)
    own = own_tokens(ids)
    forecast = Forecast(generator.stats, lambda: generator.running, limits, own, job.samples)
    pace = Pace(generator.stats, forecast, len(prompts) * job.samples, bar)
    screen.doing(pace, show)
    failed, cut = 0, 0

    def take(result: Result) -> None:
        nonlocal failed, cut
        index = left[result.index]
        pace.end(result)
        cut += result.finish_reason == "length"
        if result.error:
            failed += 1
            console.print(f"prompt {index}: {result.error}", style="red")
        if output:
            prompt = job.prompts[index]
            own = {**asdict(result), "index": index, "cut": prompt.cut, SIDE: job.side}
            output.write(row_of(job.types, prompt, own | {job.answer: result.text}))
        elif texts:
            texts.add(index, result)

    misses = Misses(ids if job.explain else ())
    with misses.watching(generator.cache) if job.explain else nullcontext():
        code = carried(results, take, run)
    screen.close()
    if texts:
        texts.flush()
    report(generator, pace.ended, screen, cut)
    for place, explanation in misses:
        said = explanation.told(lambda ids: repr(tokenizer.decode(ids)))
        console.print(f"prompt {left[place]}: {said}")
    return code or (SOME_FAILED if failed else DONE)


def _options(job: Job, prompts: list[Prompt], model: Any) -> dict[str, Any]:
    """Returns the job's options; an option that rows set has a value for each prompt.

    Args:
        model: the model's generation configuration, for options that nobody gave.
    """
    options = {"seed": job.seed, **job.options}
    sampled = options.get("do_sample", model.do_sample)
    warm = options.get("temperature", model.temperature)
    defaults = {**options, "temperature": (1.0 if warm is None else warm) if sampled else 0}
    for name in OPTIONS:
        if any(name in prompt.options for prompt in prompts):
            options[name] = [prompt.options.get(name, defaults[name]) for prompt in prompts]
    if isinstance(options.get("temperature"), list):
        options["do_sample"] = True
    return options
