"""Every error a caller may want to catch, under one base class.

Mistakes in arguments that Python already has a word for (a wrong shape, a bad value) raise plain
`ValueError` or `TypeError`; the classes here are for what only a paged cache can run into.
"""

from __future__ import annotations

from functools import partial
from typing import Any


class PagedKVError(Exception):
    """Base class of all errors of this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Python pickles an error's message alone; other arguments are given again, by their names.
        defaults = getattr(type(self).__init__, "__annotations__", {})
        named = {name: getattr(self, name) for name in defaults if hasattr(self, name)}
        return partial(type(self), **named), self.args, self.__dict__


class OtherRankError(PagedKVError, RuntimeError):
    """Another of the processes that share this work raised an error, or does not come."""


class OutOfPagesError(PagedKVError):
    """The pool cannot serve this call now; nothing was changed.

    Attributes:
        pages_needed: pages the call needs beyond those it already has, in the group that ran out.
        pages_free: pages the call could have had in that group.
    """

    def __init__(self, message: str, *, pages_needed: int, pages_free: int) -> None:
        super().__init__(message)
        self.pages_needed = pages_needed
        self.pages_free = pages_free


class SequenceTooLongError(PagedKVError, ValueError):
    """A sequence, a reservation or a step that can never fit, however much is freed."""


class TooManySequencesError(PagedKVError, ValueError):
    """More live sequences than `CacheConfig.max_sequences`."""


class UnknownSequenceError(PagedKVError, KeyError):
    """A sequence id that was never given out, or was freed."""

    __str__ = Exception.__str__  # KeyError would quote the message


class OpenStepError(PagedKVError):
    """The call is not possible while a step is open."""


class ClosedStepError(PagedKVError):
    """The step was already committed or aborted."""


class LayerWritesError(PagedKVError, RuntimeError):
    """Layers did not write, or wrote more than once, in a step that was to be committed.

    The step stays open.
    """


class WrongCacheError(PagedKVError, ValueError):
    """A step of one cache was handed to another."""


class ForkedError(PagedKVError, RuntimeError):
    """Pages that were made before `os.fork` were used in the child."""


class OffloadedError(PagedKVError):
    """The sequence is in host memory; `restore` brings it back."""


class HostMemoryError(PagedKVError, MemoryError):
    """There is not enough host memory to move a sequence to or through; nothing was changed."""


class BudgetExceeded(PagedKVError, MemoryError):
    """The configuration needs more memory than there is; nothing was allocated.

    Attributes:
        needed: bytes asked for.
        available: bytes that could be had.
        largest: the item that takes most of the bytes, where a plan says so.
        advice: arguments that make the same call succeed, where a plan knows some.
    """

    def __init__(
        self,
        message: str,
        *,
        needed: int,
        available: int,
        largest: str = "",
        advice: dict[str, int | str] | None = None,
    ) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available
        self.largest = largest
        self.advice = advice or {}


class PolicyError(PagedKVError, ValueError):
    """A retention policy returned something other than one number for each page."""


class CheckpointError(PagedKVError, ValueError):
    """A folder of weights, or a file in it, is not what it has to be; the message says where."""


class CheckpointMismatch(CheckpointError):
    """The tensors of a checkpoint are not those of its model; nothing ran.

    Attributes:
        missing: parameters and buffers of the model without a tensor in the checkpoint.
        unexpected: tensors of the checkpoint without a parameter or buffer in the model.
        mismatched: tensors whose shape or kind of dtype differs from the model's, and how.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        mismatched: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.unexpected = unexpected
        self.mismatched = mismatched


class LayersNotFound(PagedKVError, ValueError):
    """No list of layers was found in the model; `layers_path` can name it."""


class StreamError(PagedKVError, RuntimeError):
    """A streamed model is closed, streamed already, or asked for weights that are not there."""


class GradModeError(PagedKVError, RuntimeError):
    """K, V or queries have derivatives, backward or forward; pages are written in place."""


class ModelChangedError(PagedKVError, RuntimeError):
    """The model has changed since its pages were made or its rows were begun."""


class UnsupportedModelError(PagedKVError, NotImplementedError):
    """The model, or something asked of it, would be silently wrong with paged attention."""


class ModelArgsError(PagedKVError, ValueError):
    """An argument of `--model_args` that is unknown or without effect; nothing was evaluated."""


class RequestError(PagedKVError, RuntimeError):
    """A request of lm-eval that cannot be served; those finished before it are in its cache."""


class SavedFileError(PagedKVError, ValueError):
    """A file cannot be loaded into this cache; the cache is untouched."""


class CorruptFileError(SavedFileError):
    """A saved sequence is damaged: its bytes are not those that were written."""


class ForeignFileError(SavedFileError):
    """The file was not written by `PagedKVCache.save`."""


class NewerFileError(SavedFileError):
    """The file was written by a later version than this one can read."""


class WrongModelError(SavedFileError):
    """The file was saved with other weights or adapters than those of this cache."""


class WrongShapeError(SavedFileError):
    """The file's layers, heads, dtype, format or pages are not those of the cache."""


class CorruptCacheError(PagedKVError):
    """`check()` found an invariant broken: a bug in this package, with the page that shows it."""
