"""`--model pagedkv` for lm-evaluation-harness: its own transformers model, computed over pages.

A context is computed once for all its choices, and so is everything that contexts have in common.
Loading, tokenising, chat templates and truncation are lm-eval's.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from tqdm import tqdm

from pagedkv.batch import BatchGenerator, Result
from pagedkv.config import ModelPagesFields
from pagedkv.errors import ModelArgsError, RequestError, UnsupportedModelError

NAME = "pagedkv"
# The generator takes OWN of the model_args; all others are for lm-eval, or `from_pretrained`.
OBJECTS = {"cache", "plan", "groups", "states", "fingerprint"}  # for Python, not for a command
OWN = {*inspect.signature(BatchGenerator).parameters, *ModelPagesFields.__annotations__}
OWN -= {"model", "tokenizer", "fields"}
LM_EVALS = set(inspect.signature(HFLM.__init__).parameters) - {"self", "kwargs"}
# These would silently have no effect, because nothing is cast, spread or cut into batches.
WITHOUT_EFFECT = {
    "parallelize": ((None, False), "weights are put on one device; give `device`"),
    "tp_plan": ((None,), "weights are put on one device; give `device`"),
    "mixed_precision_dtype": ((None,), "the model computes in one dtype; give `dtype`"),
    "softmax_dtype": (
        (None, "float32", torch.float32),
        "log-probabilities are computed in float32",
    ),
}
# Hardly slower than 256 rows at once, in less memory.
LESS_MEMORY = {"growth_step": 2048, "max_sequences": 32}
IN_STEPS = "requests are packed into steps of `step_tokens` tokens"

log = logging.getLogger(__name__)


class PagedLM(HFLM):
    """lm-eval's `hf` model, whose scores and texts are computed over paged K and V.

    `--model_args`, or keywords, are those of lm-eval's `hf` model and those of `BatchGenerator`:
    `pretrained=..., dtype=bfloat16, kv_format=int4`.

    Args:
        pretrained: a folder, the id of a model on the hub, or a model.
        device: by default a card if there is one.
        batch_size, max_batch_size: without effect.
        arguments: all others. On a CPU, unless there is a `cache`, a `plan` or `max_tokens`,
            `growth_step` is 2,048 tokens and `max_sequences` 32.

    Attributes:
        generator: the `BatchGenerator` that computes.

    Raises:
        ModelArgsError: an argument is unknown, or without effect here, or what it names cannot be
            loaded.
        UnsupportedModelError: packed rows over pages would be wrong for this model.
    """

    def __init__(
        self,
        pretrained: Any = None,
        *,
        device: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        **arguments: Any,
    ) -> None:
        own, others = _told_apart(arguments, is_loaded=not isinstance(pretrained, str))
        for name, value in (("batch_size", batch_size), ("max_batch_size", max_batch_size)):
            if value not in (None, 1, "1"):
                log.warning("%s: %r is without effect, %s", name, value, IN_STEPS)
        if pretrained is None:
            raise ModelArgsError("pretrained: expected a folder, the id of a model, or a model")
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            super().__init__(pretrained, device=device, **others)
        except OSError as error:
            raise ModelArgsError(f"model_args: cannot load what they name: {error}") from error
        except TypeError as error:
            if not any(f"argument '{name}'" in str(error) for name in others.keys() - LM_EVALS):
                raise
            raise ModelArgsError(f"model_args: {error}") from error
        if self.device.type == "cpu" and not {"cache", "plan", "max_tokens"} & set(own):
            own = LESS_MEMORY | own
        try:
            self.generator = BatchGenerator(self.model, self.tokenizer, **own)
        except (TypeError, ValueError) as error:
            raise ModelArgsError(f"model_args: {error}") from error

    def _get_backend(self, *args: Any, **kwargs: Any) -> None:
        super()._get_backend(*args, **kwargs)
        if self.backend != "causal":
            raise UnsupportedModelError(
                f"backend: expected a decoder, got {self.backend}: the cross-attention of encoder "
                "and decoder has no pages. `--model hf` serves it"
            )

    @property
    def batch_size(self) -> int:
        """How many windows of long texts lm-eval hands over at once: all."""
        return sys.maxsize

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether it is the greedy one."""
        places: dict[tuple[int, ...], list[int]] = {}
        for place, (_, context, continuation) in enumerate(requests):
            kept = self.max_length + 1 - len(continuation)
            if kept < 1:
                raise RequestError(
                    f"{_named(requests, place)}: expected a continuation of at most max_length = "
                    f"{self.max_length} tokens, got {len(continuation)}"
                )
            places.setdefault(tuple(context[-kept:]), []).append(place)
        cut = sum(len(c) + len(more) > self.max_length + 1 for _, c, more in requests)
        if cut:
            log.warning(
                "%d of %d requests are longer than max_length = %d tokens and lose their beginning",
                *(cut, len(requests), self.max_length),
            )
        answers: list[Any] = [None] * len(requests)
        contexts, groups = [list(context) for context in places], list(places.values())
        continuations = [[list(requests[place][2]) for place in of] for of in groups]
        with self._bar("loglikelihood", len(requests), disable_tqdm) as bar:
            for score in self.generator.stream_scores(contexts, continuations):
                place = groups[score.index][score.choice]
                if score.error is not None:
                    raise RequestError(f"{_named(requests, place)}: {score.error}")
                answers[place] = answer = score.logprob, score.is_greedy
                if (key := requests[place][0]) is not None:  # a window of a longer text has none
                    self.cache_hook.add_partial("loglikelihood", key, answer)
                bar.update(1)
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text behind each context, up to the first of its stop strings."""
        alike: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            alike.setdefault(repr(sorted(request.args[1].items())), []).append(place)
        texts = [""] * len(requests)
        with self._bar("generate_until", len(requests), disable_tqdm) as bar:
            for of in alike.values():
                contexts = [requests[place].args[0] for place in of]
                for index, text in self._texts(contexts, requests[of[0]].args[1]):
                    texts[of[index]] = text
                    self.cache_hook.add_partial("generate_until", requests[of[index]].args, text)
                    bar.update(1)
        return texts

    def _bar(self, kind: str, total: int, disabled: bool) -> Any:
        disabled = disabled or self.rank != 0
        return tqdm(total=total, desc=f"Running {kind} requests", disable=disabled)

    def _texts(self, contexts: list[str], given: dict[str, Any]) -> Iterator[tuple[int, str]]:
        """Yields texts behind contexts with the same options, as they finish, with their index."""
        options = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        stops = handle_stop_sequences(options.pop("until"), eos=eos)
        new = options.pop("max_gen_toks")
        if new >= self.max_length:
            raise RequestError(
                f"max_gen_toks: expected fewer than max_length = {self.max_length}, got {new}"
            )
        if not options["do_sample"]:
            options.pop("temperature", None)  # lm-eval gives 0
        if "max_length" not in options:
            options["max_new_tokens"] = new
        options.setdefault("eos_token_id", self._ends())
        prompts = [self._prompt(context, self.max_length - new) for context in contexts]

        def stop(index: int, sample: int) -> list[Any]:
            return [StopBehind(stops, self.tokenizer, len(prompts[index]))]

        for result in self.generator.stream(prompts, processors=stop, **options):
            if result.error is not None:
                end = contexts[result.index][-60:]
                raise RequestError(f"the request whose context ends with {end!r}: {result.error}")
            yield result.index, self._answer(result, stops)

    def _prompt(self, context: str, most: int) -> list[int]:
        ids, _ = self.tok_batch_encode(
            [context], left_truncate_len=most, truncation=self.truncation
        )
        return ids[0].tolist()

    def _ends(self) -> list[int]:
        """The tokens that end a text: the model's, and the tokenizer's, as lm-eval has it."""
        ends = self.generator.model.generation_config.eos_token_id
        ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        return list(dict.fromkeys([*ends, self.eot_token_id]))

    def _answer(self, result: Result, stops: list[str]) -> str:
        """Returns a text without the thoughts before it, and without its stop string."""
        tokens, end = result.tokens, self.think_end_token
        if not isinstance(end, int):
            return postprocess_generated_text(self.tok_decode(tokens), stops, end)
        if end in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
        return postprocess_generated_text(self.tok_decode(tokens).lstrip(), stops, None)


class StopBehind:
    """A logits processor of one row that ends it behind the first stop string of its own text.

    Transformers' `stop_strings` looks at the end of the prompt, too: if two line breaks are a stop
    string and a chat template ends with one, the first line break of an answer would end it.

    Args:
        prompt: the number of tokens of the row's prompt, which are not looked at.
    """

    def __init__(self, stops: list[str], tokenizer: Any, prompt: int) -> None:
        stops = [stop for stop in stops if stop]  # every text has an empty one
        self.stops, self.tokenizer, self.prompt = stops, tokenizer, prompt
        # As many as lm-eval looks at: texts may be cut into more tokens than their stop string.
        lengths = [len(tokenizer.encode(stop, add_special_tokens=False)) for stop in stops]
        self.most = max(lengths, default=0) + 2

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        text = self.tokenizer.decode(ids[0, self.prompt :][-self.most :])
        if any(stop in text for stop in self.stops):
            scores = torch.full_like(scores, -torch.inf)
            scores[:, self.tokenizer.eos_token_id] = 0
        return scores


def _told_apart(
    arguments: dict[str, Any], is_loaded: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments for the generator, and those for lm-eval.

    Args:
        is_loaded: whether the model is loaded already; then names unknown to both are refused.
    """
    for name, (harmless, why) in WITHOUT_EFFECT.items():
        if (value := arguments.get(name)) not in harmless:
            raise ModelArgsError(f"{name}: without effect over pages, got {value!r}: {why}")
    own = {name: value for name, value in arguments.items() if name in OWN}
    others = {name: value for name, value in arguments.items() if name not in OWN}
    for name in others.keys() - LM_EVALS:
        close = get_close_matches(name, OWN - OBJECTS | {"pretrained"}, n=1, cutoff=0.8)
        if close or is_loaded:
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ModelArgsError(f"model_args: no argument is called {name}{hint}")
    formats = own.get("kv_format")
    if isinstance(formats, str) and "," in formats:
        own["kv_format"] = tuple(formats.split(","))
    elif isinstance(formats, list):
        own["kv_format"] = tuple(formats)
    return own, others


def _named(requests: Sequence[Any], place: int) -> str:
    key = requests[place][0]
    if key is None:
        return f"window {place}"
    return f"the request {key[0][-60:]!r} + {key[1][:60]!r}"


# Later versions of lm-eval find the class by its entry point, and have the name already.
if NAME not in model_registry:
    model_registry.register(NAME, target=PagedLM)
