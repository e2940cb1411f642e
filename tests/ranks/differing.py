"""Ranks that differ in what one process alone can know; each function runs on all of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch

from pagedkv import BatchGenerator
from pagedkv.batch import options as batch_options
from pagedkv.storage import memory

from .jobs import model_of, rank

LAST = {"max_new_tokens": 8, "do_sample": False}
SIZES = {"max_tokens": 1024, "page_size": 4}


@contextmanager
def here(at: int, target: Any, name: str, value: Any) -> Iterator[None]:
    """Patches something on one rank alone."""
    if rank() != at:
        yield
        return
    with mock.patch.object(target, name, value):
        yield


def error_of(call: Any) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def generator(folder: str, tokenizer: Any = None, **sizes: Any) -> BatchGenerator:
    return BatchGenerator(model_of(folder), tokenizer, **{**SIZES, **sizes})


def sizes(folder: str, more: float) -> int:
    """A size nobody said, where the last rank has more memory."""
    free = int(4_000_000 * (more if rank() else 1))
    with (
        mock.patch.object(memory, "available_memory", return_value=free),
        BatchGenerator(model_of(folder)) as batched,
    ):
        return batched.cache.config.max_tokens


def killed(folder: str, prompts: Sequence[Any], within: bool) -> tuple[str, str]:
    """The last rank dies in the middle of a forward, or between two steps."""

    def dies(*_: Any) -> None:
        if rank():
            os.kill(os.getpid(), signal.SIGKILL)

    def all_of_them() -> None:
        for _ in batched.stream(prompts, **LAST):
            if not within:
                dies()

    with generator(folder) as batched:
        if within:
            model_of(folder).model.layers[1].register_forward_pre_hook(dies)
        return error_of(all_of_them)


def without_memory(folder: str) -> tuple[str, str]:
    from pagedkv.cache import cache

    def broken(*_: Any) -> Any:
        raise MemoryError("none left")

    with here(1, cache, "make_storage", broken):
        return error_of(lambda: generator(folder, max_tokens=999))


def late(folder: str, prompts: Sequence[Any], at: int) -> list[Any]:
    """A call with a time limit, where the clock of one rank runs ahead behind its first reading."""
    clock = time.time

    def ahead() -> float:
        return clock() + 3600 * (seen.pop() if seen else 1)

    seen = [0]
    with here(at, batch_options, "time", ahead), generator(folder) as batched:
        results = batched.generate(prompts, max_time=600.0, **LAST)
        batched.cache.check()
    return list(map(asdict, results))


def differing(folder: str, prompts: Sequence[Any], what: str) -> tuple[str, str]:
    """A call that differs in one thing on rank 1."""
    mine, options, own = [list(ids) for ids in prompts], dict(LAST), rank() == 1
    if what == "size":
        return error_of(lambda: generator(folder, max_tokens=512 + 4 * own))
    with generator(folder) as batched:
        if what == "continuation":
            return error_of(lambda: batched.score(mine, [[5, 6], [7 + own]]))
        if what == "prompt":
            mine[2][0] += own
        elif what == "count" and own:
            mine = mine[1:]
        elif what == "option":
            options["max_new_tokens"] += own
        elif what == "seed":
            options |= {"do_sample": True, "seed": 3 + own}
        elif what == "salt":
            options["salt"] = [b"", b"", b"x" * own, b""]
        elif what == "processor" and own:
            options["logits_processor"] = [lambda ids, scores: scores]
        elif what == "iterator":
            mine[3][1] += own
            return error_of(lambda: batched.generate(iter(mine), **options))
        wrong = error_of(lambda: batched.generate(mine, **options))
        batched.cache.check()
    return wrong


class Words:
    """A tokenizer whose last word is one that a rank cannot read."""

    def __init__(self, breaks: bool) -> None:
        self.breaks = breaks

    def __call__(self, texts: list[str]) -> dict[str, Any]:
        return {"input_ids": [[5, 6, 7] for _ in texts]}

    def decode(self, ids: list[int], **_: Any) -> str:
        if self.breaks:
            raise ValueError("on purpose")
        return "text"


def failing(folder: str, prompts: Sequence[Any], what: str) -> Any:
    """Returns the effect of an error in the code of rank 1: raised, or a row's own."""
    own = rank() == 1

    def broken(*_: Any) -> Any:
        if own:
            raise ValueError("on purpose")
        return []

    def judge(ids: Any, scores: Any) -> Any:
        if rank() == 0:
            raise ValueError("on purpose")
        return scores[:, 0] < -1e9 if scores is not None else ids[:, 0] < 0

    def choose(ids: Any, scores: Any) -> Any:
        if rank() == 0:
            raise ValueError("on purpose")
        return scores

    def coming() -> Iterator[Any]:
        yield prompts[0]
        broken()
        yield prompts[1]

    options: dict[str, Any] = dict(LAST)
    with generator(folder, Words(own and what == "decoding")) as batched:
        given: Any = prompts
        if what == "prompts":
            given = "on purpose" if own else prompts
        elif what == "place":
            given = [*prompts[:2], {"on purpose": 1}] if own else prompts
        elif what == "option":
            options |= {"on purpose": 1} if own else {}
        elif what == "tokenizer":
            batched.encoder.tokenizer = mock.Mock(side_effect=broken) if own else Words(False)
            given = ["a"]
        elif what == "iterator":
            given = coming()
        elif what == "factory":
            options["processors"] = lambda place, sample: broken() if place == 1 else []
        elif what == "criterion":
            options["stopping_criteria"] = [judge]
        elif what == "processor":
            options["logits_processor"] = [choose]
        try:
            results = batched.generate(given, **options)
        except Exception as error:
            notes = [str(error.__cause__), *getattr(error, "__notes__", [])]
            return type(error).__name__, str(error), notes
        batched.cache.check()
    return [(one.tokens, one.error) for one in results]


