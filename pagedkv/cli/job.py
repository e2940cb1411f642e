"""One batch job: everything that can be wrong is found before the model computes anything."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console

from pagedkv.batch.drafts.draft_model import draft_config
from pagedkv.batch.generator import BatchGenerator
from pagedkv.config import field_of
from pagedkv.errors import BudgetExceeded, PagedKVError
from pagedkv.hf.model import cache_config
from pagedkv.hf.release import shared_out
from pagedkv.models.checkpoint import Checkpoint
from pagedkv.models.groups import DTYPE_BYTES
from pagedkv.models.model import Model
from pagedkv.planner import MemoryPlan, plan_memory
from pagedkv.planner.byte_sizes import readable
from pagedkv.planner.model_shape import shape_of
from pagedkv.ranks import ranks_of
from pagedkv.storage.memory import tokens_that_fit
from pagedkv.stream import LayerStreamer, find_folder, measure_experts, measure_link
from pagedkv.stream.unpacking import unpack_in_forward

from .causes import LONG, SAID, told
from .encode import Encoder
from .errors import UsageError, words_of
from .job_spec import Job
from .loading import config_of, loaded, model_of, pick, tokenizer_of
from .output import Output
from .plan import as_options
from .prompts import Prompt, bad_of, require_any
from .report import DONE, INTERRUPTED, SOME_FAILED, summary
from .screen import Screen
from .torchrun import Launch

WORTH_SAYING = 64 << 20  # bytes
MOST_ROWS = 256  # rows at once that a plan is made for; further rows wait


class JobRun(NamedTuple):
    """A job, or what is left of it, and what it writes to.

    Attributes:
        left: indices of the prompts to run.
        launch: the processes that run it together.
    """

    job: Job
    left: list[int]
    output: Output | None
    screen: Screen
    launch: Launch


class Loaded(NamedTuple):
    """The models that a job computes with.

    Attributes:
        bar: shows passes of a streamed model.
        draft: the model that drafts, if one was asked for.
    """

    model: Any
    tokenizer: Any
    plan: MemoryPlan | None
    bar: Any = None
    draft: Any = None


def run_job(run: JobRun, device: str, work: Callable[[JobRun, Loaded], int]) -> int:
    """Runs a job, and reports on it.

    Args:
        work: generates or scores once the model is loaded; returns the exit code.

    Returns:
        The command's exit code.

    Raises:
        UsageError: it cannot be run; nothing was computed.
    """
    job, left, output, screen, launch = run
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device, console = pick(device), screen.console
    screen.doing("reading the tokenizer")
    tokenizer = launch.each(lambda: tokenizer_of(job))
    screen.doing(f"encoding {len(left):,} prompts")
    prompts = [job.prompts[i] for i in left]
    launch.first(lambda: _encode(job, dict(zip(left, prompts)), tokenizer, screen))
    shared = launch.share([(prompt.ids, prompt.cause) for prompt in prompts])
    for prompt, (ids, cause) in zip(prompts, shared):
        prompt.ids, prompt.cause = ids, cause
    left = job.set_aside(left, output)
    if not left:
        return DONE
    run = run._replace(left=left)
    prompts = [job.prompts[i] for i in left]
    _tell_of_room(job.sizes["max_tokens"], max(len(prompt.ids) for prompt in prompts), console)
    screen.doing("loading the model")
    plan = None
    if job.memory:
        plan = launch.share(launch.first(lambda: _plan(job, prompts, device, launch.size)))
    if plan is None or not plan.streams:
        model = launch.each(lambda: _model(job, device, launch.size))
        if plan is not None:
            _keep_packed(model, plan)
        draft = None
        if job.draft is not None:
            screen.doing("loading the draft model")
            draft = launch.each(lambda: model_of(job.draft, job.dtype, model.device, "--draft"))
        return work(run, Loaded(model, tokenizer, plan, draft=draft))
    console.print(_said(plan))
    options = {"plan": plan, "dtype": job.dtype, "device": device, "progress": False}
    with _named("MODEL", LayerStreamer.from_pretrained, job.model, **options) as streamer:
        code = work(run, Loaded(streamer.model, tokenizer, plan, streamer.bar))
        console.print(f"\n{streamer.stats()}")
        return code


def _encode(job: Job, prompts: dict[int, Prompt], tokenizer: Any, screen: Screen) -> None:
    """Sets the ids of prompts, and prints how many are bad or were cut."""
    config = config_of(job.model).get_text_config(decoder=True)
    encoder = Encoder(job.prefix, tokenizer, job.raw, job.template)
    encoder.encode(prompts)
    if longest := field_of(config, "max_position_embeddings"):
        encoder.fit(prompts, longest, job.most_new, job.side)
    require_any(job.prompts)
    for line in told(bad_of(prompts.values()), len(job.prompts), job.skipped):
        screen.console.print(line)
    if cut := sum(prompt.cut is not None for prompt in prompts.values()):
        said = f"{cut:,} of {len(job.prompts):,} prompts {'is' if cut == 1 else 'are'} {SAID[LONG]}"
        screen.console.print(f"{said}; cut on the {job.side}")


def _tell_of_room(room: int | None, longest: int, console: Console) -> None:
    """Says, in place of the library's warning, that --max-tokens is less than a prompt has."""
    warnings.filterwarnings("ignore", "max_tokens: all pages together")
    if room is not None and longest > room:
        console.print(
            f"--max-tokens: the cache has room for {room:,} tokens, and a prompt has {longest:,}; "
            "--max-new-tokens is what an answer may have"
        )


