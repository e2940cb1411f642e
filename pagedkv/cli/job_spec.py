"""A batch job as it was asked for, and the options that its rows depend on."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

from pagedkv.config import needs_staging
from pagedkv.errors import PagedKVError

from .answers import ANSWER, refused_row, types_of
from .causes import LONG, SAID
from .errors import UsageError, words_of
from .job_rows import key_of
from .model_digest import identity_of, require_readable
from .output import Output
from .prompts import Prompt
from .scoring import Scoring
from .shard import Shard


@dataclass
class Job:
    """A batch job as it was asked for.

    Attributes:
        options: options of transformers' `generate`, for all prompts.
        sizes: arguments of the `BatchGenerator`: sizes, formats, a trace, a prefix store.
        cache: other fields of the generator's `CacheConfig`.
        memory: budgets that a plan is made for; empty without a plan.
        draft: a smaller model that drafts, if one does.
        shard: the part of the prompts to answer; all without one.
        expert_parallel: whether each of several processes has whole experts, not a part of all.
        template: variables of the chat template.
        wording: the --template that made prompts of columns, if it was given.
        scoring: what is scored, if the job does not generate.
        answer: name of the column that answers are written to.
        tokens: whether the ids of their tokens are written.
        explain: whether to say of which prompts the most was computed.
        skipped: causes of bad prompts that get no row at all.
        side: the end at which prompts that are too long are cut, if they are.
        tokenizer: one that is not the model's own.
        source: the Parquet file that all prompts come from, if they do.
    """

    model: str
    prompts: list[Prompt]
    prefix: Any
    raw: bool
    dtype: str
    sizes: dict[str, Any]
    samples: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    logprobs: bool = False
    cache: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    draft: str | None = None
    shard: Shard | None = None
    expert_parallel: bool = False
    template: dict[str, Any] = field(default_factory=dict)
    wording: str | None = None
    scoring: Scoring | None = None
    answer: str = ANSWER
    tokens: bool = False
    explain: bool = False
    skipped: frozenset[str] = frozenset()
    side: str | None = None
    source: str | None = None
    tokenizer: str | None = None

    @property
    def most_new(self) -> int:
        """The most new tokens of a prompt whose row sets no number of its own."""
        return self.scoring.most_tokens if self.scoring else int(self.options["max_new_tokens"])

    @property
    def types(self) -> dict[str, str]:
        """The types of the columns, by name, that rows have beside the prompts' own columns."""
        if self.scoring:
            return self.scoring.types
        return types_of(self.answer, self.side is not None, self.tokens, self.logprobs)

    @property
    def final(self) -> set[str]:
        """Causes of errors that stay as they are when the same command runs again."""
        return {*SAID} - self.skipped - ({LONG} if self.side else set())

    def refused(self) -> dict[int, str]:
        """Causes of the prompts that get an error in place of an answer, by index."""
        return {i: p.cause for i, p in enumerate(self.prompts) if p.cause in self.final}

    def set_aside(self, left: list[int], output: Output | None) -> list[int]:
        """Writes the rows of bad prompts, unless they are skipped.

        Returns:
            Indices of the good prompts.
        """
        bad = [i for i in left if self.prompts[i].cause]
        if output is not None:
            output.skip({i for i in bad if self.prompts[i].cause in self.skipped})
            for i in sorted(set(bad) & set(output.assigned)):
                for sample in range(self.samples):
                    output.write(refused_row(self.types, self.prompts[i], i, sample))
        return [i for i in left if not self.prompts[i].cause]

    def made_with(self) -> dict[str, Any]:
        """The model and options that every row is computed with, by name, as JSON values.

        The amount of memory, the cut of steps and the model's folder change no answer. They are
        left out, so that a job that ran out of memory can go on with less, or elsewhere.
        """
        formats = self.sizes["kv_format"]
        counts = {"retention", "budget", "keep", "read_tokens"}
        by_steps = needs_staging(formats) or bool(counts & self.cache.keys())
        if by_steps:
            counts.add("page_size")
        # Without a budget a policy evicts when pages run short, so the number of pages counts.
        if "retention" in self.cache and not self.cache.get("budget"):
            counts |= {"max_tokens", "max_sequences", "growth_step", "high_water", "low_water"}
        sizes = self.sizes | self.cache
        answers = {
            "samples": self.samples,
            "seed": self.seed,
            "logprobs": self.logprobs,
            "answer": self.answer,
            "tokens": self.tokens or None,
        }
        own = {
            "prefix": None if self.prefix is None else key_of(self.prefix),
            "raw": self.raw,
            "chat_template_kwargs": self.template or None,
            "template": self.wording,
            **(self.scoring.made_with() if self.scoring else answers),
            "dtype": self.dtype,
            "draft": self.draft if by_steps else None,
            **{name: value for name, value in sizes.items() if name in counts},
            "kv_format": ",".join(formats),
            "pack_weights": "int8" if self.sizes["pack_weights"] == "int8" else None,
        }
        given = {name: value for name, value in own.items() if value is not None}
        found = {**self.options, **given, **self._identity()}
        found.pop("num_return_sequences", None)  # `samples` says it
        return dict(json.loads(json.dumps(found, default=str)))

    def _identity(self) -> dict[str, str]:
        try:
            return identity_of(self.model, self.tokenizer)
        except (PagedKVError, ValueError, TypeError, OSError) as error:
            raise UsageError(cannot_load(self.model, error)) from error

    def require_readable(self) -> None:
        """Raises UsageError if a look at the model's folder shows that it cannot be used."""
        try:
            require_readable(self.model, self.tokenizer)
        except (PagedKVError, ValueError) as error:
            raise UsageError(f"MODEL: {error}") from error


def cannot_load(model: str, error: Exception, argument: str = "MODEL") -> str:
    """Says that a model cannot be loaded, and why."""
    if os.path.exists(model):  # False for a name that is too long; `Path` would raise
        return f"{argument}: cannot load {model}: {words_of(error)}"
    return f"{argument}: no folder {model}, and no id on the hub: {error}"
