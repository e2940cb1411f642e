"""Chat messages: what a caller may tell their template, and the ids that the template makes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

NAME = "chat_template_kwargs"
ENDS = "add_generation_prompt", "continue_final_message"
# Parameters of `apply_chat_template` that say what a prompt is; others say how it is returned.
PARAMETERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "tools": ("a list", lambda x: isinstance(x, (list, tuple))),
    "documents": ("a list", lambda x: isinstance(x, (list, tuple))),
    "chat_template": ("a text", lambda x: isinstance(x, str)),
    "add_generation_prompt": ("True or False", lambda x: isinstance(x, bool)),
    "continue_final_message": ("True or False", lambda x: isinstance(x, (bool, str))),
    "sanitize_control_tokens": ("True or False", lambda x: isinstance(x, bool)),
}
OF_THE_TEMPLATE = {"tools", "documents"}  # a template without them drops them silently

Told = Mapping[str, Any]  # arguments by name for the template of one prompt
Chats = Told | Iterable[Told | None] | None  # for a call: one for all prompts, or one for each


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], dict)


def told(value: Any) -> Told:
    """Checks what a prompt's chat template is given, and returns it; an empty dict for None.

    Raises:
        TypeError: it is no mapping of names, or a parameter has a wrong type.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError(
            f"{NAME}: expected a dict by names, or a list with one for each prompt, got {value!r}"
        )
    for name, one in value.items():
        words, fits = PARAMETERS.get(name, ("", lambda _: True))
        if one is not None and not fits(one):
            raise TypeError(f"{NAME}: {name}: expected {words}, got {one!r}")
    return value


def require_known(by: Any, told: Told) -> None:
    """Raises ValueError for a name that the template of a tokenizer or processor never mentions.

    The template would drop it silently, for example a misspelt one.
    """
    if not told:
        return
    accepted = {*inspect.signature(by.apply_chat_template).parameters}
    free = accepted & PARAMETERS.keys() - OF_THE_TEMPLATE
    taken = accepted - PARAMETERS.keys() | {"messages"}
    own = getattr(by, "chat_template", None)
    each = [told.get("chat_template"), *(own.values() if isinstance(own, Mapping) else [own])]
    text = "\n".join(template for template in each if isinstance(template, str))
    for name in told:
        mentioned = not text or re.search(rf"\b{re.escape(name)}\b", text)
        if name in taken or not (name in free or mentioned):
            raise ValueError(
                f"{NAME}: expected names that the chat template mentions, or "
                f"{', '.join(sorted(free))}, got {name!r}"
            )


def rendered(by: Any, messages: Any, told: Told, **how: Any) -> Any:
    """Renders messages by the chat template of a tokenizer or a processor.

    Args:
        told: what the template is told.
        how: arguments for the form of the result.
    """
    require_known(by, told)
    ends = {}
    if not told.keys() & {*ENDS}:  # a last assistant message goes on, else an answer begins
        goes_on = bool(messages) and messages[-1].get("role") == "assistant"
        ends = {ENDS[goes_on]: True}
    return by.apply_chat_template(messages, **ends, **told, tokenize=True, **how)


def chat_ids(tokenizer: Any, messages: list[Any], told: Told) -> list[int]:
    """Returns the ids of chat messages, up to where the answer begins or goes on."""
    ids: list[int] = rendered(tokenizer, messages, told, return_dict=False)
    return ids


def require_chats(prompts: list[Any], each: list[Told]) -> None:
    """Raises ValueError if the template is told something, and no prompt is a chat."""
    if any(each) and prompts and not any(map(is_chat, prompts)):
        raise ValueError(
            f"{NAME}: expected chat messages among the prompts, got none; text and ids pass no "
            "template"
        )