def _said(plan: MemoryPlan) -> str:
    """Says in one line what is streamed."""
    said = f"streaming {len(plan.streamed_layers)} of {len(plan.shape.layers)} layers, "
    said += f"{plan.streamed_bytes / 2**30:.2f} GiB a pass"
    if plan.expert_slots and plan.shape.experts is not None:
        experts = f"{plan.expert_slots} of {plan.shape.experts.count}"
        said += f", and experts as they are asked for, {experts} stay"
    return f"{said}; pages for {plan.max_tokens:,} tokens"


def _model(job: Job, device: str, processes: int) -> Any:
    """The model of a job, or this process's part of it."""
    if processes == 1:
        return model_of(job.model, job.dtype, device)
    parts = shared_out(processes, job.expert_parallel)
    return loaded(job.model, dtype=job.dtype, distributed_config=parts)


def _keep_packed(model: Any, plan: MemoryPlan) -> None:
    """Keeps packed weights packed, which is slower, if the plan has no room for all unpacked.

    transformers would unpack those of compressed-tensors for good in the first forward.
    """
    if plan.shape.packed and plan.unused < plan.shape.active * DTYPE_BYTES[plan.shape.dtype]:
        unpack_in_forward(model)


def generator_of(job: Job, loaded: Loaded, lengths: list[int], console: Console) -> BatchGenerator:
    """Makes the generator of a job; says how much memory packed weights take, if it is much.

    Args:
        lengths: the most tokens of each row.
    """
    model, tokenizer, plan, _, draft = loaded
    try:
        sizes = job.sizes | job.cache
        if plan is not None:
            kept = "trace", "prefix_store", "pack_weights"
            sizes = {"plan": plan} | {name: job.sizes[name] for name in kept}
        elif sizes["max_tokens"] is None:
            sizes |= _needed(lengths, job, model, draft)
        generator = BatchGenerator(model, tokenizer, draft=draft, **sizes)
        if generator.packed_bytes >= WORTH_SAYING:
            size = readable(generator.packed_bytes)
            took = f"steps are faster, for {size} more memory (off: --no-pack-weights)"
            console.print(f"weights packed for this processor: {took}")
        return generator
    except OSError as error:  # only the trace is opened here
        raise UsageError(f"--trace: cannot write {job.sizes['trace']}: {error}") from error
    except (ValueError, TypeError, PagedKVError) as error:
        raise UsageError(str(error).replace("pack_weights:", "--weight-format:")) from error


def carried(results: Iterator[Any], take: Callable[[Any], object], run: JobRun) -> int:
    """Takes all results, and prints why they end early, if they do; returns the exit code."""
    _, _, output, screen, launch = run
    try:
        launch.taken(results, take)
        if output:
            output.sync()
    except KeyboardInterrupt:
        screen.console.print("interrupted; what was finished is kept")
        return INTERRUPTED
    except BrokenPipeError:  # the reader has gone; typer ends the command
        raise
    except (OSError, RuntimeError, MemoryError, PagedKVError) as error:  # no memory, a full disk
        said = f"stopped, what was finished is kept: {words_of(error)}"
        screen.console.print(said, style="red")
        return SOME_FAILED
    return DONE


