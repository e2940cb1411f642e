"""`PromptEncoder`: ids of prompts, by a tokenizer or a processor, and the text of new tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from pagedkv.arrays import Ints
from pagedkv.hf.model import text_config

from .chats import NAME as CHATS
from .chats import Told, chat_ids, is_chat, require_chats, require_known
from .per_prompt import value_of
from .prompt_queue import ENDED
from .prompts import Prompt, Refused, Unread, as_ids, as_python, kind_of, taken_by


class PromptEncoder:
    """Makes ids of prompts; loads a tokenizer or processor from the model's checkpoint if needed.

    Args:
        model: its checkpoint has a tokenizer if none is given.
        given: a tokenizer, a processor, or None.
        takes_images: whether prompts may have images or audio.

    Attributes:
        model: as given.
        tokenizer: as given, or loaded for the first text; None before.
        processor: as given, or loaded for the first image or audio; None before, or without one.
    """

    def __init__(self, model: PreTrainedModel, given: Any, takes_images: bool) -> None:
        self.model, self._takes_images = model, takes_images
        is_processor = bool(taken_by(given))
        self.tokenizer = given.tokenizer if is_processor else given
        self.processor = given if is_processor else None

    def known(self, prompts: list[Prompt], chats: list[Told]) -> list[Ints | Unread]:
        """Encodes a list of prompts. An empty cell or another value becomes its row's error.

        Raises:
            TypeError: none of them is a prompt.
        """
        require_chats(prompts, chats)
        try:
            return self._encoded(prompts, chats, 0)
        except TypeError:
            each = list(self.coming(prompts, chats))
            if all(isinstance(prompt, Refused) for prompt in each):
                raise
            return each

    def coming(self, prompts: Iterable[Prompt], chats: Iterable[Any]) -> Iterator[Ints | Unread]:
        """Encodes prompts one by one as they come; another value becomes its row's error."""
        each = iter(chats)
        for place, prompt in enumerate(prompts):
            told = next(each, ENDED)
            try:
                if told is ENDED:
                    raise ValueError(f"{CHATS}: expected one value for each prompt, got {place}")
                ids = self.one(prompt, value_of(CHATS, told), place)
            except Exception as error:  # a template refuses messages in any way it likes
                ids = Refused(error)
            yield ids

    def one(self, prompt: Prompt, told: Told, place: int) -> Ints | Unread:
        """Returns the ids of a prompt, `[n]`; a prompt with images is read later.

        Raises:
            TypeError, ValueError: it is no prompt, or cannot be encoded.
        """
        (ids,) = self._encoded([as_python(prompt)], [told], place)
        return ids

    def text(self, ids: Sequence[int]) -> str | None:
        """Decodes new tokens; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    @property
    def start(self) -> int | None:
        """The token that begins a text, or else one that ends it; None if neither is known."""
        for source in (self.tokenizer, text_config(self.model)):
            for name in ("bos_token_id", "eos_token_id"):
                found: Any = getattr(source, name, None)
                if found is not None:
                    return found[0] if isinstance(found, (list, tuple)) else found
        return None

    def load_tokenizer(self) -> None:
        """Loads the tokenizer beside the model's checkpoint, if there is none yet.

        Raises:
            ValueError: the model was not loaded from a checkpoint.
        """
        if self.tokenizer is None:
            name = self.model.config._name_or_path
            if not name:
                raise ValueError(
                    "tokenizer: give one, because this model was not loaded from a checkpoint"
                )
            self.tokenizer = AutoTokenizer.from_pretrained(name)

    def _load_processor(self) -> None:
        if self.processor is None:
            from transformers import AutoProcessor  # imports what reads images; texts do without

            name = self.model.config._name_or_path
            try:
                self.processor = AutoProcessor.from_pretrained(name) if name else None
            except Exception:  # there is none, or it needs a package that is missing
                self.processor = None
            if self.tokenizer is None:
                self.tokenizer = getattr(self.processor, "tokenizer", None)

    def _encoded(self, prompts: list[Prompt], chats: list[Told], first: int) -> list[Ints | Unread]:
        kinds = {*map(kind_of, prompts)}
        if kinds & {"text", "chat"}:
            self.load_tokenizer()
        if "images" in kinds:
            self._load_processor()
        found = encode(prompts, self.tokenizer, self.processor, chats, first)
        if not self._takes_images and any(isinstance(prompt, Unread) for prompt in found):
            raise ValueError(
                "prompts: images and audio are not served where several processes share a model"
            )
        return found


def encode(
    prompts: list[Prompt],
    tokenizer: Any,
    processor: Any = None,
    told: Sequence[Told] | None = None,
    first: int = 0,
) -> list[Ints | Unread]:
    """Returns ids of every prompt, `[n]`: text as it stands, messages through the chat template.

    Prompts that may have images are read later, since pixels take memory.

    Args:
        told: what the template of each prompt is told; by default nothing.
        first: the place of the first prompt in its call.

    Raises:
        TypeError: something given is no prompt.
        ValueError: a template does not know what it is told.
    """
    kinds = [*map(kind_of, prompts)]
    texts = [prompt for prompt, kind in zip(prompts, kinds) if kind == "text"]
    rows = iter(tokenizer(texts)["input_ids"] if texts else ())
    read_later = {"images", "processed"}
    if _has_own_template(processor, tokenizer):
        read_later.add("chat")
    found: list[Ints | Unread] = []
    for place, (prompt, kind) in enumerate(zip(prompts, kinds)):
        own = told[place] if told and is_chat(prompt) else {}
        if kind in read_later:
            if processor is not None:
                require_known(processor, own)
            found.append(Unread(prompt, processor, own))
            continue
        if kind == "text":
            prompt = next(rows)
        elif kind == "chat":
            prompt = chat_ids(tokenizer, prompt, own)
        found.append(as_ids(prompt, first + place))
    return found


def _has_own_template(processor: Any, tokenizer: Any) -> bool:
    """Whether the processor has a chat template and the tokenizer has none."""
    own, its = (getattr(one, "chat_template", None) for one in (processor, tokenizer))
    return bool(own) and not its
