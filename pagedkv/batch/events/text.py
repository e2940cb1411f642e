"""The text of a row, piece by piece: no character and no stop string is cut in two."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

CUT = "\N{REPLACEMENT CHARACTER}"  # what the bytes of an incomplete character decode to
UNSURE = CUT, " '"  # the next token may change texts that end so: cleaning up joins quotes
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class Text:
    """Decodes tokens that come one after another into pieces of text that stay as they are.

    Args:
        tokenizer: a tokenizer of transformers; None gives empty text.
        stops: strings that end the text. A piece that may become one is held back.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._pieces: _Stream | _Window | None = None
        if tokenizer is not None:
            backend = getattr(tokenizer, "backend_tokenizer", None)
            cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
            is_plain = backend is not None and not cleans
            self._pieces = _Stream(backend) if is_plain else _Window(tokenizer)
        self._given, self._held = "", ""
        self._run: list[int] = []  # bytes, which are decoded together

    def add(self, token: int) -> str:
        """Takes in a token; returns the text that is new and whole with it."""
        if self._pieces is None:
            return ""
        goes_on = _is_byte(self._tokenizer, token)
        if self._run and not goes_on:  # a skipped token does not separate bytes
            goes_on = not self._tokenizer.decode([token], skip_special_tokens=True)
        self._run.append(token)
        if goes_on:
            return ""
        run, self._run = self._run, []
        self._held += self._pieces.add(run)
        keep = 0
        if not any(stop in self._held for stop in self._stops):  # a whole one ends the row
            keep = max((_begun(self._held, stop) for stop in self._stops), default=0)
        return self._give(len(self._held) - keep)

    def end(self, whole: str | None) -> str:
        """Returns the rest of the text once no more tokens come."""
        if whole is not None and whole.startswith(self._given):
            self._held = whole[len(self._given) :]
        return self._give(len(self._held))

    def _give(self, count: int) -> str:
        new, self._held = self._held[:count], self._held[count:]
        self._given += new
        return new


class _Stream:
    """Decodes by the stream of the `tokenizers` package: one microsecond a token."""

    def __init__(self, backend: Any) -> None:
        self._backend, self._stream = backend, DecodeStream(skip_special_tokens=True)

    def add(self, tokens: list[int]) -> str:
        new: Any = tokens if len(tokens) > 1 else tokens[0]
        try:
            return self._stream.step(self._backend, new) or ""
        except Exception:  # the tokens change earlier text: begin anew with them
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._backend, new) or ""


class _Window:
    """Decodes the last tokens with and without the new ones; serves any other tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._old = 0  # tokens whose text was given

    def add(self, tokens: list[int]) -> str:
        self._tokens += tokens
        text, before = self._decode(self._tokens), self._decode(self._tokens[: self._old])
        if text.endswith(UNSURE) or not text.startswith(before) or len(text) == len(before):
            return ""
        self._tokens, self._old = self._tokens[self._old :], len(self._tokens) - self._old
        return text[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        decoded: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return decoded


def _is_byte(tokenizer: Any, token: int) -> bool:
    """Whether a token is one byte of a character that the tokenizer does not have."""
    name = getattr(tokenizer, "convert_ids_to_tokens", lambda _: None)(token)
    return isinstance(name, str) and BYTE.fullmatch(name) is not None


def _begun(text: str, stop: str) -> int:
    """Counts the characters at a text's end that begin a stop string but do not complete it."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
