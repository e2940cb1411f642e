"""One batch job: everything that can be wrong is found before the model computes anything."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedkv.checkpoint import Checkpoint
from pagedkv.errors import BudgetExceeded, PagedKVError
from pagedkv.generate import BatchGenerator, Result
from pagedkv.hf.attach import cache_config
from pagedkv.planner import MemoryPlan, plan_memory
from pagedkv.storage.memory import tokens_that_fit
from pagedkv.stream import LayerStreamer, find_folder, measure_link

from .output import Output, key_of
from .prompts import OPTIONS, Prompt, UsageError, encode
from .report import DONE, INTERRUPTED, SOME_FAILED, summary

MOST_ROWS = 256  # that a plan is made for; more take turns


@dataclass
class Job:
    """What was asked for.

    Attributes:
        options: of transformers' `generate`, for all prompts.
        sizes: of the `BatchGenerator`.
        cache: other fields of its `CacheConfig`.
        memory: budgets that a plan is made for; empty without one.
    """

    model: str
    prompts: list[Prompt]
    prefix: Any
    raw: bool
    samples: int
    options: dict[str, Any]
    seed: int | None
    logprobs: bool
    dtype: str
    sizes: dict[str, Any]
    cache: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, str | None] = field(default_factory=dict)

    def keys(self) -> list[str]:
        """What each prompt's rows are computed from, as a digest.

        Not from its ids: a chat template may put today's date into them.
        """
        folder = Path(self.model)
        model = str(folder.resolve()) if folder.exists() else self.model
        how = self.prefix, self.raw, self.options, self.seed, self.samples
        common: tuple[Any, ...] = (model, *how, self.logprobs, self.dtype)
        formats = self.sizes["kv_format"]
        if self.cache or formats != ("dense", "dense"):
            common += (formats, self.cache)
        return [key_of(*common, prompt.content, prompt.options) for prompt in self.prompts]


def run(job: Job, out: Path | None, device: str, console: Console) -> int:
    """Runs a job and reports on it.

    Returns:
        The command's exit code.

    Raises:
        UsageError: it cannot be run; nothing was computed.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dtype, device = _dtype(job.dtype), _pick(device)
    tokenizer = _load(AutoTokenizer, job.model)
    encode(job.prompts, job.prefix, tokenizer, job.raw)
    output = Output(out, job.keys(), job.samples) if out is not None else None
    try:
        left = output.unfinished() if output else list(range(len(job.prompts)))
        if output and len(left) < len(job.prompts):
            done = len(job.prompts) - len(left)
            console.print(f"{out} has {done} of {len(job.prompts)} prompts already")
        if not left:
            return DONE
        with ExitStack() as opened:
            if not job.memory:
                model = _load(AutoModelForCausalLM, job.model, dtype=dtype).eval().to(device)
                return _generate(job, left, model, tokenizer, output, console)
            plan = _plan(job, [job.prompts[i] for i in left], device)
            if not plan.streams:
                model = _load(AutoModelForCausalLM, job.model, dtype=dtype).eval().to(device)
                return _generate(job, left, model, tokenizer, output, console, plan)
            console.print(
                f"streaming {len(plan.streamed_layers)} of {len(plan.shape.layers)} layers, "
                f"{plan.streamed_bytes / 2**30:.2f} GiB a pass; "
                f"pages for {plan.max_tokens:,} tokens"
            )
            open_one = LayerStreamer.from_pretrained
            streamer = opened.enter_context(
                _named(
                    "MODEL",
                    open_one,
                    job.model,
                    plan=plan,
                    dtype=dtype,
                    device=device,
                    progress=False,
                )
            )
            code = _generate(
                job, left, streamer.model, tokenizer, output, console, plan, streamer.bar
            )
            console.print(f"\n{streamer.stats()}")
            return code
    finally:
        if output:
            output.close()


def _generate(
    job: Job,
    left: list[int],
    model: Any,
    tokenizer: Any,
    output: Output | None,
    console: Console,
    plan: MemoryPlan | None = None,
    layers: Any = None,
) -> int:
    prompts = [job.prompts[i] for i in left]
    options = _each(job, prompts, model.generation_config)
    try:
        sizes = job.sizes | job.cache
        if plan is not None:
            sizes = {"plan": plan}
        elif sizes["max_tokens"] is None:
            sizes |= _needed(prompts, options, job, model)
        generator = BatchGenerator(model, tokenizer, **sizes)
        ids = [prompt.ids for prompt in prompts]
        results = generator.stream(ids, logprobs=job.logprobs, **options)
    except (ValueError, TypeError, PagedKVError) as error:
        raise UsageError(str(error)) from error
    sink = _Texts(prompts, job.samples) if output is None else None
    failed, rows, code = 0, 0, DONE
    try:
        for result in _shown(results, len(prompts) * job.samples, console, layers):
            rows += 1
            index = left[result.index]
            if result.error:
                failed += 1
                console.print(f"prompt {index}: {result.error}", style="red")
            if output:
                output.write(_as_row(result, index, job.prompts[index]))
            elif sink:
                sink.add(result)
    except KeyboardInterrupt:
        console.print("interrupted; what was finished is kept")
        code = INTERRUPTED
    except BrokenPipeError:  # nobody reads on; see `main`
        raise
    except (OSError, RuntimeError, PagedKVError) as error:  # a full disk, no memory on the device
        console.print(f"stopped, what was finished is kept: {error}", style="red")
        failed += 1
    if sink:
        sink.flush()
    console.print(summary(generator.stats, rows, generator.cache.config.page_size))
    return code or (SOME_FAILED if failed else DONE)


