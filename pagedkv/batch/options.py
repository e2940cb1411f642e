"""Transformers' generation options of one call, checked before any work, and the rules they make.

The rules are transformers' own: it checks the options and builds each row's logits processors and
stopping criteria from that row's prompt alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    generation,
)

from pagedkv.hf.model import device_of, text_config
from pagedkv.names import OPTIONS, meant

from .option_types import require_callables, require_kinds, require_stateless
from .per_prompt import EACH, require_seed, value_of, values_of
from .prompt_queue import ENDED
from .sampling import RowRules, reason
from .served import Served, inherited, unset

# These change every row of scores on its own and never look at ids.
WITHOUT_IDS = (
    generation.EpsilonLogitsWarper,
    generation.EtaLogitsWarper,
    generation.InfNanRemoveLogitsProcessor,
    generation.LogitNormalization,
    generation.MinPLogitsWarper,
    generation.SuppressTokensLogitsProcessor,
    generation.TemperatureLogitsWarper,
    generation.TopKLogitsWarper,
    generation.TopPLogitsWarper,
    generation.TypicalLogitsWarper,
)
# These look at ids, and change every row of scores by its own ids alone, if rows are equally long.
BY_IDS = (
    generation.ExponentialDecayLengthPenalty,
    generation.ForcedBOSTokenLogitsProcessor,
    generation.ForcedEOSTokenLogitsProcessor,
    generation.MinLengthLogitsProcessor,
    generation.MinNewTokensLengthLogitsProcessor,
    generation.NoBadWordsLogitsProcessor,
    generation.NoRepeatNGramLogitsProcessor,
    generation.RepetitionPenaltyLogitsProcessor,
    generation.SequenceBiasLogitsProcessor,
    generation.SuppressTokensAtBeginLogitsProcessor,
)
MOST_CHECKED = 1024  # configurations, and rules, that are kept for combinations of values

Seeds = int | Iterable[int | None] | None


class GenerationOptions:
    """The options of one call, for all its prompts.

    Args:
        model: its `generation_config` gives the options that are not given here.
        prompts: how many there are; None if nobody knows, because they are read as rows leave.
        options: transformers' options; `max_new_tokens`, `temperature` and `seed` may be lists
            with one value per prompt. A temperature of 0 in a list is greedy.
            Where `prompts` is None these are iterables that are read in step with the prompts.
        processors: makes the logits processors of one row, from its prompt's place and its sample.

    Raises:
        ValueError, TypeError: transformers' own errors for options it does not know or accept, and
            ours for those that packed rows do not serve.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        prompts: int | None,
        *,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        processors: Callable[[int, int], Sequence[Any]] | None = None,
        seed: Seeds = None,
        **options: Any,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._custom = (
            require_callables("logits_processor", logits_processor),
            require_callables("stopping_criteria", stopping_criteria),
        )
        for name, value in (
            ("processors", processors),
            ("prefix_allowed_tokens_fn", prefix_allowed_tokens_fn),
        ):
            if value is not None and not callable(value):
                raise TypeError(f"{name}: expected a callable, got {value!r}")
        self._make = processors
        self._allowed = prefix_allowed_tokens_fn
        self._vocabulary = text_config(model).vocab_size
        self._device = device_of(model)  # asked once, because it looks at parameters
        self.own: dict[str, Iterable[Any]] = {}
        given: dict[str, Any] = {"seed": seed, **{name: options.get(name) for name in EACH}}
        for name, one_or_more in given.items():
            if (values := values_of(name, one_or_more, prompts)) is not None:
                self.own[name] = values
                options.pop(name, None)
        self._each = [name for name in self.own if name != "seed"]
        self._seed = None if "seed" in self.own else seed
        require_seed(self._seed)
        if generation_config is not None:
            if not isinstance(generation_config, GenerationConfig):
                raise TypeError(
                    f"generation_config: expected a GenerationConfig, got {generation_config!r:.80}"
                )
            require_kinds(vars(generation_config))
        require_kinds(options)
        configs = (generation_config, model.generation_config)
        self._defaults = [unset(name, options, *configs) for name in ("max_length", "min_length")]
        self._config, unknown = model._prepare_generation_config(generation_config, **options)
        served = Served(self._config, inherited(options, generation_config))
        served.leave_out(unknown)
        try:
            model._validate_model_kwargs(dict(unknown))
        except ValueError as error:
            for name in unknown:
                if near := meant(name, vars(self._config), OPTIONS):
                    raise ValueError(f"{name}: generate has no such option{near}") from error
            raise
        if unknown:
            raise ValueError(f"options: {', '.join(unknown)} cannot be passed to packed rows")
        served.require(model)
        self.samples = self._config.num_return_sequences or 1
        require_stateless(self._custom[0], (2 if prompts is None else prompts) * self.samples)
        self._checked: dict[Any, tuple[GenerationConfig, StoppingCriteriaList]] = {}
        self._known: dict[Any, RowRules] = {}  # by a prompt's values and length
        known = [self.own[name] for name in self._each] if prompts is not None else []
        for every in set(zip(*known)) or {()}:
            self._for_values(every)
        self._begin, self._max_time = time(), self._config.max_time

    @property
    def said(self) -> list[Any]:
        """The options of the call, to compare them between processes."""
        kinds = [[type(one).__qualname__ for one in own] for own in self._custom]
        own = [self._make is None, self._allowed is None, self._seed, sorted(self.own)]
        return [self._config.to_dict(), kinds, own]

    @property
    def stops(self) -> list[str]:
        """The strings that end a text."""
        stops = self._config.stop_strings or []
        return [stops] if isinstance(stops, str) else list(stops)

    def require(self, own: Mapping[str, Any]) -> None:
        """Raises transformers' own errors for values of one prompt that it does not accept."""
        self._for_values(tuple(value_of(name, own[name]) for name in self._each))

    @property
    def is_over(self) -> bool:
        """Whether the time for the whole call is over."""
        return self._max_time is not None and time() - self._begin > self._max_time

    def what_is_wrong(self, place: int, own: Mapping[str, Any]) -> str | None:
        """Returns what is wrong with the values that came with one prompt; None if nothing is."""
        try:
            for name, value in own.items():
                if value is ENDED:
                    return f"{name}: expected one value for each prompt, got {place}"
                value_of(name, value)
        except (ValueError, TypeError) as error:
            return str(error)
        return None

    def _for_values(self, values: tuple[Any, ...]) -> tuple[GenerationConfig, StoppingCriteriaList]:
        """Returns options and stopping criteria for prompts with these values; makes them once."""
        if values not in self._checked:
            config = copy.deepcopy(self._config)
            own = dict(zip(self._each, values))
            if own.get("temperature") == 0:
                own |= {"temperature": None, "do_sample": False, "num_return_sequences": None}
            config.update(**own)
            self.model._prepare_special_tokens(config, device=self._device)
            self._processors(config, torch.zeros(1, 1, dtype=torch.long, device="cpu"), 0, [])
            if config.max_new_tokens is not None:
                config.max_length = None  # else transformers warns for every prompt which one wins
            if len(self._checked) >= MOST_CHECKED:  # values from an iterator may never end
                self._checked.clear()
            self._checked[values] = config, self._criteria(config)
        return self._checked[values]

    def rules(self, index: int, sample: int, prompt: Any, own: Mapping[str, Any]) -> RowRules:
        """Returns the rules of one sample of a prompt.

        Args:
            index: the prompt's place.
            prompt: `[n]` ids.
            own: the prompt's own values, by option.

        Raises:
            ValueError: the prompt is as long as its text may become, its processors cannot be made,
                or it is greedy and not the only sample.
        """
        values = tuple(value_of(name, own[name]) for name in self._each)
        alike = values, len(prompt)
        if (rules := self._known.get(alike)) is None:
            rules = self._new_rules(values, index, sample, prompt, own)
            if rules.ids is None and self._make is None:  # only the prompt's length matters
                if len(self._known) >= MOST_CHECKED:
                    self._known.clear()
                self._known[alike] = rules
        elif rules.generator is not None:
            rules = replace(rules, generator=self._generator(own, sample))
        return rules

    def _new_rules(
        self, values: tuple[Any, ...], index: int, sample: int, prompt: Any, own: Mapping[str, Any]
    ) -> RowRules:
        config, criteria = self._for_values(values)
        if self.samples > 1 and not config.do_sample:
            raise ValueError(
                f"temperature: 0 is greedy, and all {self.samples} num_return_sequences would be "
                "the same; give one above 0"
            )
        config = copy.copy(config)
        ids = torch.from_numpy(np.array(prompt, np.int64))[None]
        ids = ids.to(self._device, non_blocking=True)
        self.model._prepare_generated_length(
            config, *self._defaults, "input_ids", ids.shape[1], ids
        )
        self.model._validate_generated_length(config, ids.shape[1], False)
        made = self._made(index, sample)
        processors = self._processors(config, ids, index, made)
        replaced = any(type(criterion) is EosTokenCriteria for criterion in self._custom[1])
        ends = None if replaced else config._eos_token_tensor
        kinds = {type(processor) for processor in processors}
        by_text = bool(made) or not kinds <= {*WITHOUT_IDS}
        alike: Any = (config.do_sample, config.temperature)
        if by_text:  # they depend on the configuration and the prompt's length alone
            known = not made and kinds <= {*WITHOUT_IDS, *BY_IDS}
            alike = (values, ids.shape[1]) if known else None
        return RowRules(
            limit=self._limit(config),
            ends=frozenset(() if ends is None else ends.tolist()),
            alike=alike,
            processors=processors,
            criteria=criteria,
            generator=self._generator(own, sample) if config.do_sample else None,
            ids=ids if by_text or criteria else None,
            by_text=by_text,
        )

    def _made(self, index: int, sample: int) -> list[Any]:
        """Returns the processors that the caller makes for one row."""
        if self._make is None:
            return []
        try:
            return require_callables("processors", self._make(index, sample))
        except Exception as error:
            raise ValueError(reason(error, "making its processors")) from error

    def _processors(
        self, config: GenerationConfig, ids: Tensor, index: int, made: list[Any]
    ) -> LogitsProcessorList:
        allowed = None if self._allowed is None else partial(self._ids_allowed, index)
        if self.samples > 1:  # each row is given to its processors alone
            config = copy.copy(config)
            config.num_return_sequences = 1
        return self.model._get_logits_processor(
            config,
            input_ids_seq_length=ids.shape[1],
            encoder_input_ids=ids,
            prefix_allowed_tokens_fn=allowed,
            logits_processor=LogitsProcessorList(self._custom[0] + made),
            device=self._device,
            model_kwargs={},
        )

    def _ids_allowed(self, index: int, _: int, text: Tensor) -> Tensor:
        """Asks the caller which ids may follow; refuses ids that would crash a card's context."""
        assert self._allowed is not None
        ids = torch.as_tensor(self._allowed(index, text), device=text.device)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._vocabulary:
            raise ValueError(
                f"prefix_allowed_tokens_fn: expected ids 0..{self._vocabulary - 1}, got "
                f"{ids.min()}..{ids.max()}"
            )
        return ids

    def _criteria(self, config: GenerationConfig) -> StoppingCriteriaList:
        """Makes the criteria, except transformers' own for length and end tokens: rows do these."""
        custom = StoppingCriteriaList(self._custom[1])
        every = self.model._get_stopping_criteria(config, custom, tokenizer=self.tokenizer)
        return StoppingCriteriaList(
            [
                c
                for c in every
                if type(c) not in (MaxLengthCriteria, EosTokenCriteria) or c in custom
            ]
        )

    def _limit(self, config: GenerationConfig) -> int:
        """Returns the tokens a text may reach; a caller's criterion replaces the configured."""
        own = [c.max_length for c in self._custom[1] if type(c) is MaxLengthCriteria]
        return min(own) if own else config.max_length

    def _generator(self, own: Mapping[str, Any], sample: int) -> torch.Generator:
        seed = own.get("seed", self._seed)
        start = int(torch.randint(2**62, (), device="cpu")) if seed is None else int(seed) + sample
        return torch.Generator(self._device).manual_seed(start)
