"""Makes token ids of prompts, and cuts prompts that are longer than the model takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .causes import LONG, TEMPLATE, UNCUT
from .errors import UsageError
from .prompts import Prompt

SIDES = ("left", "right")  # as in tokenizers' `truncation_side`: where a text is cut


def encode(
    prompts: Mapping[int, Prompt],
    prefix: Any,
    tokenizer: Any,
    raw: bool,
    template: Mapping[str, Any],
) -> None:
    """Sets the ids of prompts, given by index, through the chat template where there is one.

    Args:
        template: what it is told.
    """
    chat = not raw and getattr(tokenizer, "chat_template", None) is not None
    good = [prompt for prompt in prompts.values() if not prompt.cause]
    if not chat and any(isinstance(each, list) for each in [prefix, *(p.content for p in good)]):
        raise UsageError("chat messages need a model with a chat template, and not --raw")
    if not chat and template:
        raise UsageError(
            "--chat-template-kwargs: expected a model with a chat template, it has none"
        )
    if chat:
        _require_known(tokenizer, template)
        for prompt in good:
            _template(tokenizer, prefix, prompt, template)
    elif good:
        rows = tokenizer([(prefix or "") + prompt.content for prompt in good])["input_ids"]
        for prompt, ids in zip(good, rows):
            prompt.ids = ids


def _require_known(tokenizer: Any, template: Mapping[str, Any]) -> None:
    from pagedkv.batch.chats import NAME, require_known, told  # which bring torch along

    try:
        require_known(tokenizer, told(template))
    except (TypeError, ValueError) as error:
        raise UsageError(str(error).replace(NAME, "--chat-template-kwargs", 1)) from error


def _template(tokenizer: Any, prefix: Any, prompt: Prompt, template: Mapping[str, Any]) -> None:
    from pagedkv.batch.chats import chat_ids  # which brings torch along

    before = [{"role": "system", "content": prefix}] if isinstance(prefix, str) else prefix or []
    content = prompt.content
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    try:
        prompt.ids = chat_ids(tokenizer, [*before, *messages], template)
    except Exception as error:  # a template may refuse an order of roles in any way it likes
        prompt.refuse(TEMPLATE, f"the chat template refuses it: {error}")


def fit(
    prompts: Mapping[int, Prompt],
    longest: int,
    new_tokens: int,
    side: str | None,
    prefix: Any,
    tokenizer: Any,
    raw: bool,
    template: Mapping[str, Any],
) -> None:
    """Cuts or refuses prompts that the model does not take.

    Args:
        longest: tokens that it takes.
        new_tokens: that a prompt which is cut leaves room for, unless it says another number.
        side: where they are cut; None where they are refused.
    """
    for prompt in prompts.values():
        tokens = len(prompt.ids)
        if prompt.cause or tokens <= longest:
            continue
        if side:
            new = prompt.options.get("max_new_tokens", new_tokens)
            # At most half of what the model takes is left to the answer.
            room = longest - min(new, longest // 2)
            prompt.ids = _cut(prompt, room, side, prefix, tokenizer, raw, template)
        if side and prompt.ids:
            prompt.cut = tokens - len(prompt.ids)
        else:
            error = f"prompt: the model takes {longest} tokens, got {tokens}"
            prompt.refuse(UNCUT if side else LONG, error)


def _cut(
    prompt: Prompt,
    room: int,
    side: str,
    prefix: Any,
    tokenizer: Any,
    raw: bool,
    template: Mapping[str, Any],
) -> list[int]:
    """Cuts a prompt's text, or its last message; returns its ids, or none where it stays too long.

    What a prefix and a template put around the text stays whole.
    """
    content = prompt.content
    text = content if isinstance(content, str) else content[-1]["content"]
    if not isinstance(text, str):
        return []
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    excess = len(prompt.ids) - room
    while excess < len(ids):
        kept = tokenizer.decode(ids[excess:] if side == "left" else ids[:-excess])
        messages = isinstance(content, list) and [*content[:-1], {**content[-1], "content": kept}]
        less = Prompt(messages or kept)
        encode({0: less}, prefix, tokenizer, raw, template)
        if less.cause:
            break
        if len(less.ids) <= room:
            return less.ids
        excess += len(less.ids) - room  # the words at the cut have become other tokens
    return []