def _each(job: Job, prompts: list[Prompt], model: Any) -> dict[str, Any]:
    """The job's options, with one value per prompt where prompts have their own.

    Args:
        model: its generation configuration, for what nobody said.
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


def _as_row(result: Result, index: int, prompt: Prompt) -> dict[str, Any]:
    row = asdict(result) | {"index": index}
    return prompt.others | {"prompt": prompt.content} | row


class _Layers(ProgressColumn):  # type: ignore[misc]  # rich is not looked into
    """How far the pass of a streamed model is."""

    def __init__(self, bar: Any) -> None:
        super().__init__()
        self._bar = bar

    def render(self, task: Task) -> Text:
        return Text(f"layer {self._bar.done} of {self._bar.total}" if self._bar else "")


def _shown(
    results: Iterable[Result], total: int, console: Console, layers: Any
) -> Iterable[Result]:
    """The results, with a progress bar where somebody watches."""
    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows"),
        TimeElapsedColumn(),
        _Layers(layers),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=sys.stdout.isatty(),  # else texts would follow the bar to standard error
    ) as progress:
        yield from progress.track(results, total=total)


class _Texts:
    """Prints texts in the order of their prompts, each as soon as those before it are out.

    On a terminal the end of each prompt stands above its text.
    """

    def __init__(self, prompts: list[Prompt], samples: int) -> None:
        self._prompts, self._on_terminal = prompts, sys.stdout.isatty()
        self._order = [(i, sample) for i in range(len(prompts)) for sample in range(samples)]
        self._next = 0
        self._held: dict[tuple[int, int], str] = {}
        self._console = Console(highlight=False, markup=False, emoji=False)

    def add(self, result: Result) -> None:
        self._held[result.index, result.sample] = (result.text or "").strip()
        while self._next < len(self._order) and self._order[self._next] in self._held:
            self._print(self._order[self._next])
            self._next += 1

    def flush(self) -> None:
        """Prints what an interruption left waiting for an earlier text."""
        for place in self._order[self._next :]:
            if place in self._held:
                self._print(place)

    def _print(self, place: tuple[int, int]) -> None:
        if place != self._order[0]:
            print()
        if self._on_terminal:
            content = self._prompts[place[0]].content
            last = content if isinstance(content, str) else content[-1]["content"]
            room = self._console.width - 4
            line = " ".join(str(last).split())
            line = line if len(line) <= room else "..." + line[3 - room :]
            self._console.print(f"> {line}", style="dim")
        print(self._held.pop(place), flush=True)


def _needed(prompts: list[Prompt], options: dict[str, Any], job: Job, model: Any) -> dict[str, Any]:
    """Pages for all rows together, where the memory holds them; else the default."""
    new = options["max_new_tokens"]
    limits = new if isinstance(new, list) else [new] * len(prompts)
    # Said, because the default of int4 is meant for long texts.
    fields = {"max_sequences": min(MOST_ROWS, len(prompts) * job.samples)} | job.cache
    fields |= {name: job.sizes[name] for name in ("page_size", "kv_format")}
    fields["growth_step"] = None  # of no weight, and more than a single token
    size = cache_config(model, 1, **fields).page_size
    rows = [len(prompt.ids) + limit + size for prompt, limit in zip(prompts, limits)]
    needed = sum(rows) * job.samples
    fits = tokens_that_fit(lambda n: cache_config(model, n, **fields), model.device)
    if needed > fits:
        return {}
    return {"max_tokens": needed, "max_sequences": fields["max_sequences"]}


def _plan(job: Job, prompts: list[Prompt], device: str) -> MemoryPlan:
    """For as many rows at once as fit, since a pass that streams costs the same for any number."""
    new = job.options["max_new_tokens"]
    limits = [int(prompt.options.get("max_new_tokens", new)) for prompt in prompts]
    length = max(len(prompt.ids) + limit for prompt, limit in zip(prompts, limits))
    batch = min(len(prompts) * job.samples, MOST_ROWS)
    options: dict[str, Any] = {**job.memory, "length": length}
    options |= {name: job.sizes[name] for name in ("page_size", "kv_format", "step_tokens")}
    options |= {"device": torch.device(device).type}
    options |= {"weight_dtype": None if job.dtype == "auto" else job.dtype}
    folder = _named("MODEL", find_folder, job.model)
    checkpoint = _named("MODEL", Checkpoint.open, folder)
    options["link_gbps"] = measure_link(checkpoint, torch.device(device))
    while True:
        try:
            return plan_memory(folder, batch=batch, **options)
        except BudgetExceeded as error:
            if batch == 1:
                raise UsageError(str(error)) from error
            batch //= 2
        except (PagedKVError, ValueError, TypeError) as error:
            raise UsageError(str(error)) from error


def _named(name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a call returns; its refusal names the argument of the command."""
    try:
        return call(*args, **options)
    except (PagedKVError, ValueError, TypeError, OSError) as error:
        raise UsageError(f"{name}: {error}") from error


def _load(kind: Any, name: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(name, **options)
    except Exception as error:  # what a broken checkpoint, or code that comes with one, may raise
        where = "" if Path(name).exists() else ", which is no folder here"
        raise UsageError(f"MODEL: cannot load {name}{where}: {error}") from error


def _dtype(name: str) -> Any:
    if name not in ("auto", "float32", "bfloat16", "float16"):
        raise UsageError(f"--dtype: expected auto, float32, bfloat16 or float16, got {name}")
    return name if name == "auto" else getattr(torch, name)


def _pick(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return str(torch.empty(0, device=device).device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device: cannot use {device}: {error}") from error