def interrupted(folder: str, prompts: Sequence[Any], pressed: Sequence[int]) -> Any:
    """Ctrl-C on some ranks, one a moment behind the other, in a call that would go on."""
    with generator(folder, max_sequences=4) as batched:
        if rank() in pressed:
            forward, calls = batched.model.forward, iter(range(1 << 30))

            def seventh(*args: Any, **kwargs: Any) -> Any:
                if next(calls) == 12 + 2 * rank():
                    os.kill(os.getpid(), signal.SIGINT)
                return forward(*args, **kwargs)

            batched.model.forward = seventh
        try:
            results = batched.generate(prompts, **LAST)
        finally:
            vars(batched.model).pop("forward", None)
        batched.cache.check()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        again = batched.generate(prompts[:1], **LAST)
        assert not again[0].error
    return [asdict(one) for one in results], batched.stats.steps


def changed(folder: str, prompts: Sequence[Any], file: str | None) -> list[Any]:
    """Weights that are written on the last rank alone, as an edit of one rank's part would.

    Args:
        file: where to save a sequence; it is loaded behind that.
    """
    with generator(folder) as batched:
        found = [batched.generate(prompts, **LAST) for _ in range(2)]
        if file is not None:
            seq = batched.cache.add(prompts[0])
            batched.cache.save(seq, f"{file}{rank()}")
            batched.cache.free(seq)
        if rank():
            with torch.no_grad():
                batched.model.model.norm.weight.add_(0)
        if file is not None:
            batched.cache.free(batched.cache.load(f"{file}{rank()}"))
        found.append(batched.generate(prompts, **LAST))
    return [[(one.tokens, one.cached_tokens) for one in results] for results in found]


def slowly(folder: str, prompts: Sequence[Any]) -> list[Any]:
    """Prompts that come more slowly on one rank than on the other."""

    def coming() -> Iterator[Any]:
        for i, ids in enumerate(prompts):
            if i % 7 == 3 * rank():
                time.sleep(0.03)
            yield ids

    with generator(folder) as batched:
        results = batched.generate(coming(), **LAST)
        batched.cache.check()
    return list(map(asdict, results))


def two_threads(folder: str, prompts: Sequence[Any]) -> str:
    with generator(folder) as batched:
        stream, found = batched.stream(prompts, **LAST), []
        next(stream)

        def second() -> None:
            found.append(error_of(lambda: next(batched.cache_stream)))

        batched.cache_stream = batched.stream(prompts, **LAST)
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        assert len(list(stream)) == len(prompts) - 1
    return found[0][0]


def left_early(folder: str, prompts: Sequence[Any]) -> int:
    with generator(folder) as batched:
        stream = batched.stream(prompts, **LAST)
        next(stream)
        del stream
        batched.cache.check()
        batched.generate(prompts, **LAST)
        return batched.cache.stats().sequences
