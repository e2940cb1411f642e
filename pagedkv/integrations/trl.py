"""Rollouts of TRL's trainers over pages: each prompt is computed once, completions fork from it.

`PagedRollouts` goes before a trainer: `class Mine(PagedRollouts, GRPOTrainer)`. `PagedGRPOTrainer`
and `PagedRLOOTrainer` are made of TRL's trainers when they are first asked for.

Pages live as long as the rollouts of one batch. By the next batch the weights have changed, so no
prefix could be found again; and while the model trains, it has the memory and its own attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pagedkv.batch.generator import BatchGenerator
from pagedkv.errors import UnsupportedModelError

if TYPE_CHECKING:
    from pagedkv.batch.results import GenerationStats, Result

    PagedGRPOTrainer: Any
    PagedRLOOTrainer: Any

TRAINERS = {"PagedGRPOTrainer": "GRPOTrainer", "PagedRLOOTrainer": "RLOOTrainer"}
# Options of the trainer that would let another engine generate.
ENGINES = ("use_vllm", "use_transformers_continuous_batching")
# Classes of modules and parameters that are parts of a model's weights.
SHARDS = {"FullyShardedDataParallel", "FSDPModule", "DTensor", "FlatParameter", "DeepSpeed ZeRO-3"}


class PagedRollouts:
    """Lets a `BatchGenerator` generate a trainer's completions.

    Args:
        args, kwargs: the trainer's own.
        generator: arguments of the `BatchGenerator`, as `{"max_tokens": 65_536}`; by default pages
            take a quarter of the memory that is free.

    Attributes:
        rollout_stats: `GenerationStats` of the latest rollouts; of the latest turn, with tools.

    Raises:
        ValueError: the trainer shall use vLLM or continuous batching, or a `rollout_func`.
    """

    rollout_stats: GenerationStats | None = None
    _generator: BatchGenerator | None = None

    def __init__(self, *args: Any, generator: dict[str, Any] | None = None, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind_partial(*args, **kwargs).arguments
        for name in ENGINES:
            if getattr(given.get("args"), name, False):
                raise ValueError(f"{name}: expected False, completions are generated over pages")
        if given.get("rollout_func") is not None:
            raise ValueError("rollout_func: expected None, completions are generated over pages")
        self._fields = dict(generator or {})
        super().__init__(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's method: the completions of a batch, in several turns if there are tools."""
        with self._pages():
            return super()._generate(*args, **kwargs)  # type: ignore[misc]

    def _generate_single_turn(
        self,
        prompt_ids: Sequence[Sequence[int]],
        images: Any = None,
        multimodal_fields: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """TRL's method: each prompt's completion, and in GRPO its tokens' log-probabilities."""
        if images is not None or "pixel_values" in (multimodal_fields or {}):
            raise ValueError("images: expected prompts of text alone for rollouts over pages")
        own = inspect.signature(super()._generate_single_turn)  # type: ignore[misc]
        # A trainer wants log-probabilities at its own temperature; results have them at 1.
        is_model_s = getattr(self, "temperature", 1.0) == 1.0
        with self._pages() as pages:
            results = self._rolled_out(pages, [list(ids) for ids in prompt_ids], is_model_s)
        tokens = [result.tokens for result in results]
        if "num_generations" not in own.parameters:
            return tokens
        return tokens, [result.logprobs for result in results] if is_model_s else None

    @contextmanager
    def _pages(self) -> Iterator[BatchGenerator]:
        """The generator of these rollouts; the outermost block makes it and closes it."""
        if self._generator is not None:
            yield self._generator
            return
        trainer: Any = self
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        require_whole(trainer.model_wrapped)
        try:
            # Mixed precision keeps weights in float32; the copies that it casts live in here.
            with trainer.accelerator.autocast():
                pages = BatchGenerator(model, trainer.processing_class, **self._fields)
                self._generator = pages
                with pages:
                    yield pages
        finally:
            self._generator = None
            torch.clear_autocast_cache()  # a caller's own autocast would train with the copies

    def _rolled_out(
        self, pages: BatchGenerator, prompts: list[list[int]], logprobs: bool
    ) -> list[Result]:
        """A result for each prompt; equal prompts are computed once and fork."""
        trainer: Any = self
        places: dict[tuple[int, ...], list[int]] = {}
        for place, prompt in enumerate(prompts):
            places.setdefault(tuple(prompt), []).append(place)
        samples = gcd(*map(len, places.values()))  # one number for all prompts of a call
        groups = [
            (list(prompt), at[i : i + samples])
            for prompt, at in places.items()
            for i in range(0, len(at), samples)
        ]
        config = deepcopy(trainer.generation_config)
        # The trainer turns the cache off if gradients are checkpointed.
        config.update(num_return_sequences=samples, use_cache=True)
        distinct = [prompt for prompt, _ in groups]
        found: dict[int, Result] = {}
        with in_eval(pages.model):
            for result in pages.stream(distinct, generation_config=config, logprobs=logprobs):
                place = groups[result.index][1][result.sample]
                if result.error is not None:
                    raise RuntimeError(f"rollout of prompt {place}: {result.error}")
                found[place] = result
        self.rollout_stats = pages.stats
        return [found[place] for place in range(len(prompts))]


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Switches modules that train to evaluation (no dropout, no checkpoints), and back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def require_whole(model: nn.Module) -> None:
    """Raises if weights are shards: a forward outside of the trainer would see only a part."""
    kinds = {type(module).__name__ for module in model.modules()}
    for parameter in model.parameters():
        kinds |= {base.__name__ for base in type(parameter).__mro__}
        kinds |= {"DeepSpeed ZeRO-3"} if hasattr(parameter, "ds_id") else set()
    found = SHARDS & kinds
    if found:
        raise UnsupportedModelError(
            f"model: expected whole weights in each process, these are shards of {min(found)}; "
            "rollouts over pages serve one process, and several with whole copies (DDP)"
        )


def __getattr__(name: str) -> Any:
    """A trainer of TRL with paged rollouts, made when it is first asked for."""
    if name not in TRAINERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import trl
    except ModuleNotFoundError as missing:
        missing.add_note("TRL is needed for this: pip install 'pagedkv[trl]'")
        raise
    bases = PagedRollouts, getattr(trl, TRAINERS[name])
    text = f"TRL's `{TRAINERS[name]}` with `PagedRollouts`."
    globals()[name] = made = type(name, bases, {"__module__": __name__, "__doc__": text})
    return made
