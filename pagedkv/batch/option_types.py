"""Checks the types of a caller's options: transformers checks few, and its errors name fewer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from operator import index
from typing import Any

import numpy as np
from transformers import GenerationConfig
from transformers.generation import (
    BaseWatermarkingConfig,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

# Packages whose processors follow one text token by token, and transformers' own that do.
STATEFUL_PACKAGES = {"xgrammar", "outlines", "outlines_core", "llguidance", "guidance"}
STATEFUL = SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor
LONGEST_NGRAM = 2**16


def is_int(value: Any) -> bool:
    """Whether a value is an integer, also one of numpy's or torch's, but no truth value."""
    return hasattr(value, "__index__") and not isinstance(value, (bool, np.bool_))


def is_number(value: Any) -> bool:
    """Whether a value is a number, but no truth value."""
    return hasattr(value, "__float__") and not isinstance(value, (bool, np.bool_))


def _is_list_of(fits: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, (list, tuple, set, np.ndarray)) and all(map(fits, value))


def _id(value: Any) -> bool:
    return is_int(value) and abs(index(value)) < 2**62


def _ids(value: Any) -> bool:
    if hasattr(value, "tolist"):  # an array or a tensor
        value = value.tolist()
    return _id(value) or _is_list_of(_id, value)


def _ids_in_order(value: Any) -> bool:
    return _ids(value) and not isinstance(value, set)


def _text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _decay(value: Any) -> bool:
    pair = isinstance(value, (list, tuple)) and len(value) == 2
    return pair and is_int(value[0]) and is_number(value[1])


# Names of options; what their values must be, in words and as a check.
_TABLE: list[tuple[str, str, Callable[[Any], bool]]] = [
    (
        "max_new_tokens max_length num_return_sequences num_beams",
        "a positive int",
        lambda x: is_int(x) and x > 0,
    ),
    (
        "min_new_tokens min_length top_k",
        "an int from 0 on",
        lambda x: is_int(x) and x >= 0,
    ),
    (  # transformers copies a text as many times
        "no_repeat_ngram_size encoder_no_repeat_ngram_size",
        f"an int from 0 to {LONGEST_NGRAM}",
        lambda x: isinstance(x, int) and is_int(x) and 0 <= x <= LONGEST_NGRAM,
    ),
    ("temperature", "a finite number from 0 on", lambda x: is_number(x) and 0 <= x < inf),
    ("max_time", "a number of seconds from 0 on", lambda x: is_number(x) and x >= 0),
    (
        "repetition_penalty encoder_repetition_penalty",
        "a finite float above 0",
        lambda x: isinstance(x, float) and 0 < x < inf,
    ),
    (
        "top_p min_p top_h typical_p epsilon_cutoff eta_cutoff assistant_ensemble_weight",
        "a number from 0 to 1",
        lambda x: is_number(x) and 0 <= x <= 1,
    ),
    (
        "do_sample renormalize_logits remove_invalid_values",
        "True or False",
        lambda x: isinstance(x, (bool, np.bool_)),
    ),
    ("penalty_alpha", "a number from 0 on", lambda x: is_number(x) and x >= 0),
    ("forced_bos_token_id pad_token_id", "an id", _id),
    ("early_stopping", "True, False or 'never'", lambda x: x in (True, False, "never")),
    (
        "eos_token_id bos_token_id decoder_start_token_id",
        "an id or a list of ids",
        _ids_in_order,
    ),
    (
        "forced_eos_token_id",
        "an id or a list of ids, at least one",
        lambda x: _ids_in_order(x) and np.size(x) > 0,
    ),
    (
        "suppress_tokens begin_suppress_tokens",
        "a list of ids",
        lambda x: _ids(x) and not is_int(x),
    ),
    (
        "bad_words_ids",
        "a list of lists of ids, none of them empty",
        lambda x: _is_list_of(lambda word: len(word) > 0 and _is_list_of(_id, word), x),
    ),
    ("exponential_decay_length_penalty", "a pair of an int and a number", _decay),
    (
        "sequence_bias",
        "a dict from ids to a bias, or a list of such pairs",
        lambda x: isinstance(x, dict) or _is_list_of(_pair, x),
    ),
    (
        "watermarking_config",
        "a WatermarkingConfig or a SynthIDTextWatermarkingConfig",
        lambda x: isinstance(x, (BaseWatermarkingConfig, dict)),
    ),
    (
        "stop_strings",
        "a text or a list of texts, none of them empty",
        lambda x: _text(x) or (_is_list_of(_text, x) and len(x) > 0),
    ),
]
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = dict.fromkeys(
    vars(GenerationConfig()), ("no array", lambda x: not getattr(x, "ndim", 0))
)
KINDS |= {name: (words, fits) for names, words, fits in _TABLE for name in names.split()}


def require_kinds(options: Mapping[str, Any]) -> None:
    """Raises for the first option whose value does not fit its name; None means not given."""
    for name, value in options.items():
        if value is None or name not in KINDS:
            continue
        words, fits = KINDS[name]
        try:
            good = bool(fits(value))
        except (TypeError, ValueError, RuntimeError):  # no order, or several elements
            good = False
        if not good:
            # If it is a number, its value is wrong, not its type.
            kind = ValueError if is_number(value) else TypeError
            raise kind(f"{name}: expected {words}, got {value!r}")


def require_callables(name: str, value: Any) -> list[Any]:
    """Returns the list that was given; an empty one for None."""
    if value is None:
        return []
    if not isinstance(value, Sequence) or not all(map(callable, value)):
        raise TypeError(f"{name}: expected a list of callables, got {value!r}")
    return list(value)


def require_stateless(processors: Sequence[Any], rows: int) -> None:
    """Raises for a processor that follows the text of one row, if there are several rows."""
    for processor in processors if rows > 1 else ():
        packages = {base.__module__.split(".")[0] for base in type(processor).__mro__}
        if packages & STATEFUL_PACKAGES or isinstance(processor, STATEFUL):
            raise ValueError(
                f"logits_processor: {type(processor).__module__}.{type(processor).__name__} "
                f"follows the text of one row, and there are {rows}; give each row its own: "
                "processors=lambda index, sample: [...]"
            )
