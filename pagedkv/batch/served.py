"""Refuses the options of transformers that packed rows do not serve, and says who gave them."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from pagedkv.hf.model import text_config
from pagedkv.models import layer_kinds

from .chats import PARAMETERS

# Options that have no meaning for packed rows, or are not done here, and their harmless values.
NOT_SERVED = {
    "guidance_scale": (None, 1, 1.0),
    "token_healing": (None, False),
    "use_mtp": (None, False),
    "is_assistant": (None, False),
    "use_cache": (None, True),
    "cache_implementation": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "return_dict_in_generate": (None, False),
}

# These change no token. Those that trainers left in a checkpoint are ignored, a caller's are not.
OF_GENERATE = {name for name in NOT_SERVED if name.startswith(("output_", "return_"))}
OF_GENERATE |= {"use_cache", "cache_implementation"}
# Options that make `generate` generate in another way, and the value that does not.
OTHER_WAYS = {
    "num_beams": 1,
    "penalty_alpha": None,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
}

_OF_THE_GENERATOR = "give it to BatchGenerator, not to a call"
_OF_THE_TEMPLATE = "give it within chat_template_kwargs"
# Options that callers give here, and where they belong.
ELSEWHERE = {
    "model": _OF_THE_GENERATOR,
    "tokenizer": _OF_THE_GENERATOR,
    "adapter_names": "adapters act in the model, for all rows: call model.set_adapter(name), then "
    "generate for the prompts of that adapter",
    **dict.fromkeys((*PARAMETERS, "enable_thinking"), _OF_THE_TEMPLATE),
}


def require_here(options: dict[str, Any]) -> None:
    """Raises TypeError for an option that does not belong to a call."""
    for name in options:
        if name in ELSEWHERE:
            raise TypeError(f"{name}: {ELSEWHERE[name]}")


def unset(name: str, options: dict[str, Any], *configs: GenerationConfig | None) -> bool:
    """Whether neither the options of a call nor its configurations set an option."""
    return options.get(name) is None and all(getattr(c, name, None) is None for c in configs)


def inherited(options: dict[str, Any], config: GenerationConfig | None) -> set[str]:
    """Returns the names of options checked here that a call leaves to the checkpoint."""
    return {name for name in (*NOT_SERVED, *OTHER_WAYS) if unset(name, options, config)}


class Served:
    """The options of a call, some of which come from the checkpoint.

    Args:
        config: all of them together.
        inherited: names of options that the caller did not give.
    """

    def __init__(self, config: GenerationConfig, inherited: set[str]) -> None:
        self._config, self._inherited = config, inherited

    def leave_out(self, others: dict[str, Any]) -> None:
        """Removes the checkpoint's options on what `generate` returns and caches.

        Args:
            others: what transformers would hand on to the forward.
        """
        for name in OF_GENERATE & self._inherited:
            setattr(self._config, name, None)
            others.pop(name, None)

    def require(self, model: PreTrainedModel) -> None:
        """Raises ValueError for the first option that packed rows do not serve."""
        for name, harmless in NOT_SERVED.items():
            value = getattr(self._config, name, None)
            if value not in harmless:
                whose = self._whose(name, harmless[-1])
                raise ValueError(f"{name}: not served for packed rows, got {value!r}{whose}")
        most = text_config(model).vocab_size - 1
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            ids = np.atleast_1d(getattr(self._config, name) or 0)
            if not 0 <= ids.min() <= ids.max() <= most:
                raise ValueError(f"{name}: expected ids 0..{most}, got {ids.tolist()}")
        mode = self._config.get_generation_mode()
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            drafts = mode == GenerationMode.ASSISTED_GENERATION
            way = "`PagedCache` with `generate` serves it"
            if drafts and any(kind.state is not None for kind in layer_kinds(text_config(model))):
                way = "drafts cannot be taken back where a model has recurrent states"
            given = {name: getattr(self._config, name, None) for name in OTHER_WAYS}
            leads = [name for name, value in given.items() if value not in (None, 1)]
            whose = "".join(self._whose(name, OTHER_WAYS[name]) for name in leads)
            raise ValueError(
                f"options: expected greedy search or sampling, got {mode.value}{whose}; {way}"
            )

    def _whose(self, name: str, instead: Any) -> str:
        """Returns a note that a value is the checkpoint's, and how a call overrides it."""
        if name not in self._inherited:
            return ""
        return f" ({name} is of the model's generation_config; {name}={instead} overrides it)"
