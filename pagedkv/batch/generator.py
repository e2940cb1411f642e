"""`BatchGenerator`: many prompts, one model, as many tokens a second as the machine gives.

A call is a `Job`: the scheduler says which rows a step computes, the runner computes them,
transformers' rules choose tokens. A row's mistake is that row's `error`; the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from transformers import PreTrainedModel

from pagedkv.cache.cache import PagedKVCache
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.adapters import without_adapters
from pagedkv.hf.blocked_weights import PackWeights
from pagedkv.hf.transaction import forget_dead
from pagedkv.pages.salts import Salt
from pagedkv.planner import MemoryPlan
from pagedkv.ranks import ranks_of, spelled

from .chats import NAME as CHATS
from .chats import Chats, require_chats
from .drafts.draft_model import DraftModel, require_draft, tokens_for_both
from .drafts.drafter import why_none
from .drafts.model_drafts import ModelDrafts
from .encoder import PromptEncoder, needs_tokenizer
from .events.asynchronous import AsyncEvents
from .events.events import Events, Maker
from .graphs import DecodeGraphs, can_capture
from .job import GenerationJob
from .options import GenerationOptions
from .packed import PackedModel
from .per_prompt import each_of
from .precompile import compile_for
from .prompt_queue import PromptQueue
from .prompts import Prompt, Refused, Unread, as_list, has_length, require_prompts
from .results import GenerationStats, Result, Running, Score, by_choice, finished, in_order
from .rows import Row
from .runner import StepRunner
from .scheduler import Scheduler
from .scores.continuations import Continuation, ContinuationRunner, most_logits
from .scores.job import ScoreJob
from .scores.pairs import by_prompt, contexts_of
from .served import require_here
from .step_images import StepImages
from .tried import require_like_alone
from .widths import default_step_tokens, widths

if TYPE_CHECKING:
    from typing import Unpack

    from pagedkv.config import ModelPagesFields


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
        unknown: "check" looks at a model that no list knows, as `PagedCache` does, and tries packed
            rows of it; default is to refuse it.
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
            require_like_alone(self._packed, unknown)
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
        ranks = self.cache.ranks
        source, may_see, chosen = ranks.agree(
            partial(self._ready, prompts, salt, chat_template_kwargs, options)
        )
        source.require_same(ranks, ranks.size > 1 and [bool(logprobs), chosen.said])
        self.stats = GenerationStats()
        return self._run(source, may_see, chosen, logprobs, self.stats)

    def _ready(
        self, prompts: Any, salt: Any, told: Any, options: dict[str, Any]
    ) -> tuple[PromptQueue, bool, GenerationOptions]:
        """Checks a call; returns its prompts, whether some may have images, and its options."""
        require_prompts(prompts)
        self._require_ready()
        require_here(options)
        every = as_list(prompts) if has_length(prompts) else None
        count = None if every is None else len(every)
        salts, chats = each_of("salt", salt, count), each_of(CHATS, told, count)
        if every is None:
            ids: Any = self.encoder.coming(prompts, chats)
        else:
            ids = self.encoder.known(every, list(chats))
        chosen = self._options(count, options)
        may_see = every is None or any(
            isinstance(prompt, Unread) and not isinstance(prompt, Refused) for prompt in ids
        )
        source = PromptQueue(ids, {"salt": salts, **chosen.own}, every is not None)
        known = [] if every is None else [one for one in ids if not isinstance(one, Unread)]
        if sum(map(len, known)) > self.cache.config.max_tokens:  # else all prefixes stay stored
            source.put_together(self.cache.config.page_size)
        return source, may_see, chosen

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
        make = Maker(
            self._options,
            self.encoder.one,
            partial(self._result, logprobs=logprobs),
            lambda: self.tokenizer,
            self._parts(source, True, logprobs, stats),
        )
        return Events(make, source, stats, logprobs)

    def async_events(self, *, logprobs: bool = False) -> AsyncEvents:
        """`events` for `asyncio`: `async with generator.async_events() as live`.

        Steps are taken in a thread of their own, which ends with the block.
        """
        return AsyncEvents(self.events(logprobs=logprobs))

    def _options(self, prompts: int | None, options: dict[str, Any]) -> GenerationOptions:
        require_here(options)
        if options.get("stop_strings"):
            self.encoder.load_tokenizer()
        return GenerationOptions(self.model, self.tokenizer, prompts, **options)

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
        every = self.cache.ranks.agree(partial(as_list, prompts))
        said: dict[str, Any] = {"salt": salt, CHATS: chat_template_kwargs}
        stream = self.stream_scores(every, continuations, **said)
        arranged = partial(by_choice, prompts=len(every))
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
        given = prompts, continuations, salt, chat_template_kwargs
        source = self.cache.ranks.agree(partial(self._ready_to_score, *given))
        source.require_same(self.cache.ranks, "scores")
        self.stats = GenerationStats()
        return self._run_scores(source, self.stats)

    def _ready_to_score(
        self, prompts: Any, continuations: Any, salt: Any, told: Any
    ) -> PromptQueue:
        """Checks a call of `score`; returns its contexts."""
        prompts = as_list(prompts)
        self._require_ready()
        salts = list(each_of("salt", salt, len(prompts)))
        chats = list(each_of(CHATS, told, len(prompts)))
        require_chats(prompts, chats)
        each = by_prompt(continuations, len(prompts))
        words = [one for own in each for one in own if isinstance(one, str)]
        if words or any(map(needs_tokenizer, prompts)):
            self.encoder.load_tokenizer()
        contexts = contexts_of(prompts, each, salts, chats, self.tokenizer, self.encoder.start)
        return PromptQueue(contexts, {"salt": [context.salt for context in contexts]}, known=True)

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

    def _parts(
        self, source: PromptQueue, may_see: bool, logprobs: bool, stats: GenerationStats
    ) -> tuple[Any, ...]:
        """Makes the parts of a job of rows that generate: scheduler, runner and the rest."""
        packed, graphs, widths = self._packed, self._graphs, (self.step_tokens, self.verify_width)
        drafter = None
        if self._draft is not None:
            drafter = ModelDrafts(self._draft, self.step_tokens, stats, self.cache.ranks)
        scheduler = Scheduler(self.cache, *widths, self._most_sampling, stats, drafter)
        self._scheduler = scheduler
        sight = StepImages(packed, stats) if may_see else None
        runner = StepRunner(packed, graphs, logprobs, stats, self._ahead, sight)
        return packed, graphs, scheduler, runner, source, stats, sight

    def _run(
        self,
        source: PromptQueue,
        may_see: bool,
        options: GenerationOptions,
        logprobs: bool,
        stats: GenerationStats,
    ) -> Iterator[Result]:
        job = GenerationJob(options, *self._parts(source, may_see, logprobs, stats))
        with closing(job.run()) as rows:
            for row in rows:
                try:
                    result = self._result(row, logprobs)
                except Exception as error:  # whatever a tokenizer may raise
                    rows.throw(error)
                    raise
                yield result

    def _run_scores(self, source: PromptQueue, stats: GenerationStats) -> Iterator[Score]:
        packed, most = self._packed, most_logits(self._packed.model, self._most_sampling)
        scheduler = Scheduler(self.cache, self.step_tokens, 1, most, stats)
        runner = ContinuationRunner(packed, stats)
        job = ScoreJob(packed, None, scheduler, runner, source, stats)
        with closing(job.run()) as rows:
            for row in rows:
                assert isinstance(row, Continuation)
                yield row.result()

    def _require_ready(self) -> None:
        self._packed.require_open()
        for packed in self._models:
            packed.require_same_kind()
            packed.require_caching()
        self._packed.warn_of_hooks()
        forget_dead()  # an interrupt may have left a step of a `PagedCache` open

    def _result(self, row: Row, logprobs: bool) -> Result:
        return Result(
            row.index,
            row.sample,
            row.tokens,
            self.encoder.text(row.tokens),
            row.logprobs if logprobs else None,
            "error" if row.error else row.finish_reason,  # type: ignore[arg-type]
            row.cached_tokens,
            row.error,
        )
