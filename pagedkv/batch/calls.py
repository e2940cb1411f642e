"""Checks the arguments of a call before any work, and makes a queue of its prompts."""

from __future__ import annotations

from typing import Any

from pagedkv.config import CacheConfig

from .chats import NAME as CHATS
from .chats import require_chats
from .encoder import PromptEncoder
from .options import GenerationOptions
from .per_prompt import each_of
from .prompt_queue import PromptQueue
from .prompts import Refused, Unread, as_list, kind_of, listed
from .scores.pairs import by_prompt, contexts_of
from .served import require_here


def to_generate(
    encoder: PromptEncoder,
    config: CacheConfig,
    prompts: Any,
    salt: Any,
    told: Any,
    options: dict[str, Any],
) -> tuple[PromptQueue, GenerationOptions]:
    """Returns the prompts and the options of a call of `generate`.

    Prompts that may not fit into pages together are put in the order of their prefixes.

    Args:
        told: what chat templates are told.

    Raises:
        ValueError, TypeError: see `BatchGenerator.generate`.
    """
    every = listed(prompts)
    count = None if every is None else len(every)
    salts, chats = each_of("salt", salt, count), each_of(CHATS, told, count)
    known = None if every is None else encoder.known(every, list(chats))
    chosen = options_of(encoder, count, options)  # its stop strings need the tokenizer, too
    own = {"salt": salts, **chosen.own}
    if known is None:
        return PromptQueue(encoder.coming(prompts, chats), own, known=False), chosen
    may_see = any(isinstance(one, Unread) and not isinstance(one, Refused) for one in known)
    source = PromptQueue(known, own, known=True, may_see=may_see)
    tokens = sum(len(one) for one in known if not isinstance(one, Unread))
    if tokens > config.max_tokens:  # else all prefixes stay stored
        source.put_together(config.page_size)
    return source, chosen


def options_of(
    encoder: PromptEncoder, prompts: int | None, options: dict[str, Any]
) -> GenerationOptions:
    """Returns the options of a call; loads a tokenizer if they need one."""
    require_here(options)
    if options.get("stop_strings"):
        encoder.load_tokenizer()
    return GenerationOptions(encoder.model, encoder.tokenizer, prompts, **options)


def to_score(
    encoder: PromptEncoder, prompts: Any, continuations: Any, salt: Any, told: Any
) -> tuple[PromptQueue, int]:
    """Returns the contexts of a call of `score`, and how many prompts they are of.

    Raises:
        ValueError, TypeError: see `BatchGenerator.score`.
    """
    prompts = as_list(prompts)
    salts = list(each_of("salt", salt, len(prompts)))
    chats = list(each_of(CHATS, told, len(prompts)))
    require_chats(prompts, chats)
    each = by_prompt(continuations, len(prompts))
    words = any(isinstance(one, str) for own in each for one in own)
    if words or not {"text", "chat"}.isdisjoint(map(kind_of, prompts)):
        encoder.load_tokenizer()
    contexts = contexts_of(prompts, each, salts, chats, encoder.tokenizer, encoder.start)
    return PromptQueue(contexts, {}, known=True, may_see=False), len(prompts)
