"""A smaller model that drafts: whether it fits the model, and its own pages."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from pagedkv.batch.packed import PackedModel
from pagedkv.batch.widths import WITH_DRAFT
from pagedkv.cache.cache import PagedKVCache
from pagedkv.config import CacheConfig
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.adapters import without_adapters
from pagedkv.hf.blocked_weights import PackWeights
from pagedkv.hf.model import (
    cache_config,
    device_of,
    longest_of,
    require_head,
    require_model,
    text_config,
)
from pagedkv.hf.model_pages import tokens_of
from pagedkv.hf.placement import devices_of
from pagedkv.step.metadata import StepMetadata


class DraftModel:
    """A model that drafts for another one, with pages laid out like those of the other.

    The pages are for this generator alone, and have no host tier and no policy: when they run
    short, rows lose drafts, but no row fails.

    Args:
        draft: the smaller model.
        main: the model it drafts for, and its pages.
        width: most tokens of a row that a step verifies.
        pack_weights: as for `PackedModel`.

    Raises:
        UnsupportedModelError: packed rows over pages would be wrong for this model.
        BudgetExceeded: its pages do not fit into memory.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        main: PackedModel,
        width: int,
        pack_weights: PackWeights = False,
    ) -> None:
        beside = main.kv
        config = draft_config(draft, beside.config, width)
        make = partial(PagedKVCache, device=beside.device, backend=beside.backend)
        cache = beside.ranks.agree(lambda: make(config, debug=beside.debug))
        try:
            self.packed = PackedModel(draft, cache=cache, pack_weights=pack_weights)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"draft: {error}") from error
        self.cache, self.width = cache, width
        self.longest = min(config.max_sequence_length or 0, longest_of(self.packed.model))
        # Vocabularies may be padded to different round numbers; the words are the same.
        self.vocabulary = vocabulary_of(self.packed.model)
        self._words = vocabulary_of(main.model)
        self._adapters = self.packed.adapters()

    def begin(self) -> None:
        """Forgets stored prefixes if the model's weights or adapters have changed."""
        self.packed.forget_stale()
        adapters = self.packed.adapters()
        if adapters != self._adapters:  # perhaps switched while rows of the last call were drafted
            self.cache.clear_prefixes()
            self._adapters = adapters

    @torch.inference_mode()
    def logits(self, step: StepMetadata, rows: list[int]) -> Tensor:
        """Runs the model over an open step; returns `[n, words]` for some rows' last tokens."""
        logits = self.packed.logits(step, step.last_rows[rows])
        if (more := self._words - logits.shape[1]) > 0:
            return nn.functional.pad(logits, (0, more), value=-torch.inf)
        return logits[:, : self._words]


def vocabulary_of(model: Any) -> int:
    """Returns the number of ids that a model knows."""
    return int(text_config(model).vocab_size)


def require_draft(draft: Any, model: Any, tokenizer: Any) -> None:
    """Raises where a model cannot draft for another one.

    Raises:
        TypeError: it is no model of transformers, or has no language model head.
        ValueError: it has another vocabulary, or is on another device.
        UnsupportedModelError: one of the two has recurrent states.
    """
    draft, model = without_adapters(draft), without_adapters(model)
    require_model(draft, "draft")
    require_head(draft, "draft")
    if not isinstance(model, PreTrainedModel):
        return  # `PackedModel` refuses it
    expected, got = vocabulary_of(model), vocabulary_of(draft)
    if not _has_same_words(draft, tokenizer) and expected != got:
        raise ValueError(
            f"draft: expected the model's vocabulary of {expected} ids, got {got}; they may differ "
            "where the tokenizers of both are known, and are the same"
        )
    if len(several := {str(device) for device in devices_of(draft).values()}) > 1:
        raise ValueError(f"draft: expected a model on one device, got {', '.join(sorted(several))}")
    if (place := device_of(draft)) != device_of(model):
        raise ValueError(f"draft: expected a model on {device_of(model)}, got one on {place}")
    for name, one in (("draft: it", draft), ("draft: its model", model)):
        if _has_states(one):
            raise UnsupportedModelError(
                f"{name} has recurrent states ({type(one).__name__}), and the state behind a "
                "rejected draft cannot be taken back"
            )


def _has_states(model: PreTrainedModel) -> bool:
    try:
        return bool(cache_config(model, max_tokens=1).states)
    except Exception:  # such a model is refused for another reason
        return False


def _has_same_words(draft: PreTrainedModel, tokenizer: Any) -> bool:
    """Whether the draft's tokenizer is on this machine, and has the same words.

    Raises:
        ValueError: it has another id for a word.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    name = draft.config._name_or_path
    if not name or not hasattr(tokenizer, "get_vocab"):
        return False
    try:
        own = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception:  # its folder has none
        return False
    words, others = tokenizer.get_vocab(), own.get_vocab()
    if differ := [word for word, at in words.items() if others.get(word, at) != at]:
        word = min(differ)
        raise ValueError(
            f"draft: expected the model's tokenizer, got one in which {word!r} is {others[word]}, "
            f"not {words[word]} ({name})"
        )
    return bool(words == others)


def draft_config(draft: Any, beside: CacheConfig, width: int = WITH_DRAFT) -> CacheConfig:
    """Returns the configuration of a draft's pages: as many and as large as the model's."""
    draft = without_adapters(draft)
    names = ("page_size", "max_sequences", "max_sequence_length", "max_step_tokens", "growth_step")
    fields = {name: getattr(beside, name) for name in names}
    try:
        return cache_config(draft, beside.max_tokens, rollback=width, **fields)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"draft: {error}") from error


def tokens_for_both(model: Any, draft: Any, fields: dict[str, Any]) -> int:
    """Returns a `max_tokens` for the pages of two models if the caller gave none.

    Args:
        fields: fields of `CacheConfig` for the model's own pages.
    """
    return tokens_of(without_adapters(model), fields, partial(draft_config, draft))
