"""Makes token ids of prompts, and cuts prompts that are longer than the model takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .causes import LONG, TEMPLATE, UNCUT
from .errors import UsageError
from .prompts import Prompt

SIDES = ("left", "right")  # as in tokenizers' `truncation_side`: where a text is cut


class Encoder(NamedTuple):
    """Makes the ids of prompts, through the chat template where there is one.

    Attributes:
        prefix: what goes before every prompt: a text, chat messages, or None.
        raw: whether the chat template is left out.
        template: variables of the chat template.
    """

    prefix: Any
    tokenizer: Any
    raw: bool
    template: Mapping[str, Any]

    def encode(self, prompts: Mapping[int, Prompt]) -> None:
        """Sets the ids of prompts, given by index."""
        prefix, tokenizer = self.prefix, self.tokenizer
        chat = not self.raw and getattr(tokenizer, "chat_template", None) is not None
        good = [prompt for prompt in prompts.values() if not prompt.cause]
        lists = (isinstance(each, list) for each in [prefix, *(p.content for p in good)])
        if not chat and any(lists):
            raise UsageError("chat messages need a model with a chat template, and not --raw")
        if not chat and self.template:
            raise UsageError(
                "--chat-template-kwargs: expected a model with a chat template, it has none"
            )
        if chat:
            self._require_known()
            for prompt in good:
                self._fill(prompt)
        elif good:
            rows = tokenizer([(prefix or "") + prompt.content for prompt in good])["input_ids"]
            for prompt, ids in zip(good, rows):
                prompt.ids = ids

    def _require_known(self) -> None:
        from pagedkv.batch.chats import NAME, require_known, told  # which bring torch along

        try:
            require_known(self.tokenizer, told(self.template))
        except (TypeError, ValueError) as error:
            raise UsageError(str(error).replace(NAME, "--chat-template-kwargs", 1)) from error

    def _fill(self, prompt: Prompt) -> None:
        """Sets the ids of a prompt by the chat template."""
        from pagedkv.batch.chats import chat_ids  # which brings torch along

        system = [{"role": "system", "content": self.prefix}]
        before = system if isinstance(self.prefix, str) else self.prefix or []
        content = prompt.content
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        try:
            prompt.ids = chat_ids(self.tokenizer, [*before, *messages], self.template)
        except Exception as error:  # a template may raise anything to refuse an order of roles
            prompt.refuse(TEMPLATE, f"the chat template refuses it: {error}")

    def fit(
        self, prompts: Mapping[int, Prompt], longest: int, new_tokens: int, side: str | None
    ) -> None:
        """Cuts or refuses prompts that the model does not take.

        Args:
            longest: tokens that the model takes.
            new_tokens: room that a cut prompt leaves for its answer, unless its row sets another.
            side: the end at which prompts are cut; None if they are refused.
        """
        for prompt in prompts.values():
            tokens = len(prompt.ids)
            if prompt.cause or tokens <= longest:
                continue
            if side:
                new = prompt.options.get("max_new_tokens", new_tokens)
                # The answer gets at most half of the tokens that the model takes.
                prompt.ids = self._cut(prompt, longest - min(new, longest // 2), side)
            if side and prompt.ids:
                prompt.cut = tokens - len(prompt.ids)
            else:
                error = f"prompt: the model takes {longest} tokens, got {tokens}"
                prompt.refuse(UNCUT if side else LONG, error)

    def _cut(self, prompt: Prompt, room: int, side: str) -> list[int]:
        """Cuts a prompt's text, or its last message; returns its ids, none if it stays too long.

        A prefix, and the text that a chat template adds, stay whole.
        """
        content = prompt.content
        text = content if isinstance(content, str) else content[-1]["content"]
        if not isinstance(text, str):
            return []
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        excess = len(prompt.ids) - room
        while excess < len(ids):
            kept = self.tokenizer.decode(ids[excess:] if side == "left" else ids[:-excess])
            whole = isinstance(content, list) and [*content[:-1], {**content[-1], "content": kept}]
            less = Prompt(whole or kept)
            self.encode({0: less})
            if less.cause:
                break
            if len(less.ids) <= room:
                return less.ids
            excess += len(less.ids) - room  # the words at the cut have become other tokens
        return []
