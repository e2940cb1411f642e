"""`BatchGenerator`: many prompts, one model, as many tokens a second as the machine gives.

A call is a `Job`: the scheduler says which rows a step computes, the runner computes them,
transformers' rules choose tokens. A row's mistake is that row's `error`; the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from transformers import PreTrainedModel

from pagedkv.cache.cache import PagedKVCache
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.adapters import without_adapters
from pagedkv.hf.blocked_weights import PackWeights
from pagedkv.hf.transaction import forget_dead
from pagedkv.pages.salts import Salt
from pagedkv.planner import MemoryPlan
from pagedkv.ranks import ranks_of, spelled

from .calls import to_generate, to_score
from .chats import Chats
from .drafts.draft_model import DraftModel, require_draft, tokens_for_both
from .drafts.drafter import why_none
from .drafts.model_drafts import ModelDrafts
from .encoder import PromptEncoder
from .events.asynchronous import AsyncEvents
from .events.events import Events, Parts
from .graphs import DecodeGraphs, can_capture
from .job import GenerationJob
from .options import GenerationOptions
from .packed import PackedModel
from .precompile import compile_for
from .prompt_queue import PromptQueue
from .prompts import Prompt
from .results import GenerationStats, Result, Running, Score, by_choice, finished, in_order
from .runner import StepRunner
from .scheduler import Scheduler
from .scores.continuations import Continuation, ContinuationRunner, most_logits
from .scores.job import ScoreJob
from .step_images import StepImages
from .tried import require_like_alone
from .widths import default_step_tokens, widths

if TYPE_CHECKING:
    from typing import Unpack

    from pagedkv.config import ModelPagesFields

T = TypeVar("T")


class BatchGenerator:
    """Generates for many prompts at once over paged K and V.

    Rows are packed without padding, join and leave at every step, and share every prefix they have
    in common, also with earlier calls. The model is switched to paged attention until `close`.

    Args:
        model: a decoder whose forward takes `position_ids`, or a PEFT model of one.
        tokenizer: for prompts given as text, or the model's processor for images and audio;
            default the one saved with the model's checkpoint.
        cache: pages to use; default the model's own, shared with its `PagedCache`s.
        plan: sizes the model's own pages and the two widths below.
        max_tokens: token slots of those pages; default as for `PagedCache`.
        step_tokens: most tokens computed in one step, by default the plan's, or 1024, on a card up
            to 8192 where it has memory for them. Fewer let decoding rows wait less for prompts,
            more compute prompts faster.
        verify_width: most tokens of a decoding row in one step, by default the plan's, or 1 (5 with
            a `draft`). All but the first are drafts, looked up in the row's own text; those that
            turn out right are kept. Results are the same for any width, except with `int4`,
            `retention` and `read_tokens`, where attention depends on how a text is cut into steps.
            More than 1 pays if a step of more tokens takes no longer.
        draft: a smaller model of the same vocabulary, on the same device, that makes the drafts
            instead. It gets pages of its own, for as many tokens as `cache` has. The more of a
            row's last drafts were right, the more it gets. A draft pays if its step takes a small
            part of the model's time, and many of its tokens are right.
        pack_weights: on a CPU, multiply with weights that are packed into blocks once, instead of
            in every step. It takes at most as many bytes again as the weights of linear layers, and
            gains more if a step has fewer tokens; see docs/generate.md. `auto` packs if that takes
            at most half of the free memory, or what `plan` counts for it. A model that cannot be
            packed runs as it is; with True a warning says so. `int8`, in float32, rounds weights
            (except embeddings and head) and their inputs to 8 bits: it takes half the bytes again,
            answers are not quite the model's, and prefixes are shared only among generators with
            `int8`.
        batch_invariant: on a CPU, give a row the same bits alone and in any batch, in steps of any
            width and pages of any size, in float32 and bfloat16; refused where that cannot be. See
            docs/howto/rollouts.md for what it costs.
        cuda_graphs: replay decoding steps as CUDA graphs, where the pages are on CUDA and attended
            by Triton kernels.
        unknown: "check" looks at a model that no list knows, as `PagedCache` does; default is to
            refuse it. Packed rows of it are tried, and of any model in which code of others runs.
        fields: other fields of `CacheConfig` (page_size, max_sequences, ...).

    Attributes:
        stats: a `GenerationStats` of the latest call, filled while it runs.

    Raises:
        TypeError: it is no model, or one without a language model head.
        UnsupportedModelError: packed rows over pages would be wrong for this model.
        BudgetExceeded: the pages do not fit into memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        cache: PagedKVCache | None = None,
        plan: MemoryPlan | None = None,
        max_tokens: int | None = None,
        step_tokens: int | None = None,
        verify_width: int | None = None,
        draft: PreTrainedModel | None = None,
        pack_weights: PackWeights = "auto",
        batch_invariant: bool = False,
        cuda_graphs: bool = True,
        unknown: Literal["check"] | None = None,
        **fields: Unpack[ModelPagesFields],
    ) -> None:
        ranks = ranks_of(without_adapters(model))
        if ranks.size > 1:
            given = [one is None for one in (cache, plan, draft)]
            ranks.require_same("arguments", spelled([step_tokens, verify_width, max_tokens, given]))
        asked = verify_width
        step_tokens, verify_width = widths(step_tokens, verify_width, plan, draft is not None)
        if draft is not None:
            require_draft(draft, model, tokenizer)
            if cache is None and plan is None and max_tokens is None:
                max_tokens = tokens_for_both(model, draft, dict(fields))
        sizes: dict[str, Any] = {"plan": plan, "max_tokens": max_tokens, **fields}
        sizes |= {"cache": cache, "unknown": unknown}
        sizes |= {"pack_weights": pack_weights, "batch_invariant": batch_invariant}
        self._packed = PackedModel(model, **sizes)
        self.cache = self._packed.kv
        self.model = model = self._packed.model
        self.encoder = PromptEncoder(model, tokenizer, takes_images=ranks.size == 1)
        if step_tokens is None:
            step_tokens = ranks.least(default_step_tokens(model, self.cache.device))
        self.step_tokens = step_tokens
        try:
            require_like_alone(self._packed)
            why_one = why_none(self.cache.config)
            if why_one and draft is not None:
                raise ValueError(f"draft: expected none {why_one}")
            if why_one and asked is not None and asked > 1:
                raise ValueError(f"verify_width: expected 1 {why_one}, got {asked}")
            self.verify_width = 1 if why_one else verify_width
            self._draft = None
            if draft is not None:
                self._draft = DraftModel(draft, self._packed, verify_width, pack_weights)
        except BaseException:
            self._packed.close()
            raise
        captured = cuda_graphs and can_capture(self._packed)
        self._graphs = DecodeGraphs(self._packed) if captured else None
        # A CPU has no device to run ahead of.
        self._ahead = self.cache.device.type == "cuda" and not self.cache.config.states
        # The plan has memory for the logits of this many rows.
        self._most_sampling = None if plan is None else plan.batch * plan.verify_width
        self.stats = GenerationStats()
        self._scheduler: Scheduler | None = None  # of the latest call

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that was given, or the one beside the checkpoint once it was needed."""
        return self.encoder.tokenizer

    def generate(self, prompts: Iterable[Prompt], **options: Any) -> list[Result]:
        """Returns all results in the order of the prompts; Ctrl-C returns those that are finished.

        An error that ends the call, such as one of the model's forward, has them as its `results`.

        Args:
            prompts: each a text, `[n]` ids, a list of chat messages, or what a processor returns
                for one prompt; or a column of them. Messages may have images or audio, and a
                dictionary with `text` and these is given to the processor. An iterator is read as
                rows leave.
            options: what transformers' `generate` takes (`max_new_tokens`, `do_sample`,
                `temperature`, `top_p`, `stop_strings`, `num_return_sequences`, `generation_config`,
                `logits_processor`, `stopping_criteria`, ...). `max_new_tokens` and `temperature`
                may be lists with one value per prompt, or iterators that are read in step with the
                one that gives prompts. Beyond these `seed`, an int or a list:
                sample k of a prompt draws as `generate` alone would after
                `torch.manual_seed(seed + k)`, whatever else is in the batch; `logprobs=True`;
                `salt`, bytes or regions, as for `PagedKVCache.add`, or a list of them: prefixes are
                shared only under the same salt;
                `chat_template_kwargs`, a dict or a list of them: what the chat template is told
                (`tools`, `documents`, `enable_thinking`, ...);
                and `processors`, a function of a prompt's place and a sample. It returns the list
                of logits processors of this row alone, for grammars that follow one text.

        Raises:
            ValueError, TypeError: options that are unknown or not served, or a list without any
                prompt, before any work.
        """
        stream = self.stream(prompts, **options)
        return finished(stream, "rows were finished", in_order)

    def stream(
        self,
        prompts: Iterable[Prompt],
        *,
        logprobs: bool = False,
        salt: Salt | Iterable[Salt] = b"",
        chat_template_kwargs: Chats = None,
        **options: Any,
    ) -> Iterator[Result]:
        """Yields results as they finish; arguments as for `generate`, which are checked at once.

        Prompts of an iterator are read as rows leave, up to a few hundred ahead. A wrong prompt is
        its row's error; an error of the iterator is raised after the rows that it gave before. A
        list that does not fit into the pages together is taken prefix by prefix.

        A paused stream keeps its pages. Other rows of its thread that need those pages end as
        errors; rows of other threads wait.
        """
        ranks, given = self.cache.ranks, (prompts, salt, chat_template_kwargs, options)
        source, chosen = self._ready(to_generate, self.cache.config, *given)
        source.require_same(ranks, ranks.size > 1 and [bool(logprobs), chosen.said])
        self.stats = GenerationStats()
        return self._run(source, chosen, logprobs, self.stats)

    def events(self, *, logprobs: bool = False) -> Events:
        """Returns `Events`: rows are added while others run, and each token is an event.

        One thread reads the events, and so takes the steps; any thread may add rows and cancel
        them. `docs/howto/events.md` shows it, and `async_events` for `asyncio`.

        Args:
            logprobs: whether events have the log-probability of their token.

        Raises:
            UnsupportedModelError: several processes share the model, whose steps have to agree.
        """
        if self.cache.ranks.size > 1:
            raise UnsupportedModelError("events: not served where several processes share a model")
        self._require_ready()
        self.stats = stats = GenerationStats()
        source = PromptQueue((), {}, known=True)
        return Events(self.encoder, self._parts(source, logprobs, stats), logprobs)

    def async_events(self, *, logprobs: bool = False) -> AsyncEvents:
        """`events` for `asyncio`: `async with generator.async_events() as live`.

        Steps are taken in a thread of their own, which ends with the block.
        """
        return AsyncEvents(self.events(logprobs=logprobs))

    def score(
        self,
        prompts: Iterable[Prompt],
        continuations: Any,
        *,
        salt: Salt | Sequence[Salt] = b"",
        chat_template_kwargs: Chats = None,
    ) -> list[list[Score]]:
        """Scores given continuations; returns a list for each prompt, in the order of the prompts.

        A context is computed once for all its continuations, and found by later calls. Ctrl-C
        returns what is finished; an error that ends the call has it as its `results`.

        Args:
            prompts: text, ids or chat messages, as for `generate`. An empty one stands for the
                token that begins a text.
            continuations: text or ids, one list for all prompts or a list for each of them.
                Behind a text, text is encoded together with it, and spaces at the prompt's end
                belong to the continuation. Behind ids and messages it is encoded alone.
            salt: bytes, regions, or a list of them, as for `generate`.
            chat_template_kwargs: a dict or a list of them, as for `generate`.

        Raises:
            ValueError, TypeError: invalid prompts or continuations, before any work.
        """
        count, stream = self._scores(prompts, continuations, salt, chat_template_kwargs)
        arranged = partial(by_choice, prompts=count)
        return finished(stream, "continuations were scored", arranged)

    def stream_scores(
        self,
        prompts: Iterable[Prompt],
        continuations: Any,
        *,
        salt: Salt | Sequence[Salt] = b"",
        chat_template_kwargs: Chats = None,
    ) -> Iterator[Score]:
        """Yields scores as they finish; arguments as for `score`, which are checked at once."""
        return self._scores(prompts, continuations, salt, chat_template_kwargs)[1]

    def _scores(self, *given: Any) -> tuple[int, Iterator[Score]]:
        """Checks a call of `score`; returns the number of its prompts, and their scores."""
        source, count = self._ready(to_score, *given)
        source.require_same(self.cache.ranks, "scores")
        self.stats = GenerationStats()
        return count, self._run_scores(source, self.stats)

    @property
    def running(self) -> list[Running]:
        """Rows of the latest call that run, for a thread that watches another one compute."""
        rows = [] if self._scheduler is None else [*self._scheduler.rows.running]
        return [
            Running(row.index, row.sample, [*row.tokens], max(0, len(row.prompt) - row.done))
            for row in rows
        ]

    def warm_up(self, workers: int | None = None) -> int:
        """Compiles the kernels that steps of this model launch, so that no step waits for them.

        The model computes a few hundred tokens for it. Where attention is not Triton's, there is
        nothing to do. If several processes share the model, all of them have to call it.

        Args:
            workers: processes that compile; default one for each core.

        Returns:
            How many kernels were compiled; others were in Triton's cache on disk.

        Raises:
            RuntimeError: a kernel does not compile.
        """
        self._require_ready()
        with self.cache.lock:
            return sum(compile_for(one, workers) for one in self._models)

    def close(self) -> None:
        """Detaches the model from paged attention. Idempotent."""
        for packed in self._models:
            packed.close()

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed weights, those of a draft included."""
        return sum(packed.packed_bytes for packed in self._models)

    @property
    def _models(self) -> list[PackedModel]:
        return [self._packed, *([] if self._draft is None else [self._draft.packed])]

    def __enter__(self) -> BatchGenerator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _parts(self, source: PromptQueue, logprobs: bool, stats: GenerationStats) -> Parts:
        """Makes the arguments of a job of rows that generate."""
        packed, graphs, widths = self._packed, self._graphs, (self.step_tokens, self.verify_width)
        drafter = None
        if self._draft is not None:
            drafter = ModelDrafts(self._draft, self.step_tokens, stats, self.cache.ranks)
        scheduler = Scheduler(self.cache, *widths, self._most_sampling, stats, drafter)
        self._scheduler = scheduler
        sight = StepImages(packed, stats) if source.may_see else None
        runner = StepRunner(packed, graphs, logprobs, stats, self._ahead, sight)
        return scheduler, runner, source

    def _run(
        self,
        source: PromptQueue,
        options: GenerationOptions,
        logprobs: bool,
        stats: GenerationStats,
    ) -> Iterator[Result]:
        job = GenerationJob(options, *self._parts(source, logprobs, stats))
        with closing(job.run()) as rows:
            for row in rows:
                try:
                    result = row.result(self.encoder.text(row.tokens), logprobs)
                except Exception as error:  # whatever a tokenizer may raise
                    rows.throw(error)
                    raise
                yield result

    def _run_scores(self, source: PromptQueue, stats: GenerationStats) -> Iterator[Score]:
        most = most_logits(self.model, self._most_sampling)
        scheduler = Scheduler(self.cache, self.step_tokens, 1, most, stats)
        job = ScoreJob(scheduler, ContinuationRunner(self._packed, stats), source)
        with closing(job.run()) as rows:
            for row in rows:
                assert isinstance(row, Continuation)
                yield row.score()

    def _ready(self, call: Callable[..., T], *given: Any) -> T:
        """Returns what a function of `calls.py` makes of a call; all ranks agree on errors."""

        def ready() -> T:
            self._require_ready()
            return call(self.encoder, *given)

        return self.cache.ranks.agree(ready)

    def _require_ready(self) -> None:
        self._packed.require_open()
        for packed in self._models:
            packed.require_same_kind()
            packed.require_caching()
        self._packed.warn_of_hooks()
        forget_dead()  # an interrupt may have left a step of a `PagedCache` open