def report(generator: BatchGenerator, rows: int, screen: Screen, cut: int = 0) -> None:
    """Prints the summary of a job.

    Args:
        rows: how many rows ended.
        cut: how many of them ended at their limit.
    """
    config, console = generator.cache.config, screen.console
    sizes = {"page_size": config.page_size, "bytes_per_state": config.bytes_per_state}
    counts = {"from_store": generator.cache.stats().tokens_from_store, "cut": cut}
    console.print(summary(generator.stats, rows, **sizes, **counts, width=console.width))


def lengths_of(prompts: list[Prompt], new: Any, longest: int | None) -> list[int]:
    """Returns the most tokens that each prompt's row can have; 0 for a prompt that is too long.

    Args:
        new: the most new tokens, a list by prompt or one number for all.
        longest: the most tokens of a text that the model takes.
    """
    every = new if isinstance(new, list) else [new] * len(prompts)
    most = longest or sys.maxsize
    lengths = [len(prompt.ids) for prompt in prompts]
    return [min(n + limit, most) if n <= most else 0 for n, limit in zip(lengths, every)]


def _needed(lengths: list[int], job: Job, model: Any, draft: Any) -> dict[str, Any]:
    """Returns sizes of a cache for all rows at once, or none if memory does not hold them."""
    # `max_sequences` is given, because its default with staging pages is meant for long texts.
    sizes = {"max_sequences": min(MOST_ROWS, len(lengths) * job.samples)} | job.cache
    sizes |= {name: job.sizes[name] for name in ("page_size", "kv_format")}
    sizes["growth_step"] = None  # it changes no size, and would be larger than `max_tokens` here
    size = cache_config(model, 1, **sizes).page_size
    needed = sum(length + size for length in lengths) * job.samples
    beside = None if draft is None else partial(draft_config, draft)
    fits = tokens_that_fit(lambda n: cache_config(model, n, **sizes), model.device, beside)
    fits = ranks_of(model).least(fits)
    if needed > fits:
        return {}
    return {"max_tokens": needed, "max_sequences": sizes["max_sequences"]}


def _plan(job: Job, prompts: list[Prompt], device: str, processes: int) -> MemoryPlan:
    """Plans for as many rows at once as fit: a streamed pass costs the same for any number."""
    limits = [int(prompt.options.get("max_new_tokens", job.most_new)) for prompt in prompts]
    batch = min(len(prompts) * job.samples, MOST_ROWS)
    options: dict[str, Any] = {**job.memory}
    passed = "page_size", "kv_format", "step_tokens"
    options |= {name: job.sizes[name] for name in passed}
    packed = job.sizes["pack_weights"]
    options["pack_weights"] = packed != "auto" and packed
    options |= {"device": torch.device(device).type, "ranks": processes}
    options |= {"weight_dtype": None if job.dtype == "auto" else job.dtype}
    checkpoint = _named("MODEL", Checkpoint.open, _named("MODEL", find_folder, job.model))
    options["link_gbps"] = measure_link(checkpoint, torch.device(device))
    on_cpu = torch.device(device).type == "cpu"
    shape = _named("MODEL", shape_of, Model.of(checkpoint), on_cpu=on_cpu)
    longest = shape.settings.max_position_embeddings
    if shape.experts is not None:
        size = shape.experts.widest // shape.experts.count
        options["expert_gbps"] = measure_experts(checkpoint, size)
    options["length"] = max(1, *lengths_of(prompts, limits, longest))
    while True:
        try:
            return plan_memory(checkpoint, batch=batch, **options)
        except BudgetExceeded as error:
            if batch == 1:
                raise UsageError(refusal(error, prompts)) from error
            batch //= 2
        except (PagedKVError, ValueError, TypeError) as error:
            raise UsageError(as_options(str(error))) from error


def refusal(error: BudgetExceeded, prompts: list[Prompt]) -> str:
    """Says in options of this command what would fit; a length is a prompt and its answer."""
    message = str(error)
    if length := error.advice.get("length"):
        new = int(length) - max(len(prompt.ids) for prompt in prompts)
        alike = not any("max_new_tokens" in prompt.options for prompt in prompts)
        said = f"--max-new-tokens {new} or " if alike and new > 0 else ""
        message = message.replace(f"{length=} or ", said)
    message = re.sub(r"\branks=(?=\d)", "torchrun --nproc-per-node ", message)
    return as_options(message)


def _named(name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls a function; its error is raised again with the name of the command's argument."""
    try:
        return call(*args, **options)
    except (PagedKVError, ValueError, TypeError, OSError) as error:
        raise UsageError(f"{name}: {error}") from error
